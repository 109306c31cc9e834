"""Setting: the computation and the layout of a step, from which operators, sizes and memory follow."""

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
from braid.scheduling.model.sizes import PartSizes, part_sizes
from braid.scheduling.schedule.memory import DTYPE_BYTES
from braid.scheduling.text.suggestions import must_be_one_of

MOST_UNIT_LAYERS: Final = 8
"""Longer units make the search longer without a gain: an order reaches over a few operators."""


REDUCE_DTYPES: Final = (None, "bf16")
"""Dtypes that gradients may be rounded to where ranks sum them."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model on a layout under a schedule; choices that the schedule leaves open are decided or not."""

    model: ModelShape
    layout: ParallelLayout
    workload: Workload
    schedule: str = "megatron"
    dtype: str = "bf16"
    recompute: str = "none"
    """Recompute policy of all layers, or of each (`policies_of`)."""
    reduce_dtype: str | None = None
    """Dtype to which gradients are rounded where ranks sum them; None: the dtype that adds them up."""
    context: str = "all_gather"
    pipeline: str = ""
    """One of the schedule's pipelines; empty: left open, and searched if the schedule searches."""
    hop: int = 0
    """Slots for a message between stages, from the pipeline's choices; 0: as usual, or left open."""
    partitions: tuple[Partition, ...] = ()
    """Cuts of collectives and adjacent operators."""
    unit_layers: int = 0
    """Most layers of a unit (`braid.scheduling.model.units`); 0: every part is a unit."""
    distances: tuple[int, int] = (0, 0)
    """`Schedule.prefetch` and `Schedule.keep`; (0, 0): the schedule's default under the ZeRO stage."""

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
        """The kind of every layer on this layout, with variants."""
        return with_policies(self.layout.kinds(self.model.kinds), self.recompute)

    @property
    def kind(self) -> ScheduleKind:
        """The schedule's properties."""
        return SCHEDULES[self.schedule]

    @property
    def order(self) -> Pipeline:
        """The pipeline; if left open, the first that suits the layout."""
        return PIPELINES[self.pipeline or (self.kind.pipelines_on(self.layout) or self.kind.pipelines)[0]]

    @property
    def pairs(self) -> PairMethod | None:
        """How forward passes run beside backward passes; None if the pipeline combines none."""
        return self.kind.pairs if self.order.pairs or not self.kind.searched else None

    @property
    def named(self) -> ScheduleName:
        """The name of the schedule with its decided pipeline and hop."""
        return ScheduleName(self.schedule, self.pipeline, self.hop)

    @property
    def title(self) -> str:
        """The name of the lowered schedule: the schedule's, with any pipeline but its first."""
        return self.schedule if self.pipeline in ("", self.kind.pipelines[0]) else str(self.named)

    @property
    def name(self) -> ScheduleName:
        """The schedule's name, with the pipeline only where the schedule would not choose it by itself."""
        named = self.pipeline in self.kind.more
        return ScheduleName(self.schedule, self.pipeline if named else "")

    def sizes(self, streams: Mapping[str, Stream] | None = None) -> PartSizes:
        """Return the sizes of the model's parts on a rank, for a micro-batch; ``streams``: of each axis."""
        micro_batch = self.workload.micro_batch
        return part_sizes(self.model, self.layout, micro_batch, streams, self.context, self.recompute)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of a replica in one step."""
        return self.workload.micro_batches(self.layout)
