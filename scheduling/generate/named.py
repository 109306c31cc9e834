"""The schedules by name: each has one pipeline, or a choice of pipelines, and a method of pairing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

from braid.scheduling.generate.dualpipe_zero_bubble import dual_pipe_v, zero_bubble_v
from braid.scheduling.generate.pipelines import (
    BlockOrder,
    eager_one_forward_one_backward,
    eager_paired_w,
    folded_sub_batches,
    folded_w,
    interleaved,
    layer_by_layer,
    one_forward_one_backward,
    paired_w,
    sub_batches,
    twin_ended,
)
from braid.scheduling.mesh.layout import ParallelLayout, Placement
from braid.scheduling.schedule.gone import GONE, replacement
from braid.scheduling.text.suggestions import must_be_one_of


class PairMethod(StrEnum):
    """How the passes of a block share the rank."""

    TURNS = "turns"
    """Passes take turns, operator by operator (Wavelet's round robin)."""
    EXCHANGES = "exchanges"
    """Exchanges of experts run beside the other pass's attention and experts, in one fixed order."""
    WITHIN_PASSES = "within_passes"
    """Sub-batches take turns, within each pass (Merak)."""
    ACROSS_PASSES = "across_passes"
    """Sub-batches take turns, across forward pass, recomputation and backward pass (Oases)."""
    BARRIERS = "barriers"
    """Paired segments of both passes run between barriers (DHelix)."""
    ORDER = "order"
    """One searched order of issue, with events and waits but no barriers."""


@lru_cache(maxsize=8)
def _generated(
    generator: Callable[..., BlockOrder], layout: ParallelLayout, micro_batches: int, hop: int
) -> BlockOrder:
    """Return a generator's blocks, cached for settings that differ only in what passes compute."""
    return generator(layout, micro_batches, *((hop,) if hop else ()))


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """An order of blocks, and the placement of its chunks."""

    generator: Callable[..., BlockOrder]
    """Makes the order from layout and number of micro-batches, and a hop if there are `hops`."""
    placement: Placement
    alone: Placement
    """The placement on a single stage, which need not fold for pairs of strands."""
    hops: tuple[int, ...] = (0,)
    """Choices of slots for a message between stages, the usual one first; (0,): no choice."""
    pairs: bool = False
    """Whether blocks combine a forward and a backward pass."""
    twins: bool = False
    """Whether blocks combine the same pass of two micro-batches."""

    def order(self, layout: ParallelLayout, micro_batches: int, hop: int = 0) -> BlockOrder:
        """Return the blocks of every stage; ``hop``: a member of `hops`."""
        return _generated(self.generator, layout, micro_batches, hop)

    def placement_on(self, stages: int) -> Placement:
        """Return the placement of chunks on a number of stages."""
        return self.alone if stages == 1 else self.placement


def _pipeline(
    generator: Callable[..., BlockOrder],
    placement: Placement,
    alone: Placement | None = None,
    **options: Any,
) -> Pipeline:
    return Pipeline(generator=generator, placement=placement, alone=alone or placement, **options)


# Most backward passes that go layer by layer together at a step's end.
_TOGETHER = {
    f"together_{count}": _pipeline(partial(layer_by_layer, together=count), Placement.LINEAR)
    for count in (2, 4, 8)
}

PIPELINES: Final[Mapping[str, Pipeline]] = {
    "1f1b": _pipeline(one_forward_one_backward, Placement.LINEAR),
    "eager_1f1b": _pipeline(eager_one_forward_one_backward, Placement.LINEAR),
    "folded": _pipeline(folded_w, Placement.FOLDED),
    "interleaved": _pipeline(interleaved, Placement.INTERLEAVED),
    "w": _pipeline(paired_w, Placement.FOLDED, Placement.LINEAR, pairs=True),
    "twins": _pipeline(twin_ended, Placement.FOLDED, Placement.LINEAR, pairs=True, twins=True),
    "sub_batches": _pipeline(sub_batches, Placement.LINEAR, twins=True),
    "folded_sub_batches": _pipeline(folded_sub_batches, Placement.FOLDED, Placement.LINEAR, twins=True),
    "eager_w": _pipeline(eager_paired_w, Placement.FOLDED, hops=(2, 3, 4), pairs=True),
    "v": _pipeline(dual_pipe_v, Placement.FOLDED, pairs=True),
    "zero_bubble_v": _pipeline(zero_bubble_v, Placement.FOLDED),
    **_TOGETHER,
}
"""Orders of blocks by name."""


@dataclass(frozen=True, kw_only=True)
class ScheduleKind:
    """A named schedule: its pipelines, and how blocks of several passes run."""

    pipelines: tuple[str, ...]
    """The default pipeline, or the pipelines that are searched for the best."""
    more: tuple[str, ...] = ()
    """Pipelines that are used only where they are named."""
    pairs: PairMethod | None = None
    """Method of pairing; None where no block has passes of two kinds."""
    cuts_collectives: bool = False
    long_units: bool = False
    """Whether orders cross the borders of layers wherever they can, since they need no search."""
    searched: bool = False
    """Whether orders are searched for, also of passes that run alone (Braid's schedule)."""
    early_sums: bool = False
    """Whether gradients are summed as soon as they are final, beside the remaining passes."""
    partitions: bool = False
    """Whether the cuts of collectives are searched for (Centauri's operation tier)."""
    reorders: bool = False
    """Whether the order of a lone backward pass is searched for (Centauri's layer tier)."""

    @property
    def nameable(self) -> tuple[str, ...]:
        """All pipelines that can be named with the schedule."""
        return (*self.pipelines, *self.more)

    @property
    def decided(self) -> bool:
        """Whether orders have to be decided, with a profile's costs."""
        return self.searched or self.pairs is PairMethod.BARRIERS

    def pipelines_on(self, layout: ParallelLayout) -> tuple[str, ...]:
        """Return the unnamed pipelines that suit a layout; of pipelines that coincide on it, the first."""
        fitting = [
            name for name in self.pipelines if PIPELINES[name].placement_on(layout.pp) is layout.placement
        ]
        if layout.pp > 1 and len(fitting) > 1 and "twins" in fitting:
            fitting.remove("twins")  # with several stages it coincides with w
        if layout.data_ranks == 1 or not self.early_sums:
            fitting = [name for name in fitting if name not in _TOGETHER] or fitting
        return tuple(fitting)

    def distances(self, zero: int) -> tuple[tuple[int, int], ...]:
        """Return choices of (`Schedule.prefetch`, `Schedule.keep`) under a ZeRO stage, the default first.

        The searched choices reach from half a layer (of four buckets) to four layers ahead. Without overlap
        of sums nothing is started ahead.
        """
        if zero < 2 or not self.early_sums:
            return ((0, 0),)
        far = ((4, 4), (2, 2), (8, 8), (8, 24), (16, 48)) if self.searched else ((4, 4),)
        return far if zero > 2 else tuple(dict.fromkeys((ahead, 0) for ahead, _ in far))


def _kind(*pipelines: str, **options: Any) -> ScheduleKind:
    return ScheduleKind(pipelines=pipelines, **options)


SCHEDULES: Final[Mapping[str, ScheduleKind]] = {
    "megatron": _kind("1f1b", more=("eager_1f1b", "folded")),
    "ddp": _kind("1f1b", early_sums=True),
    "interleaved": _kind("interleaved"),
    "intra_batch": _kind("1f1b", cuts_collectives=True),
    "wavelet": _kind("w", pairs=PairMethod.TURNS),
    "expert_overlap": _kind("w", pairs=PairMethod.EXCHANGES),
    "merak": _kind("sub_batches", pairs=PairMethod.WITHIN_PASSES, long_units=True),
    "oases": _kind(
        "sub_batches", more=("folded_sub_batches",), pairs=PairMethod.ACROSS_PASSES, long_units=True
    ),
    "dhelix": _kind("w", pairs=PairMethod.BARRIERS),
    "braid": _kind(
        *("w", "twins", "eager_w", "v", *_TOGETHER),
        more=("sub_batches", "folded_sub_batches"),
        pairs=PairMethod.ORDER,
        searched=True,
        early_sums=True,
        partitions=True,
        reorders=True,
    ),
    "dualpipev": _kind("v", pairs=PairMethod.TURNS),
    "zbv": _kind("zero_bubble_v"),
}
"""Training schedules by name."""


def schedule_trouble(name: str) -> str | None:
    """Return why a schedule's name cannot be used, for a message behind the name; None if it can."""
    if name in GONE:
        return replacement(name)
    return None if name in SCHEDULES else must_be_one_of(name, SCHEDULES)


class ScheduleName(NamedTuple):
    """A schedule and perhaps one of its pipelines, written ``SCHEDULE[:PIPELINE[/SLOTS]]``."""

    schedule: str
    pipeline: str = ""
    """Empty: the schedule's default pipeline, or the best of its searched pipelines."""
    hop: int = 0
    """Slots for a message between stages; 0: the usual number, or the best."""

    @classmethod
    def parse(cls, text: str) -> "ScheduleName":
        """Parse the text that ``str`` writes; `ValueError` names the unknown word."""
        schedule, _, pipeline = text.partition(":")
        pipeline, _, hop = pipeline.partition("/")
        if hop and not hop.isdecimal():
            raise ValueError(f"slots of a message must be a number, not {hop!r} ({text})")
        return cls(schedule, pipeline, int(hop or 0)).checked()

    def checked(self) -> "ScheduleName":
        """Return itself; `ValueError` names the unknown word."""
        schedule, pipeline, hop = self
        if trouble := schedule_trouble(schedule):
            raise ValueError(f"schedule={schedule!r} {trouble}")
        nameable = SCHEDULES[schedule].nameable
        if pipeline and pipeline not in nameable:
            wrong = must_be_one_of(pipeline, nameable)
            raise ValueError(f"pipeline={pipeline!r} {wrong} with schedule {schedule}")
        hops = [slots for slots in PIPELINES[pipeline or nameable[0]].hops if slots]
        if hop and hop not in hops:
            one_of = f"must be one of {', '.join(map(str, hops))}"
            remedy = one_of if hops else "cannot be chosen; leave it out"
            raise ValueError(f"hop={hop}, slots of a message in pipeline {pipeline or nameable[0]}, {remedy}")
        return self

    def __str__(self) -> str:
        pipeline = self.pipeline + (f"/{self.hop}" if self.hop else "")
        return self.schedule + (f":{pipeline}" if pipeline else "")

    def placement_on(self, stages: int) -> Placement:
        """Return the placement on a number of stages, which all pipelines of a search share."""
        return PIPELINES[self.pipeline or SCHEDULES[self.schedule].pipelines[0]].placement_on(stages)
