"""Communicators on the model of the machine, with NCCL's rules (`tests.cuda.machine`)."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.cuda.entries import Call, Kernel, Target, View, unnoted
from tests.cuda.log import Event, RankLog, Stream

if TYPE_CHECKING:
    from tests.cuda.machine import Machine


MakeKernel = Callable[[list[Tensor], list[Tensor]], tuple[Call, Callable[[], None]]]
"""The next call of a communicator on what it reads and writes, and how it is taken part in."""
Views = tuple[tuple[View, ...], tuple[View, ...]]


class Work:
    """A kernel under way, with what torch keeps for it."""

    def __init__(self, accelerator: Any, end: Any = None, kept: Sequence[Tensor] = ()) -> None:
        """``end``: an event of the accelerator's; None if there is no kernel."""
        self._accelerator, self._end, self._kept = accelerator, end, list(kept)

    def wait(self) -> None:
        """The current stream waits; torch lets go."""
        if self._end is not None:
            self._accelerator.current().wait_event(self._end)
        self._kept.clear()


class Collectives(ABC):
    """Those of a group (`braid.kernels.collectives.communicator.TorchGroup`), by their kind."""

    own: int
    """This rank's number."""
    device = torch.device("cpu")

    def rank(self) -> int:
        return self.own

    @abstractmethod
    def size(self) -> int: ...

    @abstractmethod
    def _collective(self, kind: str, x: Tensor, y: Tensor) -> Any:
        """From x into y."""

    def all_gather(self, y: Tensor, x: Tensor) -> Any:
        return self._collective("all_gather", x, y)

    def reduce_scatter(self, y: Tensor, x: Tensor) -> Any:
        return self._collective("reduce_scatter", x, y)

    def all_reduce(self, x: Tensor) -> Any:
        return self._collective("all_reduce", x, x)


@dataclass(eq=False)
class ModelGroup(Collectives):
    """A communicator as one rank has it."""

    log: RankLog
    shared: "Shared"
    own: int
    stream: Stream
    calls: int = 0
    pairs: dict[tuple[str, int], int] = field(default_factory=lambda: defaultdict(int))

    def size(self) -> int:
        return len(self.shared.ranks)

    def messages(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Work:
        """As one kernel; as none if there are none."""
        if not sends and not receives:
            return Work(self.log)
        peers = [("send", peer) for _, peer in sends] + [("receive", peer) for _, peer in receives]
        reads, writes = [x for x, _ in sends], [x for x, _ in receives]
        return self._issue(partial(self._exchange, peers), reads, writes)

    def _collective(self, kind: str, x: Tensor, y: Tensor) -> Work:
        return self._issue(partial(self._join, kind), [x], [y])

    def _join(self, kind: str, reads: list[Tensor], writes: list[Tensor]) -> tuple[Call, Callable[[], None]]:
        (x,), (y,) = reads, writes
        call = Call(self.shared, kind, self.calls, (x.dtype, x.numel()))
        return call, lambda: self.shared.join(self, call, x, y)

    def _exchange(
        self, peers: Sequence[tuple[str, int]], reads: list[Tensor], writes: list[Tensor]
    ) -> tuple[Call, Callable[[], None]]:
        numbered = []
        for way, peer in peers:
            numbered.append((way, peer, self.pairs[way, peer]))
            self.pairs[way, peer] += 1
        sizes = tuple((x.dtype, x.numel()) for x in (*reads, *writes))
        call = Call(self.shared, "messages", self.calls, sizes, tuple(numbered))
        return call, lambda: self.shared.exchange(self, call, reads, writes)

    def _issue(self, kernel: MakeKernel, reads: list[Tensor], writes: list[Tensor]) -> Work:
        log, current = self.log, self.log.current()
        ready, end = Event(log), Event(log)
        ready.record(current)
        self.stream.wait_event(ready)
        views = tuple(map(log.view, reads)), tuple(map(log.view, writes))
        if log.graph is None:
            self.run(kernel, current, views, reads, writes)
        else:
            log.graph.kernel(self, kernel, current, views)
        end.record(self.stream)
        return Work(log, end, [*reads, *writes])

    def run(
        self,
        kernel: MakeKernel,
        current: Stream,
        views: Views,
        reads: list[Tensor],
        writes: list[Tensor],
        captured: bool = False,
    ) -> None:
        """Take part in the next collective or messages, by themselves or as part of a graph."""
        if reads:  # what only receives holds up the device behind an earlier receive, never the host
            self.log.settle(current)
        call, enter = kernel(reads, writes)
        call.captured = captured
        self.calls += 1
        self.log.note(Kernel(self.stream.number, call, *views))
        call.outputs = tuple(map(Target, writes))
        with unnoted(), self.shared.machine.changed:
            if self.log.aborted:
                call.spoil()
            else:
                enter()
        self.stream.pending.add(call)


@dataclass(eq=False)
class Shared:
    """What the members of a communicator share; used under the machine's lock."""

    machine: "Machine"
    name: str
    ranks: tuple[int, ...]
    waiting: dict[int, dict[int, tuple[Call, Tensor, Target]]] = field(default_factory=dict)
    """Of collectives: by number, what each member gave, and where it wants the result."""
    sent: dict[tuple[int, int, int], tuple[Call, Tensor]] = field(default_factory=dict)
    received: dict[tuple[int, int, int], tuple[Call, Target]] = field(default_factory=dict)
    """Of messages, by source, target and number."""
    open: dict[Call, int] = field(default_factory=dict)
    """Messages of a call that have not met theirs."""

    def join(self, member: ModelGroup, call: Call, x: Tensor, y: Tensor) -> None:
        """Give a member's part; the last one to come computes."""
        here = self.waiting.setdefault(call.number, {})
        here[member.own] = call, x.clone(), Target(y)
        if len(here) == len(self.ranks):
            del self.waiting[call.number]
            _compute(call.kind, [here[n] for n in range(len(self.ranks))])
            for one, _, _ in here.values():
                one.done = True
            self.machine.changed.notify_all()

    def exchange(self, member: ModelGroup, call: Call, sends: list[Tensor], receives: list[Tensor]) -> None:
        """Give a member's messages; those whose other end is there pass."""
        self.open[call] = len(call.peers)
        for (way, peer, number), x in zip(call.peers, [*sends, *receives], strict=True):
            if way == "send":
                self._meet((member.own, peer, number), self.sent, self.received, (call, x.clone()))
            else:
                self._meet((peer, member.own, number), self.received, self.sent, (call, Target(x)))
        self.machine.changed.notify_all()

    def _meet(
        self, key: Any, own: dict[Any, Any], others: dict[Any, Any], mine: tuple[Call, Tensor | Target]
    ) -> None:
        if key not in others:
            own[key] = mine
            return
        theirs = others.pop(key)
        (_, source), (_, target) = (mine, theirs) if own is self.sent else (theirs, mine)
        into = target.tensor()
        if into is not None and source.numel() == into.numel():
            into.copy_(source.view(into.shape))
        for call, _ in (mine, theirs):
            self.open[call] -= 1
            call.done = not self.open[call]


def _compute(kind: str, members: list[tuple[Call, Tensor, Target]]) -> None:
    """What a collective leaves in its outputs; sums in rank order. Unequal members leave what they had."""
    inputs, outputs = [x for _, x, _ in members], [y.tensor() for _, _, y in members]
    if len({(call.kind, *call.shape) for call, _, _ in members}) > 1:
        return
    compute_collective(kind, inputs, outputs)


def compute_collective(kind: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None]) -> None:
    """A collective on the tensors of all members; inputs and outputs may be the same.

    Where a member's output is None its memory was given back: the log says so.
    """
    if kind == "all_gather":
        whole = torch.cat([x.reshape(-1) for x in inputs])
        parts: Sequence[Tensor] = [whole] * len(outputs)
    else:
        total = inputs[0].clone()
        for x in inputs[1:]:
            total += x
        parts = [total] * len(outputs) if kind == "all_reduce" else total.reshape(-1).chunk(len(inputs))
    for y, part in zip(outputs, parts, strict=True):
        if y is not None:
            y.copy_(part.view(y.shape))
