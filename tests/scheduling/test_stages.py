"""Stages of what replicas share: all of the data is moved, beside operators.

What they come to: `tests.cuda.test_special_runs`.
"""

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import permutations
from math import prod
from unittest.mock import patch

import pytest

from braid.scheduling.generate.lower import training_schedule
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
