"""Messages between controller and ranks: plain data, importable without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
from numpy.typing import NDArray

from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.trace.spans import OverlapNumbers

if TYPE_CHECKING:  # tests of GPUs run where pydantic is not installed
    from braid.actors.config import Config


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Meeting point of the ranks of one generation."""

    address: str
    port: int
    generation: int
    hosts: tuple[str, ...] = ()
    """Host of every rank; transfers within a host stay inside a node. Empty: there is one host."""
    copies_shift: int = 0
    """Copies of a rank's state go to the rank ``copies_shift`` further on; 0: no copies are sent."""


@dataclass(frozen=True, kw_only=True)
class Rescue:
    """The checkpoint that survivors of lost ranks write from copies of all ranks' states."""

    meeting: Rendezvous
    survivors: tuple[int, ...]
    step: int
    sources: tuple[int, ...]
    """For every rank, lost ones too, the survivor that has its state."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """Result of writing a rank's share of a checkpoint."""

    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """(bytes, SHA-256) of the files that the rank wrote and read back, by name."""
    failure: str = ""
    """Why files could not be written, although the rank works; empty on success."""


FaultKind = Literal["kill", "stop", "nan", "skip", "hold"]
FaultPhase = Literal["forward", "backward", "reduce", "gather", "optimizer", "save"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault that a rank injects into itself in a drill."""

    name: str
    """Name of its mark's file in the run's directory."""
    kind: FaultKind
    """SIGKILL, SIGSTOP, a NaN gradient (nan: once; skip: whenever the step runs, so that the step is
    skipped), or a wait until `faults.let_go`."""
    rank: int
    step: int | None
    """Step from 0; in a save, the first save after it. None: as soon as it is called (`faults.call`)."""
    phase: FaultPhase
    place: float = 0.0
    """Position in [0, 1) among the blocks of the phase, or among its transfers."""


@dataclass(frozen=True, kw_only=True)
class CopiesHeld:
    """Copies in a rank's memory: steps of its own state, and of the state of the rank it is partner of."""

    own: tuple[int, ...]
    partner: int | None
    partners: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SerialStep:
    """A step of the serial schedule, simulated with a measured profile."""

    seconds: float
    alpha: float
    """Communication's share of the step."""

    @property
    def limit_speedup(self) -> float:
        """The greatest speedup by any overlap: min(1 / alpha, 1 / (1 - alpha))."""
        shorter = min(self.alpha, 1 - self.alpha)
        return 1 / (1 - shorter)

    def recovered(self, seconds: float) -> float | None:
        """Return the share of the possible gain that a measured step achieved; None without gain."""
        best = self.seconds / self.limit_speedup
        return (self.seconds - seconds) / (self.seconds - best) if self.seconds > best else None


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Plan of a run for every rank: configuration, shape of the model, text of the schedule, data."""

    config: "Config"
    shape: ModelShape
    schedule: str
    data: str
    solo_ns: Mapping[str, int] = field(default_factory=dict)
    """Measured times of operators alone, by their names in the profile; empty without a profile."""
    profile: str = ""
    """Source of the profile behind the decisions: hardware that ranks are checked against."""
    streams: Mapping[str, Stream] = field(default_factory=dict)
    """Stream of each mesh axis in that profile."""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """Further files for the run directory that decisions were based on (``profile.json``, ...)."""
    serial: SerialStep | None = None
    """The step without any overlap by the profile; None without a profile."""
    faults: tuple[Fault, ...] = ()
    """Faults of a drill."""


@dataclass(frozen=True, kw_only=True)
class RoutingSums:
    """Statistics of one rank's routers in a step's training passes, for the rank's own tokens, by layer."""

    layers: tuple[int, ...]
    """Indices in the model, from 0, of the rank's L layers with experts."""
    visits: NDArray[np.int64]
    """(L, experts). A visit is a token with one of its choices, whether accepted or dropped."""
    dropped: NDArray[np.int64]
    """(L,): visits that were dropped for lack of capacity."""
    losses: NDArray[np.float64]
    """(L, 2): sums over tokens of balance loss and z loss; 0 where the model lacks the loss."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Results of one training step on one rank."""

    loss_sum: float
    gradient_norm: float
    lr: float
    seconds: float
    overlap: OverlapNumbers
    peak_bytes: int
    """Peak bytes in use during the step."""
    lifetime_peak_bytes: int
    """Peak bytes in use since the rank's process began."""
    applied: bool = True
    """Whether the parameters were updated; False if gradients were not finite."""
    samples: int = 0
    """Digest of this replica's samples (`samples_digest`); 0 on all but one of its ranks."""
    discarded: int = 0
    """Number of passes whose gradients were not finite."""
    dropped_spans: int = 0
    """Number of spans that could not be streamed so far."""
    sampled_every: int = 1
    """Spans of one in so many steps are streamed."""
    routing: RoutingSums | None = None
    """None for models without experts."""


COMPUTE: Final = "compute"
"""Name of a second computation that runs beside an operator."""


MESSAGE: Final = "pp/message"
"""Name of messages between neighbouring stages that run beside an operator."""
SUM: Final = "dp/sum"
"""Name of a sum of gradients that runs beside an operator; along a factor the name has the same end."""
OUTSIDE: Final = ("/message", "/sum")
"""Ends of the names of transfers that are not collectives of a layer."""


@dataclass(frozen=True, kw_only=True)
class Together:
    """One measurement of an operator beside another operator or transfer; nanoseconds."""

    operator_ns: int
    other_ns: int
    both_ns: int
    """From the begin of the first to the end of the last."""
    delay_ns: int = 0
    """From the begin of the other to the begin of the operator."""

    @property
    def overlap_ns(self) -> int:
        """How long both were running."""
        return min(self.operator_ns, self.other_ns - self.delay_ns)


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Measurements of one rank. Keys are as in `braid.scheduling.cost.profile`."""

    solo_ns: Mapping[str, list[int]]
    together: Mapping[tuple[str, str], list[Together]]
    """Measurements by operator and its companion: a spare transfer's class or `COMPUTE`."""
    spares: Mapping[str, list[int]]
    """Times of spare transfers alone, by class."""
    handling: Mapping[str, list[tuple[int, int]]]
    """For spare transfers beside an operator, by class: how long starting them, and continuing after their
    end, occupied the rank."""
    spare_of: Mapping[str, str]
    """The class of every collective of the graphs: equal kind, axis and size."""
    transfers: Mapping[str, list[tuple[int, int]]]
    """Payload bytes and time, by ``AXIS/KIND``."""
    streams: Mapping[str, Stream]
    """Stream of the transfers of this rank's groups, by axis."""
    norm_ns_per_parameter: list[float]
    optimizer_ns_per_parameter: list[float]
    copy_ns_per_byte: list[float] = field(default_factory=lambda: [0.0])
    expert_rows: list[int] = field(default_factory=list)
    """Rows of this rank's experts, by pass; empty if all ranks have equally many."""
    experts_with: tuple[int, ...] = ()
    """The ranks that received tokens of these passes: this rank's group along ep."""
    transfers_alone: bool = False
    """Whether ranks began every collective together, so that its time contains no waiting for others."""
    hardware: str
