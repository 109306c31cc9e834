"""A model of hosts, streams and communicators on CUDA, in plain Python: does what ranks issue come to an end?

Every rank has a host, which issues a fixed list of `Action`, and a device, which takes streams in order. Time
does not pass: what can go on goes on, and what is left stands still for ever. `deadlock` describes that as a
cycle of what waits for what; `unequal` compares what the members of each communicator issue.

What is modelled, and where it comes from (torch's ``ProcessGroupNCCL.cpp``):

- A communicator runs its kernels one after the other, on a stream of its own, behind what the stream that
  issues them had to do, and that stream then waits for them (``collective``, ``pointToPoint``).
- A kernel begins when it is the first of its stream, and ends once all members run theirs: a collective meets
  the members' collective of the same number, a send the receive of the same number between the same two
  ranks; one of several messages ends when all of them have met theirs. Nothing is buffered: small messages of
  NCCL may end earlier, on which no schedule may count.
- Unbatched messages make a communicator for each pair of ranks and group; with communicators that are made at
  set-up (``device_id``) they run on that of the group instead, one behind the other. See `FirstUse`.
- ``slots``: so many kernels of communicators run on a device at a time, however small; computation always
  finds room. Which kernel takes a free slot (`Order`) is all that a device may choose, and all that the end
  depends on: whatever else can happen takes nothing away, and may as well happen at once. Some greedy and
  some random orders are tried, so a number of slots is *refuted* by an order that stands still, and never
  proven by those that do not. Without a limit there is nothing to choose.
- ``queues``: a device reads its streams through so many hardware queues (``CUDA_DEVICE_MAX_CONNECTIONS``, 8
  where nothing is said). A wait that is not over, or a kernel that cannot begin, holds up all that was issued
  to its queue later: so CUDA's manuals tell of false dependencies, how far drivers avoid them is not known
  here. Which streams share a queue is not either: those of equal number, modulo the queues, in the order of
  first use; or (``deal``) drawn by lot.

Not modelled: how long anything takes, thread blocks and SMs, the launch queue's length, and memory.
"""

import random
from collections import defaultdict, deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace

from tests.cuda.actions import (
    COMPUTE,
    Action,
    Call,
    Compute,
    FirstUse,
    Group,
    Programs,
    Start,
    Synchronise,
    Wait,
)
from tests.cuda.orders import FIRST_ISSUED, Order


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a device is given; None: as much as it likes."""

    first: FirstUse = FirstUse.WARM
    slots: int | None = None
    order: Order = FIRST_ISSUED
    queues: int | None = None
    deal: int | None = None
    """Seed by which streams share queues; None: dealt out in the order of first use."""

    def __str__(self) -> str:
        slots = "" if self.slots is None else f", {self.slots} slots ({self.order})"
        return f"{self.first}{slots}{'' if self.queues is None else f', {self.queues} queues'}"


def deadlock(programs: Programs, machine: Machine) -> str | None:
    """Run everything as far as it goes; None if that is to the end, else what waits for what."""
    run = _Run(programs, machine)
    run.go()
    return run.left()


# -- the run -------------------------------------------------------------------------------------------------


class _Stream:
    __slots__ = ("device", "done", "issued", "items", "name", "queue", "watchers")

    def __init__(self, name: str, device: "_Device", queue: "_Queue") -> None:
        self.name, self.device, self.queue = name, device, queue
        self.issued = self.done = 0
        self.items: deque[_Item] = deque()
        """Those that have not ended."""
        self.watchers: list[_Queue | _Device] = []


@dataclass(eq=False, slots=True)
class _Item:
    """What a stream is given: a computation, a wait for ``behind`` things of ``other``, or a ``call``."""

    stream: _Stream
    number: int
    name: str
    other: _Stream | None = None
    behind: int = 0
    call: Call | None = None
    meetings: "tuple[_Meeting, ...]" = ()
    unmet: int = 0
    """Meetings where others are missing."""
    issued: int = 0


@dataclass(eq=False, slots=True)
class _Meeting:
    """A kernel of each of some ranks, which end together."""

    ranks: tuple[int, ...]
    items: dict[int, _Item] = field(default_factory=dict)
    running: list[_Item] = field(default_factory=list)

    @property
    def missing(self) -> list[int]:
        """Ranks whose kernel does not run yet."""
        there = {item.stream.device.rank for item in self.running}
        return [rank for rank in self.ranks if rank not in there]


class _Queue:
    __slots__ = ("device", "items")

    def __init__(self, device: "_Device") -> None:
        self.device = device
        self.items: deque[_Item] = deque()


class _Device:
    """A rank's device, and its host."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.streams: dict[str, _Stream] = {}
        self.queues: list[_Queue] = []
        self.running: list[_Item] = []
        self.ready: list[_Item] = []
        """Kernels that want a slot."""
        self.calls = 0
        self.ends: dict[str, tuple[_Stream, int]] = {}
        self.host: Generator[_Blocked, None, None]
        self.blocked: _Blocked | None = None
        self.ended = False


@dataclass(frozen=True)
class _Blocked:
    """Why a host stands: ``until`` all members use a communicator, or streams have done so many things."""

    name: str
    until: Group | tuple[tuple[_Stream, int], ...]


class _Run:
    def __init__(self, programs: Programs, machine: Machine) -> None:
        self._machine, self._key = machine, machine.order.keys()
        self._work: deque[_Queue | _Device] = deque()
        self._devices = [_Device(rank) for rank in range(len(programs))]
        self._joined: dict[Group, set[int]] = defaultdict(set)
        self._joining: dict[Group, list[_Device]] = defaultdict(list)
        self._meetings: dict[tuple[object, ...], _Meeting] = {}
        self._counts: dict[tuple[object, ...], int] = defaultdict(int)
        self._deal = None if machine.deal is None else random.Random(machine.deal)
        for device, program in zip(self._devices, programs, strict=True):
            device.queues = [_Queue(device) for _ in range(machine.queues or 0)]
            device.host = self._host(device, program)
            self._work.append(device)

    def go(self) -> None:
        """Until nothing can go on."""
        while True:
            while self._work:
                match self._work.popleft():
                    case _Device() as device:
                        if not device.ended:
                            device.blocked = next(device.host, None)
                            device.ended = device.blocked is None
                    case _Queue() as queue:
                        self._read(queue)
            if not self._take_slot():
                return

    # -- hosts ---------------------------------------------------------------------------------------------

    def _host(self, device: _Device, program: Sequence[Action]) -> Generator[_Blocked, None, None]:
        """Issue a program; yields wherever the host has to wait."""
        compute = self._stream(device, COMPUTE)
        for action in program:
            match action:
                case Compute(name):
                    self._put(_Item(compute, compute.issued, name))
                case Start():
                    yield from self._start(device, compute, action)
                case Wait(name):
                    if name not in device.ends:
                        yield _Blocked(f"{name}, which it has not issued", ())
                    self._behind(compute, *device.ends.pop(name), f"computation waits for {name}")
                case Synchronise(name, everything):
                    yield from self._synchronise(device, name, everything=everything)

    def _start(self, device: _Device, compute: _Stream, start: Start) -> Generator[_Blocked, None, None]:
        side = self._stream(device, start.side)
        if side is not compute:
            self._behind(side, compute, compute.issued, f"{start.name} waits for what was computed before")
        kernels = []
        for calls in [start.calls] if start.calls[0].batched else [(call,) for call in start.calls]:
            call = calls[0]
            communicator = call.communicator(device.rank, self._machine.first)
            if self._machine.first.blocks and device.rank not in self._joined[communicator]:
                yield from self._join(device, communicator, start.name)
            stream = self._stream(device, communicator.name)
            self._behind(stream, side, side.issued, "")
            self._put_kernel(device, stream, communicator, calls, start.name)
            kernels.append(stream)
        for stream in kernels:
            self._behind(side, stream, stream.issued, "")
        device.ends[start.name] = side, side.issued

    def _join(self, device: _Device, communicator: Group, name: str) -> Generator[_Blocked, None, None]:
        """The host's part in making a communicator."""
        if self._machine.first is FirstUse.LAZY_IDLE:
            yield from self._synchronise(device, f"the device, to make {communicator.name}", everything=True)
        joined = self._joined[communicator]
        joined.add(device.rank)
        if len(joined) == len(communicator.ranks):
            self._work.extend(self._joining.pop(communicator, ()))
        while len(joined) < len(communicator.ranks):
            self._joining[communicator].append(device)
            yield _Blocked(name, communicator)

    def _synchronise(
        self, device: _Device, name: str, *, everything: bool
    ) -> Generator[_Blocked, None, None]:
        streams = device.streams.values() if everything else [device.streams[COMPUTE]]
        targets = tuple((stream, stream.issued) for stream in streams)
        while unmet := [stream for stream, count in targets if stream.done < count]:
            unmet[0].watchers.append(device)
            yield _Blocked(name, targets)

    # -- streams -------------------------------------------------------------------------------------------

    def _stream(self, device: _Device, name: str) -> _Stream:
        if name not in device.streams:
            if self._machine.queues is None:
                queue = _Queue(device)
            elif self._deal is None:
                queue = device.queues[len(device.streams) % self._machine.queues]
            else:
                queue = self._deal.choice(device.queues)
            device.streams[name] = _Stream(name, device, queue)
        return device.streams[name]

    def _put(self, item: _Item) -> None:
        stream = item.stream
        stream.issued += 1
        stream.items.append(item)
        stream.queue.items.append(item)
        if len(stream.queue.items) == 1:
            self._work.append(stream.queue)

    def _behind(self, stream: _Stream, other: _Stream, count: int, name: str) -> None:
        """Let a stream wait until another one has done so many things."""
        if other.done < count and stream is not other:  # an event that has happened holds up nothing
            self._put(_Item(stream, stream.issued, name, other, count))

    def _put_kernel(
        self, device: _Device, stream: _Stream, group: Group, calls: Sequence[Call], name: str
    ) -> None:
        meetings = tuple(self._meeting(device.rank, group, call) for call in calls)
        unmet, issued = len(meetings), device.calls
        item = _Item(
            stream, stream.issued, name, call=calls[0], meetings=meetings, unmet=unmet, issued=issued
        )
        for meeting in meetings:
            meeting.items[device.rank] = item
        device.calls += 1
        self._put(item)

    def _meeting(self, rank: int, group: Group, call: Call) -> _Meeting:
        """Of the members' next call along its line."""
        line = call.line(rank)
        ranks = group.ranks if call.peer is None else (rank, call.peer)
        self._counts[group, rank, line] += 1
        return self._meetings.setdefault((group, line, self._counts[group, rank, line]), _Meeting(ranks))

    def _read(self, queue: _Queue) -> None:
        """Begin what a hardware queue holds, as far as that goes."""
        while queue.items:
            item = queue.items[0]
            stream = item.stream
            if stream.done < item.number:  # what the stream was given before is still under way
                stream.watchers.append(queue)
                return
            if item.other is not None and item.other.done < item.behind:
                item.other.watchers.append(queue)
                return
            if item.call is not None and self._machine.slots is not None:
                if item not in queue.device.ready:
                    queue.device.ready.append(item)
                return
            queue.items.popleft()
            self._begin(item)

    def _begin(self, item: _Item) -> None:
        if not item.meetings:
            self._end(item.stream)
            return
        item.stream.device.running.append(item)
        for meeting in item.meetings:
            meeting.running.append(item)
            if len(meeting.running) == len(meeting.ranks):
                self._met(meeting)

    def _met(self, meeting: _Meeting) -> None:
        """End the kernels that wait for nobody else."""
        for one in meeting.running:
            one.unmet -= 1
            if not one.unmet:
                one.stream.device.running.remove(one)
                self._end(one.stream)

    def _end(self, stream: _Stream) -> None:
        stream.done += 1
        stream.items.popleft()
        if stream.watchers:
            self._work.extend(stream.watchers)
            stream.watchers.clear()

    def _take_slot(self) -> bool:
        """Let one kernel have a free slot; whether there was one that wanted it."""
        slots, key = self._machine.slots, self._key
        if slots is None:
            return False
        ready = [i for device in self._devices if len(device.running) < slots for i in device.ready]
        if not ready:
            return False
        item = min(ready, key=lambda i: key(i.stream.device.rank, i.call, i.issued, _alone(i)))
        device, queue = item.stream.device, item.stream.queue
        device.ready.remove(item)
        queue.items.popleft()
        self._work.append(queue)
        self._begin(item)
        return True

    # -- what is left --------------------------------------------------------------------------------------

    def left(self) -> str | None:
        """What waits for what, followed until it closes a circle or ends; None where all is done."""
        open_: Iterable[_Device | _Stream] = [
            *(device for device in self._devices if not device.ended),
            *(stream for device in self._devices for stream in device.streams.values() if stream.items),
        ]
        at: _Device | _Stream | None = next(iter(open_), None)
        if at is None:
            return None
        seen: dict[int, int] = {}
        lines: list[str] = []
        while at is not None and id(at) not in seen:
            seen[id(at)] = len(lines)
            line, at = self._host_waits(at) if isinstance(at, _Device) else self._stream_waits(at)
            lines.append(line)
        circle = lines[seen[id(at)] :] if at is not None else lines
        told = "\n".join(f"  {line}" for line in circle if line)
        return f"{'a circle' if at is not None else 'no end'} ({self._machine}):\n{told}"

    def _host_waits(self, device: _Device) -> "tuple[str, _Device | _Stream | None]":
        blocked, rank = device.blocked, device.rank
        if blocked is None:
            return f"rank {rank}: its host has issued everything", None
        if isinstance(blocked.until, Group):
            missing = min(set(blocked.until.ranks) - self._joined[blocked.until])
            text = f"the first use of {blocked.until.name} (at {blocked.name}), until rank {missing} uses it"
            return f"rank {rank}: its host is blocked by {text}", self._devices[missing]
        unmet = [stream for stream, count in blocked.until if stream.done < count]
        return f"rank {rank}: its host waits for {blocked.name}", unmet[0] if unmet else None

    def _stream_waits(self, stream: _Stream) -> "tuple[str, _Device | _Stream | None]":
        """Why the first thing that a stream still has to do is not done."""
        item, rank = stream.items[0], stream.device.rank
        if item in stream.device.running:
            meeting = next(one for one in item.meetings if one.missing)
            missing = meeting.missing[0]
            there = meeting.items.get(missing)
            line = f"rank {rank}: {_told(item)} runs until rank {missing} "
            if there is None:
                return f"{line}issues its part", self._devices[missing]
            return f"{line}runs {_told(there)}", there.stream
        head = stream.queue.items[0]
        if head is not item:
            return f"rank {rank}: {_told(item)} is behind {_told(head)} in one hardware queue", head.stream
        if item.other is not None:
            return f"rank {rank}: {item.name}" if item.name else "", item.other
        first = stream.device.running[0]
        return f"rank {rank}: {_told(item)} finds no slot free beside {_told(first)}", first.stream


def _alone(item: _Item) -> bool:
    """Whether a kernel would wait for others: some of them do not run yet."""
    return any(len(meeting.missing) > 1 for meeting in item.meetings)


def _told(item: _Item) -> str:
    if item.call is None:
        return f"a wait on {item.stream.name}" if item.other is not None and not item.name else item.name
    return f"{item.name} ({replace(item.call, what='')})"
