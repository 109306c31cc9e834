"""Which schedule runs, and what its decisions are made from: a section of the configuration."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from braid.actors.config.model import Section
from braid.scheduling.lowering.named import SCHEDULES
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


class OverlapConfig(Section):
    """Which schedule runs: one of the built-in ones, or a file made with ``braid schedule --output``.

    Schedules with searched pairings (dhelix, braid and its points such as braid_twins) take them from a plan
    (``braid plan --output``), or else from a profile, which is measured on first use. ``auto``: the one that
    is simulated to be fastest, or needs less memory and is within 2 % of it.
    """

    # what runs beside what; auto: the fastest
    schedule: Annotated[str, one_of((*SCHEDULES, AUTO))] = "megatron"
    schedule_file: Path | None = None  # a schedule's text, from `braid schedule --output`
    plan: Path | None = None  # decisions to repeat, from `braid plan --output` or a run's plan.yaml
    profile: Path | None = None  # measured costs to use instead of the run's own profile
    # Share by which a schedule that is found here may need more for activations than megatron's: 0.03 is 3 %.
    memory_slack: Annotated[float, Field(ge=0)] | None = None
    # issue the passes of a step as one CUDA graph; auto: with a single rank, if the host takes about as long
    # to issue the passes as the GPU to run them; with several ranks false, as that is untested on two GPUs
    cuda_graphs: bool | Literal["auto"] = "auto"

    @property
    def needs_profile(self) -> bool:
        """Whether decisions are left that measured costs have to make."""
        if self.plan is not None or self.schedule_file is not None:
            return False
        return self.schedule == AUTO or SCHEDULES[self.schedule].decided
