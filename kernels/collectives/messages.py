"""Collectives on CPUs, made of messages between all pairs of ranks.

gloo builds reduce-scatter on all-reduce, which moves twice the bytes, and its collectives copy more than its
messages do (docs/log.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from braid.kernels.collectives.primitives import Launch, Line, Work, Works, started


@dataclass(frozen=True)
class MessageLine(Line):
    """A line of ranks on CPUs, and the connections between the ranks.

    Messages to later ranks may use another process group than messages to earlier ranks. gloo guards a
    connection with one lock, which its thread tries in an endless loop when data arrive while another thread
    sends; if both threads share a CPU, the sender cannot continue before the loop's time slice ends. With
    both directions on one connection this took 3 ms for every other exchange (docs/log.md).
    """

    group: dist.ProcessGroup
    upward: dist.ProcessGroup | None = None
    """Process group for messages to later ranks; None: ``group`` has both directions."""

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    def toward(self, source: int, target: int) -> dist.ProcessGroup:
        """Return the process group for messages from one rank to another."""
        return self.upward if self.upward is not None and source < target else self.group

    def all_gather(
        self, x: Tensor, into: Tensor | None = None, shares: Sequence[int] | None = None
    ) -> Launch:
        return self._gather_rows(x, into, shares)

    def reduce_scatter(
        self, x: Tensor, into: Tensor | None = None, shares: Sequence[int] | None = None
    ) -> Launch:
        return self._scatter_rows(x, into, shares)

    def all_reduce(self, x: Tensor) -> Launch:
        group = self.group
        return Launch(x, lambda: started(dist.all_reduce(x, group=group, async_op=True)), sends=x.nbytes)

    def send(self, x: Tensor, to: int, tag: int) -> Launch:
        x = x.contiguous()
        group = self.toward(self.rank, to)
        return Launch(x, lambda: started(dist.isend(x, group=group, group_dst=to, tag=tag)), sends=x.nbytes)

    def receive(self, x: Tensor, source: int, tag: int) -> Launch:
        group = self.toward(source, self.rank)
        return Launch(x, lambda: started(dist.irecv(x, group=group, group_src=source, tag=tag)))

    def meet(self) -> None:
        dist.barrier(self.group)

    def align(self) -> None:
        """Wait for all ranks, as `meet` does: on a CPU the host is the only stream."""
        self.meet()

    def warm_up(self) -> None:
        """Do nothing: gloo connects all pairs of ranks when it makes a group."""

    def _trade(self, x: Tensor, y: Tensor, to: int, source: int) -> Work:
        arriving = self.receive(y, source, 0).issue()
        return Works([arriving, self.send(x, to, 0).issue()])

    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Work:
        """Send and receive all messages. Messages between two ranks of a group arrive in the order in which
        they were sent, so exchanges need no tags as long as all ranks start them in the same order."""
        works = []
        for distance in range(1, self.size):
            source, target = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            if incoming[source].numel():
                works.append(self.receive(incoming[source], source, 0).issue())
            if outgoing[target].numel():
                works.append(self.send(outgoing[target], target, 0).issue())
        return Works(works)
