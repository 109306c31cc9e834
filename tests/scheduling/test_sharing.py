"""What ranks share, proven operation by operation: gathers, sums, and how far ahead they are.

`Walk` is an interpreter of linked code that knows of buckets no more than which modules each of them has.
"""

from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache
from itertools import product
from unittest.mock import patch

import pytest

from braid.scheduling.generate.lower import training_schedule, validation_schedule
from braid.scheduling.generate.setting import Setting
from braid.scheduling.model.operators import Parameters, Phase
from braid.scheduling.model.units import members_of
from braid.scheduling.schedule import buckets
from braid.scheduling.schedule.buckets import BucketKey
from braid.scheduling.schedule.code import Code, Stretch
from braid.scheduling.schedule.operations import (
    Allocate,
    Clip,
    Compute,
    Gather,
    Node,
    Norm,
    Operation,
    Reduce,
    Release,
    Start,
    Step,
    Update,
    Wait,
)
from braid.scheduling.schedule.schedule import Block, Prefetch, Schedule
from braid.scheduling.schedule.validate import linked
from tests.scheduling.cases import (
    LLAMA,
    SEARCHED,
    choices_for,
    code_of,
    layout_for,
    model_parts,
    parts_for,
    setting_for,
)

NAMES = (
    "megatron",
    "ddp",
    "megatron:eager_1f1b",
    "megatron:folded",
    "interleaved",
    "wavelet",
    "dhelix",
    "dualpipev",
    "zbv",
    "braid:w",
    "braid:v",
    "braid:twins",
    "braid:together_4",
)
DISTANCES = ((0, 0), (1, 0), (2, 2), (3, 7), (4, 40), (1000, 1000))
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


class Walk:
    """Goes through a stage of linked code, and fails where it breaks a rule."""

    def __init__(self, code: Code, stage: int) -> None:
        self.code, self.stretches, self.zero = code, code.stages[stage], code.layout.zero
        self.keys = [key for key in code.buckets.keys if key[0] in code.layout.chunks_of(stage)]
        self.behind = isinstance(self.stretches[-1].instruction, Prefetch)
        """Whether a step begins what the next one gathers."""
        self.there: set[BucketKey] = set()
        """Buckets whose parameters may be read."""
        self.under_way: dict[Gather | Reduce, int] = {}
        """Transfers, and how many uses had begun at their start; -1: at PREFETCH, or in the step before."""
        self.begun: tuple[Gather, ...] = ()
        """What was under way at the begin of the last run: the step before has begun it."""
        self.allocated: set[BucketKey] = set()
        self.owed: dict[BucketKey, set[str]] = defaultdict(set)
        """Axes over which gradients that were added have not begun to be summed."""

    def run(self) -> None:
        """Every operation of a step.

        What it begins for the next step is under way at its own begin: in a first step before all else.
        """
        if self.behind and not self.begun:
            first = (o.what for o in self.stretches[-1].operations if isinstance(o, Start))
            self.under_way = {replace(one, move=None): -1 for one in first if isinstance(one, Gather)}
        self.begun = tuple(one for one in self.under_way if isinstance(one, Gather))
        if not self.code.schedule.trains:
            self.there.clear()  # steps have come in between
        self.uses: list[BucketKey] = []
        """Runs of operators that read one bucket's parameters, none of another one between them."""
        self.released: set[int] = set()
        """Numbers of uses behind which what was gathered is let go of."""
        self.updated: list[BucketKey] = []
        self.counts: Counter[str] = Counter()
        self.begins = self.normed = self.clipped = False
        for stretch in self.stretches:
            self.new_block = True
            for operation in stretch.operations:
                what = getattr(operation, "what", None)
                if isinstance(operation, Start | Wait) and (move := getattr(what, "move", None)) is not None:
                    # What goes in stages begins with the first and ends with the last of them.
                    if not (move.last if isinstance(operation, Wait) else move.number == 0):
                        continue
                    operation = replace(operation, what=replace(what, move=None))
                self.share(operation, stretch)
                sums = [o for o in self.under_way if isinstance(o, Reduce) and o.axis in ("dp", "edp")]
                assert self.zero < 2 or len(sums) <= max(1, self.code.schedule.prefetch)
        assert tuple(self.under_way) == self.begun
        assert not self.begins
        if self.code.schedule.trains:
            assert sorted(self.updated) == self.keys, "every bucket is updated once"
        if self.behind:
            assert not self.there
            assert list(dict.fromkeys(self.uses)) == list(dict.fromkeys(_key(one) for one in self.begun))

    def share(self, operation: Operation, stretch: Stretch) -> None:
        """The rules of an operation."""
        match operation:
            case Start(what=Gather() as what):
                assert what not in self.under_way
                assert _key(what) not in self.there
                prefetched = isinstance(stretch.instruction, Prefetch)
                assert prefetched or isinstance(stretch.instruction, Block)
                assert not self.uses or not prefetched or self.updated[-1] == _key(what), "once updated"
                self.under_way[what] = -1 if prefetched else len(self.uses)
                self.begins = self.begins or not prefetched
                self.counts["gathers"] += 1
            case Wait(what=Gather() as what):
                # Right before a use of the bucket, as many uses behind the start as the schedule says.
                begun, ahead = self.under_way.pop(what), self.code.schedule.prefetch
                if self.zero < 3:
                    assert begun == -1
                else:
                    assert len(self.uses) < ahead if begun == -1 else len(self.uses) - begun == ahead
                self.there.add(_key(what))
                self.begins = True
            case Release(what=what):
                assert self.zero > 2
                assert self.uses[-1] == _key(what), "behind its use"
                assert len(self.uses) - 1 not in self.released
                self.released.add(len(self.uses) - 1)
                self.there.remove(_key(what))
            case Allocate(what=what):
                assert self.zero > 1
                assert _key(what) not in self.allocated
                assert not self.owed[_key(what)]
                self.allocated.add(_key(what))
            case Start(what=Reduce(chunk=int()) as what):
                self.start_sum(what)
            case Wait(what=Reduce(chunk=int()) as what):
                del self.under_way[what]
                if self.zero > 1 and what.axis in ("dp", "edp"):
                    self.allocated.remove(_key(what))
            case Compute(what=Node() as node):
                self.compute(node, stretch.passes[operation.turn].chunk)
            case Compute(what=Norm()):
                assert not any(self.owed.values()), "every bucket that was added to is summed"
                assert not self.under_way
                assert not self.allocated
                self.normed = True
            case Compute(what=Clip()):
                assert self.normed
                assert self.behind
                self.clipped = True
            case Compute(what=Step() | Update() as what):
                assert self.normed
                assert self.behind == self.clipped == isinstance(what, Update)
                assert isinstance(what, Step) or isinstance(stretch.instruction, Prefetch)
                for key in [(what.chunk, what.bucket)] if isinstance(what, Update) else self.keys:
                    assert not any(_key(one) == key for one in self.under_way if isinstance(one, Gather))
                    self.updated.append(key)
                    self.there.discard(key)  # what was gathered before is old from here on

    def compute(self, node: Node, chunk: int) -> None:
        """What an operator reads is there, and what it adds to waits to be summed."""
        operator = node.operator
        key = self.code.buckets.home(chunk, node.part, operator.module)
        begun = False
        if key is not None and operator.phase is not Phase.WEIGHT_GRADIENT:
            begun = self.new_block or self.uses[-1] != key
            self.new_block = False
            if begun:
                self.uses.append(key)
            assert not self.zero or key in self.there, f"{operator.name} reads parameters that are not there"
        assert begun or not self.begins, "gathers stand right before a use"
        self.begins = False
        if key is not None and operator.adds_gradients:
            assert not self.normed
            held = self.code.buckets.of(key[0])[key[1]].parameters
            needed = {"tp": self.code.layout.tp > 1, "dp": held.dense, "edp": held.experts}
            axes = {axis for axis in needed if needed[axis]}
            replicas = {Reduce(key[0], axis, key[1]) for axis in axes - {"tp"}}
            assert not replicas & set(self.under_way), "nothing is added to what is being summed"
            assert not [one for one in self.under_way if isinstance(one, Reduce) and one.axis == "tp"]
            assert self.zero < 2 or key in self.allocated, f"{operator.name} adds to gradients without memory"
            self.owed[key] = axes
            self.counts["adds"] += 1

    def start_sum(self, what: Reduce) -> None:
        """Over tp first, once for what was added."""
        assert not self.normed
        assert what not in self.under_way
        assert what.chunk is not None
        own = range(len(self.code.buckets.of(what.chunk)))
        if what.axis != "ends":
            for number in own if what.bucket is None else (what.bucket,):
                owed = self.owed[what.chunk, number]
                assert what.axis == "tp" or "tp" not in owed, "over tp first"
                assert self.zero < 2 or (what.chunk, number) in self.allocated
                assert self.zero < 2 or what.axis in owed, "nothing was added since"
                owed.discard(what.axis)
        elif self.zero > 1:
            assert not any(self.owed[what.chunk, number] for number in own)
        self.under_way[what] = len(self.uses)
        self.counts["sums"] += what.axis == "dp"


def _key(what: Gather | Reduce) -> BucketKey:
    assert what.chunk is not None
    assert what.bucket is not None
    return what.chunk, what.bucket


def walked(code: Code, stage: int) -> Walk:
    """A stage, gone through twice: the second step goes on with what the first one has begun."""
    walk = Walk(code, stage)
    for _ in range(2):
        walk.run()
    return walk


ALL = [
    pytest.param(
        name, pp, 1 + (pp + zero) % 2, zero, tied, far, id=f"{name}-pp{pp}-zero{zero}{'-tied' * tied}"
    )
    for number, (name, pp, zero) in enumerate(product(NAMES, (1, 2), (1, 2, 3)))
    for tied, far in [(number % 4 in (0, 3), DISTANCES[number % 2 :: 2] if zero > 1 else DISTANCES[:1])]
]
"""With one table or two, and with half of the distances, by turns."""


def check_shared(code: Code) -> None:
    """All that `Walk` demands; buckets are let go of once, exactly where nothing uses them soon enough."""
    zero, ahead, keep = code.layout.zero, code.schedule.prefetch, code.schedule.keep
    for stage in range(code.layout.pp):
        walk = walked(code, stage)
        assert walk.counts["adds"]
        read = {*walk.uses}
        assert read == {*walk.keys}
        if zero < 3:
            assert walk.counts["gathers"] == (len(read) if zero else 0)
            assert not walk.released
            continue
        assert not walk.there
        assert walk.counts["gathers"] == len(walk.released)
        last: dict[BucketKey, int] = {}
        for number, key in reversed([*enumerate(walk.uses)]):
            again = last.get(key)
            assert (number in walk.released) == (again is None or again - number > max(keep, ahead, 1))
            last[key] = number


@pytest.mark.parametrize(("name", "pp", "tp", "zero", "tied", "far"), ALL)
@pytest.mark.slow
def test_what_is_read_is_there_and_what_is_added_is_summed(
    name: str, pp: int, tp: int, zero: int, tied: bool, far: tuple[tuple[int, int], ...]
) -> None:
    for distances in far:
        check_shared(code_with(name, pp, tp, zero, distances, tied=tied))


# -- buckets -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("least", [1, LEAST, 1 << 17])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("name", "pp"), [("megatron", 1), ("megatron", 2), ("megatron:folded", 2)])
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
        blocks = [s.body for s in code.stages[0] if isinstance(s.instruction, Block)]
        assert len(blocks) == 80
        assert len(set(map(id, blocks))) <= 8


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("pp", [1, 2])
def test_validations_gather_and_sum_nothing(zero: int, pp: int) -> None:
    """Forward passes alone read what is there, too."""
    layout = layout_for("megatron", pp, 1, 2, zero)
    code = code_of(validation_schedule(LLAMA, layout, 3, model_parts()), layout)
    for stage in range(pp):
        walk = walked(code, stage)
        assert walk.counts["gathers"] == len(walk.uses) // (1 if zero == 3 else 3)
        assert not walk.counts["sums"]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_one_replica_has_no_shares(zero: int) -> None:
    """There is nothing to gather then, and every parameter is there."""
    layout = layout_for("megatron", 1, 1, 1, zero)
    own = setting_for("megatron", layout, 2)
    code = linked(training_schedule(own, parts_for(own)), layout, own.model.kinds, parts_for(own))
    kinds = {type(operation) for stretch in code.stages[0] for operation in stretch.operations}
    assert not kinds & {Allocate, Release}
