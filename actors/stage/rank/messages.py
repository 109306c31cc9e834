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
    """The address at which the ranks of one generation meet."""

    address: str
    port: int
    generation: int
    hosts: tuple[str, ...] = ()
    """Host of every rank, from which links inside and between nodes follow; empty: one host."""
    copies_shift: int = 0
    """Copies of a rank's state go to the rank so many positions further on; 0: to none."""


@dataclass(frozen=True, kw_only=True)
class Rescue:
    """Plan of the checkpoint that survivors of lost ranks write from copies of all ranks' states."""

    meeting: Rendezvous
    survivors: tuple[int, ...]
    step: int
    sources: tuple[int, ...]
    """For every rank, lost ranks too, the survivor that has its state."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """Result of writing a rank's share of a checkpoint."""

    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """(bytes, SHA-256) of each file that the rank wrote and read back, by the file's name."""
    failure: str = ""
    """Reason why files could not be written, although the rank works; empty on success."""


FaultKind = Literal["kill", "stop", "nan", "skip", "hold"]
FaultPhase = Literal["forward", "backward", "reduce", "gather", "optimizer", "save"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault that a rank injects into itself in a drill."""

    name: str
    """Name of the file in the run's directory that marks the fault as fired."""
    kind: FaultKind
    """Effect of the fault: SIGKILL (kill), SIGSTOP (stop), a NaN gradient (nan: once; skip: whenever the step
    runs, so that the step is skipped), or a wait until `faults.let_go` (hold)."""
    rank: int
    step: int
    """Step of the fault, from 0; with phase "save", the first save after this step."""
    phase: FaultPhase
    place: float = 0.0
    """Share of the phase's blocks or transfers after which the fault fires, in [0, 1)."""


@dataclass(frozen=True, kw_only=True)
class CopiesHeld:
    """Copies in a rank's memory, named by step: of its own state, and of the state of rank ``partner``, which
    sends its copies here."""

    own: tuple[int, ...]
    partner: int | None
    partners: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SerialStep:
    """A step of the serial schedule, simulated with a measured profile."""

    seconds: float
    alpha: float
    """Share of the step's time that is communication."""

    @property
    def limit_speedup(self) -> float:
        """The greatest speedup by any overlap: min(1 / alpha, 1 / (1 - alpha))."""
        shorter = min(self.alpha, 1 - self.alpha)
        return 1 / (1 - shorter)

    def recovered(self, seconds: float) -> float | None:
        """Return the share of the possible gain that a measured step has; None if there is no gain."""
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
    """Source of the profile behind the decisions; names the hardware that ranks are checked against."""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """Files behind the decisions (``profile.json``, ...), for the run's directory, by name."""
    serial: SerialStep | None = None
    """The simulated step without any overlap; None without a profile."""
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RoutingSums:
    """Statistics of one rank's routers in a step's training passes, for this rank's own tokens, by layer."""

    layers: tuple[int, ...]
    """Indices in the model, from 0, of the L layers with experts on this rank."""
    visits: NDArray[np.int64]
    """(L, experts): visits, each a token with one of its choices, accepted or dropped."""
    dropped: NDArray[np.int64]
    """(L,): numbers of visits that were dropped for lack of capacity."""
    losses: NDArray[np.float64]
    """(L, 2): sums over tokens of the balance loss and the z loss; 0 where the model lacks the loss."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Results of one training step on one rank."""

    loss_sum: float
    gradient_norm: float
    lr: float
    seconds: float
    overlap: OverlapNumbers
    peak_bytes: int
    lifetime_peak_bytes: int
    """Peak bytes in use since the rank's process began."""
    applied: bool = True
    """Whether the parameters were updated; False if gradients were not finite."""
    samples: int = 0
    """Digest of this replica's samples (`samples_digest`); 0 on all but one of the replica's ranks."""
    discarded: int = 0
    """Number of attempts at the step whose gradients were not finite."""
    dropped_spans: int = 0
    """Number of spans so far that could not be streamed."""
    sampled_every: int = 1
    """Interval of streaming, in steps: spans of every n-th step are streamed."""
    routing: RoutingSums | None = None
    """Statistics of the routers; None for models without experts."""


MESSAGE: Final = "pp/message"
"""Name, in measurements, of messages between neighbouring stages that run at the same time as an operator."""
SUM: Final = "dp/sum"
"""Name, in measurements, of a sum of gradients that runs at the same time as an operator; along a factor of
an axis the name ends alike."""
OUTSIDE: Final = ("/message", "/sum")
"""Suffixes of the names of transfers that are not collectives of a layer."""


@dataclass(frozen=True, kw_only=True)
class Together:
    """One measurement, in nanoseconds, of an operator or transfer that runs at the same time as another
    transfer."""

    operator_ns: int
    other_ns: int
    both_ns: int
    """Time from the beginning of the first to the end of the last."""
    delay_ns: int = 0
    """Time from the beginning of the other transfer to the beginning of the operator."""

    @property
    def overlap_ns(self) -> int:
        """Time for which both were running."""
        return min(self.operator_ns, self.other_ns - self.delay_ns)


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Measurements of one rank. Keys are as in `braid.scheduling.cost.profile`."""

    solo_ns: Mapping[str, list[int]]
    together: Mapping[tuple[str, str], list[Together]]
    """Measurements by operator and the class of the spare transfer that ran beside it."""
    spares: Mapping[str, list[int]]
    """Times of spare transfers (run for measurement only) alone, by class."""
    handling: Mapping[str, list[tuple[int, int]]]
    """Time for which the rank itself was busy with a spare transfer beside an operator, by class: to start
    the transfer, and to continue after its end."""
    spare_of: Mapping[str, str]
    """Class of every collective of the graphs; collectives of equal kind, axis and size are of one class."""
    transfers: Mapping[str, list[tuple[int, int]]]
    """Pairs of payload bytes and time, by ``AXIS/KIND``."""
    streams: Mapping[str, Stream]
    """Stream of the transfers of this rank's groups, by axis."""
    norm_ns_per_parameter: list[float]
    optimizer_ns_per_parameter: list[float]
    copy_ns_per_byte: list[float] = field(default_factory=lambda: [0.0])
    expert_rows: list[int] = field(default_factory=list)
    """Rows of this rank's experts, by pass; empty if all ranks have equally many."""
    experts_with: tuple[int, ...] = ()
    """The ranks that exchanged tokens in these passes: this rank's group along ep."""
    transfers_alone: bool = False
    """Whether ranks began every collective together, so that its time contains no waiting for other ranks."""
    hardware: str
