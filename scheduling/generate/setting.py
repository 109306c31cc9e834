"""The setting of a step: model, layout and schedule, from which operators, sizes and memory follow."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from braid.scheduling.generate.named import (
    PIPELINES,
    SCHEDULES,
    PairMethod,
    Pipeline,
    ScheduleKind,
    ScheduleName,
)
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.mesh.partition import Partition
from braid.scheduling.model.fit import check_fit
from braid.scheduling.model.recompute import policies_of, with_policies
from braid.scheduling.model.shape import CONTEXT_MODES, ModelShape, Workload
from braid.scheduling.model.sizes import PartSizes
from braid.scheduling.schedule.memory import DTYPE_BYTES
from braid.scheduling.schedule.states import ADAMW, OptimizerStates
from braid.scheduling.text.suggestions import must_be_one_of

MOST_UNIT_LAYERS: Final = 8
"""Largest number of layers in a unit. Longer units make the search longer without a gain, since overlap
reaches only over a few operators."""


REDUCE_DTYPES: Final = (None, "bf16")
"""Dtypes to which gradients may be rounded when ranks sum them; None: no rounding."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model on a layout under a schedule, with the schedule's choices as far as they are decided."""

    model: ModelShape
    layout: ParallelLayout
    workload: Workload
    schedule: str = "megatron"
    dtype: str = "bf16"
    recompute: str = "none"
    """Recompute policy of all layers in one word, or of each layer in turn (`policies_of`)."""
    reduce_dtype: str | None = None
    """Dtype to which gradients are rounded when ranks sum them; None: gradients are not rounded."""
    states: OptimizerStates = ADAMW
    """What the optimizer keeps of every parameter."""
    context: str = "all_gather"
    pipeline: str = ""
    """Name of one of the schedule's pipelines; empty: not decided."""
    hop: int = 0
    """Time slots planned for a message between stages, one of the pipeline's choices; 0: default or not
    decided."""
    partitions: tuple[Partition, ...] = ()
    """How collectives and adjacent operators are cut into pieces and stages."""
    unit_layers: int = 0
    """Most layers of a unit (`braid.scheduling.model.units`); 0: every part is a unit."""
    distances: tuple[int, int] = (0, 0)
    """(`Schedule.prefetch`, `Schedule.keep`); (0, 0) is replaced by the schedule's default for the ZeRO
    stage."""

    def __post_init__(self) -> None:
        self.named.checked()
        for key, value, choices in (
            ("dtype", self.dtype, tuple(DTYPE_BYTES)),
            ("reduce_dtype", self.reduce_dtype, REDUCE_DTYPES),
            ("context", self.context, CONTEXT_MODES),
        ):
            if value not in choices:
                raise ValueError(f"{key}={value!r} {must_be_one_of(value, choices)}")
        policies_of(self.recompute, self.model.layers)
        if self.kind.long_units and not self.unit_layers:
            object.__setattr__(self, "unit_layers", MOST_UNIT_LAYERS)
        if not 0 <= self.unit_layers <= MOST_UNIT_LAYERS:
            raise ValueError(
                f"unit_layers={self.unit_layers} must be between 0 and {MOST_UNIT_LAYERS} layers"
            )
        if not any(self.distances):
            object.__setattr__(self, "distances", self.kind.distances(self.layout.zero)[0])
        if min(self.distances) < 0 or (any(self.distances) and self.layout.zero < 2):
            raise ValueError(
                f"distances={self.distances} must be (0, 0) unless gradients are in shares (ZeRO 2)"
            )
        cut = [partition.what for partition in self.partitions]
        if (twice := next((name for name in cut if cut.count(name) > 1), None)) is not None:
            raise ValueError(f"partition {twice} stands twice; keep one")
        self._check_placement()
        check_fit(self.model, self.layout, self.workload)

    def _check_placement(self) -> None:
        placement = self.order.placement_on(self.layout.pp)
        if self.layout.placement not in (placement, self.order.placement):
            raise ValueError(
                f"layout.placement={self.layout.placement.value!r} does not go with "
                f"schedule={self.schedule!r}; set it to {placement.value!r}"
            )

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kind of every layer; layers with an own tensor-parallel degree or recompute policy have variant
        kinds."""
        return with_policies(self.layout.kinds(self.model.kinds), self.recompute)

    @property
    def kind(self) -> ScheduleKind:
        return SCHEDULES[self.schedule]

    @property
    def order(self) -> Pipeline:
        """The decided pipeline; if none is decided, the schedule's first that suits the layout."""
        return PIPELINES[self.pipeline or (self.kind.pipelines_on(self.layout) or self.kind.pipelines)[0]]

    @property
    def pairs(self) -> PairMethod | None:
        """Method by which the passes of a block are interleaved; None if no block needs one."""
        return self.kind.pairs if self.order.pairs or not self.kind.searched else None

    @property
    def named(self) -> ScheduleName:
        """Full name of the schedule, with its decided pipeline and hop."""
        return ScheduleName(self.schedule, self.pipeline, self.hop)

    @property
    def title(self) -> str:
        """Name that the lowered schedule carries: the schedule's name, followed by the pipeline unless that
        is the schedule's first."""
        return self.schedule if self.pipeline in ("", self.kind.pipelines[0]) else str(self.named)

    @property
    def name(self) -> ScheduleName:
        """Name of the schedule, with the pipeline only if planning would not try it unless named."""
        named = self.pipeline in self.kind.more
        return ScheduleName(self.schedule, self.pipeline if named else "")

    def sizes(self, streams: Mapping[str, Stream] | None = None) -> PartSizes:
        """Return the sizes from which the parts' graphs for one micro-batch on one rank are written.

        ``streams``: mesh axis -> stream of its collectives.
        """
        micro_batch = self.workload.micro_batch
        return PartSizes(self.model, self.layout, micro_batch, streams, self.context, self.recompute)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches that each data-parallel replica runs in one step."""
        return self.workload.micro_batches(self.layout)
