"""A recorded step again, in other orders: whatever streams, events and communicators allow.

The log of all ranks becomes a graph of what must come before what. Any order along it is one that a machine
may take, so all must leave the same bits. Memory lies as an allocator would place it that gives freed memory
away at once: operators really share it, and what is freed is overwritten when its stream comes to that point.
A step that is right in one order only, as it happens to be recorded, ends with other bits in some other one.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.cuda.communicators import compute_collective
from tests.cuda.entries import Call, Freed, HostWaited, Kernel, Operator, Recorded, Waited
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


class Replay:
    """A machine's logs, ready to run again."""

    def __init__(self, machine: Machine) -> None:
        self.nodes: list[Node] = []
        self.read: dict[tuple[int, int], Any] = {}
        """What hosts read in this order: by rank and number."""
        self._meetings: dict[Any, list[tuple[Node, Call, list[Tensor], list[Tensor]]]] = defaultdict(list)
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
                        if host is not None:
                            host.after.append(node)
                        host, told = node, set()
                case Operator():
                    run = self._operator(entry, placement, (log.rank, len(self.nodes)))
                    if run is not None:
                        node = add(entry.stream, entry.name, run)
                        if entry.host is not None or entry.stream == HOST:
                            if host is not None:
                                host.after.append(node)
                            host, told = node, {entry.stream}
                case Kernel():
                    node = add(entry.stream, entry.name)
                    reads, writes = (
                        [placement.tensor(view) for view in views] for views in (entry.reads, entry.writes)
                    )
                    for key in _meeting(entry.call, log.rank):
                        self._meetings[key].append((node, entry.call, reads, writes))

    def _operator(
        self, entry: Operator, placement: Placement, key: tuple[int, int]
    ) -> Callable[[], object] | None:
        if _unfilled(entry) or not entry.touches:
            return None
        function = entry.function
        arguments, named = placed(placement, entry.arguments), placed(placement, entry.named)
        results = [placement.tensor(view) for view in entry.results]
        if entry.host is not None:

            def read() -> None:
                self.read[key] = function(*arguments, **named)

            return read
        if not results:
            return lambda: function(*arguments, **named)
        if len(results) == 1:
            (target,) = results

            def run_one() -> None:
                out = function(*arguments, **named)
                target.copy_(out if isinstance(out, Tensor) else fresh(out)[0])

            return run_one

        def run_all() -> None:
            for target, out in zip(results, fresh(function(*arguments, **named)), strict=True):
                target.copy_(out)

        return run_all

    def _join_kernels(self) -> None:
        """A node for all members of a collective, and for both ends of a message."""
        for key, members in self._meetings.items():
            joint = Node(members[0][0].name, lane=members[0][0].lane)
            joint.run = _kernel(key, members)
            self.nodes.append(joint)
            for node, _, _, _ in members:
                # The member's own node begins, the joint one runs, and what follows comes after that.
                joint.after += node.after
                node.after = [joint]

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


def _meeting(call: Call, rank: int) -> Iterator[Any]:
    """What a kernel takes part in."""
    if call.kind != "messages":
        yield call.of.name, call.number
        return
    own = call.of.ranks.index(rank)
    for way, peer, number in call.peers:
        source, target = (own, peer) if way == "send" else (peer, own)
        yield call.of.name, source, target, number


def _kernel(key: Any, members: list[tuple[Node, Call, list[Tensor], list[Tensor]]]) -> Callable[[], object]:
    calls = [call for _, call, _, _ in members]
    if calls[0].kind == "messages":
        pairs = [
            tensor
            for way in ("send", "receive")
            for _, call, reads, writes in members
            for (own, peer, number), tensor in zip(call.peers, [*reads, *writes], strict=True)
            if own == way and number == key[3] and peer == (key[2] if way == "send" else key[1])
        ]
        if len(pairs) != 2:
            raise RuntimeError(f"message {key} has {len(pairs)} ends")
        source, target = pairs
        return lambda: target.copy_(source.view(target.shape))
    inputs = [reads[0] for _, _, reads, _ in members]
    outputs = [writes[0] for _, _, _, writes in members]
    return lambda: compute_collective(calls[0].kind, inputs, outputs)


def _order(nodes: list[Node], seed: int | None) -> Iterator[Node]:
    """Nodes along the graph. Some lanes are starved, others go first, as drawn."""
    generator = random.Random(seed)
    weight: dict[tuple[int, int], float] = defaultdict(lambda: generator.choice((0.001, 1.0, 1.0, 1000.0)))
    ready = []
    for node in nodes:
        node.before = node.needs
        if not node.needs:
            ready.append(node)
    ready.reverse()
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


def same(first: dict[Any, Any], second: dict[Any, Any]) -> bool:
    """Whether two orders left the same bits."""
    if first.keys() != second.keys():
        return False
    return all(
        torch.equal(one, second[key]) if isinstance(one, Tensor) else one == second[key]
        for key, one in first.items()
    )
