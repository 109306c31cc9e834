"""Spans and the numbers made of them, of simulator and runtime alike (docs/design.md, Numbers of overlap)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from braid.scheduling.operators import Stream

Interval = tuple[int, int]
"""Start and end in nanoseconds, end excluded."""


STRANDS: Final = ("", "alpha", "beta")
DIRECTIONS: Final = ("", "forward", "backward")
KINDS: Final = ("operator", "block", "paired block")
"""Blocks are spans too: what lies between them is bubble."""


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
    bytes: int = 0
    flops: int = 0


@dataclass(frozen=True, kw_only=True)
class Label:
    """What all executions of an operator have in common."""

    operator: str
    stream: Stream
    layer: int = -1
    bytes: int = 0
    flops: int = 0
    shapes: str = ""
    """Of its inputs and outputs, for people."""
    key: str = ""
    """Its name in a profile."""
    solo_ns: int | None = None
    """What it takes with nothing beside it, where that was measured."""


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals as disjoint ones in order, with gaps between them; empty ones vanish."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif start < end:
            merged.append((start, end))
    return merged


def length_ns(disjoint: Sequence[Interval]) -> int:
    """Total length of disjoint intervals."""
    return sum(end - start for start, end in disjoint)


def overlap_ns(first: Sequence[Interval], second: Sequence[Interval]) -> int:
    """Length of the intersection of two unions, each disjoint and in order."""
    total = i = j = 0
    while i < len(first) and j < len(second):
        start = max(first[i][0], second[j][0])
        end = min(first[i][1], second[j][1])
        total += max(0, end - start)
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Time with some communication in flight, and the part of it during which no compute operator ran."""

    communication_ns: int
    exposed_ns: int

    @property
    def hidden_fraction(self) -> float:
        """Share of the communication that compute hid; 1.0 where there was none."""
        if not self.communication_ns:
            return 1.0
        return 1.0 - self.exposed_ns / self.communication_ns


def communication(compute: Iterable[Interval], transfers: Iterable[Interval]) -> Communication:
    """The communication numbers of one rank and step from its spans."""
    in_flight = merge(transfers)
    hidden = overlap_ns(in_flight, merge(compute))
    total = length_ns(in_flight)
    return Communication(communication_ns=total, exposed_ns=total - hidden)


@dataclass(frozen=True, kw_only=True)
class OverlapNumbers:
    """What overlap came to on one rank in one step (docs/design.md, Numbers of overlap); nanoseconds."""

    communication_ns: int
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

    @property
    def exposed_ns(self) -> int:
        """Communication during which nothing was computed."""
        return self.communication_ns - self.hidden_ns

    @property
    def hidden_fraction(self) -> float:
        """Share of the communication that compute hid; 1.0 where there was none."""
        return self.hidden_ns / self.communication_ns if self.communication_ns else 1.0
