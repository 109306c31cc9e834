"""Lists all schedules by name: each has one pipeline or a choice of pipelines, and a method of pairing
passes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

from braid.scheduling.generate.dualpipe_zero_bubble import dual_pipe_v, zero_bubble_v
from braid.scheduling.generate.pipelines import (
    BlockOrder,
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
    """Method by which the operators of a block's passes are interleaved on a rank."""

    TURNS = "turns"
    """Passes take turns, operator by operator (Wavelet's round robin)."""
    EXCHANGES = "exchanges"
    """All-to-alls of experts overlap the other pass's attention and experts, in one fixed order."""
    WITHIN_PASSES = "within_passes"
    """Two sub-batches take turns, which end with each pass (Merak)."""
    ACROSS_PASSES = "across_passes"
    """Two sub-batches take turns, which may reach across forward pass, recomputation and backward pass
    (Oases)."""
    BARRIERS = "barriers"
    """Segments of a forward and a backward pass run together between barriers (DHelix)."""
    ORDER = "order"
    """A forward and a backward pass are issued in one searched order, with events and waits but no
    barriers."""


@lru_cache(maxsize=8)
def _generated(
    generator: Callable[..., BlockOrder], layout: ParallelLayout, micro_batches: int, hop: int
) -> BlockOrder:
    """Return the blocks that a generator makes; cached, since many settings differ only in what passes
    compute."""
    return generator(layout, micro_batches, *((hop,) if hop else ()))


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A pipeline: the function that orders its blocks, and the placement of chunks that it needs."""

    generator: Callable[..., BlockOrder]
    """Function of (layout, number of micro-batches) that returns the blocks; it also takes a hop if there is
    a choice of `hops`."""
    placement: Placement
    alone: Placement
    """Placement of chunks if there is a single stage, where pairs of strands need no folding."""
    hops: tuple[int, ...] = (0,)
    """Numbers of time slots that may be planned for a message between stages, the default first; (0,): no
    choice."""
    pairs: bool = False
    """Whether blocks combine a forward and a backward pass."""
    twins: bool = False
    """Whether blocks combine the same pass of two micro-batches."""

    def order(self, layout: ParallelLayout, micro_batches: int, hop: int = 0) -> BlockOrder:
        """Return the blocks of every stage; ``hop``: slots for a message, one of `hops`, 0 for the
        default."""
        return _generated(self.generator, layout, micro_batches, hop)

    def placement_on(self, stages: int) -> Placement:
        """Return the placement of chunks for a pipeline of that many stages."""
        return self.alone if stages == 1 else self.placement


def _pipeline(
    generator: Callable[..., BlockOrder],
    placement: Placement,
    alone: Placement | None = None,
    **options: Any,
) -> Pipeline:
    return Pipeline(generator=generator, placement=placement, alone=alone or placement, **options)


# The number is the most backward passes that go layer by layer together at a step's end.
_TOGETHER = {
    f"together_{count}": _pipeline(partial(layer_by_layer, together=count), Placement.LINEAR)
    for count in (2, 4, 8)
}

PIPELINES: Final[Mapping[str, Pipeline]] = {
    "1f1b": _pipeline(one_forward_one_backward, Placement.LINEAR),
    "eager_1f1b": _pipeline(partial(one_forward_one_backward, eagerness=2), Placement.LINEAR),
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
"""Name -> pipeline."""


@dataclass(frozen=True, kw_only=True)
class ScheduleKind:
    """Properties of a named schedule: its pipelines, how passes in a block are interleaved, what is
    searched."""

    pipelines: tuple[str, ...]
    """The schedule's pipeline, or several pipelines of which planning takes the best."""
    more: tuple[str, ...] = ()
    """Further pipelines, which are used only if the user names one."""
    pairs: PairMethod | None = None
    """Method by which passes of a block are interleaved; None if no block has several passes."""
    cuts_collectives: bool = False
    long_units: bool = False
    """Whether units are as long as possible, so that orders, which need no search, reach across layers."""
    searched: bool = False
    """Whether planning searches the order of operators, also in unpaired passes (Braid's schedule)."""
    early_sums: bool = False
    """Whether gradient sums start as soon as gradients are final and overlap the remaining passes."""
    partitions: bool = False
    """Whether planning searches how to cut collectives (Centauri's operation tier)."""
    reorders: bool = False
    """Whether planning searches the order of an unpaired backward pass (Centauri's layer tier)."""

    @property
    def nameable(self) -> tuple[str, ...]:
        """Names of all pipelines that the user can choose with this schedule."""
        return (*self.pipelines, *self.more)

    @property
    def decided(self) -> bool:
        """Whether the schedule needs orders of operators that planning decides with a profile's costs."""
        return self.searched or self.pairs is PairMethod.BARRIERS

    def pipelines_on(self, layout: ParallelLayout) -> tuple[str, ...]:
        """Return those of `pipelines` that suit a layout; of pipelines that are equal on it, only the
        first."""
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

        The searched choices reach from half a layer (of four buckets) to four layers ahead. If gradient sums
        overlap nothing (`early_sums`), no gather starts ahead of its use.
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
"""Name -> training schedule."""


def schedule_trouble(name: str) -> str | None:
    """Return None if a schedule of that name exists, else the reason, as an error text that follows the
    name."""
    if name in GONE:
        return replacement(name)
    return None if name in SCHEDULES else must_be_one_of(name, SCHEDULES)


class ScheduleName(NamedTuple):
    """Name of a schedule and, if given, of one of its pipelines; as text ``SCHEDULE[:PIPELINE[/SLOTS]]``."""

    schedule: str
    pipeline: str = ""
    """Name of the pipeline; empty for the schedule's default pipeline, or the best of those it searches."""
    hop: int = 0
    """Number of time slots planned for a message between stages; 0 for the pipeline's default, or the
    best."""

    @classmethod
    def parse(cls, text: str) -> "ScheduleName":
        """Parse ``SCHEDULE[:PIPELINE[/SLOTS]]``; raise `ValueError` that names an unknown word."""
        schedule, _, pipeline = text.partition(":")
        pipeline, _, hop = pipeline.partition("/")
        if hop and not hop.isdecimal():
            raise ValueError(f"slots of a message must be a number, not {hop!r} ({text})")
        return cls(schedule, pipeline, int(hop or 0)).checked()

    def checked(self) -> "ScheduleName":
        """Return this name if schedule, pipeline and hop exist; else raise `ValueError` that names the wrong
        one."""
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

    @property
    def point(self) -> str:
        """Text of the pipeline and its time slots: ``PIPELINE/SLOTS``; empty if none is given."""
        return self.pipeline + (f"/{self.hop}" if self.hop else "")

    def __str__(self) -> str:
        return self.schedule + (f":{self.point}" if self.point else "")

    def placement_on(self, stages: int) -> Placement:
        """Return the placement of chunks for a pipeline of that many stages.

        If no pipeline is named, it is the placement of the schedule's first one.
        """
        return PIPELINES[self.pipeline or SCHEDULES[self.schedule].pipelines[0]].placement_on(stages)
