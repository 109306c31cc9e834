"""Defines spans and overlap numbers, for simulator and runtime alike (docs/design.md, Numbers of overlap)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from braid.scheduling.mesh.cluster import Stream

STRANDS: Final = ("", "alpha", "beta")
DIRECTIONS: Final = ("", "forward", "backward")
KINDS: Final = ("operator", "block", "paired block", "waiting")
"""Kinds of spans. The time between blocks is bubble. "waiting": a rank has issued a collective, but another
member has not."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """One operator's execution on one rank."""

    rank: int
    step: int
    strand: str
    micro_batch: int
    chunk: int
    layer: int
    operator: str
    stream: Stream
    start_ns: int
    end_ns: int
    direction: str = ""
    bytes: int = 0
    flops: int = 0


@dataclass(frozen=True, kw_only=True)
class Label:
    """Properties that all executions of an operator share."""

    operator: str
    stream: Stream
    layer: int = -1
    axis: str = ""
    """Axis of the mesh (or its factor) whose ranks take part in a collective; empty if there is none."""
    kind: str = ""
    """Kind of a layer's collective (`braid.scheduling.model.operators.Kind`)."""
    bytes: int = 0
    flops: int = 0
    shapes: str = ""
    """Shapes of inputs and outputs, for people."""
    key: str = ""
    """Name of the operator in a profile."""
    solo_ns: int | None = None
    """Nanoseconds that it takes with nothing running beside it; None if not measured."""

    @property
    def along(self) -> str:
        """Axis along which it communicates, "pp" for messages between stages; empty for computation."""
        return "" if self.stream is Stream.COMPUTE else self.axis or "pp"


@dataclass(frozen=True, kw_only=True)
class PeerWait:
    """Time for which a rank waited, in a step, until a peer had issued the collectives of an operator,
    too."""

    peer: int
    operator: str
    ns: int


@dataclass(frozen=True, kw_only=True)
class OverlapNumbers:
    """Overlap numbers of one rank in one step (docs/design.md, Numbers of overlap), in nanoseconds."""

    communication_ns: int
    """Time with some transfer under way. A collective lasts from its last member's issue to its last member's
    end."""
    hidden_ns: int
    slowdown_ns: int | None
    """Compute time in paired blocks beyond the same operators' solo times; None without a profile."""
    launch_gap_ns: int
    """Time inside blocks with nothing running."""
    bubble_ns: int
    """Time between blocks."""
    compute_ns: int
    links_together_ns: int
    """Part of the communication time in which links inside nodes and between nodes moved data
    simultaneously."""
    waiting_ns: int = 0
    """Time of waiting for a peer: no computation and no transfer under way, while this rank had issued a
    collective and another member had not."""
    peer_waits: tuple[PeerWait, ...] = ()
    """Peers for which this rank waited, and the operators, the longest waits first."""
    fullest_bytes: int = 0
    """For every collective, the bytes sent by the member that sends most, summed over all collectives.
    Divided by the rate of a link that all of them use, this is a lower bound of `communication_ns`. 0: not
    known."""
    exposed_by_axis_ns: Mapping[str, int] = field(default_factory=dict)
    """For each axis by itself, the time of its transfers without computation; "pp": messages between stages.
    The sum exceeds `exposed_ns` if transfers of two axes were exposed at once."""

    @property
    def exposed_ns(self) -> int:
        return self.communication_ns - self.hidden_ns

    @property
    def hidden_fraction(self) -> float | None:
        """Share of the communication that compute hid; None if there was none."""
        return self.hidden_ns / self.communication_ns if self.communication_ns else None
