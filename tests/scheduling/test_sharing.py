"""What ranks share, proven operation by operation: gathers, sums, and how far ahead they are.

`Walk` is an interpreter of linked code that knows of buckets no more than which modules each of them has.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from unittest.mock import patch

import pytest

from braid.scheduling import buckets
from braid.scheduling.buckets import BucketKey
from braid.scheduling.code import (
    Allocate,
    Clip,
    Code,
    Compute,
    Node,
    Operation,
    Release,
    Start,
    Stretch,
    Update,
    Wait,
)
from braid.scheduling.lowering.lower import training_schedule, validation_schedule
from braid.scheduling.memory import rank_memory
from braid.scheduling.operators import Parameters
from braid.scheduling.operators import Pass as Phase
from braid.scheduling.schedule import Block, Gather, Norm, Prefetch, Reduce, Schedule, Step
from braid.scheduling.setting import Setting
from braid.scheduling.spec import ParallelLayout
from braid.scheduling.units import members_of
from braid.scheduling.validate import linked
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


def rounded(elements: int, ways: int) -> int:
    """Elements in equal shares of whole multiples of 32."""
    return -(-elements // (32 * ways)) * 32 * ways


@dataclass
class Use:
    """A run of operators that read one bucket's parameters, none of another one between them."""

    key: BucketKey
    gathered: bool = False
    released: bool = False


@dataclass
class Walk:
    """Goes through a stage of linked code, and fails where it breaks a rule."""

    code: Code
    stage: int
    uses: list[Use] = field(default_factory=list)
    """Those that have begun."""
    there: set[BucketKey] = field(default_factory=set)
    """Buckets whose parameters may be read."""
    under_way: dict[Gather | Reduce, int] = field(default_factory=dict)
    """Transfers, and how many uses had begun when they started; -1: at PREFETCH, or in the step before."""
    begun: tuple[Gather, ...] = ()
    """What was under way at the begin of the last run: the step before has begun it."""
    updated: list[BucketKey] = field(default_factory=list)
    """In the order of their updates."""
    allocated: set[BucketKey] = field(default_factory=set)
    owed: dict[BucketKey, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Axes over which gradients that were added have not begun to be summed."""
    counts: Counter[str] = field(default_factory=Counter)
    _begins: bool = False
    """Whether the next compute operator has to begin a use."""
    _new_block: bool = True
    _normed: bool = False
    _clipped: bool = False

    @property
    def layout(self) -> ParallelLayout:
        """The code's."""
        return self.code.layout

    @property
    def behind(self) -> bool:
        """Whether a step begins what the next one gathers."""
        *_, last = self.code.stages[self.stage]
        return isinstance(last.instruction, Prefetch)

    def run(self) -> None:
        """Every operation of a step.

        What it begins for the next step is under way at its own begin: in a first step before all else.
        """
        if self.behind and not self.begun:
            last = self.code.stages[self.stage][-1]
            first = (o.what for o in last.operations if isinstance(o, Start))
            self.under_way = {replace(one, move=None): -1 for one in first if isinstance(one, Gather)}
        self.begun = tuple(one for one in self.under_way if isinstance(one, Gather))
        if not self.code.schedule.trains:
            self.there.clear()  # steps have come in between
        self.uses.clear()
        self.updated.clear()
        self.counts.clear()
        self._normed = self._clipped = False
        for stretch in self.code.stages[self.stage]:
            self._new_block = True
            for operation in stretch.operations:
                self._share(operation, stretch)
        assert tuple(self.under_way) == self.begun
        assert not self._begins
        if self.code.schedule.trains:
            assert sorted(self.updated) == self._keys, "every bucket is updated once"
        if self.behind:
            assert not self.there
            first_uses = dict.fromkeys(use.key for use in self.uses)
            assert list(first_uses) == list(dict.fromkeys(_key(one) for one in self.begun))

    @property
    def _keys(self) -> list[BucketKey]:
        return [key for key in self.code.buckets.keys if key[0] in self.layout.chunks_of(self.stage)]

    # -- rules -------------------------------------------------------------------------------------------

    def _share(self, operation: Operation, stretch: Stretch) -> None:
        """What goes in stages begins with the first and ends with the last of them."""
        if isinstance(operation, Start | Wait) and isinstance(what := operation.what, Gather | Reduce):
            if what.move is not None and not (
                what.move.last if isinstance(operation, Wait) else what.move.number == 0
            ):
                return
            operation = replace(operation, what=replace(what, move=None))
        match operation:
            case Start(what=Gather() as what):
                self._start_gather(what, stretch)
            case Wait(what=Gather() as what):
                self._wait_gather(what)
            case Release(what=what):
                self._release(what)
            case Allocate(what=what):
                self._allocate(what)
            case Start(what=Reduce(chunk=int()) as what):
                self._start_sum(what)
            case Wait(what=Reduce(chunk=int()) as what):
                self._wait_sum(what)
            case Compute(what=Node() as node):
                self._compute(node, stretch.passes[operation.turn].chunk)
            case Compute(what=Norm()):
                assert not any(self.owed.values()), "every bucket that was added to is summed"
                assert not self.under_way
                assert not self.allocated
                self._normed = True
            case Compute(what=Step()):
                assert self._normed
                assert not self.behind
                for key in self._keys:
                    self._update(key)
            case Compute(what=Clip()):
                assert self._normed
                assert self.behind
                self._clipped = True
            case Compute(what=Update(chunk, bucket)):
                assert self._clipped
                assert isinstance(stretch.instruction, Prefetch)
                self._update((chunk, bucket))
        if self.layout.zero > 1:
            sums = [o for o in self.under_way if isinstance(o, Reduce) and o.axis in ("dp", "edp")]
            assert len(sums) <= max(1, self.code.schedule.prefetch)

    def _update(self, key: BucketKey) -> None:
        """What was gathered before is old from here on."""
        assert key not in self.updated
        assert not any(_key(one) == key for one in self.under_way if isinstance(one, Gather))
        self.updated.append(key)
        self.there.discard(key)

    def _compute(self, node: Node, chunk: int) -> None:
        operator = node.operator
        key = self.code.buckets.home(chunk, node.part, operator.module)
        reads = key is not None and operator.phase is not Phase.WEIGHT_GRADIENT
        begun = False
        if key is not None and reads:
            begun = self._new_block or self.uses[-1].key != key
            self._new_block = False
            if begun:
                self.uses.append(Use(key))
            if self.layout.zero:
                assert key in self.there, f"{operator.name} reads parameters that are not there"
        assert begun or not self._begins, "gathers stand right before a use"
        self._begins = False
        if key is not None and operator.adds_gradients:
            assert not self._normed
            replicas = {Reduce(key[0], axis, key[1]) for axis in self._axes(key) if axis != "tp"}
            assert not replicas & set(self.under_way), "nothing is added to what is being summed"
            assert not [one for one in self.under_way if isinstance(one, Reduce) and one.axis == "tp"]
            if self.layout.zero > 1:
                assert key in self.allocated, f"{operator.name} adds to gradients without memory"
            self.owed[key] = set(self._axes(key))
            self.counts["adds"] += 1

    def _axes(self, key: BucketKey) -> list[str]:
        held = self._parameters(key)
        found = {"tp": self.layout.tp > 1, "dp": held.dense, "edp": held.experts}
        return [axis for axis, needed in found.items() if needed]

    def _parameters(self, key: BucketKey) -> Parameters:
        return self.code.buckets.of(key[0])[key[1]].parameters

    def _start_gather(self, what: Gather, stretch: Stretch) -> None:
        key = _key(what)
        assert what not in self.under_way
        assert key not in self.there
        prefetched = isinstance(stretch.instruction, Prefetch)
        assert prefetched or isinstance(stretch.instruction, Block)
        assert not self.uses or not prefetched or self.updated[-1] == key, "as soon as it is updated"
        self.under_way[what] = -1 if prefetched else len(self.uses)
        self._begins = self._begins or not prefetched
        self.counts["gathers"] += 1

    def _wait_gather(self, what: Gather) -> None:
        """Right before a use of the bucket, which is as many uses behind the start as the schedule says."""
        begun, here = self.under_way.pop(what), len(self.uses)
        ahead = self.code.schedule.prefetch
        if self.layout.zero < 3:
            assert begun == -1
        elif begun == -1:
            assert here < ahead
        else:
            assert here - begun == ahead
        self.there.add(_key(what))
        self._begins = True

    def _release(self, what: Gather) -> None:
        assert self.layout.zero > 2
        key = _key(what)
        assert self.uses[-1].key == key, "behind its use"
        assert not self.uses[-1].released
        self.uses[-1].released = True
        self.there.remove(key)
        self.counts["releases"] += 1

    def _allocate(self, what: Reduce) -> None:
        assert self.layout.zero > 1
        key = _key(what)
        assert key not in self.allocated
        assert not self.owed[key]
        self.allocated.add(key)
        self.counts["allocations"] += 1

    def _start_sum(self, what: Reduce) -> None:
        assert not self._normed
        assert what not in self.under_way
        assert what.chunk is not None
        own = range(len(self.code.buckets.of(what.chunk)))
        if what.axis != "ends":
            for number in own if what.bucket is None else (what.bucket,):
                key = what.chunk, number
                owed = self.owed[key]
                assert what.axis == "tp" or "tp" not in owed, "over tp first"
                assert self.layout.zero < 2 or key in self.allocated
                assert self.layout.zero < 2 or what.axis in owed, "nothing was added since"
                owed.discard(what.axis)
        elif self.layout.zero > 1:
            assert not any(self.owed[what.chunk, number] for number in own)
        self.under_way[what] = len(self.uses)
        self.counts["sums"] += what.axis == "dp"

    def _wait_sum(self, what: Reduce) -> None:
        del self.under_way[what]
        if self.layout.zero > 1 and what.axis in ("dp", "edp"):
            self.allocated.remove(_key(what))


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
        read = {use.key for use in walk.uses}
        assert read == {key for key in code.buckets.keys if key[0] in code.layout.chunks_of(stage)}
        if zero < 3:
            assert walk.counts["gathers"] == (len(read) if zero else 0)
            assert not walk.counts["releases"]
            continue
        assert not walk.there
        assert walk.counts["gathers"] == walk.counts["releases"]
        last: dict[BucketKey, int] = {}
        for number in reversed(range(len(walk.uses))):
            use = walk.uses[number]
            again = last.get(use.key)
            assert use.released == (again is None or again - number > max(keep, ahead, 1))
            last[use.key] = number


@pytest.mark.parametrize(("name", "pp", "tp", "zero", "tied", "far"), ALL)
@pytest.mark.slow
def test_what_is_read_is_there_and_what_is_added_is_summed(
    name: str, pp: int, tp: int, zero: int, tied: bool, far: tuple[tuple[int, int], ...]
) -> None:
    for distances in far:
        check_shared(code_with(name, pp, tp, zero, distances, tied=tied))


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_what_a_rank_keeps_is_a_share_of_every_bucket(zero: int, tied: bool) -> None:
    """Of optimizer states, with ZeRO 2 of gradients, with ZeRO 3 of parameters, each padded by itself."""
    code = code_with("ddp", 1, 1, zero, (0, 0), tied=tied)
    memory = rank_memory(code, LLAMA, "bf16", 0)
    whole = sum(rounded(one.parameters.total, 2) for one in code.buckets.of(0))
    share = whole // 2
    assert memory.parameter_bytes == (share if zero > 2 else whole) * 2
    assert memory.gradient_bytes == (share if zero > 1 else whole) * 4
    assert memory.optimizer_bytes == share * 12


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
            for module, held in part.modules.items():
                key = found.home(chunk, place, module)
                if module not in holding:
                    assert key is None
                elif table and held.tied:
                    assert key == (0, 0)
                else:
                    assert key is not None
                    assert module in found.of(key[0])[key[1]].modules
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
