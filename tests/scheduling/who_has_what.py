"""Which rows and columns every rank has of every value of a cut layer, counted cell by cell.

A reference for `braid.scheduling.generate.partitions` that knows of stages no more than what a collective
along a dim of a mesh does: gathers bring what ranks have together, scatters add up what all of them have.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from braid.scheduling.mesh.partition import DimRanks, Region, Share, factor_of, whole_axis
from braid.scheduling.model.operators import Graph, Kind, Operator, Part

Cells = np.ndarray
"""Booleans: [ranks along every dim of the mesh, rows of a rank, columns]."""


def _range(share: Share, size: int) -> list[int]:
    number, ways = share
    return [n for n in range(size) if (number - 1) * size // ways <= n < number * size // ways]


def cells(region: Region, place: tuple[int, ...], rows: int, columns: int) -> Cells:
    """What a value of a region has on the rank at a place."""
    found = np.zeros((*region.mesh, rows, columns), dtype=bool)
    ranks = []
    for span, size, own in zip(region.spans, region.mesh, place, strict=True):
        others = [n for n in range(size) if n != own]
        ranks.append({DimRanks.ALL: [*range(size)], DimRanks.OWN: [own], DimRanks.OTHERS: others}[span])
    found[np.ix_(*ranks, _range(region.rows, rows), _range(region.columns, columns))] = True
    return found


def cover_once(masks: list[Cells], whole: Cells) -> bool:
    """Whether some cells are all of a whole, none of them twice."""
    return np.array_equal(np.sum(masks, axis=0, dtype=int), whole.astype(int))


@dataclass
class CutGraph:
    """A pass of a layer before and after it was cut."""

    part: Part
    cut: Part
    before: Graph
    after: Graph

    def __post_init__(self) -> None:
        self.pieces: dict[str, list[Operator]] = defaultdict(list)
        for op in self.after.operators:
            if op.piece is not None:
                self.pieces[op.piece.whole].append(op)

    def check(self) -> None:
        """Everything below."""
        self.check_operators()
        for op in self.before.operators:
            if op.name in self.pieces and op.kind.communicates:
                self.check_collective(op)
        for op in self.before.operators:
            if op.name in self.pieces and not op.kind.communicates:
                self.check_compute(op)

    # -- operators ---------------------------------------------------------------------------------------

    def check_operators(self) -> None:
        """What is not cut is as it was; pieces do the same work; the completing one comes last."""
        whole = [op for op in self.after.operators if op.piece is None]
        kept = [op for op in self.before.operators if op.name not in self.pieces]
        assert {op.name: op for op in whole} == {op.name: op for op in kept}
        assert self.pieces.keys() <= {op.name for op in self.before.operators}
        for name, pieces in self.pieces.items():
            op, moves = self.before.named(name), self.before.named(name).kind.communicates
            for one in pieces:
                assert one.piece is not None
                assert one.piece.measured_as == op.measured_as
                assert one.key.startswith(f"{op.key}.")
                assert (one.kind, one.phase, one.module) == (op.kind, op.phase, op.module)
                assert whole_axis(one.axis or "") == (op.axis or "")
                if not moves:
                    assert (one.stream, one.axis) == (op.stream, op.axis)
            assert abs(op.flops - sum(one.flops for one in pieces)) <= len(pieces)
            assert 0 <= op.bytes - sum(one.bytes for one in pieces) <= len(pieces)
            assert sum(one.piece.share for one in pieces if one.piece) <= 1 + 1e-9
            complete = [one for one in pieces if one.completes]
            assert not complete or (len(complete) == 1 and complete[0] is pieces[-1])
            assert all(one.completed_by(pieces[-1]) == bool(complete) for one in pieces[:-1])

    # -- collectives -------------------------------------------------------------------------------------

    def check_collective(self, op: Operator) -> None:
        """Every stage moves what ranks have, and brings what its result is said to have, as a ring does."""
        gathers, values = op.kind is Kind.ALL_GATHER, self.cut.values
        (x,), (y,) = op.reads, op.writes
        rows = self.part.values[x if gathers else y].rows
        ranks = self.part.values[y if gathers else x].rows // rows
        columns = self.part.values[y].columns
        first = self.pieces[op.name][0]
        factor = factor_of(first.axis or "")
        mesh = (ranks,) if factor is None else factor.mesh
        assert int(np.prod(mesh)) == ranks
        places = [*product(*map(range, mesh))]
        own, everybody = ((span,) * len(mesh) for span in (DimRanks.OWN, DimRanks.ALL))

        def region_of(name: str) -> Region:
            if (region := values[name].region) is not None:
                assert (region.axis, region.mesh) == (op.axis, mesh)
                return region
            assert name in (x, y)
            return Region(op.axis or "", mesh, own if (name == x) == gathers else everybody)

        summed: dict[str, frozenset[int]] = {}
        for stage in self.pieces[op.name]:
            factor = factor_of(stage.axis or "")
            assert (factor is None) == (len(mesh) == 1)
            dim = 0 if factor is None else factor.dim
            assert factor is None or factor.mesh == mesh
            (source,), target = stage.reads, stage.writes[0]
            held, made = region_of(source), region_of(target)
            spans = list(made.spans)
            spans[dim] = DimRanks.OWN if gathers else DimRanks.ALL
            moved = replace(made, spans=tuple(spans))
            for place in places:
                line = [(*place[:dim], n, *place[dim + 1 :]) for n in range(mesh[dim])]
                has = {at: cells(held, at, rows, columns) for at in line}
                brought = cells(made, place, rows, columns)
                if gathers:
                    sent = {at: cells(moved, at, rows, columns) for at in line}
                    assert all((has[at] >= sent[at]).all() for at in line), (
                        f"{stage.name} sends what is not there"
                    )
                    assert cover_once([*sent.values()], brought), f"{stage.name} brings something else"
                else:
                    assert all((has[at] >= brought).all() for at in line), (
                        f"{stage.name} adds what is not there"
                    )
                whole = brought if gathers else cells(moved, place, rows, columns)
                assert stage.bytes == 2 * int(whole.sum()) * (mesh[dim] - 1) // mesh[dim]
                if (value := values[target]).region is not None:
                    assert value.elements == brought.sum()
                    assert value.rows == brought.any(axis=-1).sum()
            assert gathers or dim not in summed.get(source, ()), f"{stage.name} adds up twice"
            summed[target] = summed.get(source, frozenset()) | {dim}
        last = [stage for stage in self.pieces[op.name] if values[stage.writes[0]].piece_of == y]
        if last:
            assert y in last[-1].writes
        else:
            last = [stage for stage in self.pieces[op.name] if y in stage.writes]
            assert len(last) == 1 or (gathers and self._next(op)), f"nothing makes {y}"
        if not gathers:
            assert all(summed[stage.writes[0]] == {*range(len(mesh))} for stage in last)
        for place in places if last else ():
            found = [cells(region_of(stage.writes[0]), place, rows, columns) for stage in last]
            assert cover_once(found, cells(region_of(y), place, rows, columns))

    def _next(self, op: Operator) -> list[Operator]:
        """What is cut behind a gather."""
        return [one for one in self.before.operators if one.name in self.pieces and one.reads == op.writes]

    # -- what computes -----------------------------------------------------------------------------------

    def check_compute(self, op: Operator) -> None:
        """Pieces have the rows that they work on, and all of them together are the whole."""
        values, pieces = self.cut.values, self.pieces[op.name]
        (x,), (z,) = op.reads, op.writes
        regions = [values[one.writes[0]].region for one in pieces]
        if pieces[-1].writes == (z,) and regions[-1] is None:
            self._check_products(op)
            return
        first = regions[0]
        assert first is not None
        for place, rows in self._places(first, self.part.values[z].rows):
            columns = self.part.values[z].columns
            whole = cells(
                Region(first.axis, first.mesh, (DimRanks.ALL,) * len(first.mesh)), place, rows, columns
            )
            made = []
            for one, region in zip(pieces, regions, strict=True):
                assert region is not None
                made.append(cells(region, place, rows, columns))
                value = values[one.writes[0]]
                assert value.elements == made[-1].sum()
                assert value.rows == made[-1].any(axis=-1).sum()
                (source,) = one.reads
                if (held := values[source].region) is not None:
                    there = cells(held, place, rows, 1)
                    assert (there >= made[-1].any(axis=-1, keepdims=True)).all(), f"{one.name} lacks rows"
                else:
                    assert source == x
            assert cover_once(made, whole), f"pieces of {op.name} are not the whole"
        placed = [one for one in pieces if values[one.writes[0]].piece_of == z]
        assert placed in ([], pieces)
        assert pieces[-1].completes == bool(placed)

    def _check_products(self, op: Operator) -> None:
        """Each with other columns of what is read, added to what is there so far."""
        values, pieces = self.cut.values, self.pieces[op.name]
        regions, so_far = [], None
        for one in pieces:
            source, *before = one.reads
            assert before == ([] if so_far is None else [so_far])
            (so_far,) = one.writes
            assert (values[so_far].alias_of or so_far) == op.writes[0]
            region = values[source].region
            assert region is not None
            assert values[source].rows == self.part.values[op.reads[0]].rows, f"{one.name} lacks rows"
            regions.append(region)
        value = self.part.values[op.reads[0]]
        for place, rows in self._places(regions[0], value.rows):
            whole = np.ones((*regions[0].mesh, rows, value.columns), dtype=bool)
            assert cover_once([cells(one, place, rows, value.columns) for one in regions], whole)

    @staticmethod
    def _places(region: Region, rows: int) -> Iterator[tuple[tuple[int, ...], int]]:
        for place in product(*map(range, region.mesh)):
            yield place, rows // int(np.prod(region.mesh))


def check_cut(part: Part, cut: Part) -> None:
    """That a layer was cut into something that computes the same, with the same work."""
    assert {name: one for name, one in cut.values.items() if name in part.values} == dict(part.values)
    assert cut.saved() == part.saved()
    assert [cut.saved_bytes(width) for width in (2, 4)] == [part.saved_bytes(width) for width in (2, 4)]
    given = {*cut.saved(), *cut.constants, f"d.{cut.output}"}
    for before, after, there in (
        (part.forward, cut.forward, {*cut.inputs}),
        (part.backward, cut.backward, given),
    ):
        written = set(there)
        for op in after.operators:
            assert set(op.reads) <= written, f"{op.name} reads what is not there"
            assert not set(op.writes) & (written - there), f"{op.name} writes again"
            assert len(set(op.writes)) == len(op.writes) in (1, 2) or op.piece is None
            written |= set(op.writes)
        CutGraph(part, cut, before, after).check()
    for output in (part.output, *(f"d.{name}" for name in part.inputs)):
        makers = [
            op for graph in (cut.forward, cut.backward) for op in graph.operators if output in op.writes
        ]
        assert len(makers) == 1
