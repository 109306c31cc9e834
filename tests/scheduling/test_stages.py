"""Stages of what replicas share: they come to what the whole collective does, one after the other."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import permutations
from math import prod
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from braid.kernels.collectives import primitives
from braid.kernels.collectives.primitives import Launch, gathered, scattered
from braid.scheduling.generate.lower import training_schedule
from braid.scheduling.mesh.mesh import place_in, sub_groups
from braid.scheduling.mesh.partition import Partition, Target
from braid.scheduling.model.operators import Kind
from braid.scheduling.model.stages import Move, moves_of
from braid.scheduling.schedule import buckets
from braid.scheduling.schedule.code import Code
from braid.scheduling.schedule.operations import Compute, Gather, Node, Operation, Reduce, Start
from braid.scheduling.schedule.schedule import Prefetch
from braid.scheduling.schedule.text import parse, write
from braid.scheduling.schedule.validate import linked
from tests.scheduling.cases import LLAMA, layout_for, parts_for, setting_for

KINDS = (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_GATHER)
MESHES = ((2, 2), (2, 3), (3, 2), (2, 2, 3))
ORDERS = [(mesh, order) for mesh in MESHES for order in permutations(range(len(mesh)))]


def staged(kind: Kind, mesh: tuple[int, ...], order: tuple[int, ...]) -> tuple[Move, ...]:
    """The stages of a collective of replicas."""
    return moves_of(kind, (Partition(what=Target("dp", kind.value), mesh=mesh, order=order),), "dp")


# -- stages by themselves ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mesh", "order"), ORDERS)
def test_parts_that_are_moved_add_up(kind: Kind, mesh: tuple[int, ...], order: tuple[int, ...]) -> None:
    """All stages together send as much as the whole collective, as rings do; they are numbered."""
    moves = staged(kind, mesh, order)
    ranks, twice = prod(mesh), 1 + (kind is Kind.ALL_REDUCE)
    sent = sum(
        Fraction(one.factor.size - 1, one.factor.size) / one.part * (1 + (one.kind is Kind.ALL_REDUCE))
        for one in moves
    )
    assert sent == twice * Fraction(ranks - 1, ranks)
    assert [one.number for one in moves] == [*range(len(moves))]
    assert {one.stages for one in moves} == {len(moves)}
    assert [one.last for one in moves] == [*[False] * (len(moves) - 1), True]
    assert {(one.factor.axis, one.factor.mesh) for one in moves} == {("dp", mesh)}
    dims = [one.factor.dim for one in moves]
    assert dims == [*order, *order[-2::-1]] if kind is Kind.ALL_REDUCE else dims == [*order]


def test_what_is_not_divided_has_no_stages() -> None:
    partitions = (
        Partition(what=Target("dp", "all_gather"), mesh=(2, 2), order=(0, 1)),
        Partition(what=Target("tp", "reduce_scatter"), mesh=(2, 2), order=(0, 1)),
    )
    assert not moves_of(Kind.REDUCE_SCATTER, partitions, "dp")
    assert not moves_of(Kind.ALL_REDUCE, partitions, "dp")
    assert len(moves_of(Kind.ALL_GATHER, partitions, "dp")) == 2


# -- what they come to ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class FakeLine:
    """Ranks along a dim, as one of them sees them; what they launch is carried out for all at once."""

    rank: int
    size: int
    launched: tuple[Kind, Tensor, Tensor] | None = None

    def _launch(self, kind: Kind, x: Tensor, y: Tensor) -> Launch:
        self.launched = kind, x, y
        return Launch(y, lambda: None)  # type: ignore[arg-type, return-value]

    def all_gather(self, x: Tensor, into: Tensor | None = None) -> Launch:
        """Of all ranks, in their order."""
        return self._launch(Kind.ALL_GATHER, x, gathered(x, self.size) if into is None else into)

    def reduce_scatter(self, x: Tensor, into: Tensor | None = None) -> Launch:
        """This rank's part of the sum."""
        return self._launch(Kind.REDUCE_SCATTER, x, scattered(x, self.size) if into is None else into)

    def all_reduce(self, x: Tensor) -> Launch:
        """In place."""
        return self._launch(Kind.ALL_REDUCE, x, x)


def carried_out(moves: tuple[Move, ...], mesh: tuple[int, ...], held: list[Tensor]) -> list[Tensor]:
    """What every rank has in the end, with the functions that the runtime moves buckets with."""
    whole = max(x.numel() for x in held) * (prod(mesh) if moves[0].kind is Kind.ALL_GATHER else 1)
    for move in moves:
        dim, ways = move.factor.dim, mesh[move.factor.dim]
        lines = [FakeLine(place_in(mesh, rank)[dim], ways) for rank in range(prod(mesh))]
        launches = []
        for line, x in zip(lines, held, strict=True):
            if move.kind is Kind.ALL_REDUCE:
                launches.append(line.all_reduce(x))
            else:
                scatters = move.kind is Kind.REDUCE_SCATTER
                stage = primitives.scatter_stage if scatters else primitives.gather_stage
                launches.append(stage(line, x, move.outer))  # type: ignore[arg-type]
            moved = launches[-1].result if move.kind is Kind.ALL_GATHER else x
            assert moved.numel() * move.part == whole, "it moves that part of the whole"
        for group in sub_groups(mesh, dim):
            kinds, sent, into = zip(*(lines[rank].launched or () for rank in group), strict=True)
            ((kind),) = {*kinds}
            all_of_it = torch.cat(sent) if kind is Kind.ALL_GATHER else torch.stack(sent).sum(0)
            parts = all_of_it.chunk(ways) if kind is Kind.REDUCE_SCATTER else [all_of_it] * ways
            for y, part in zip(into, parts, strict=True):
                y.copy_(part)
        for launch in launches:
            if launch.finish is not None:
                launch.finish()
        held = [launch.result for launch in launches]
    return held


@pytest.mark.parametrize(("mesh", "order"), ORDERS)
@pytest.mark.parametrize("elements", [1, 7, 13, 24])
def test_stages_of_sums_and_gathers_come_to_the_whole(
    mesh: tuple[int, ...], order: tuple[int, ...], elements: int
) -> None:
    """Every rank ends with what it ends with where the collective is not divided, in the same places.

    A bucket that does not divide is summed with zeros behind it.
    """
    ranks = prod(mesh)
    generator = torch.Generator().manual_seed(elements)
    own = torch.randint(-99, 99, (ranks, elements), generator=generator).double()
    grads = torch.stack([primitives.whole_shares(x, ranks) for x in own])
    assert grads.shape[1] == -(-elements // ranks) * ranks
    total = grads.sum(0)
    assert torch.equal(total[:elements], own.sum(0))
    assert not total[elements:].any()
    scatter, gather, reduce = (
        staged(kind, mesh, order) for kind in (Kind.REDUCE_SCATTER, Kind.ALL_GATHER, Kind.ALL_REDUCE)
    )
    shares = carried_out(scatter, mesh, [*grads.clone()])
    for rank, share in enumerate(shares):
        assert torch.equal(share, total.chunk(ranks)[rank])
    for whole in carried_out(gather, mesh, [*total.chunk(ranks)]):
        assert torch.equal(whole, total)
    for whole in carried_out(reduce, mesh, [*grads.clone()]):
        assert torch.equal(whole, total)


# -- in linked code ------------------------------------------------------------------------------------------


def code_of(zero: int, order: tuple[int, int]) -> Code:
    """Validated code over four replicas that share everything in stages, gathers in the other order."""
    ways = {"reduce_scatter": order, "all_gather": order[::-1]} if zero else {"all_reduce": order}
    cut = tuple(Partition(what=Target("dp", kind), mesh=(2, 2), order=own) for kind, own in ways.items())
    distances = ((0, 0), (0, 0), (3, 0), (3, 7))[zero]
    shape, layout = replace(LLAMA, layers=4), layout_for("ddp", 1, 1, 4, zero)
    own = setting_for("ddp", layout, 4, model=shape, partitions=cut, distances=distances)
    parts = parts_for(own)
    schedule = training_schedule(own, parts)
    assert parse(write(schedule)) == schedule
    with patch.object(buckets, "LEAST_ELEMENTS", 5000):
        return linked(schedule, layout, own.model.kinds, parts)


def two_steps(code: Code) -> Iterator[Operation]:
    """Operations of two steps, with what a step before them has begun."""
    (own,) = code.stages
    if isinstance(own[-1].instruction, Prefetch):
        yield from (one for one in own[-1].operations if isinstance(one, Start))
    for _ in range(2):
        yield from (one for stretch in own for one in stretch.operations)


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_stages_are_under_way_beside_operators(zero: int, order: tuple[int, int]) -> None:
    """Every stage of gathers and of sums of some bucket runs beside what computes.

    That they follow each other, and what they come to: `tests.cuda.test_special_runs`.
    """
    begun: dict[Gather | Reduce, int] = {}
    beside: set[tuple[type, int]] = set()
    computed = 0
    for operation in two_steps(code_of(zero, order)):
        computed += isinstance(operation, Compute) and isinstance(operation.what, Node)
        what = getattr(operation, "what", None)
        if not isinstance(what, Gather | Reduce) or what.move is None:
            continue
        if isinstance(operation, Start):
            begun[what] = computed
        elif begun.pop(what) < computed:
            beside.add((type(what), what.move.number))
    wanted = {(Reduce, n) for n in range(2 if zero else 3)}
    if zero == 3:
        wanted |= {(Gather, n) for n in range(2)}
    assert beside >= wanted
