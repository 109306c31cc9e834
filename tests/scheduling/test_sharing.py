"""What ranks share: which modules are gathered and summed together, and how far ahead.

That what is read is there, and what is added is summed: `tests.cuda.test_combinations`, on small buckets too.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from unittest.mock import patch

import pytest

from braid.scheduling.generate.lower import training_schedule
from braid.scheduling.generate.setting import Setting
from braid.scheduling.mesh.partition import Partition, Target
from braid.scheduling.model.operators import Phase
from braid.scheduling.model.parameters import Parameters
from braid.scheduling.model.units import members_of
from braid.scheduling.schedule import buckets
from braid.scheduling.schedule.buckets import BucketKey
from braid.scheduling.schedule.code import Code
from braid.scheduling.schedule.operations import (
    Compute,
    Gather,
    Node,
    Operation,
    Reduce,
    Release,
    Start,
    Wait,
)
from braid.scheduling.schedule.schedule import Block, Prefetch, Schedule
from braid.scheduling.schedule.text import parse, write
from braid.scheduling.schedule.validate import linked
from tests.scheduling.cases import (
    LLAMA,
    SEARCHED,
    choices_for,
    layout_for,
    parts_for,
    setting_for,
)

NAMES = (
    "megatron",
    "ddp",
    "megatron:folded",
    "dhelix",
    "zbv",
    "braid:w",
    "braid:together_4",
)
DISTANCES = ((0, 0), (1, 0), (3, 7), (1000, 1000))
"""How far ahead buckets travel, and for how long they are kept."""
LEAST = 5000
"""So few parameters that layers are cut at several modules, and that norms still have company."""
MICRO_BATCHES = 6


@cache
def setting_of(name: str, pp: int, tp: int, zero: int, *, tied: bool) -> Setting:
    """A small model over two replicas."""
    shape = replace(LLAMA, layers=4, tied_head=tied)
    return setting_for(name, layout_for(name, pp, tp, 2, zero), MICRO_BATCHES, model=shape)


@cache
def schedule_of(name: str, pp: int, tp: int, zero: int, *, tied: bool, ends: bool = False) -> Schedule:
    """Its schedule; ``ends``: backward passes leave their weight gradients."""
    own = setting_of(name, pp, tp, zero, tied=tied)
    return training_schedule(own, parts_for(own), choices_for(own, ends=ends))


def code_with(name: str, pp: int, tp: int, zero: int, distances: tuple[int, int], *, tied: bool) -> Code:
    """Its validated code, with parts that have several buckets."""
    ahead, keep = distances
    own = setting_of(name, pp, tp, zero, tied=tied)
    schedule = schedule_of(name, pp, tp, zero, tied=tied, ends=name in SEARCHED and ahead % 2 == 1)
    schedule = replace(schedule, prefetch=ahead if zero > 1 else 0, keep=keep if zero > 2 else 0)
    with patch.object(buckets, "LEAST_ELEMENTS", LEAST):
        return linked(schedule, own.layout, own.model.kinds, parts_for(own))


def check_shared(code: Code, stage: int) -> None:
    """Gathers stand right before a use and begin as many uses earlier as the schedule says; buckets are let
    go of once, exactly where nothing uses them soon enough; no more sums are under way than there may be."""
    zero, ahead, keep = code.layout.zero, code.schedule.prefetch, code.schedule.keep
    uses: list[BucketKey] = []
    """Runs of operators that read one bucket's parameters, none of another one between them."""
    started: dict[Gather, int] = {}
    """Gathers under way, and how many uses had begun at their start; -1: at PREFETCH."""
    gathered: list[BucketKey] = []
    due, released, sums = set[BucketKey](), set[int](), set[Reduce]()
    for stretch in code.stages[stage]:
        fresh = True
        for operation in stretch.operations:
            match operation:
                case Start(what=Gather() as what):
                    started[what] = -1 if isinstance(stretch.instruction, Prefetch) else len(uses)
                    gathered.append(_key(what))
                case Wait(what=Gather() as what):
                    begun = started.pop(what, -1)
                    assert zero < 3 or (len(uses) < ahead if begun < 0 else len(uses) - begun == ahead)
                    due.add(_key(what))
                case Release(what=what):
                    assert uses[-1] == _key(what), "behind its use"
                    assert len(uses) - 1 not in released
                    released.add(len(uses) - 1)
                case Start(what=Reduce(chunk=int(), axis="dp") as what):
                    sums.add(what)
                    assert zero < 2 or len(sums) <= max(1, ahead)
                case Wait(what=Reduce(chunk=int(), axis="dp") as what):
                    sums.remove(what)
                case Compute(what=Node() as node) if node.operator.phase is not Phase.WEIGHT_GRADIENT:
                    chunk = stretch.passes[operation.turn].chunk
                    if (key := code.buckets.home(chunk, node.part, node.operator.module)) is not None:
                        uses += [key] if fresh or uses[-1] != key else []
                        fresh = False
                        assert due <= {key}, "right before a use"
                        due.clear()
    assert not due
    if zero < 3:
        assert gathered == list(dict.fromkeys(uses)), "in the order in which they are used first"
        assert not released
        return
    assert len(gathered) == len(released)
    last: dict[BucketKey, int] = {}
    for number, key in reversed([*enumerate(uses)]):
        again = last.get(key)
        assert (number in released) == (again is None or again - number > max(keep, ahead, 1))
        last[key] = number


def _key(what: Gather | Reduce) -> BucketKey:
    assert what.chunk is not None
    assert what.bucket is not None
    return what.chunk, what.bucket


ALL = [
    pytest.param(
        name, pp, 1 + (pp + zero) % 2, zero, tied, far, id=f"{name}-pp{pp}-zero{zero}{'-tied' * tied}"
    )
    for number, (name, pp, zero) in enumerate(product(NAMES, (1, 2), (1, 2, 3)))
    for tied, far in [(number % 4 in (0, 3), DISTANCES[number % 2 :: 2] if zero > 1 else DISTANCES[:1])]
]
"""With one table or two, and with half of the distances, by turns."""


@pytest.mark.parametrize(("name", "pp", "tp", "zero", "tied", "far"), ALL)
@pytest.mark.slow
def test_buckets_travel_as_far_ahead_as_a_schedule_says(
    name: str, pp: int, tp: int, zero: int, tied: bool, far: tuple[tuple[int, int], ...]
) -> None:
    for distances in far:
        code = code_with(name, pp, tp, zero, distances, tied=tied)
        for stage in range(pp):
            check_shared(code, stage)


# -- buckets -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("least", [1, LEAST])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("name", "pp"), [("megatron", 2), ("megatron:folded", 2)])
def test_buckets_are_runs_of_modules_and_none_is_smaller_than_need_be(
    least: int, tied: bool, name: str, pp: int
) -> None:
    """All modules with parameters in one each, in order; a table of two ends of one stage in the first."""
    own = setting_of(name, pp, 1, 1, tied=tied)
    parts, layout = parts_for(own), own.layout
    members = {chunk: members_of(parts, layout, own.model.kinds, chunk) for chunk in range(layout.chunks)}
    with patch.object(buckets, "LEAST_ELEMENTS", least):
        found = buckets.Buckets(members, layout)
    for chunk, own_parts in members.items():
        homeless = tied and layout.is_last(chunk) and not layout.ends_apart
        for place, part in enumerate(own_parts):
            here = [one for one in found.of(chunk) if one.part == place]
            table = homeless and place == len(own_parts) - 1
            holding = {module: held for module, held in part.modules.items() if held.total}
            wanted = [module for module, held in holding.items() if not (table and held.tied)]
            assert [module for one in here for module in one.modules] == wanted
            for bucket in here:
                assert bucket.parameters == sum((part.modules[m] for m in bucket.modules), Parameters())
                *rest, last = bucket.modules
                if bucket is not here[-1]:
                    assert bucket.parameters.total >= least
                    assert bucket.parameters.total - part.modules[last].total < least or not rest
                assert bucket.parameters.total >= least or len(here) == 1
            numbered = [*enumerate(found.of(chunk))]
            homes = {module: (chunk, n) for n, one in numbered if one.part == place for module in one.modules}
            homes |= {module: (0, 0) for module, held in holding.items() if table and held.tied}
            for module in part.modules:
                assert found.home(chunk, place, module) == homes.get(module)
    total = sum(one.parameters.total for chunk in members for one in found.of(chunk))
    twice = own.model.vocabulary * own.model.hidden * (tied and layout.ends_apart)
    assert total == own.model.parameters() + twice


def test_passes_that_share_a_body_share_it_with_their_gathers() -> None:
    """In the middle of a step equal blocks are one body, so that code stays small."""
    own = setting_for("ddp", layout_for("ddp", 1, 1, 2, 3), 40, model=replace(LLAMA, layers=4))
    schedule = training_schedule(own, parts_for(own))
    for ahead, keep in ((0, 0), (2, 2), (4, 4)):
        schedule = replace(schedule, prefetch=ahead, keep=keep)
        code = linked(schedule, own.layout, own.model.kinds, parts_for(own))
        blocks = [s.operations for s in code.stages[0] if isinstance(s.instruction, Block)]
        assert len(blocks) == 80
        assert len(set(map(id, blocks))) <= 8


# -- in stages ----------------------------------------------------------------------------------------------


def staged_code(zero: int, order: tuple[int, int]) -> Code:
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
    for operation in two_steps(staged_code(zero, order)):
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
