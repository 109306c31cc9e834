"""The schedules by the names that users know: each a pipeline, or a choice of some, and a way to pair."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

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
from braid.scheduling.generate.zero_bubble import dual_pipe_v, zero_bubble_v
from braid.scheduling.mesh.layout import ParallelLayout, Placement
from braid.scheduling.schedule.gone import GONE, replacement
from braid.scheduling.text.suggestions import must_be_one_of


class PairMethod(StrEnum):
    """How the passes of a block share the rank."""

    TURNS = "turns"
    """They take turns, operator by operator (Wavelet's round robin)."""
    EXCHANGES = "exchanges"
    """What experts exchange goes beside the other pass's attention and experts, in one fixed order."""
    WITHIN_PASSES = "within_passes"
    """Sub-batches by turns, each pass for itself (Merak)."""
    ACROSS_PASSES = "across_passes"
    """Sub-batches by turns, through forward, recomputation and backward (Oases)."""
    BARRIERS = "barriers"
    """Paired segments between barriers (DHelix)."""
    ORDER = "order"
    """One searched order of issue, events and waits only."""


@lru_cache(maxsize=8)
def _generated(
    generator: Callable[..., BlockOrder], layout: ParallelLayout, micro_batches: int, hop: int
) -> BlockOrder:
    """Settings that differ in what their passes compute share it."""
    return generator(layout, micro_batches, *((hop,) if hop else ()))


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """An order of blocks, and where its chunks are."""

    generator: Callable[..., BlockOrder]
    """Of layout and number of micro-batches; where there are `hops`, of one of them, too."""
    placement: Placement
    alone: Placement
    """The placement on one stage, which need not fold for pairs of strands."""
    hops: tuple[int, ...] = (0,)
    """Slots that a message between stages may be given, the usual number first; 0: there is no choice."""
    pairs: bool = False
    """Whether blocks bring a forward beside a backward pass."""
    twins: bool = False
    """Whether blocks bring the same pass of two micro-batches together."""

    def order(self, layout: ParallelLayout, micro_batches: int, hop: int = 0) -> BlockOrder:
        """The blocks of every stage; ``hop``: one of `hops`."""
        return _generated(self.generator, layout, micro_batches, hop)

    def placement_on(self, stages: int) -> Placement:
        """The placement on a number of stages."""
        return self.alone if stages == 1 else self.placement


def _pipeline(
    generator: Callable[..., BlockOrder],
    placement: Placement,
    alone: Placement | None = None,
    **more: Any,
) -> Pipeline:
    return Pipeline(generator=generator, placement=placement, alone=alone or placement, **more)


# Backward passes that go layer by layer at a step's end: so many at most.
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
    """The one that is taken where none is named, or those that are searched for the best."""
    more: tuple[str, ...] = ()
    """Those that can only be named."""
    pairs: PairMethod | None = None
    """None where no block has passes of two kinds."""
    cuts_collectives: bool = False
    long_units: bool = False
    """Whether orders go over the borders of layers wherever they can, as they take no search."""
    searched: bool = False
    """Our own: orders are searched for, also of passes that run alone."""
    early_sums: bool = False
    """Whether gradients are summed as soon as they are final, beside what is left of the last passes."""
    partitions: bool = False
    """Whether it is searched for how collectives are cut (Centauri's operation tier)."""
    reorders: bool = False
    """Whether operators of a backward pass by itself are brought into the best order (its layer tier)."""

    @property
    def nameable(self) -> tuple[str, ...]:
        """All pipelines that it may have."""
        return (*self.pipelines, *self.more)

    @property
    def decided(self) -> bool:
        """Whether orders have to be decided, with a profile's costs."""
        return self.searched or self.pairs is PairMethod.BARRIERS

    def pipelines_on(self, layout: ParallelLayout) -> tuple[str, ...]:
        """Where none is named, those that suit a layout; of pipelines that are the same on it, the first."""
        fitting = [
            name for name in self.pipelines if PIPELINES[name].placement_on(layout.pp) is layout.placement
        ]
        if layout.pp > 1 and len(fitting) > 1 and "twins" in fitting:
            fitting.remove("twins")  # with several stages it is w
        if layout.data_ranks == 1 or not self.early_sums:
            fitting = [name for name in fitting if name not in _TOGETHER] or fitting
        return tuple(fitting)

    def distances(self, zero: int) -> tuple[tuple[int, int], ...]:
        """How far ahead buckets travel under a ZeRO stage (`Schedule.prefetch`), for how long they are kept.

        The usual ones first; those that are searched for, of a layer's four buckets: from half a layer ahead
        to four. Nothing travels ahead where nothing overlaps.
        """
        if zero < 2 or not self.early_sums:
            return ((0, 0),)
        far = ((4, 4), (2, 2), (8, 8), (8, 24), (16, 48)) if self.searched else ((4, 4),)
        return far if zero > 2 else tuple(dict.fromkeys((ahead, 0) for ahead, _ in far))


def _kind(*pipelines: str, **more: Any) -> ScheduleKind:
    return ScheduleKind(pipelines=pipelines, **more)


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
"""Training schedules by the names that users know."""


def schedule_trouble(name: str) -> str | None:
    """Why a schedule's name cannot be used, to stand behind it in a message; None if it can."""
    if name in GONE:
        return replacement(name)
    return None if name in SCHEDULES else must_be_one_of(name, SCHEDULES)


class ScheduleName(NamedTuple):
    """A schedule and perhaps one of its pipelines, written ``SCHEDULE[:PIPELINE[/SLOTS]]``."""

    schedule: str
    pipeline: str = ""
    """Empty: the schedule's own one, or the best of those that it searches."""
    hop: int = 0
    """Slots for a message between stages; 0: the usual number, or the best."""

    @classmethod
    def parse(cls, text: str) -> "ScheduleName":
        """Read what ``str`` writes; `ValueError` says what is not known."""
        schedule, _, pipeline = text.partition(":")
        pipeline, _, hop = pipeline.partition("/")
        if hop and not hop.isdecimal():
            raise ValueError(f"slots of a message must be a number, not {hop!r} ({text})")
        return cls(schedule, pipeline, int(hop or 0)).checked()

    def checked(self) -> "ScheduleName":
        """Itself; `ValueError` says what of it is not known."""
        schedule, pipeline, hop = self
        if trouble := schedule_trouble(schedule):
            raise ValueError(f"schedule={schedule!r} {trouble}")
        nameable = SCHEDULES[schedule].nameable
        if pipeline and pipeline not in nameable:
            wrong = must_be_one_of(pipeline, nameable)
            raise ValueError(f"pipeline={pipeline!r} {wrong} with schedule {schedule}")
        hops = [one for one in PIPELINES[pipeline or nameable[0]].hops if one]
        if hop and hop not in hops:
            one_of = f"must be one of {', '.join(map(str, hops))}"
            known = one_of if hops else "cannot be chosen; leave it out"
            raise ValueError(f"hop={hop}, slots of a message in pipeline {pipeline or nameable[0]}, {known}")
        return self

    def __str__(self) -> str:
        pipeline = self.pipeline + (f"/{self.hop}" if self.hop else "")
        return self.schedule + (f":{pipeline}" if pipeline else "")

    def placement_on(self, stages: int) -> Placement:
        """The placement on a number of stages; all pipelines that a schedule searches share it."""
        return PIPELINES[self.pipeline or SCHEDULES[self.schedule].pipelines[0]].placement_on(stages)
