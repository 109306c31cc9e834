"""Centauri's operation tier in a run: which collectives are cut, and how, with the costs of the run.

Every scheme of the partition space of a layer's collective is applied to the layer's graph and priced with
the adjacent operators, on the streams of a rank, with the profile's costs; the shortest is taken, or the
whole collective if that is shortest. The simulator tells the effect on a step (`cuts`).

The other tiers are the order of a backward pass's operators (`braid.scheduling.plan.orders`) and the number
of micro-batches that run together (the pipelines ``together_N``).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, NamedTuple

from braid.scheduling.cost.profile import Profile
from braid.scheduling.generate.partition_checks import CUT, can_be_cut, operators_beside
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.partition import ABOUT_OWN, Factor, Partition, Target
from braid.scheduling.model.operators import Graph, Kind, Operator, Part
from braid.scheduling.model.stages import moves_of
from braid.scheduling.model.units import chunk_parameters
from braid.scheduling.plan.orders import BenchOf, CostedSetting
from braid.scheduling.schedule.memory import DTYPE_BYTES, sent_width
from braid.scheduling.schedule.timeline import run_in_order
from braid.scheduling.text.pattern import is_layer

MOST_BESIDE = 2
"""Most operators next to a collective that are cut with it: a GEMM and an activation. The operator behind
them is a collective, or couples tokens."""


def cuts(bench: CostedSetting, bench_of: BenchOf, *, layers: bool = True) -> Iterator[tuple[Partition, ...]]:
    """Yield sets of partitions to simulate a setting with.

    They cut the layers' collectives, or gradient sums and parameter gathers, or all of these. ``layers``:
    whether layers' collectives may be cut.
    """
    of_layers = operation_tier(bench, bench_of) if layers else ()
    shared = sharing_partitions(bench)
    yield from dict.fromkeys(cut for cut in (of_layers, shared, (*of_layers, *shared)) if cut)


# -- collectives of layers -----------------------------------------------------------------------------------


class Collecting(NamedTuple):
    """A layer's tensor-parallel gather or scatter, and the adjacent operators that can be cut with it."""

    part: str
    forward: bool
    op: Operator
    beside: tuple[str, ...]

    def graph(self, bench: CostedSetting) -> Graph:
        """Return the forward or backward graph that contains the collective."""
        part = bench.members[self.part]
        return part.forward if self.forward else part.backward

    def span_ns(self, bench: CostedSetting) -> float:
        """Return the ns from first start to last end of the collective and its adjacent operators, whether
        cut or whole in ``bench``."""
        return span_ns(self.graph(bench), {self.op.name, *self.beside}, bench.profile)


def collectives(bench: CostedSetting) -> list[Collecting]:
    """Return all tensor-parallel gathers and scatters of the layers that can be cut."""
    return [
        Collecting(name, graph is part.forward, op, tuple(near.name for near in beside))
        for name, part in bench.members.items()
        if is_layer(name)
        for graph in (part.forward, part.backward)
        for op in graph.operators
        if can_be_cut(part, op) and op.axis == "tp"
        for beside in [operators_beside(graph, op, MOST_BESIDE)]
    ]


def operation_tier(bench: CostedSetting, bench_of: BenchOf) -> tuple[Partition, ...]:
    """Return the best cuts of the layers' gathers and scatters; collectives that are as good whole have none.

    ``bench``: a setting without partitions. No operator is adjacent to two gathers or to two scatters, so
    cuts of several collectives are priced at once.
    """
    spans: dict[Collecting, list[tuple[float, Partition | None]]] = {}
    for kind in CUT:
        spaces = {
            c: list(points(bench.members[c.part], c.graph(bench), c.op, bench.profile))
            for c in collectives(bench)
            if c.op.kind is kind
        }
        for collective in spaces:
            spans[collective] = [(collective.span_ns(bench), None)]
        for tried in zip_longest(*spaces.values()):
            chosen = {c: point for c, point in zip(spaces, tried, strict=True) if point is not None}
            cut = bench_of(replace(bench.setting, partitions=tuple(chosen.values())))
            for collective, point in chosen.items():
                spans[collective].append((collective.span_ns(cut), point))
    best = [_plainest(spans[collective]) for collective in collectives(bench)]
    return tuple(point for point in best if point is not None)


def _plainest(spans: Sequence[tuple[float, Partition | None]]) -> Partition | None:
    """Return the partition with fewest pieces among those at most `HARDLY` slower than the fastest.

    ``spans``: pairs of ns and partition; None stands for the whole collective.
    """
    least = min(ns for ns, _ in spans)
    alike = [(ns, point) for ns, point in spans if ns <= least * (1 + HARDLY)]

    def cut(span: tuple[float, Partition | None]) -> tuple[int, float]:
        ns, point = span
        return (0 if point is None else point.pieces * max(1, len(point.order))), ns

    return min(alike, key=cut)[1]


HARDLY = 0.02
"""Relative time difference that is below the simulator's accuracy. Within it fewer pieces are preferred,
since every piece has costs that no profile shows."""


PIECE_COUNTS = (1, 2, 4, 8)
"""Numbers of pieces into which a collective may be cut; the last is Centauri's MAX_CHUNKS."""


def points(part: Part, graph: Graph, op: Operator, profile: Profile) -> Iterator[Partition]:
    """Yield all ways to partition a gather or scatter (section 3.1), without the whole collective.

    The collective is split into stages between and inside nodes, if the profile has such transfers: in both
    orders, and for a gather also around its own node (figure 5e). It is cut into pieces alone or with
    adjacent operators, along tokens or along the width of a product; for a gather also as its stages deliver
    rows.
    """
    assert op.axis is not None
    mesh, gathers = profile.meshes.get(op.axis), op.kind is Kind.ALL_GATHER
    orders: list[tuple[int, ...]] = [()]
    if mesh is not None:
        orders += [(0, 1), (1, 0), ABOUT_OWN] if gathers else [(1, 0), (0, 1)]
    for order in orders:
        division: dict[str, Any] = {"mesh": mesh, "order": order} if order else {}
        for cut in _pieces(part, graph, op):
            added_up = gathers and cut.get("dim") == "width"  # all rows are needed; they come in two stages
            if (cut.get("delivered") and not order) or (added_up and order == ABOUT_OWN):
                continue
            if order or cut.get("pieces", 1) > 1:
                yield Partition(what=Target(part.name, op.name), **division, **cut)


def _pieces(part: Part, graph: Graph, op: Operator) -> Iterator[dict[str, Any]]:
    """Yield ways to cut a collective, alone or with adjacent operators, as keyword arguments of `Partition`.

    No piece is empty.
    """
    moved = part.values[op.reads[0]], part.values[op.writes[0]]
    rows, width = min(value.rows for value in moved), moved[1].columns
    yield from ({"pieces": n} for n in PIECE_COUNTS if n <= rows)
    chain = operators_beside(graph, op, MOST_BESIDE)
    for length in range(1, len(chain) + 1):
        along = {"dim": "tokens", "operators": length}
        if op.kind is Kind.ALL_GATHER:
            yield {**along, "delivered": True}
        yield from ({**along, "pieces": n} for n in PIECE_COUNTS[1:] if n <= rows)
    if chain and chain[0].kind is Kind.GEMM:
        across = {"dim": "width", "operators": 1}
        yield from ({**across, "pieces": n} for n in PIECE_COUNTS[1:] if n <= width)


def span_ns(graph: Graph, names: set[str], profile: Profile) -> float:
    """Return the ns from the first start to the last end if a rank runs only the named operators, or their
    pieces.

    Streams run them in the order of the graph. While a rank starts a collective, or takes its result, it does
    not compute; if nothing runs beside the collective, this time is part of the collective's time.
    """
    queues: dict[Stream, list[str]] = defaultdict(list)
    lengths: dict[str, int] = {}
    waits: dict[str, Sequence[str]] = {}
    unasked: dict[str, tuple[str, int]] = {}
    """Name of a transfer's end -> (transfer, ns to take its result), for transfers not waited for so far."""
    writers: dict[str, tuple[str, ...]] = {}
    pieces: dict[str, list[str]] = {}

    def put(name: str, stream: Stream, ns: int, after: Sequence[str]) -> None:
        queues[stream].append(name)
        lengths[name], waits[name] = ns, after

    def take(name: str) -> None:
        transfer, ns = unasked.pop(name)
        put(name, Stream.COMPUTE, ns, [transfer])

    for op in graph.operators:
        whole = op.name if op.piece is None else op.piece.whole
        if whole not in names:
            continue
        after = tuple(dict.fromkeys(name for value in op.reads for name in writers.get(value, ())))
        for name in filter(unasked.__contains__, after):
            take(name)
        ns, done = profile.solo(op.key), op.name
        if op.piece is not None and op.kind.communicates:
            begins, ends = profile.issue_ns.get(op.key, 0), profile.take_ns.get(op.key, 0)
            begin, done = f"{op.name} begins", f"{op.name} ends"
            put(begin, Stream.COMPUTE, begins, after)
            put(op.name, op.stream, max(0, ns - begins - ends), [begin])
            unasked[done] = op.name, ends
        else:
            put(op.name, op.stream, ns, after)
        pieces.setdefault(whole, []).append(done)
        for value in op.writes:
            completes = op.completes and value == op.writes[-1]
            writers[value] = tuple(pieces[whole]) if completes else (done,)
    for name in list(unasked):
        take(name)
    times, stuck = run_in_order(queues, waits.__getitem__, lengths.__getitem__)
    assert not stuck
    return max((last for _, last in times.values()), default=0)


# -- sums of gradients and gathers of parameters ---------------------------------------------------------


def sharing_partitions(bench: CostedSetting) -> tuple[Partition, ...]:
    """Return partitions that split gradient sums and parameter gathers into stages inside and between nodes.

    The faster order of stages is taken, and only if it beats the whole transfer for a bucket of a layer's
    size.
    """
    setting, profile = bench.setting, bench.profile
    layout, mesh = setting.layout, profile.meshes.get("dp")
    if mesh is None or not setting.kind.early_sums:
        return ()
    kinds = setting.kinds
    layers = max(1, len(kinds) // layout.pp)
    count = sum(chunk_parameters(bench.members, layout, kinds, c).dense for c in layout.chunks_of(0)) / layers
    wanted = (Kind.REDUCE_SCATTER, Kind.ALL_GATHER) if layout.zero else (Kind.ALL_REDUCE,)
    partitions = []
    for kind in wanted:
        gathers, dtype = kind is Kind.ALL_GATHER, setting.dtype
        payload = count * (DTYPE_BYTES[dtype] if gathers else sent_width(dtype, setting.reduce_dtype))
        whole = profile.transfer("dp", kind).ns(payload)
        best = min((stages_ns(profile, kind, mesh, order, payload), order) for order in ((0, 1), (1, 0)))
        if best[0] < whole:
            partitions.append(Partition(what=Target("dp", kind), mesh=mesh, order=best[1]))
    return tuple(partitions)


def stages_ns(
    profile: Profile, kind: Kind, mesh: tuple[int, ...], order: tuple[int, ...], payload: float
) -> float:
    """Return the larger of a staged transfer's ns inside nodes and ns between nodes.

    The larger one decides, since the stages of one bucket overlap the stages of another.
    """
    along: dict[Factor, float] = {}
    partition = Partition(what=Target("dp", kind), mesh=mesh, order=order)
    for move in moves_of(kind, (partition,), "dp"):
        ns = profile.transfer(move.factor, move.kind).ns(payload / move.part)
        along[move.factor] = along.get(move.factor, 0.0) + ns
    return max(along.values())
