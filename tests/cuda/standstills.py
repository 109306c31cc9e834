"""A check over linked code: do members of each communicator agree, and does what ranks issue come to an end?

Every rank has a host, which issues a list of `Action` (`tests.cuda.issued`), and a device, which takes
streams in order. Time does not pass: what can go on goes on, and what is left stands still for ever.

- A communicator runs its kernels one after the other, on a stream of its own, behind what the stream that
  issues them had to do, and that stream then waits for them (torch's ``ProcessGroupNCCL.cpp``).
- A kernel begins when it is the first of its stream, and ends once all members run theirs: a collective meets
  the members' collective of the same number, a send the receive of the same number between the same ranks.
  Nothing is buffered: small messages of NCCL may end earlier, on which no schedule may count.
- ``slots``: so many kernels of communicators run on a device at a time; computation always finds room. Which
  kernel takes a free slot is all that a device may choose: drawn by ``seed``. An order that stands still
  refutes a number of slots; orders that do not, prove nothing.
- ``queues``: a device reads its streams through so many hardware queues (``CUDA_DEVICE_MAX_CONNECTIONS``). A
  wait that is not over, or a kernel that cannot begin, holds up all that was issued to its queue later.
"""

import random
from collections import defaultdict, deque
from dataclasses import dataclass, field

from tests.cuda.issued import COMPUTE, Call, Compute, Programs, Start, Synchronise, Wait


def unequal(programs: Programs) -> str | None:
    """The first call that the members of a communicator do not issue alike; None if there is none."""
    issued: dict[object, dict[int, list[Call]]] = defaultdict(lambda: defaultdict(list))
    for rank, program in enumerate(programs):
        for call in (call for action in program if isinstance(action, Start) for call in action.calls):
            key = call.communicator(rank), call.line(rank)
            members = call.group.ranks if call.peer is None else (rank, call.peer)
            for member in members:
                issued[key].setdefault(member, [])
            issued[key][rank].append(call)
    for sequences in issued.values():
        (first, calls), *others = sequences.items()
        for other, theirs in others:
            for number in range(max(len(calls), len(theirs))):
                a, b = (own[number] if number < len(own) else None for own in (calls, theirs))
                if a is None or b is None or not a.meets(b):
                    told = (
                        f"rank {rank} issues {call or 'nothing more'}"
                        for rank, call in ((first, a), (other, b))
                    )
                    return f"call {number}: {', '.join(told)}"
    return None


def streams_of(programs: Programs) -> int:
    """Streams of the rank that has most, the communicators' among them."""
    return max(
        len(
            {COMPUTE}
            | {action.side for action in program if isinstance(action, Start)}
            | {str(c.communicator(rank)) for a in program if isinstance(a, Start) for c in a.calls}
        )
        for rank, program in enumerate(programs)
    )


def standstill(
    programs: Programs, *, slots: int | None = None, queues: int | None = None, seed: int | None = None
) -> str | None:
    """Run everything as far as it goes; None if that is to the end, else what every rank waits for.

    seed: of the choice among kernels that want a slot; None: the one that was issued first.
    """
    run = _Run(programs, slots, queues, seed)
    run.go()
    lines = [line for rank in run.ranks for line in rank.left()]
    return "\n".join(lines) or None


@dataclass(eq=False)
class _Item:
    """What a stream is given: a kernel with its meetings, or a wait for ``count`` things of ``other``."""

    stream: str
    name: str
    other: str = ""
    count: int = 0
    meetings: tuple[object, ...] = ()
    issued: int = 0


@dataclass
class _Rank:
    number: int
    program: deque[object]
    queues: int | None
    given: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    done: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    read: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Things of every stream that have been given, have ended, and have left their queue."""
    lines: dict[object, deque[_Item]] = field(default_factory=dict)
    """Hardware queues, or streams where each has a queue of its own."""
    queue_of: dict[str, object] = field(default_factory=dict)
    ends: dict[str, tuple[str, int]] = field(default_factory=dict)
    calls: dict[object, int] = field(default_factory=lambda: defaultdict(int))
    running: list[_Item] = field(default_factory=list)
    ready: list[_Item] = field(default_factory=list)

    def put(self, item: _Item) -> None:
        """Behind all that the stream and its queue have."""
        if item.stream not in self.queue_of:
            number = len(self.queue_of)
            self.queue_of[item.stream] = item.stream if self.queues is None else number % self.queues
        self.given[item.stream] += 1
        item.issued = sum(self.given.values())
        self.lines.setdefault(self.queue_of[item.stream], deque()).append(item)

    def after(self, stream: str, other: str, name: str = "") -> None:
        """Let a stream wait for all that another one was given."""
        if stream != other and self.done[other] < self.given[other]:
            self.put(_Item(stream, name, other, self.given[other]))

    def issue(self) -> bool:
        """Let the host go on; whether it did."""
        before = len(self.program)
        while self.program and self._issued(self.program[0]):
            self.program.popleft()
        return len(self.program) < before

    def _issued(self, action: object) -> bool:
        match action:
            case Compute(name):
                self.put(_Item(COMPUTE, name))
            case Wait(name):
                if name not in self.ends:
                    return False
                other, count = self.ends.pop(name)
                if self.done[other] < count:
                    self.put(_Item(COMPUTE, f"computation waits for {name}", other, count))
            case Synchronise(_, everything):
                streams = [*self.given] if everything else [COMPUTE]
                return all(self.done[one] >= self.given[one] for one in streams)
            case Start(name, side, calls):
                self.after(side, COMPUTE, f"{name} waits for what was computed before")
                for kernel in [calls] if calls[0].batched else [(call,) for call in calls]:
                    communicator = kernel[0].communicator(self.number)
                    stream = str(communicator)
                    self.after(stream, side)
                    self.put(_Item(stream, name, meetings=tuple(map(self._meeting, kernel))))
                    self.after(side, stream)
                self.ends[name] = side, self.given[side]
        return True

    def _meeting(self, call: Call) -> object:
        """The members' next call along its line, and who comes to it."""
        key = call.communicator(self.number), call.line(self.number)
        self.calls[key] += 1
        return (
            *key,
            self.calls[key],
            tuple(sorted(call.group.ranks if call.peer is None else (self.number, call.peer))),
        )

    def left(self) -> list[str]:
        """What the host and the streams wait for."""
        found = [f"rank {self.number}: its host waits for {self.program[0]}"] if self.program else []
        found += [f"rank {self.number}: {item.name} runs until others do" for item in self.running]
        heads = (items[0] for items in self.lines.values() if items)
        return found + [f"rank {self.number}: {one.name or 'a wait'} on {one.stream}" for one in heads]


class _Run:
    def __init__(self, programs: Programs, slots: int | None, queues: int | None, seed: int | None) -> None:
        self.ranks = [_Rank(number, deque(own), queues) for number, own in enumerate(programs)]
        self._slots, self._random = slots, None if seed is None else random.Random(seed)
        self._there: dict[object, list[tuple[_Rank, _Item]]] = defaultdict(list)
        self._unmet: dict[_Item, int] = {}

    def go(self) -> None:
        """Until nothing can go on."""
        moved = True
        while moved:
            moved = False
            for rank in self.ranks:
                moved |= rank.issue() | self._read(rank)
            moved = moved or self._take_slot()

    def _read(self, rank: _Rank) -> bool:
        """Begin what the queues of a device hold, as far as that goes."""
        moved = False
        for items in [*rank.lines.values()]:
            while items:
                item = items[0]
                if rank.done[item.stream] < rank.read[item.stream]:
                    break  # what the stream was given before is under way
                if item.other and rank.done[item.other] < item.count:
                    break
                if item.meetings and self._slots is not None and item not in rank.ready:
                    rank.ready.append(item)
                if item.meetings and self._slots is not None:
                    break
                self._begin(rank, items.popleft())
                moved = True
        return moved

    def _begin(self, rank: _Rank, item: _Item) -> None:
        rank.read[item.stream] += 1
        if not item.meetings:
            rank.done[item.stream] += 1
            return
        rank.running.append(item)
        self._unmet[item] = len(item.meetings)
        for meeting in item.meetings:
            there = self._there[meeting]
            there.append((rank, item))
            if len(there) == len(meeting[-1]):  # type: ignore[index]
                for member, kernel in there:
                    self._unmet[kernel] -= 1
                    if not self._unmet[kernel]:
                        member.running.remove(kernel)
                        member.done[kernel.stream] += 1

    def _take_slot(self) -> bool:
        """Let one kernel have a free slot; whether there was one that wanted it."""
        if self._slots is None:
            return False
        wanting = [(r, item) for r in self.ranks if len(r.running) < self._slots for item in r.ready]
        if not wanting:
            return False
        rank, item = (
            self._random.choice(wanting) if self._random else min(wanting, key=lambda one: one[1].issued)
        )
        rank.ready.remove(item)
        rank.lines[rank.queue_of[item.stream]].popleft()
        self._begin(rank, item)
        return True
