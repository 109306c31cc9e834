"""Spans and the numbers made of them, of simulator and runtime alike (docs/design.md, Numbers of overlap)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from braid.scheduling.mesh.cluster import Stream

Interval = tuple[int, int]
"""Start and end in nanoseconds, end excluded."""


STRANDS: Final = ("", "alpha", "beta")
DIRECTIONS: Final = ("", "forward", "backward")
KINDS: Final = ("operator", "block", "paired block", "waiting")
"""Blocks are spans too: what lies between them is bubble. Waiting: a rank has issued a collective, another
member of it has not."""


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
    """What all executions of an operator have in common."""

    operator: str
    stream: Stream
    layer: int = -1
    axis: str = ""
    """The axis of the mesh (or its factor) whose ranks a collective spans. Empty: no collective."""
    kind: str = ""
    """Of a layer's collective (`braid.scheduling.model.operators.Kind`)."""
    bytes: int = 0
    flops: int = 0
    shapes: str = ""
    """Of its inputs and outputs, for people."""
    key: str = ""
    """Its name in a profile."""
    solo_ns: int | None = None
    """What it takes with nothing beside it, where that was measured."""

    @property
    def along(self) -> str:
        """The axis that it communicates over, "pp" for messages between stages; empty: it computes."""
        return "" if self.stream is Stream.COMPUTE else self.axis or "pp"


@dataclass(frozen=True, kw_only=True)
class PeerWait:
    """How long a rank waited, in a step, until a peer too had issued the collectives of an operator."""

    peer: int
    operator: str
    ns: int


@dataclass(frozen=True, kw_only=True)
class OverlapNumbers:
    """What overlap came to on one rank in one step (docs/design.md, Numbers of overlap); nanoseconds."""

    communication_ns: int
    """With some transfer under way. A collective is from its last member's issue to its last member's end."""
    hidden_ns: int
    slowdown_ns: int | None
    """Compute in paired blocks beyond the same operators' solo times; None without a profile."""
    launch_gap_ns: int
    """Inside blocks, with nothing running."""
    bubble_ns: int
    """Between blocks."""
    compute_ns: int
    links_together_ns: int
    """Of the communication, when links inside nodes and between them moved data at the same time."""
    waiting_ns: int = 0
    """Waiting for a peer: with nothing computed and no transfer under way, while this rank had issued a
    collective and another member had not."""
    peer_waits: tuple[PeerWait, ...] = ()
    """For whom this rank waited longest, and with which operators: the longest first."""
    fullest_bytes: int = 0
    """The sum over all collectives of what the member with most to send sent. Over the rate of a link that
    all of them take, it is the least that `communication_ns` can be. 0: not known."""
    exposed_by_axis_ns: Mapping[str, int] = field(default_factory=dict)
    """Of each axis, by itself, transfers during which nothing was computed; "pp": messages between stages.
    Their sum exceeds `exposed_ns` where transfers of two axes were exposed at once."""

    @property
    def exposed_ns(self) -> int:
        return self.communication_ns - self.hidden_ns

    @property
    def hidden_fraction(self) -> float:
        """Share of the communication that compute hid; 1.0 where there was none."""
        return self.hidden_ns / self.communication_ns if self.communication_ns else 1.0
