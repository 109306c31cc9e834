"""Centauri's operation tier in a run: which collectives are cut, and how, with the costs of the run.

Every scheme of the partition space of a layer's collective is carried out in the layer's graph and priced
with the operators beside it, on the streams of a rank, as the profile has them; the shortest is taken, the
whole collective where that is. What comes of it for a step is for the simulator to say (`cuts`).

The other tiers are the order of a backward pass's operators (`braid.scheduling.plan.orders`) and how many
micro-batches go together (the pipelines ``together_N``).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, NamedTuple

from braid.scheduling.cost.profile import Profile
from braid.scheduling.generate.partition_checks import CUT, can_be_cut, operators_beside
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.partition import ABOUT_OWN, PARTITIONED, Factor, Partition, factor_of
from braid.scheduling.model.operators import Graph, Kind, Operator, Part
from braid.scheduling.model.stages import moves_of
from braid.scheduling.model.units import chunk_parameters
from braid.scheduling.plan.orders import BenchOf, CostedSetting
from braid.scheduling.schedule.memory import DTYPE_BYTES, sent_width
from braid.scheduling.schedule.timeline import run_in_order
from braid.scheduling.text.pattern import is_layer

MOST_BESIDE = 2
"""A GEMM and an activation: what comes before or behind is a collective, or coupled along the tokens."""


def cuts(bench: CostedSetting, bench_of: BenchOf, *, layers: bool = True) -> Iterator[tuple[Partition, ...]]:
    """Partitions to simulate a setting with: of layers' collectives, of what replicas share, of both.

    ``layers``: whether theirs may be cut.
    """
    own = operation_tier(bench, bench_of) if layers else ()
    shared = sharing_partitions(bench)
    yield from dict.fromkeys(found for found in (own, shared, (*own, *shared)) if found)


# -- collectives of layers -----------------------------------------------------------------------------------


class Collecting(NamedTuple):
    """A collective of a layer, and what can be cut with it."""

    part: str
    forward: bool
    op: Operator
    beside: tuple[str, ...]

    def graph(self, bench: CostedSetting) -> Graph:
        """The pass that it stands in."""
        part = bench.members[self.part]
        return part.forward if self.forward else part.backward

    def span_ns(self, bench: CostedSetting) -> float:
        """What it and the operators beside it take, cut or whole."""
        return span_ns(self.graph(bench), {self.op.name, *self.beside}, bench.profile)


def collectives(bench: CostedSetting) -> list[Collecting]:
    """All gathers and scatters of the layers over tensor parallelism."""
    return [
        Collecting(name, graph is part.forward, op, tuple(one.name for one in beside))
        for name, part in bench.members.items()
        if is_layer(name)
        for graph in (part.forward, part.backward)
        for op in graph.operators
        if can_be_cut(part, op) and op.axis == "tp"
        for beside in [operators_beside(graph, op, MOST_BESIDE)]
    ]


def operation_tier(bench: CostedSetting, bench_of: BenchOf) -> tuple[Partition, ...]:
    """The best way to cut every gather and scatter of the layers; those that are as good whole have none.

    ``bench``: of a setting without partitions. What stands beside a gather stands beside no other one, nor
    beside two scatters: points of several collectives are priced at once.
    """
    spans: dict[Collecting, list[tuple[float, Partition | None]]] = {}
    for kind in CUT:
        own = {
            one: list(points(bench.members[one.part], one.graph(bench), one.op, bench.profile))
            for one in collectives(bench)
            if one.op.kind is kind
        }
        for one in own:
            spans[one] = [(one.span_ns(bench), None)]
        for tried in zip_longest(*own.values()):
            chosen = {one: point for one, point in zip(own, tried, strict=True) if point is not None}
            cut = bench_of(replace(bench.setting, partitions=tuple(chosen.values())))
            for one, point in chosen.items():
                spans[one].append((one.span_ns(cut), point))
    best = [_plainest(spans[one]) for one in collectives(bench)]
    return tuple(point for point in best if point is not None)


def _plainest(spans: Sequence[tuple[float, Partition | None]]) -> Partition | None:
    """The least cut of those that take hardly longer than the shortest."""
    least = min(ns for ns, _ in spans)
    alike = [(ns, point) for ns, point in spans if ns <= least * (1 + HARDLY)]

    def cut(span: tuple[float, Partition | None]) -> tuple[int, float]:
        ns, point = span
        return (0 if point is None else point.pieces * max(1, len(point.order))), ns

    return min(alike, key=cut)[1]


HARDLY = 0.02
"""So little longer the simulator cannot tell; every piece has costs that no profile has."""


PIECE_COUNTS = (1, 2, 4, 8)
"""Into how many pieces a collective may be cut; the last is Centauri's MAX_CHUNKS."""


def points(part: Part, graph: Graph, op: Operator, profile: Profile) -> Iterator[Partition]:
    """The partition space of a gather or scatter (section 3.1), the whole of it aside.

    Over nodes and inside them, where the profile has those: in both orders, and a gather also about its own
    node (figure 5e). In pieces: of the transfer alone, or with operators beside it, along tokens or along the
    width of a product; those of a gather also as its stages deliver.
    """
    assert op.axis is not None
    what, mesh, gathers = f"{part.name}/{op.name}", node_mesh(profile, op.axis), op.kind is Kind.ALL_GATHER
    orders: list[tuple[int, ...]] = [()]
    if mesh is not None:
        orders += [(0, 1), (1, 0), ABOUT_OWN] if gathers else [(1, 0), (0, 1)]
    for order in orders:
        division: dict[str, Any] = {"mesh": mesh, "order": order} if order else {}
        for cut in _pieces(part, graph, op):
            added_up = gathers and cut.get("dim") == "width"  # every piece has all rows, which come in two
            if (cut.get("delivered") and not order) or (added_up and order == ABOUT_OWN):
                continue
            if order or cut.get("pieces", 1) > 1:
                yield Partition(what=what, **division, **cut)


def _pieces(part: Part, graph: Graph, op: Operator) -> Iterator[dict[str, Any]]:
    """Pieces of a collective, alone and with the operators beside it, as many as have some of it each: what a
    `Partition` says of them."""
    moved = part.values[op.reads[0]], part.values[op.writes[0]]
    rows, width = min(value.rows for value in moved), moved[1].columns
    yield from ({"pieces": n} for n in PIECE_COUNTS if n <= rows)
    beside = operators_beside(graph, op, MOST_BESIDE)
    for length in range(1, len(beside) + 1):
        along = {"dim": "tokens", "operators": length}
        if op.kind is Kind.ALL_GATHER:
            yield {**along, "delivered": True}
        yield from ({**along, "pieces": n} for n in PIECE_COUNTS[1:] if n <= rows)
    if beside and beside[0].kind is Kind.GEMM:
        across = {"dim": "width", "operators": 1}
        yield from ({**across, "pieces": n} for n in PIECE_COUNTS[1:] if n <= width)


def node_mesh(profile: Profile, axis: str) -> tuple[int, ...] | None:
    """Nodes x ranks of each, where a profile has transfers along these factors of an axis."""
    factors = (factor_of(key.partition("/")[0]) for key in profile.transfers)
    return next((one.mesh for one in factors if one is not None and one.axis == axis), None)


def span_ns(graph: Graph, names: set[str], profile: Profile) -> float:
    """From the first start to the last end of some operators, or of their pieces, alone on a rank.

    Streams serve them in the order of the graph. A rank that is busy with starting a collective, or with what
    it brings, computes nothing meanwhile; where nothing runs beside it, that is part of the collective.
    """
    queues: dict[Stream, list[str]] = defaultdict(list)
    lengths: dict[str, int] = {}
    waits: dict[str, Sequence[str]] = {}
    unasked: dict[str, tuple[str, int]] = {}
    """Of transfers that nothing has asked for yet: what is left to do, the transfer, how long it takes."""
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


# -- what replicas share -------------------------------------------------------------------------------------


def sharing_partitions(bench: CostedSetting) -> tuple[Partition, ...]:
    """Sums of gradients and gathers of parameters in stages, inside nodes and between them, where that is
    shorter for a bucket of a layer's size, in the shorter of the two orders."""
    setting, profile = bench.setting, bench.profile
    layout, mesh = setting.layout, node_mesh(profile, PARTITIONED[1])
    if mesh is None or not setting.kind.early_sums:
        return ()
    kinds = setting.kinds
    layers = max(1, len(kinds) // layout.pp)
    count = sum(chunk_parameters(bench.members, layout, kinds, c).dense for c in layout.chunks_of(0)) / layers
    wanted = (Kind.REDUCE_SCATTER, Kind.ALL_GATHER) if layout.zero else (Kind.ALL_REDUCE,)
    found = []
    for kind in wanted:
        gathers, dtype = kind is Kind.ALL_GATHER, setting.dtype
        payload = count * (DTYPE_BYTES[dtype] if gathers else sent_width(dtype, setting.reduce_dtype))
        whole = profile.transfer("dp", kind).ns(payload)
        best = min((stages_ns(profile, kind, mesh, order, payload), order) for order in ((0, 1), (1, 0)))
        if best[0] < whole:
            found.append(Partition(what=f"dp/{kind.value}", mesh=mesh, order=best[1]))
    return tuple(found)


def stages_ns(
    profile: Profile, kind: Kind, mesh: tuple[int, ...], order: tuple[int, ...], payload: float
) -> float:
    """The longer of what the stages take inside nodes and between them, as those of one bucket go beside
    those of another."""
    along: dict[Factor, float] = {}
    partition = Partition(what=f"dp/{kind.value}", mesh=mesh, order=order)
    for move in moves_of(kind, (partition,), "dp"):
        ns = profile.transfer(str(move.factor), move.kind).ns(payload / move.part)
        along[move.factor] = along.get(move.factor, 0.0) + ns
    return max(along.values())
