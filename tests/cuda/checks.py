"""What is wrong with a rank's log, whatever order the device chose when it was taken.

Vector clocks over streams, the host among them: what a stream is given comes after what it was given before,
after the events that it waited for, and after whatever the host had waited for when it was given. A race is
two accesses to the same bytes, one of them a write, of which neither comes after the other; a use after free
is an access that does not come before the memory was given back, in the order of the stream whose pool it
went back to, as the next to get it may use it at once.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from tests.cuda.entries import Call, Entry, Freed, HostWaited, Kernel, Made, Operator, Recorded, View, Waited
from tests.cuda.host_memory import HOST
from tests.cuda.log import RankLog
from tests.cuda.machine import Machine

Clock = dict[int, int]


@dataclass(frozen=True)
class _Access:
    stream: int
    tick: int
    writes: bool
    extent: tuple[int, int]
    name: str


@dataclass
class _Order:
    """Clocks of streams and events of one rank."""

    clocks: dict[int, Clock] = field(default_factory=lambda: defaultdict(dict))
    events: dict[int, Clock] = field(default_factory=dict)

    def join(self, stream: int, other: Clock) -> None:
        own = self.clocks[stream]
        for key, tick in other.items():
            own[key] = max(own.get(key, 0), tick)

    def tick(self, stream: int) -> int:
        """The stream is given something now."""
        self.join(stream, self.clocks[HOST])
        own = self.clocks[stream]
        own[stream] = own.get(stream, 0) + 1
        return own[stream]

    def comes_after(self, stream: int, access: _Access) -> bool:
        return self.clocks[stream].get(access.stream, 0) >= access.tick


def faults_of_logs(machine: Machine) -> list[str]:
    """All that is wrong, whatever order the devices choose."""
    of_memory = [fault for log in machine.ranks for fault in faults_of_memory(log)]
    return of_memory + faults_of_communicators(machine)


def faults_of_memory(log: RankLog) -> list[str]:
    """Races and uses after free, in words; empty for a correct rank."""
    return list(dict.fromkeys(f"rank {log.rank}: {fault}" for fault in _faults(log.entries)))


def _faults(entries: Sequence[Entry]) -> Iterator[str]:
    order = _Order()
    accesses: dict[int, list[_Access]] = {}
    pools: dict[int, int] = {}
    for entry in entries:
        match entry:
            case Made(memory, stream, nbytes):
                pools[memory] = stream
                accesses[memory] = [_Access(stream, order.tick(stream), True, (0, nbytes), "its allocation")]
            case Freed(memory) if memory not in pools:
                continue  # of a graph that never ran
            case Freed(memory):
                pool = pools[memory]
                order.join(pool, order.clocks[HOST])
                for access in accesses.pop(memory):
                    if not order.comes_after(pool, access):
                        yield f"{access.name} uses memory that may have been given to others by then"
            case Recorded(event, stream):
                order.join(stream, order.clocks[HOST])
                order.events[event] = dict(order.clocks[stream])
            case Waited(stream, event):
                order.join(stream, order.events.get(event, {}))
            case HostWaited(event):
                order.join(HOST, order.events.get(event, {}))
            case Operator() | Kernel():
                tick = order.tick(entry.stream)
                if isinstance(entry, Kernel) and entry.call.kind == "messages" and _meet(entry):
                    yield f"{entry.name} receives into memory that it sends from"
                for view, writes in _accesses_of(entry):
                    access = _Access(entry.stream, tick, writes, view.extent, entry.name)
                    yield from _races(order, accesses[view.memory], access)
                if isinstance(entry, Operator) and entry.host is not None:
                    order.join(HOST, order.clocks[entry.stream])


def _meet(entry: Kernel) -> bool:
    """Whether what it reads and what it writes, at once and in no order, lies in the same place."""
    pairs = product(entry.reads, entry.writes)
    return any(a.memory == b.memory and _overlap(a.extent, b.extent) for a, b in pairs)


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def _accesses_of(entry: Operator | Kernel) -> Iterator[tuple[View, bool]]:
    if isinstance(entry, Operator) and not entry.touches:
        return
    written = [*entry.writes, *(entry.results if isinstance(entry, Operator) else ())]
    for view in written:
        yield view, True
    for view in entry.reads:
        if view not in written:
            yield view, False


def _races(order: _Order, before: list[_Access], new: _Access) -> Iterator[str]:
    (begin, end), kept = new.extent, [new]
    for access in before:
        after = order.comes_after(new.stream, access)
        if _overlap(new.extent, access.extent) and (new.writes or access.writes) and not after:
            yield f"{new.name} and {access.name} touch the same memory in no order"
        # What a later write comes after, and covers, no later access needs to look at.
        if not (new.writes and after and begin <= access.extent[0] and access.extent[1] <= end):
            kept.append(access)
    before[:] = kept


def faults_of_communicators(machine: Machine) -> list[str]:
    """Members that do not do the same in the same order, all in a graph or all by itself."""
    found = []
    for shared in machine.communicators:
        members = [
            [e.call for e in machine.ranks[rank].entries if isinstance(e, Kernel) and e.call.of is shared]
            for rank in shared.ranks
        ]
        found += _unequal(shared.name, members)
    return found


def _unequal(name: str, members: list[list[Call]]) -> Iterator[str]:
    sums = [
        [(one.kind, one.captured, *one.shape) for one in own if one.kind != "messages"] for own in members
    ]
    for number, own in enumerate(sums):
        if own != sums[0]:
            at = next((n for n, (a, b) in enumerate(zip(own, sums[0], strict=False)) if a != b), len(own))
            yield f"{name}: sum or gather {at} of member {number} is not that of member 0"
    messages: dict[tuple[int, int], dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for number, own in enumerate(members):
        for call in own:
            for (way, peer, _), size in zip(call.peers, call.shape, strict=False):
                pair = (number, peer) if way == "send" else (peer, number)
                messages[pair][way].append((call.captured, size))
    for (source, target), ways in messages.items():
        if ways["send"] != ways["receive"]:
            yield f"{name}: messages from member {source} to {target} are not those that are received"
