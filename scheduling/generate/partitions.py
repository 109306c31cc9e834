"""Partitions carried out in graphs: a collective becomes stages and pieces, operators beside it pieces.

So that a micro-batch overlaps with itself: a piece of a GEMM runs while the next one of the all-gather before
it, or the last one of the reduce-scatter behind it, is on a link; and a stage inside nodes of one piece while
one between nodes of another is. All of them are operators like any others for whoever schedules, prices or
runs them. MegaScale's pipelines of gathers and GEMMs are the partition `mega_scale`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from braid.scheduling.generate.partition_checks import can_be_cut, check_partition, operators_beside
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.mesh.partition import WHOLE, DimRanks, Factor, Partition, Region, Share, chosen
from braid.scheduling.model.operators import Graph, Kind, Operator, Part, Phase, Piece, Value
from braid.scheduling.model.stages import Stage, gather_stages, scatter_stages
from braid.scheduling.text.pattern import is_layer

WAYS = (2, 4, 8)
"""Numbers of pieces that are tried, and measured."""


def mega_scale(ways: int) -> tuple[Partition, ...]:
    """Gathers of layers that a GEMM reads, in pieces of tokens (as DHelix describes it, section 2.3)."""
    return (Partition(what="tp/all_gather", pieces=ways, dim="tokens", operators=1),) if ways > 1 else ()


def with_partitions(
    parts: Mapping[str, Part], partitions: Sequence[Partition], layout: ParallelLayout
) -> dict[str, Part]:
    """The parts of a model with collectives of its layers cut. `ValueError` for what cannot be cut so.

    Weight gradients keep the whole tensors. A piece's result is part of the whole value's memory, where
    something reads that; the last piece completes it. (Executed, a piece also has its rows side by side for
    itself while it is under way.) Partitions of sums and gathers outside layers are left to the linker.
    """
    if not partitions:
        return dict(parts)
    for one in partitions:
        check_partition(one, parts, layout)
    return {
        name: _Cutter(part, partitions, layout).part() if is_layer(name) else part
        for name, part in parts.items()
    }


def cut_gemms(part: Part) -> frozenset[str]:
    """The GEMMs, by key, that a partition of the layer's gathers can run in pieces of tokens."""
    found = set()
    for graph in (part.forward, part.backward):
        for op in graph.operators:
            gathers = op.kind is Kind.ALL_GATHER and can_be_cut(part, op)
            if gathers and (beside := operators_beside(graph, op, 1)):
                found.add(beside[0].key)
    return frozenset(found)


@dataclass
class _Cutter:
    """Cuts a layer."""

    original: Part
    partitions: Sequence[Partition]
    layout: ParallelLayout
    _values: dict[str, Value] = field(default_factory=dict)
    _readers: dict[str, set[str]] = field(default_factory=dict)
    """Names of operators of both passes, by what they read."""

    def part(self) -> Part:
        """The layer, cut."""
        part = self.original
        self._values = dict(part.values)
        for op in (*part.forward.operators, *part.backward.operators):
            for name in op.reads:
                self._readers.setdefault(name, set()).add(op.name)
        self._readers.setdefault(part.output, set()).add("the next part")
        forward, backward = self._graph(part.forward), self._graph(part.backward)
        return replace(part, forward=forward, backward=backward, values=self._values)

    def _graph(self, graph: Graph) -> Graph:
        taken: set[str] = set()
        groups: dict[str, list[Operator]] = {}
        for op in graph.operators:
            how = chosen(self.partitions, f"{self.original.name}/{op.name}", f"{op.axis}/{op.kind.value}")
            if how is None or not can_be_cut(self.original, op):
                continue
            beside = [one for one in operators_beside(graph, op, how.operators) if one.name not in taken]
            if how.operators and not beside:
                if not how.mesh:
                    continue
                how = replace(how, operators=0, dim="", delivered=False, pieces=1)
            taken.update((op.name, *(one.name for one in beside)))
            cutting = _Cutting(self, op, how, beside)
            groups[cutting.first.name] = list(cutting.operators())
        operators: list[Operator] = []
        for op in graph.operators:
            if op.name in groups:
                operators += groups[op.name]
            elif op.name not in taken:
                operators.append(op)
        return Graph(operators=tuple(operators))

    def values(self) -> dict[str, Value]:
        """Those of the layer, to be added to."""
        return self._values

    def read_by_others(self, value: str, *readers: str) -> bool:
        """Whether something else needs it whole."""
        return bool(self._readers.get(value, set()).difference(readers))


@dataclass
class _Cutting:
    """Cuts one collective and what is ``beside`` it, nearest first."""

    layer: _Cutter
    op: Operator
    how: Partition
    beside: Sequence[Operator]

    def __post_init__(self) -> None:
        op, self.values = self.op, self.layer.values()
        assert op.axis is not None
        self.axis = op.axis
        self.gathers = op.kind is Kind.ALL_GATHER
        self.x, self.y = op.reads[0], op.writes[0]
        self.rank_rows = self.values[self.x if self.gathers else self.y].rows
        self.mesh = self.how.mesh or (self.layer.layout.degree(self.axis),)

    @property
    def first(self) -> Operator:
        """What all of it stands in the place of."""
        return self.beside[-1] if self.beside and not self.gathers else self.op

    def operators(self) -> Iterator[Operator]:
        """Stages of pieces, and pieces of what is beside."""
        return self._gather() if self.gathers else self._scatter()

    def _gather(self) -> Iterator[Operator]:
        """The stages of a piece beside those of the next; then what follows, piece by piece."""
        how, beside, pieces = self.how, self.beside, self.how.pieces
        stages = gather_stages(self.mesh, how)
        last = (0, 2) if how.about_own else (len(stages) - 1,)
        lone = len(last) == pieces == 1
        kept = lone or not beside or self.layer.read_by_others(self.y, beside[0].name)
        waves = sorted((piece + n, n, piece) for piece in range(1, pieces + 1) for n in range(len(stages)))
        final = [(n, piece) for _, n, piece in waves if n in last][-1]
        made: dict[tuple[int, int], str] = {}
        for _, n, piece in waves:
            stage, share = stages[n], (piece, pieces)
            label = _label(n, len(stages), share)
            if lone and n in last:
                writes: tuple[str, ...] = (self.y,)
            else:
                placed = n in last and kept
                writes = (self._piece(self.y, label, self._region(stage.spans, share), placed=placed),)
                if placed and (n, piece) == final:
                    writes = (*writes, self.y)
            made[n, piece] = writes[0]
            source = self.x if stage.source is None else made[stage.source, piece]
            yield self._stage(label, stage, share, source, writes)
        brought = [
            (made[n, piece], self._region(stage.fresh if how.delivered else stage.spans, (piece, pieces)))
            for piece in range(1, pieces + 1)
            for n, stage in enumerate(stages)
            if how.delivered or n in last
        ]
        if len(brought) == 1:
            yield from beside
        elif beside and how.dim == "width":
            yield from self._sums(beside[0], [name for name, _ in brought])
        elif beside:
            for number, (name, region) in enumerate(brought, start=1):
                yield from self._along(beside, region, name, (number, len(brought)))

    def _scatter(self) -> Iterator[Operator]:
        """What comes before, piece by piece, and the stages of the pieces before it."""
        pieces = self.how.pieces
        stages = scatter_stages(self.mesh, self.how)
        before = self.beside[::-1] if pieces > 1 else ()
        if pieces == 1:
            yield from self.beside[::-1]
        made: dict[tuple[int, int], str] = {}
        everybody = (DimRanks.ALL,) * len(self.mesh)
        # What computes comes last of what may begin at the same time.
        for _, _, n, piece in sorted(
            (piece + n, n < 0, n, piece) for piece in range(1, pieces + 1) for n in range(-1, len(stages))
        ):
            share = (piece, pieces)
            if n < 0:
                source = before[0].reads[0] if before else self.x
                for one in self._along(before, self._region(everybody, share), source, share, ends=self.op):
                    yield one
                    source = one.writes[0]
                made[n, piece] = source
                continue
            label, ends = _label(n, len(stages), share), n == len(stages) - 1
            if ends and pieces == 1:
                writes: tuple[str, ...] = (self.y,)
            else:
                region = self._region(stages[n].spans, share)
                writes = (self._piece(self.y if ends else self.x, label, region, placed=ends),)
                if ends and piece == pieces:
                    writes = (*writes, self.y)
            made[n, piece] = writes[0]
            yield self._stage(label, stages[n], share, made[n - 1, piece], writes)

    def _along(
        self,
        chain: Sequence[Operator],
        region: Region,
        source: str,
        number: Share,
        ends: Operator | None = None,
    ) -> Iterator[Operator]:
        """A piece of every operator of a chain; ``ends``: what takes its result."""
        for place, one in enumerate(chain):
            (z,) = one.writes
            after = chain[place + 1] if place + 1 < len(chain) else ends
            whole = after is None or self.layer.read_by_others(z, after.name)
            writes: tuple[str, ...] = (self._piece(z, _of(number), region, placed=whole),)
            portion = self.values[writes[0]].elements / self.values[z].elements
            if whole and number[0] == number[1]:
                writes = (*writes, z)
            yield self._compute(one, number, (source,), writes, portion)
            source = writes[0]

    def _sums(self, one: Operator, sources: Sequence[str]) -> Iterator[Operator]:
        """A GEMM whose inputs come column by column: what it has so far, and a product of these."""
        (z,) = one.writes
        before: tuple[str, ...] = ()
        for number, source in enumerate(sources, start=1):
            again = ".again" if self.op.phase is Phase.RECOMPUTE else ""
            name = z if number == len(sources) else f"{z}{again}.{_of((number, len(sources)))}"
            if name != z:
                self.values[name] = replace(self.values[z], name=name, alias_of=z)
            share = number, len(sources)
            yield self._compute(one, share, (source, *before), (name,), 1 / len(sources))
            before = (name,)

    def _region(self, spans: tuple[DimRanks, ...], share: Share) -> Region:
        if self.how.dim == "width":
            return Region(self.axis, self.mesh, spans, WHOLE, share)
        return Region(self.axis, self.mesh, spans, share)

    def _piece(self, whole: str, label: str, region: Region, *, placed: bool) -> str:
        """A value that has a region of all ranks' rows; ``placed``: the whole one has them too."""
        # What is computed again is the same value, perhaps in other pieces.
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
            piece_of=whole if placed else None,
        )
        return name

    def _compute(
        self, one: Operator, number: Share, reads: tuple[str, ...], writes: tuple[str, ...], portion: float
    ) -> Operator:
        return replace(
            one,
            name=f"{one.name}.{_of(number)}",
            own_name=f"{one.own_name}.{_of(number)}",
            measured_as=f"{one.measured_as}.{_of(number)}",
            piece=Piece(one.name, *number, one.measured_as, portion),
            reads=reads,
            writes=writes,
            flops=round(one.flops * portion),
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
            axis=str(factor) if len(self.mesh) > 1 else op.axis,
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
