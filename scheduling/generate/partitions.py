"""Applies partitions to graphs: collectives become stages and pieces, adjacent operators become pieces.

A micro-batch then overlaps with itself: a piece of a GEMM runs while the next piece of the preceding
all-gather, or the previous piece of the following reduce-scatter, is on a link; and one piece's stage inside
nodes runs beside another piece's stage between nodes. All pieces are ordinary operators for scheduling,
pricing and execution. MegaScale's pipelines of gathers and GEMMs are the partition `mega_scale`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from braid.scheduling.generate.partition_checks import can_be_cut, check_partition, operators_beside
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.mesh.partition import WHOLE, DimRanks, Factor, Partition, Region, Share, Target, chosen
from braid.scheduling.model.operators import Graph, Kind, Operator, Part, Phase, Piece, Value
from braid.scheduling.model.stages import Stage, gather_stages, scatter_stages
from braid.scheduling.text.pattern import is_layer

WAYS = (2, 4, 8)
"""Numbers of pieces per collective that planning tries and profiling measures."""


def mega_scale(ways: int) -> tuple[Partition, ...]:
    """Return MegaScale's partition (DHelix section 2.3): tensor-parallel gathers and the GEMMs that read them
    are cut into ``ways`` pieces along tokens. It is empty if ``ways`` is 1."""
    return (
        (Partition(what=Target("tp", "all_gather"), pieces=ways, dim="tokens", operators=1),)
        if ways > 1
        else ()
    )


def with_partitions(
    parts: Mapping[str, Part], partitions: Sequence[Partition], layout: ParallelLayout
) -> dict[str, Part]:
    """Return the parts of a model with the collectives of its layers cut.

    Weight gradients read whole tensors. If an operator reads a whole value, the pieces lie in the value's
    memory and the last piece completes it; during its transfer a piece also has contiguous memory of its own.
    The linker cuts sums and gathers outside layers. Raises `ValueError` for impossible cuts.
    """
    if not partitions:
        return dict(parts)
    for partition in partitions:
        check_partition(partition, parts, layout)
    return {
        name: _Cutter(part, partitions, layout).part() if is_layer(name) else part
        for name, part in parts.items()
    }


def cut_gemms(part: Part) -> frozenset[str]:
    """Return the profile keys of a layer's GEMMs that read a gather, so that both can be cut along tokens."""
    keys = set()
    for graph in (part.forward, part.backward):
        for op in graph.operators:
            gathers = op.kind is Kind.ALL_GATHER and can_be_cut(part, op)
            if gathers and (chain := operators_beside(graph, op, 1)):
                keys.add(chain[0].key)
    return frozenset(keys)


@dataclass
class _Cutter:
    """Rewrites the graphs of one layer so that its collectives are cut as ``partitions`` say."""

    original: Part
    partitions: Sequence[Partition]
    layout: ParallelLayout
    values: dict[str, Value] = field(default_factory=dict)
    """The layer's values, to which cutting adds pieces."""
    _readers: dict[str, set[str]] = field(default_factory=dict)
    """Name of a value -> names of the operators, in both passes, that read it."""

    def part(self) -> Part:
        """Return the layer with its collectives cut."""
        part = self.original
        self.values = dict(part.values)
        for op in (*part.forward.operators, *part.backward.operators):
            for name in op.reads:
                self._readers.setdefault(name, set()).add(op.name)
        self._readers.setdefault(part.output, set()).add("the next part")
        forward, backward = self._graph(part.forward), self._graph(part.backward)
        return replace(part, forward=forward, backward=backward, values=self.values)

    def _graph(self, graph: Graph) -> Graph:
        taken: set[str] = set()
        groups: dict[str, list[Operator]] = {}
        for op in graph.operators:
            how = chosen(self.partitions, f"{self.original.name}/{op.name}", f"{op.axis}/{op.kind.value}")
            if how is None or not can_be_cut(self.original, op):
                continue
            chain = [near for near in operators_beside(graph, op, how.operators) if near.name not in taken]
            if how.operators and not chain:
                if not how.mesh:
                    continue
                how = replace(how, operators=0, dim="", delivered=False, pieces=1)
            taken.update((op.name, *(near.name for near in chain)))
            cutting = _Cutting(self, op, how, chain)
            groups[cutting.first.name] = list(cutting.operators())
        operators: list[Operator] = []
        for op in graph.operators:
            if op.name in groups:
                operators += groups[op.name]
            elif op.name not in taken:
                operators.append(op)
        return Graph(operators=tuple(operators))

    def read_by_others(self, value: str, *readers: str) -> bool:
        """Return whether any operator other than ``readers`` reads the value, so that it must exist as a
        whole."""
        return bool(self._readers.get(value, set()).difference(readers))


@dataclass
class _Cutting:
    """Cuts one collective, together with the ``adjacent`` operators (nearest first)."""

    layer: _Cutter
    op: Operator
    how: Partition
    adjacent: Sequence[Operator]

    def __post_init__(self) -> None:
        op, self.values = self.op, self.layer.values
        assert op.axis is not None
        self.axis = op.axis
        self.gathers = op.kind is Kind.ALL_GATHER
        self.x, self.y = op.reads[0], op.writes[0]
        self.rank_rows = self.values[self.x if self.gathers else self.y].rows
        self.mesh = self.how.mesh or (self.layer.layout.degree(self.axis),)

    @property
    def first(self) -> Operator:
        """The first operator, in graph order, of those that are cut; all pieces take its place."""
        return self.adjacent[-1] if self.adjacent and not self.gathers else self.op

    def operators(self) -> Iterator[Operator]:
        """Yield the operators that replace the cut ones: all pieces' stages, and pieces of adjacent
        operators."""
        return self._gather() if self.gathers else self._scatter()

    def _gather(self) -> Iterator[Operator]:
        """Yield the operators of a cut gather: the stages of all pieces, staggered so that stages of
        different pieces overlap, then the adjacent readers piece by piece."""
        how, adjacent, pieces = self.how, self.adjacent, self.how.pieces
        stages = gather_stages(self.mesh, how)
        last = (0, 2) if how.about_own else (len(stages) - 1,)
        lone = len(last) == pieces == 1
        whole_read = lone or not adjacent or self.layer.read_by_others(self.y, adjacent[0].name)
        waves = sorted((piece + n, n, piece) for piece in range(1, pieces + 1) for n in range(len(stages)))
        final = [(n, piece) for _, n, piece in waves if n in last][-1]
        results: dict[tuple[int, int], str] = {}
        for _, n, piece in waves:
            stage, share = stages[n], (piece, pieces)
            label = _label(n, len(stages), share)
            if lone and n in last:
                writes: tuple[str, ...] = (self.y,)
            else:
                placed = n in last and whole_read
                writes = (self._piece(self.y, label, self._region(stage.spans, share), placed=placed),)
                if placed and (n, piece) == final:
                    writes = (*writes, self.y)
            results[n, piece] = writes[0]
            source = self.x if stage.source is None else results[stage.source, piece]
            yield self._stage(label, stage, share, source, writes)
        arrivals = [
            (results[n, piece], self._region(stage.fresh if how.delivered else stage.spans, (piece, pieces)))
            for piece in range(1, pieces + 1)
            for n, stage in enumerate(stages)
            if how.delivered or n in last
        ]
        if len(arrivals) == 1:
            yield from adjacent
        elif adjacent and how.dim == "width":
            yield from self._sums(adjacent[0], [name for name, _ in arrivals])
        elif adjacent:
            for number, (name, region) in enumerate(arrivals, start=1):
                yield from self._along(adjacent, region, name, (number, len(arrivals)))

    def _scatter(self) -> Iterator[Operator]:
        """Yield the operators of a cut scatter: the adjacent operators piece by piece, and among them the
        stages of earlier pieces."""
        pieces = self.how.pieces
        stages = scatter_stages(self.mesh, self.how)
        before = self.adjacent[::-1] if pieces > 1 else ()
        if pieces == 1:
            yield from self.adjacent[::-1]
        results: dict[tuple[int, int], str] = {}
        everybody = (DimRanks.ALL,) * len(self.mesh)
        # If several operators may begin at the same time, compute operators come last.
        for _, _, n, piece in sorted(
            (piece + n, n < 0, n, piece) for piece in range(1, pieces + 1) for n in range(-1, len(stages))
        ):
            share = (piece, pieces)
            if n < 0:
                source = before[0].reads[0] if before else self.x
                for op in self._along(before, self._region(everybody, share), source, share, ends=self.op):
                    yield op
                    source = op.writes[0]
                results[n, piece] = source
                continue
            label, ends = _label(n, len(stages), share), n == len(stages) - 1
            if ends and pieces == 1:
                writes: tuple[str, ...] = (self.y,)
            else:
                region = self._region(stages[n].spans, share)
                writes = (self._piece(self.y if ends else self.x, label, region, placed=ends),)
                if ends and piece == pieces:
                    writes = (*writes, self.y)
            results[n, piece] = writes[0]
            yield self._stage(label, stages[n], share, results[n - 1, piece], writes)

    def _along(
        self,
        chain: Sequence[Operator],
        region: Region,
        source: str,
        number: Share,
        ends: Operator | None = None,
    ) -> Iterator[Operator]:
        """Yield one piece of every operator in a chain of adjacent operators.

        ``source``: the piece that the first one reads; ``number``: (piece, pieces); ``ends``: the operator
        that reads the chain's result.
        """
        for index, op in enumerate(chain):
            (z,) = op.writes
            after = chain[index + 1] if index + 1 < len(chain) else ends
            whole = after is None or self.layer.read_by_others(z, after.name)
            writes: tuple[str, ...] = (self._piece(z, _of(number), region, placed=whole),)
            portion = self.values[writes[0]].elements / self.values[z].elements
            if whole and number[0] == number[1]:
                writes = (*writes, z)
            yield self._compute(op, number, (source,), writes, portion)
            source = writes[0]

    def _sums(self, op: Operator, sources: Sequence[str]) -> Iterator[Operator]:
        """Yield a GEMM as several GEMMs, one for each piece of its input's columns; each adds to the previous
        sum."""
        (z,) = op.writes
        before: tuple[str, ...] = ()
        for number, source in enumerate(sources, start=1):
            again = ".again" if self.op.phase is Phase.RECOMPUTE else ""
            name = z if number == len(sources) else f"{z}{again}.{_of((number, len(sources)))}"
            if name != z:
                self.values[name] = replace(self.values[z], name=name, alias_of=z, gradient_of=None)
            share = number, len(sources)
            yield self._compute(op, share, (source, *before), (name,), 1 / len(sources))
            before = (name,)

    def _region(self, spans: tuple[DimRanks, ...], share: Share) -> Region:
        if self.how.dim == "width":
            return Region(self.axis, self.mesh, spans, WHOLE, share)
        return Region(self.axis, self.mesh, spans, share)

    def _piece(self, whole: str, label: str, region: Region, *, placed: bool) -> str:
        """Add a value for one piece of the value ``whole`` and return its name.

        ``region``: the rows and columns that it holds; ``placed``: whether ``whole`` holds these rows too.
        """
        # A recomputed value has the same name as the original, but perhaps different pieces.
        again = ".again" if self.op.phase is Phase.RECOMPUTE else ""
        like, name = self.values[whole], f"{whole}{again}.{label}"
        elements = region.elements(self.rank_rows, like.columns)
        rows = replace(region, columns=WHOLE).elements(self.rank_rows, 1)
        if not elements:
            raise ValueError(
                f"partition {self.how.what}: pieces={self.how.pieces} of {self.rank_rows} tokens of "
                f"{like.columns} elements leave some empty; use fewer pieces"
            )
        self.values[name] = replace(
            like,
            name=name,
            elements=elements,
            rows=rows,
            region=region,
            alias_of=None,
            gradient_of=None,
            piece_of=whole if placed else None,
        )
        return name

    def _compute(
        self, op: Operator, number: Share, reads: tuple[str, ...], writes: tuple[str, ...], portion: float
    ) -> Operator:
        return replace(
            op,
            name=f"{op.name}.{_of(number)}",
            own_name=f"{op.own_name}.{_of(number)}",
            measured_as=f"{op.measured_as}.{_of(number)}",
            piece=Piece(op.name, *number, op.measured_as, portion),
            reads=reads,
            writes=writes,
            flops=round(op.flops * portion),
        )

    def _stage(
        self, label: str, stage: Stage, share: Share, source: str, writes: tuple[str, ...]
    ) -> Operator:
        op, size = self.op, self.mesh[stage.dim]
        spans = tuple(DimRanks.ALL if dim == stage.dim else span for dim, span in enumerate(stage.spans))
        value = self.values[self.y]
        elements = self._region(spans, share).elements(self.rank_rows, value.columns)
        sent = value.precision.bytes_each(2) * elements * (size - 1) // size
        factor = Factor(self.axis, self.mesh, stage.dim)
        return replace(
            op,
            name=f"{op.name}.{label}",
            own_name=f"{op.own_name}.{label}",
            measured_as=f"{op.measured_as}.{label}",
            axis=factor if len(self.mesh) > 1 else op.axis,
            stream=Stream.INTRA if len(self.mesh) > 1 and factor.inside else op.stream,
            piece=Piece(op.name, *share, op.measured_as, sent / op.bytes),
            reads=(source,),
            writes=writes,
            bytes=sent,
        )


def _of(share: Share) -> str:
    return f"{share[0]}of{share[1]}"


def _label(stage: int, stages: int, share: Share) -> str:
    words = [f"s{stage + 1}"] if stages > 1 else []
    if share[1] > 1:
        words.append(_of(share))
    return ".".join(words)
