"""A recorded step again, in other orders: whatever streams, events and communicators allow.

The log of all ranks becomes a graph of what must come before what. Any order along it is one that a machine
may take, so all must leave the same bits. Memory lies as an allocator would place it that gives freed memory
away at once: operators really share it, and what is freed is overwritten when its stream comes to that point.
A step that is right in one order only, as it happens to be recorded, ends with other bits in some other one.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.cuda.communicators import compute_collective
from tests.cuda.entries import Freed, HostWaited, Kernel, Operator, Recorded, Waited
from tests.cuda.host_memory import HOST
from tests.cuda.log import RankLog
from tests.cuda.machine import Machine
from tests.cuda.replay_memory import Placement, fresh, placed

_UNFILLED = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided")


@dataclass(eq=False)
class Node:
    """Something that runs: an operator, a kernel of all its members, the loss of freed memory."""

    name: str
    run: Callable[[], object] | None = None
    before: int = 0
    """Nodes that come before it and are not done."""
    after: list["Node"] = field(default_factory=list)
    needs: int = 0
    lane: tuple[int, int] = (0, 0)
    """Rank and stream."""


@dataclass(frozen=True)
class _Part:
    """A rank's in a collective or a message."""

    node: Node
    kind: str
    gives: Tensor | None = None
    takes: Tensor | None = None


class Replay:
    """A machine's logs, ready to run again."""

    def __init__(self, machine: Machine) -> None:
        self.nodes: list[Node] = []
        self.read: dict[tuple[int, int], Any] = {}
        """What hosts read in this order: by rank and number."""
        self._meetings: dict[Any, list[_Part]] = defaultdict(list)
        self.placements = [Placement(log) for log in machine.ranks]
        for log, placement in zip(machine.ranks, self.placements, strict=True):
            self._rank(log, placement)
        self._join_kernels()
        for node in self.nodes:
            for later in node.after:
                later.needs += 1

    # -- the graph --

    def _rank(self, log: RankLog, placement: Placement) -> None:
        last: dict[int, Node] = {}
        events: dict[int, Node | None] = {}
        host: Node | None = None
        told: set[int] = set()  # streams that come after `host` by now

        def add(stream: int, name: str, run: Callable[[], object] | None = None) -> Node:
            node = Node(name, run, lane=(log.rank, stream))
            self.nodes.append(node)
            if stream in last:
                last[stream].after.append(node)
            if host is not None and stream not in told:
                host.after.append(node)
                told.add(stream)
            last[stream] = node
            return node

        def follows(node: Node, *streams: int) -> None:
            """The host does not go on before a node, which some streams come after anyway."""
            nonlocal host, told
            if host is not None:
                host.after.append(node)
            host, told = node, {*streams}

        for entry in log.entries:
            match entry:
                case Freed(memory) if placement.is_own(memory):
                    add(placement.streams[memory], "freed", placement.poison(memory))
                case Recorded(event, stream):
                    events[event] = last.get(stream)
                case Waited(stream, event):
                    if (before := events.get(event)) is not None:
                        before.after.append(add(stream, "wait"))
                case HostWaited(event):
                    if (before := events.get(event)) is not None:
                        node = Node("host", lane=(log.rank, 0))
                        self.nodes.append(node)
                        before.after.append(node)
                        follows(node)
                case Operator() if entry.touches and not _unfilled(entry):
                    run = self._operator(entry, placement, (log.rank, len(self.nodes)))
                    node = add(entry.stream, entry.name, run)
                    if entry.host is not None or entry.stream == HOST:
                        follows(node, entry.stream)
                case Kernel():
                    node, call = add(entry.stream, entry.name), entry.call
                    reads, writes = ([*map(placement.tensor, side)] for side in (entry.reads, entry.writes))
                    if call.kind != "messages":
                        part = _Part(node, call.kind, reads[0], writes[0])
                        self._meetings[call.of.name, call.number].append(part)
                        continue
                    own = call.of.ranks.index(log.rank)
                    for (way, peer, number), x in zip(call.peers, [*reads, *writes], strict=True):
                        pair = (own, peer) if way == "send" else (peer, own)
                        part = _Part(node, call.kind, **{"gives" if way == "send" else "takes": x})
                        self._meetings[call.of.name, *pair, number].append(part)

    def _operator(self, entry: Operator, placement: Placement, key: tuple[int, int]) -> Callable[[], object]:
        arguments, named = placed(placement, entry.arguments), placed(placement, entry.named)
        results = [placement.tensor(view) for view in entry.results]

        def run() -> None:
            out = entry.function(*arguments, **named)
            if entry.host is not None:
                self.read[key] = out
            for target, one in zip(results, fresh(out), strict=False):
                target.copy_(one)

        return run

    def _join_kernels(self) -> None:
        """A node for all members of a collective, and for both ends of a message."""
        for key, members in self._meetings.items():
            first = members[0].node
            joint = Node(first.name, _joint(key, members), lane=first.lane)
            self.nodes.append(joint)
            for member in members:
                # The member's own node begins, the joint one runs, and what follows comes after that.
                joint.after += member.node.after
                member.node.after = [joint]

    # -- orders --

    def run(self, seed: int | None) -> dict[Any, Any]:
        """Run everything in one order (None: about that of the log) and return what is left."""
        for placement in self.placements:
            placement.reset()
        self.read.clear()
        done = 0
        for node in _order(self.nodes, seed):
            if node.run is not None:
                node.run()
            done += 1
        if done < len(self.nodes):
            stuck = [node.name for node in self.nodes if node.before > 0][:5]
            raise RuntimeError(f"{len(self.nodes) - done} of {len(self.nodes)} nodes cannot run: {stuck}")
        left: dict[Any, Any] = dict(self.read)
        for rank, placement in enumerate(self.placements):
            left |= {(rank, "memory", memory): content.clone() for memory, content in placement.there.items()}
        return left


def _unfilled(entry: Operator) -> bool:
    return entry.function.name().partition(".")[0] in _UNFILLED


def _joint(key: Any, members: list[_Part]) -> Callable[[], object]:
    """What a collective does, or a message."""
    given = [one.gives for one in members if one.gives is not None]
    taken = [one.takes for one in members if one.takes is not None]
    if members[0].kind != "messages":
        return lambda: compute_collective(members[0].kind, given, taken)
    if (len(given), len(taken)) != (1, 1):
        raise RuntimeError(f"message {key} has {len(members)} ends")
    return lambda: taken[0].copy_(given[0].view(taken[0].shape))


def _order(nodes: list[Node], seed: int | None) -> Iterator[Node]:
    """Nodes along the graph. Some lanes are starved, others go first, as drawn."""
    generator = random.Random(seed)
    weight: dict[tuple[int, int], float] = defaultdict(lambda: generator.choice((0.001, 1.0, 1.0, 1000.0)))
    for node in nodes:
        node.before = node.needs
    ready = [node for node in reversed(nodes) if not node.needs]
    while ready:
        at = -1
        if seed is not None and len(ready) > 1:
            at = generator.choices(range(len(ready)), [weight[node.lane] for node in ready])[0]
        node = ready[at]
        ready[at] = ready[-1]
        ready.pop()
        yield node
        for later in node.after:
            later.before -= 1
            if not later.before:
                ready.append(later)


def differences(first: dict[Any, Any], second: dict[Any, Any]) -> list[Any]:
    """Keys of what one of two orders left and the other did not, to the bit."""

    def same(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)

    return [key for key in {**first, **second} if not same(first.get(key), second.get(key))]


def faults_of_orders(machine: Machine, orders: Iterable[int]) -> list[str]:
    """Orders, by their seeds, that cannot run, or leave other bits."""
    try:
        replay = Replay(machine)
        first = replay.run(None)
        return [f"order {seed} leaves other bits" for seed in orders if differences(first, replay.run(seed))]
    except RuntimeError as error:
        return [str(error)]
