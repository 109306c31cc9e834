"""The schedules by the names that users know, each a pipeline and a way to run its paired blocks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from braid.scheduling.lowering.pipelines import (
    BlockOrder,
    bidirectional,
    eager_one_forward_one_backward,
    eager_paired_w,
    folded_w,
    interleaved,
    one_forward_one_backward,
    paired_w,
    twin_ended,
)
from braid.scheduling.lowering.zero_bubble import dual_pipe_v, zero_bubble_v
from braid.scheduling.spec import ParallelLayout, Placement


class PairMethod(StrEnum):
    """How the two passes of a paired block share the rank."""

    TURNS = "turns"
    """The strands take turns, operator by operator (Wavelet's round robin)."""
    BARRIERS = "barriers"
    """Paired segments between barriers (DHelix)."""
    ORDER = "order"
    """One searched order of issue, events and waits only."""


@dataclass(frozen=True, kw_only=True)
class PipelineKind:
    """A named schedule's pipeline: generator, placement of chunks, how paired blocks run."""

    generator: Callable[..., BlockOrder]
    """Of layout and number of micro-batches; where there are `hops`, of one of them, too."""
    placement: Placement
    pairs: PairMethod | None = None
    """How paired blocks run; None where there are none."""
    splits_collectives: bool = False
    executable: bool = False
    """Whether the runtime of this version executes it."""
    hops: tuple[int, ...] = ()
    """Slots that a message between stages may be given, the usual number first; none: there is no choice."""

    def order(self, layout: ParallelLayout, micro_batches: int, hop: int = 0) -> BlockOrder:
        """The blocks of every stage; ``hop``: one of `hops`, 0 is the usual one."""
        if not self.hops:
            return self.generator(layout, micro_batches)
        return self.generator(layout, micro_batches, hop or self.hops[0])

    def placement_on(self, stages: int) -> Placement:
        """The placement for a number of stages: one stage alone has nothing to fold for pairs of strands."""
        alone = stages == 1 and self.generator in (paired_w, twin_ended)
        return Placement.LINEAR if alone else self.placement


SCHEDULES: Final[Mapping[str, PipelineKind]] = {
    "megatron": PipelineKind(generator=one_forward_one_backward, placement=Placement.LINEAR, executable=True),
    "eager": PipelineKind(
        generator=eager_one_forward_one_backward, placement=Placement.LINEAR, executable=True
    ),
    "folded": PipelineKind(generator=folded_w, placement=Placement.FOLDED, executable=True),
    "interleaved": PipelineKind(generator=interleaved, placement=Placement.INTERLEAVED, executable=True),
    "intra_batch": PipelineKind(
        generator=one_forward_one_backward,
        placement=Placement.LINEAR,
        splits_collectives=True,
        executable=True,
    ),
    "wavelet": PipelineKind(
        generator=paired_w, placement=Placement.FOLDED, pairs=PairMethod.TURNS, executable=True
    ),
    "bidirectional": PipelineKind(
        generator=bidirectional, placement=Placement.BIDIRECTIONAL, pairs=PairMethod.BARRIERS
    ),
    "dhelix": PipelineKind(
        generator=paired_w, placement=Placement.FOLDED, pairs=PairMethod.BARRIERS, executable=True
    ),
    "braid": PipelineKind(
        generator=paired_w, placement=Placement.FOLDED, pairs=PairMethod.ORDER, executable=True
    ),
    "braid_eager": PipelineKind(
        generator=eager_paired_w,
        placement=Placement.FOLDED,
        pairs=PairMethod.ORDER,
        executable=True,
        hops=(2, 3, 4),
    ),
    "braid_twins": PipelineKind(
        generator=twin_ended, placement=Placement.FOLDED, pairs=PairMethod.ORDER, executable=True
    ),
    "braid_v": PipelineKind(
        generator=dual_pipe_v, placement=Placement.FOLDED, pairs=PairMethod.ORDER, executable=True
    ),
    "dualpipev": PipelineKind(
        generator=dual_pipe_v, placement=Placement.FOLDED, pairs=PairMethod.TURNS, executable=True
    ),
    "zbv": PipelineKind(generator=zero_bubble_v, placement=Placement.FOLDED, executable=True),
}
"""Training schedules by the names that users know."""

EXECUTABLE: Final = tuple(name for name, kind in SCHEDULES.items() if kind.executable)
