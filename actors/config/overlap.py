"""Which schedule runs, and what its decisions are made from: a section of the configuration."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field, model_validator

from braid.actors.config.model import Section
from braid.scheduling.gone import GONE, replacement
from braid.scheduling.lowering.named import SCHEDULES, ScheduleName
from braid.scheduling.suggestions import must_be_one_of

AUTO: Final = "auto"


def one_of(options: Iterable[str]) -> AfterValidator:
    """A string that must be one of ``options``."""
    known = tuple(options)

    def check(value: str) -> str:
        if value not in known:
            raise ValueError(must_be_one_of(value, known))
        return value

    return AfterValidator(check)


def _not_gone(name: str) -> str:
    """A schedule's name that no other has taken the place of."""
    if name in GONE:
        raise ValueError(replacement(name))
    return name


class OverlapConfig(Section):
    """Which schedule runs: one of the built-in ones, or a file made with ``braid schedule --output``.

    Schedules with searched pairings (dhelix, braid) take them from a plan (``braid plan --output``) or from a
    profile, which is measured on first use. ``auto``: the one that is simulated to be fastest, or needs less
    memory and is within 2 % of it.
    """

    # what runs beside what; auto: the fastest
    schedule: Annotated[str, AfterValidator(_not_gone), one_of((*SCHEDULES, AUTO))] = "megatron"
    # of the schedule, perhaps with slots of a message between stages (eager_w/3); null: braid searches the
    # best, all others take their first
    pipeline: str | None = None
    schedule_file: Path | None = None  # a schedule's text, from `braid schedule --output`
    plan: Path | None = None  # decisions to repeat, from `braid plan --output` or a run's plan.yaml
    profile: Path | None = None  # measured costs to use instead of the run's own profile
    # Share by which a schedule that is found here may need more for activations than megatron's: 0.03 is 3 %.
    memory_slack: Annotated[float, Field(ge=0)] | None = None
    # issue the passes of a step as one CUDA graph; auto: with a single rank, if the host takes about as long
    # to issue the passes as the GPU to run them; with several ranks false, as that is untested on two GPUs
    cuda_graphs: bool | Literal["auto"] = "auto"

    @model_validator(mode="after")
    def _pipeline(self) -> "OverlapConfig":
        if self.pipeline is not None and self.schedule == AUTO:
            raise ValueError(
                f"pipeline={self.pipeline!r} is of one schedule, and schedule=auto; name the schedule, or "
                f"leave the pipeline out"
            )
        _ = self.name  # `ValueError` where the schedule has no such pipeline
        return self

    @property
    def name(self) -> ScheduleName:
        """Schedule and pipeline; of ``auto``, the serial schedule."""
        if self.schedule == AUTO:
            return ScheduleName("megatron")
        return ScheduleName.parse(f"{self.schedule}:{self.pipeline or ''}")

    @property
    def needs_profile(self) -> bool:
        """Whether decisions are left that measured costs have to make."""
        if self.plan is not None or self.schedule_file is not None:
            return False
        return self.schedule == AUTO or SCHEDULES[self.schedule].decided
