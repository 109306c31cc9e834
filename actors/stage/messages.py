"""What controller and ranks tell each other: plain data, importable without torch."""

from dataclasses import dataclass

from braid.actors.config import Config
from braid.scheduling.spec import ModelShape


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the ranks of one generation meet."""

    address: str
    port: int
    generation: int


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What every rank is told: the configuration, the model's shape, the schedule's text, the data."""

    config: Config
    shape: ModelShape
    schedule: str
    data: str


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one rank saw of one training step."""

    loss_sum: float
    gradient_norm: float
    lr: float
    seconds: float
    communication_seconds: float
    exposed_seconds: float
    peak_bytes: int
