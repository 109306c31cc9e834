"""Collectives on CPU: messages between all pairs of ranks.

gloo builds reduce-scatter on all-reduce, which moves twice the bytes, and its collectives copy more than its
messages do (docs/log.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from braid.kernels.collectives.primitives import Extents, Launch, Work, gathered, parts_of, scattered, traded


@dataclass(frozen=True)
class MessageLine:
    """The ranks of a line, and the connections between them (`Line`).

    Messages to later ranks take one process group and messages to earlier ranks another. gloo guards
    a connection with one lock, which its thread tries in an endless loop when something arrives while another
    thread sends; where both share a CPU, the sender cannot go on before the kernel ends the loop's time
    slice. With both directions on one connection that was 3 ms for every other exchange (docs/log.md).
    """

    group: dist.ProcessGroup
    upward: dist.ProcessGroup | None = None
    """For messages to ranks that come later in the group; None: ``group``, as the others."""

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.group.size()

    def toward(self, source: int, target: int) -> dist.ProcessGroup:
        """The group for messages from one rank to another."""
        return self.upward if self.upward is not None and source < target else self.group

    def all_gather(
        self, x: Tensor, into: Tensor | None = None, shares: Sequence[int] | None = None
    ) -> Launch:
        """(t, ...) -> (t x ranks, ...)."""
        x = x.contiguous()
        y = into if into is not None else gathered(x, self.size, shares)
        parts = parts_of(y, self.size, shares)
        own = parts[self.rank]
        finish = None if own.data_ptr() == x.data_ptr() else lambda: own.copy_(x)
        return Launch(y, lambda: self._exchange([x] * self.size, parts), finish, x.nbytes * (self.size - 1))

    def reduce_scatter(
        self, x: Tensor, into: Tensor | None = None, shares: Sequence[int] | None = None
    ) -> Launch:
        """(T, ...) -> (T / ranks, ...); the sum is in rank order."""
        x, own = x.contiguous(), self.rank
        y = into if into is not None else scattered(x, self.size, None if shares is None else shares[own])
        parts = parts_of(x, self.size, shares)
        arrived = [parts[own] if peer == own else torch.empty_like(y) for peer in range(self.size)]

        def total() -> None:
            # y may be this rank's part of x: it is written last.
            so_far = arrived[0]
            for number, part in enumerate(arrived[1:], start=1):
                last = number == self.size - 1
                so_far = torch.add(so_far, part, out=y if last else arrived[int(own == 0)])

        return Launch(y, lambda: self._exchange(parts, arrived), total, x.nbytes - y.nbytes)

    def all_to_all(self, x: Tensor, extents: Extents) -> Launch:
        """To every rank its tokens."""
        return traded(x, extents, self.rank, self._exchange)

    def all_reduce(self, x: Tensor) -> Launch:
        """In place."""
        group = self.group
        return Launch(x, lambda: _started(dist.all_reduce(x, group=group, async_op=True)), sends=x.nbytes)

    def send(self, x: Tensor, to: int, tag: int) -> Launch:
        """To one rank."""
        x = x.contiguous()
        group = self.toward(self.rank, to)
        return Launch(x, lambda: _started(dist.isend(x, group=group, group_dst=to, tag=tag)), sends=x.nbytes)

    def receive(self, x: Tensor, source: int, tag: int) -> Launch:
        """From one rank."""
        group = self.toward(source, self.rank)
        return Launch(x, lambda: _started(dist.irecv(x, group=group, group_src=source, tag=tag)))

    def swap(self, x: Tensor, peer: int) -> Launch:
        """With one rank."""
        return self._trade(x, peer, peer)

    def shift(self, x: Tensor, by: int) -> Launch:
        """Around the line."""
        return self._trade(x, (self.rank + by) % self.size, (self.rank - by) % self.size)

    def meet(self) -> None:
        """With all ranks."""
        dist.barrier(self.group)

    def align(self) -> None:
        """There is no stream but the host."""
        self.meet()

    def warm_up(self) -> None:
        """gloo connects all pairs when it makes a group."""

    def _trade(self, x: Tensor, to: int, source: int) -> Launch:
        """Send ``x`` to one rank and receive as much from one."""
        x = x.contiguous()
        y = torch.empty_like(x)

        def issue() -> Work:
            arriving = self.receive(y, source, 0).issue()
            return _All([arriving, self.send(x, to, 0).issue()])

        return Launch(y, issue, sends=x.nbytes)

    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Work:
        """Send ``outgoing[peer]`` to every other rank and receive ``incoming[peer]`` from it, if they are not
        empty, which both sides know.

        Messages between two ranks of a group arrive in the order in which they were sent, so exchanges need
        no tags as long as all ranks start them in one order, as they do collectives.
        """
        works = []
        for distance in range(1, self.size):
            source, target = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            if incoming[source].numel():
                works.append(self.receive(incoming[source], source, 0).issue())
            if outgoing[target].numel():
                works.append(self.send(outgoing[target], target, 0).issue())
        return _All(works)


@dataclass(frozen=True)
class _All:
    """Several works as one."""

    works: Sequence[Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def _started(work: dist.Work | None) -> dist.Work:
    """The work of an asynchronous call; torch returns none to ranks outside the group."""
    assert work is not None, "this rank is not in the group it communicates in"
    return work
