"""What controller and ranks tell each other: plain data, importable without torch."""

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
    """Where the ranks of one generation meet."""

    address: str
    port: int
    generation: int
    hosts: tuple[str, ...] = ()
    """Of all ranks, by rank: what is exchanged within one stays inside a node. Empty: there is one host."""
    copies_shift: int = 0
    """Copies of a rank's state go to the rank so much further on; 0: to nobody."""


@dataclass(frozen=True, kw_only=True)
class Rescue:
    """What survivors of lost ranks write of all ranks' states."""

    meeting: Rendezvous
    survivors: tuple[int, ...]
    step: int
    sources: tuple[int, ...]
    """For every rank, lost ones too, the survivor that has its state."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """What became of a rank's share of a checkpoint."""

    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """Bytes and SHA-256 of the files that it wrote and read back, by their names."""
    failure: str = ""
    """Why they could not be written, by a rank that is well itself; empty if they are."""


FaultKind = Literal["kill", "stop", "nan", "skip", "hold"]
FaultPhase = Literal["forward", "backward", "reduce", "gather", "optimizer", "save"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that a rank does to itself in a drill."""

    name: str
    """Its mark's file in the run's directory."""
    kind: FaultKind
    """SIGKILL, SIGSTOP, a gradient that is no number (nan: once; skip: whenever its step is done, so that the
    step is left out), or a wait until `faults.let_go`."""
    rank: int
    step: int | None
    """From 0; in a save, the first one after this step. None: as soon as it is called (`faults.call`)."""
    phase: FaultPhase
    place: float = 0.0
    """In [0, 1): where among the blocks of the phase, or among its transfers."""


@dataclass(frozen=True, kw_only=True)
class CopiesHeld:
    """Copies in a rank's memory: steps of its own, and of those of the rank whose partner it is."""

    own: tuple[int, ...]
    partner: int | None
    partners: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SerialStep:
    """A step of the serial schedule, simulated with a measured profile."""

    seconds: float
    alpha: float
    """Share of it that is communication."""

    @property
    def limit_speedup(self) -> float:
        """No overlap makes the step faster than this: min(1 / alpha, 1 / (1 - alpha))."""
        shorter = min(self.alpha, 1 - self.alpha)
        return 1 / (1 - shorter)

    def recovered(self, seconds: float) -> float | None:
        """Share of the possible gain that a measured step won; None where nothing can be won."""
        best = self.seconds / self.limit_speedup
        return (self.seconds - seconds) / (self.seconds - best) if self.seconds > best else None


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What every rank is told: the configuration, the model's shape, the schedule's text, the data."""

    config: "Config"
    shape: ModelShape
    schedule: str
    data: str
    solo_ns: Mapping[str, int] = field(default_factory=dict)
    """Measured times of operators alone, by their names in the profile; empty without one."""
    profile: str = ""
    """The source of the profile that decisions were made with: hardware that ranks are checked against."""
    streams: Mapping[str, Stream] = field(default_factory=dict)
    """Where that profile says that the mesh's axes lie."""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """Further files for the run directory: what decisions were made with (``profile.json``, ...)."""
    serial: SerialStep | None = None
    """What the step would take without any overlap, as the profile says; None without one."""
    faults: tuple[Fault, ...] = ()
    """Of a drill."""


@dataclass(frozen=True, kw_only=True)
class RoutingSums:
    """What the routers of one rank did with its own tokens in a step's training passes, by layer."""

    layers: tuple[int, ...]
    """Numbers in the model, from 0, of the rank's L layers with experts."""
    visits: NDArray[np.int64]
    """L x experts. A visit is a token and one of its choices, whether it found a place or was dropped."""
    dropped: NDArray[np.int64]
    """Visits that found no place, L."""
    losses: NDArray[np.float64]
    """Sums over tokens of the balance loss and of the z loss, L x 2; 0 where the model has none."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one rank saw of one training step."""

    loss_sum: float
    gradient_norm: float
    lr: float
    seconds: float
    overlap: OverlapNumbers
    peak_bytes: int
    """Most memory in use at once, of the step."""
    lifetime_peak_bytes: int
    """The same since the rank's process began."""
    applied: bool = True
    """Whether the parameters were updated: not if the gradients were no numbers."""
    samples: int = 0
    """Digest of this replica's samples (`samples_digest`); 0 on all but one of its ranks."""
    discarded: int = 0
    """Passes whose gradients were no numbers."""
    dropped_spans: int = 0
    """Spans that could not be streamed so far."""
    sampled_every: int = 1
    """Spans of every so many steps are streamed."""
    routing: RoutingSums | None = None
    """None for models without experts."""


COMPUTE: Final = "compute"
"""What stands beside an operator when a second computation does."""


MESSAGE: Final = "pp/message"
"""What stands beside an operator when neighbouring stages exchange messages."""
SUM: Final = "dp/sum"
"""What stands beside an operator when replicas sum gradients; along a factor of an axis in the same way."""
OUTSIDE: Final = ("/message", "/sum")
"""Ends of the names of what is no collective of a layer."""


@dataclass(frozen=True, kw_only=True)
class Together:
    """One measurement of an operator with something beside it; nanoseconds."""

    operator_ns: int
    other_ns: int
    both_ns: int
    """From the begin of the first to the end of the last."""
    delay_ns: int = 0
    """From the begin of the other to that of the operator."""

    @property
    def overlap_ns(self) -> int:
        """How long both were running."""
        return min(self.operator_ns, self.other_ns - self.delay_ns)


@dataclass(frozen=True, kw_only=True)
class Samples:
    """What one rank measured. Keys are those of `braid.scheduling.cost.profile`."""

    solo_ns: Mapping[str, list[int]]
    together: Mapping[tuple[str, str], list[Together]]
    """By operator and what stood beside it: a spare transfer's class or `COMPUTE`."""
    spares: Mapping[str, list[int]]
    """Spare transfers alone, by class."""
    handling: Mapping[str, list[tuple[int, int]]]
    """Of spare transfers beside an operator, by class: how long the rank was busy with starting them, and
    with going on after their end."""
    spare_of: Mapping[str, str]
    """The class of every collective of the graphs: equal kind, axis and size."""
    transfers: Mapping[str, list[tuple[int, int]]]
    """Payload bytes and time, by ``AXIS/KIND``."""
    streams: Mapping[str, Stream]
    """What this rank's groups exchange goes over, by axis."""
    norm_ns_per_parameter: list[float]
    optimizer_ns_per_parameter: list[float]
    copy_ns_per_byte: list[float] = field(default_factory=lambda: [0.0])
    expert_rows: list[int] = field(default_factory=list)
    """Of this rank's experts, pass by pass; empty where all ranks have as many."""
    experts_with: tuple[int, ...] = ()
    """The ranks that tokens of these passes went to: this rank's group along ep."""
    transfers_alone: bool = False
    """Whether ranks began every collective together, so that its time contains no waiting for the others."""
    hardware: str
