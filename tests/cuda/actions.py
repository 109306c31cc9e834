"""What a rank's host issues on CUDA, the communicators that run it, and whether their members agree."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

COMPUTE = "compute"
"""The stream of computation."""


class FirstUse(StrEnum):
    """How communicators come to be."""

    EAGER = "eager"
    """All at set-up (``device_id``): a group's messages run on the group's communicator."""
    WARM = "warm"
    """All at set-up, by using each of them once: a group's messages run on one for each pair of ranks."""
    LAZY = "lazy"
    """As they are used first: the host blocks until every member uses it. Pairs as for ``WARM``."""
    LAZY_IDLE = "lazy and idle"
    """And as if making one waited for all that its device was given: it allocates and copies
    (NVIDIA/nccl#1082)."""

    @property
    def blocks(self) -> bool:
        """Whether the host blocks at a first use."""
        return self in (FirstUse.LAZY, FirstUse.LAZY_IDLE)


class Group(NamedTuple):
    """A process group, or one of its communicators."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """One kernel of a communicator."""

    kind: str
    group: Group
    elements: int
    peer: int | None = None
    """Of a message, the other rank."""
    what: str = ""
    """What travels, named alike by all members. NCCL knows nothing of it; data would be mixed up."""
    batched: bool = False
    """Whether it is one of several messages in a kernel of the group's own communicator."""

    def __str__(self) -> str:
        way = "" if self.peer is None else f" {'to' if self.kind == 'send' else 'from'} rank {self.peer}"
        return f"{self.kind}{way} of {self.elements} on {self.group.name}{f': {self.what}' * bool(self.what)}"

    def communicator(self, rank: int, first: FirstUse) -> Group:
        """The communicator that runs it."""
        if self.peer is None or self.batched or first is FirstUse.EAGER:
            return self.group
        low, high = sorted((rank, self.peer))
        return Group(f"{self.group.name} {low}:{high}", (low, high))

    def line(self, rank: int) -> tuple[object, ...]:
        """What it is counted along: the members' collectives, or the messages from one rank to another."""
        match self.kind:
            case "send":
                return rank, self.peer
            case "receive":
                return self.peer, rank
        return ()


@dataclass(frozen=True)
class Compute:
    """Kernels on the compute stream."""

    name: str


@dataclass(frozen=True)
class Start:
    """Issue calls from a side stream, after what was computed so far (`CudaStreams.start`). Messages that are
    batched are one kernel."""

    name: str
    side: str
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Wait:
    """Let the compute stream wait for what was started under this name."""

    name: str


@dataclass(frozen=True)
class Synchronise:
    """Let the host wait for its device, or for the compute stream alone."""

    name: str
    everything: bool = True


Action = Compute | Start | Wait | Synchronise
Programs = Sequence[Sequence[Action]]
"""What every rank's host issues, by rank."""


def unequal(programs: Programs, first: FirstUse = FirstUse.EAGER) -> str | None:
    """The first call that the members of a communicator do not issue alike; None if there is none."""
    issued: dict[object, dict[int, list[Call]]] = defaultdict(lambda: defaultdict(list))
    members: dict[object, tuple[int, ...]] = {}
    for rank, program in enumerate(programs):
        for call in (call for action in program if isinstance(action, Start) for call in action.calls):
            communicator, line = call.communicator(rank, first), call.line(rank)
            key = communicator, line
            issued[key][rank].append(call)
            members[key] = communicator.ranks if call.peer is None else tuple(sorted((rank, call.peer)))
    for key, sequences in issued.items():
        one, *others = members[key]
        for other in others:
            if cause := _differ(one, sequences[one], other, sequences[other]):
                return cause
    return None


def _differ(one: int, here: list[Call], other: int, there: list[Call]) -> str | None:
    """How two members' calls of one line differ."""
    for number in range(max(len(here), len(there))):
        a, b = (calls[number] if number < len(calls) else None for calls in (here, there))
        if a is None or b is None or not _alike(a, b):
            told = (f"rank {rank} issues {call or 'nothing more'}" for rank, call in ((one, a), (other, b)))
            return f"call {number}: {', '.join(told)}"
    return None


def _alike(a: Call, b: Call) -> bool:
    kinds = {a.kind, b.kind}
    return (a.elements, a.what) == (b.elements, b.what) and len(kinds) == (1 if a.peer is None else 2)


def most_streams(programs: Programs, first: FirstUse) -> int:
    """Streams of the rank that has most, the communicators' among them. With as many hardware queues or more,
    none shares one; torch has 32 to give out."""
    most = 0
    for rank, program in enumerate(programs):
        names = {COMPUTE}
        for start in (action for action in program if isinstance(action, Start)):
            names |= {start.side, *(call.communicator(rank, first).name for call in start.calls)}
        most = max(most, len(names))
    return most
