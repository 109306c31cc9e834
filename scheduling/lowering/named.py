"""The schedules by the names that users know: each a pipeline, or a choice of some, and a way to pair."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial
from typing import Final

from braid.scheduling.lowering.pipelines import (
    BlockOrder,
    bidirectional,
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
    two_beside_one,
    weights_apart,
)
from braid.scheduling.lowering.zero_bubble import dual_pipe_v, zero_bubble_v
from braid.scheduling.spec import ParallelLayout, Placement


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
    hops: tuple[int, ...] = (0,),
) -> Pipeline:
    return Pipeline(generator=generator, placement=placement, alone=alone or placement, hops=hops)


# Backward passes that go layer by layer at a step's end: so many at most.
_TOGETHER = {
    f"together_{count}": _pipeline(partial(layer_by_layer, together=count), Placement.LINEAR)
    for count in (2, 4, 8)
}

PIPELINES: Final[Mapping[str, Pipeline]] = {
    "1f1b": _pipeline(one_forward_one_backward, Placement.LINEAR),
    "eager_1f1b": _pipeline(eager_one_forward_one_backward, Placement.LINEAR),
    "weights_apart": _pipeline(weights_apart, Placement.LINEAR),
    "folded": _pipeline(folded_w, Placement.FOLDED),
    "interleaved": _pipeline(interleaved, Placement.INTERLEAVED),
    "bidirectional": _pipeline(bidirectional, Placement.BIDIRECTIONAL),
    "w": _pipeline(paired_w, Placement.FOLDED, Placement.LINEAR),
    "twins": _pipeline(twin_ended, Placement.FOLDED, Placement.LINEAR),
    "sub_batches": _pipeline(sub_batches, Placement.LINEAR),
    "folded_sub_batches": _pipeline(folded_sub_batches, Placement.FOLDED, Placement.LINEAR),
    "two_beside_one": _pipeline(two_beside_one, Placement.FOLDED, Placement.LINEAR),
    "eager_w": _pipeline(eager_paired_w, Placement.FOLDED, hops=(2, 3, 4)),
    "v": _pipeline(dual_pipe_v, Placement.FOLDED),
    "zero_bubble_v": _pipeline(zero_bubble_v, Placement.FOLDED),
    **_TOGETHER,
}
"""Orders of blocks by name."""


@dataclass(frozen=True, kw_only=True)
class ScheduleKind:
    """A named schedule: its pipeline, or those that are searched for the best; how blocks of several run."""

    pipelines: tuple[str, ...]
    pairs: PairMethod | None = None
    """None where no block has passes of two kinds, and for sub-batches whose orders are searched for."""
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
    def decided(self) -> bool:
        """Whether orders have to be decided, with a profile's costs."""
        return self.searched or self.pairs is PairMethod.BARRIERS

    def pipelines_on(self, layout: ParallelLayout) -> tuple[str, ...]:
        """The pipelines that suit a layout; of those that are the same on it, the first."""
        fitting = [
            name for name in self.pipelines if PIPELINES[name].placement_on(layout.pp) is layout.placement
        ]
        if layout.pp > 1 and len(fitting) > 1 and "twins" in fitting:
            fitting.remove("twins")  # with several stages it is w
        if layout.dp * layout.cp == 1:
            fitting = [name for name in fitting if not name.startswith("together")] or fitting
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

    def placement_on(self, stages: int) -> Placement:
        """The placement on a number of stages; all pipelines of a schedule that is searched share it."""
        return PIPELINES[self.pipelines[0]].placement_on(stages)


def _kind(*pipelines: str, pairs: PairMethod | None = None, **more: bool) -> ScheduleKind:
    return ScheduleKind(pipelines=pipelines, pairs=pairs, **more)


def _searched(*pipelines: str, pairs: PairMethod | None = PairMethod.ORDER, **without: bool) -> ScheduleKind:
    tiers = {"early_sums": True, "partitions": True, "reorders": True} | without
    return _kind(*pipelines, pairs=pairs, searched=True, **tiers)


_APART = ("w", "twins", "eager_w", "v")
"""Pipelines of braid whose micro-batches go through the model one by one, or in pairs of strands."""


SCHEDULES: Final[Mapping[str, ScheduleKind]] = {
    "megatron": _kind("1f1b"),
    "ddp": _kind("1f1b", early_sums=True),
    "ooo_backprop": _kind("weights_apart", early_sums=True),
    "eager": _kind("eager_1f1b"),
    "folded": _kind("folded"),
    "interleaved": _kind("interleaved"),
    "intra_batch": _kind("1f1b", cuts_collectives=True),
    "wavelet": _kind("w", pairs=PairMethod.TURNS),
    "expert_overlap": _kind("w", pairs=PairMethod.EXCHANGES),
    "merak": _kind("sub_batches", pairs=PairMethod.WITHIN_PASSES, long_units=True),
    "oases": _kind("sub_batches", pairs=PairMethod.ACROSS_PASSES, long_units=True),
    "oases_folded": _kind("folded_sub_batches", pairs=PairMethod.ACROSS_PASSES, long_units=True),
    "two_beside_one": _kind("two_beside_one", pairs=PairMethod.TURNS),
    "bidirectional": _kind("bidirectional", pairs=PairMethod.BARRIERS),
    "dhelix": _kind("w", pairs=PairMethod.BARRIERS),
    "braid": _searched(*_APART, *_TOGETHER),
    "dualpipev": _kind("v", pairs=PairMethod.TURNS),
    "zbv": _kind("zero_bubble_v"),
    "braid_w": _searched("w"),
    "braid_sub_batches": _searched("sub_batches", pairs=None),
    "braid_sub_batches_folded": _searched("folded_sub_batches", pairs=None),
    "braid_eager": _searched("eager_w"),
    "braid_twins": _searched("twins"),
    "braid_v": _searched("v"),
    **{f"braid_{name}": _searched(name, pairs=None) for name in _TOGETHER},
    "braid_whole": _searched(*_APART, *_TOGETHER, partitions=False),
    "braid_in_order": _searched(*_APART, *_TOGETHER, reorders=False),
    "braid_apart": _searched(*_APART, early_sums=False),
}
"""Training schedules by the names that users know; those that begin with ``braid_`` are points of braid: one
pipeline of it, or all without one of Centauri's tiers (operation, layer, model)."""

POINTS: Final = tuple(name for name in SCHEDULES if name.startswith("braid_"))
"""Of ``braid``, which searches them all."""
