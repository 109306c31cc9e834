"""Stages of what replicas share: they come to what the whole collective does, one after the other."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import permutations, product
from math import prod
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from braid.kernels.collectives.primitives import Launch, gathered, scattered
from braid.kernels.collectives.stages import gather_stage, scatter_stage, whole_shares
from braid.scheduling.generate.lower import training_schedule
from braid.scheduling.mesh.mesh import place_in, sub_groups
from braid.scheduling.mesh.partition import Partition
from braid.scheduling.model.operators import Kind
from braid.scheduling.model.stages import Move, moves_of
from braid.scheduling.schedule import buckets
from braid.scheduling.schedule.code import Code
from braid.scheduling.schedule.operations import Compute, Gather, Node, Norm, Operation, Reduce, Start, Wait
from braid.scheduling.schedule.schedule import Prefetch
from braid.scheduling.schedule.text import parse, write
from braid.scheduling.schedule.validate import linked
from tests.scheduling.cases import LLAMA, choices_for, layout_for, parts_for, setting_for
from tests.scheduling.test_sharing import LEAST, check_shared

KINDS = (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_GATHER)
MESHES = ((2, 2), (2, 3), (3, 2), (2, 2, 3))
ORDERS = [(mesh, order) for mesh in MESHES for order in permutations(range(len(mesh)))]


def staged(kind: Kind, mesh: tuple[int, ...], order: tuple[int, ...]) -> tuple[Move, ...]:
    """The stages of a collective of replicas."""
    return moves_of(kind, (Partition(what=f"dp/{kind.value}", mesh=mesh, order=order),), "dp")


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
        Partition(what="dp/all_gather", mesh=(2, 2), order=(0, 1)),
        Partition(what="tp/reduce_scatter", mesh=(2, 2), order=(0, 1)),
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
                stage = scatter_stage if move.kind is Kind.REDUCE_SCATTER else gather_stage
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
    grads = torch.stack([whole_shares(x, ranks) for x in own])
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

DP, MESH = 4, (2, 2)
MICRO_BATCHES = 4
DISTANCES = ((0, 0), (1, 0), (3, 7), (1000, 1000))
NAMES = ("megatron", "ddp", "zbv", "interleaved", "braid:w", "braid:twins", "braid:together_2")


def partitions_of(zero: int, order: tuple[int, ...]) -> tuple[Partition, ...]:
    """Of all that replicas exchange under a ZeRO stage, gathers in the other order."""
    if not zero:
        return (Partition(what="dp/all_reduce", mesh=MESH, order=order),)
    return (
        Partition(what="dp/reduce_scatter", mesh=MESH, order=order),
        Partition(what="dp/all_gather", mesh=MESH, order=order[::-1]),
    )


@cache
def code_with(
    name: str, pp: int, zero: int, order: tuple[int, ...], distances: tuple[int, int], shards: int = 0
) -> Code:
    """Validated code over four replicas that share everything in stages, with layers of several buckets."""
    layout = layout_for(name, pp, 1, DP * (1 + bool(shards)), zero)
    layout = replace(layout, shards=shards)
    shape = replace(LLAMA, layers=4)
    own = setting_for(name, layout, MICRO_BATCHES, model=shape, partitions=partitions_of(zero, order))
    parts = parts_for(own)
    schedule = training_schedule(own, parts, choices_for(own))
    ahead, keep = distances
    schedule = replace(schedule, prefetch=ahead if zero > 1 else 0, keep=keep if zero > 2 else 0)
    assert parse(write(schedule)) == schedule
    with patch.object(buckets, "LEAST_ELEMENTS", LEAST):
        return linked(schedule, layout, own.model.kinds, parts)


def shared_by(operation: Operation) -> Gather | Reduce | None:
    """What an operation starts or waits for of what replicas share in stages."""
    what = getattr(operation, "what", None)
    return what if isinstance(what, Gather | Reduce) and what.move is not None else None


def two_steps(code: Code, stage: int) -> Iterator[Operation]:
    """Operations of two steps, with what a step before them has begun."""
    own = code.stages[stage]
    last = own[-1]
    if isinstance(last.instruction, Prefetch):
        yield from (one for one in last.operations if isinstance(one, Start))
    for _ in range(2):
        yield from (one for stretch in own for one in stretch.operations)


CASES = [
    pytest.param(name, pp, zero, order, id=f"{name}-pp{pp}-zero{zero}-{order[0]}{order[1]}")
    for n, (name, pp, zero) in enumerate(product(NAMES, (1, 2), range(4)))
    for order in [((0, 1), (1, 0))[(n + n // 4 + n // 8) % 2]]
]


@pytest.mark.parametrize(("name", "pp", "zero", "order"), CASES)
def test_every_stage_is_over_before_the_next_begins(
    name: str, pp: int, zero: int, order: tuple[int, ...]
) -> None:
    """Started once and waited for once, in order, for every transfer of every bucket, before the norm."""
    for distances in DISTANCES if zero > 1 else DISTANCES[:1]:
        code = code_with(name, pp, zero, order, distances)
        for stage in range(pp):
            check_stages(code, stage)


def check_stages(code: Code, stage: int) -> None:
    """The rules of stages; what comes of them for parameters and gradients is for `check_shared`."""
    zero = code.layout.zero
    kinds = {Reduce: Kind.REDUCE_SCATTER if zero else Kind.ALL_REDUCE, Gather: Kind.ALL_GATHER}
    moves = {cls: moves_of(kind, code.schedule.partitions, "dp") for cls, kind in kinds.items()}
    under_way: dict[Gather | Reduce, Move] = {}
    over: dict[Gather | Reduce, Move] = {}
    """What is between two stages."""
    complete = {Reduce: 0, Gather: 0}
    for operation in two_steps(code, stage):
        what = getattr(operation, "what", None)
        if isinstance(what, Reduce | Gather) and what.axis == "dp" and isinstance(operation, Start | Wait):
            assert (what.move is None) == (what.chunk is None), "squares are summed as they were"
        if over and not isinstance(operation, Wait):  # waits for others may come in between
            assert isinstance(operation, Start), "the next stage begins at once"
        if isinstance(what, Reduce) and what.axis == "replica":
            assert replace(what, axis="dp") not in {*under_way, *over}
        if (move := what.move if shared_by(operation) else None) is None:
            if isinstance(what, Norm):
                assert not any(isinstance(one, Reduce) for one in under_way)
            continue
        whole = replace(what, move=None)
        assert move == moves[type(what)][move.number]
        if isinstance(operation, Start):
            assert whole not in under_way
            before = over.pop(whole, None)
            assert move.number == (0 if before is None else before.number + 1)
            under_way[whole] = move
        else:
            assert under_way.pop(whole) == move
            if move.last:
                complete[type(whole)] += 1
            else:
                over[whole] = move
    assert not over
    assert all(isinstance(one, Gather) and move.number == 0 for one, move in under_way.items())
    assert bool(complete[Gather]) == bool(zero)
    assert complete[Reduce]


@pytest.mark.parametrize(("name", "pp", "zero", "order"), CASES)
@pytest.mark.slow
def test_what_is_read_is_there_and_what_is_added_is_summed(
    name: str, pp: int, zero: int, order: tuple[int, ...]
) -> None:
    """As where nothing is divided: a gather ends right before a use, a sum before anything is added."""
    for distances in DISTANCES if zero > 1 else DISTANCES[:1]:
        check_shared(code_with(name, pp, zero, order, distances))


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_stages_are_under_way_beside_operators(zero: int, order: tuple[int, ...]) -> None:
    """Every stage of gathers and of sums of some bucket runs beside what computes."""
    code = code_with("ddp", 1, zero, order, (3, 7))
    begun: dict[Gather | Reduce, int] = {}
    beside: set[tuple[type, int]] = set()
    computed = 0
    for operation in two_steps(code, 0):
        computed += isinstance(operation, Compute) and isinstance(operation.what, Node)
        if (what := shared_by(operation)) is None or what.move is None:
            continue
        if isinstance(operation, Start):
            begun[what] = computed
        elif begun.pop(what) < computed:
            beside.add((type(what), what.move.number))
    wanted = {(Reduce, n) for n in range(2 if zero else 3)}
    if zero == 3:
        wanted |= {(Gather, n) for n in range(2)}
    assert beside >= wanted


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("name", ["ddp", "zbv"])
def test_shares_are_summed_over_replicas_when_all_stages_are_over(name: str, zero: int) -> None:
    """Hybrid sharding."""
    code = code_with(name, 1, zero, (1, 0), (2, 2), 4)
    check_stages(code, 0)
    operations = [one for stretch in code.stages[0] for one in stretch.operations]
    axes = [one.what.axis for one in operations if isinstance(one, Start) and isinstance(one.what, Reduce)]
    assert "replica" in axes
