"""Collectives on GPUs: kernels of a communicator, which run in the order in which they were issued."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from braid.kernels.collectives.primitives import (
    Channel,
    Launch,
    Line,
    Work,
    Works,
    gathered,
    scattered,
    started,
)

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""torch 2.13 renamed these functions, and warns of the old names."""


@dataclass(frozen=True)
class TorchGroup:
    """The NCCL functions that a `Communicator` needs, called through torch. Tests replace this class by a
    model.

    All calls return at once; the work runs on the group's own stream, after the work issued so far on the
    current stream. Ranks are numbers in the group. Single messages are sent as batches of one: outside a
    batch torch makes a communicator for every pair of ranks at its first use, and the host waits until the
    other rank does the same.
    """

    own: dist.ProcessGroup

    def rank(self) -> int:
        return self.own.rank()

    def size(self) -> int:
        return self.own.size()

    @property
    def device(self) -> torch.device:
        """The device of all tensors that the group transfers."""
        return torch.accelerator.current_accelerator() or torch.device("cpu")

    def all_gather(self, y: Tensor, x: Tensor) -> Work:
        """Gather x of every rank into y, in rank order."""
        return started(_gather(y, x, group=self.own, async_op=True))

    def reduce_scatter(self, y: Tensor, x: Tensor) -> Work:
        """Sum x over the ranks; store this rank's part of the sum in y."""
        return started(_scatter(y, x, group=self.own, async_op=True))

    def all_reduce(self, x: Tensor) -> Work:
        return started(dist.all_reduce(x, group=self.own, async_op=True))

    def messages(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Work:
        """Send and receive messages, each with its peer, as one kernel, or do nothing."""
        both = ((dist.irecv, receives), (dist.isend, sends))
        batch = [
            dist.P2POp(kind, x, group=self.own, group_peer=peer)
            for kind, messages in both
            for x, peer in messages
        ]
        return Works(dist.batch_isend_irecv(batch) if batch else ())


@dataclass(frozen=True)
class Communicator(Line):
    """A line of ranks on GPUs, whose collectives are kernels of one communicator."""

    group: TorchGroup

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    def all_gather(
        self, x: Tensor, into: Tensor | None = None, shares: Sequence[int] | None = None
    ) -> Launch:
        """Gather; with ``shares`` by messages, since NCCL needs equal parts."""
        if shares is not None:
            return self._gather_rows(x, into, shares)
        x = x.contiguous()
        y = into if into is not None else gathered(x, self.size)
        return Launch(y, lambda: self.group.all_gather(y, x))

    def reduce_scatter(
        self, x: Tensor, into: Tensor | None = None, shares: Sequence[int] | None = None
    ) -> Launch:
        if shares is not None:
            return self._scatter_rows(x, into, shares)
        x = x.contiguous()
        y = into if into is not None else scattered(x, self.size)
        return Launch(y, lambda: self.group.reduce_scatter(y, x))

    def all_reduce(self, x: Tensor) -> Launch:
        return Launch(x, lambda: self.group.all_reduce(x))

    def send(self, x: Tensor, to: int, tag: int) -> Launch:
        """Send to one rank; ``tag`` is ignored, since messages between two ranks arrive in order."""
        x = x.contiguous()
        return Launch(x, lambda: self.group.messages([(x, to)], []))

    def receive(self, x: Tensor, source: int, tag: int) -> Launch:
        return Launch(x, lambda: self.group.messages([], [(x, source)]))

    def meet(self) -> None:
        """Wait on the host until all ranks call this, by reading the result of a sum."""
        self._sum().item()

    def align(self) -> None:
        """Issue a sum, which aligns the ranks' streams; the host does not wait."""
        self._sum()

    def _sum(self) -> Tensor:
        one = torch.ones(1, device=self.group.device)
        self.group.all_reduce(one).wait()
        return one

    def warm_up(self) -> None:
        """Run a sum, and send a message between every two ranks; in each batch all ranks send equally far."""
        self.meet()
        x, y = (torch.zeros(1, device=self.group.device) for _ in range(2))
        for distance in range(1, self.size):
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            self._trade(x, y, to, source).wait()
        y.item()

    def _trade(self, x: Tensor, y: Tensor, to: int, source: int) -> Work:
        """Send x and receive y in one kernel, so that neither side waits for the other to start first."""
        return self.group.messages([(x, to)], [(y, source)])

    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Work:
        others = [rank for rank in range(self.size) if rank != self.rank]
        return self.group.messages(
            [(outgoing[rank], rank) for rank in others if outgoing[rank].numel()],
            [(incoming[rank], rank) for rank in others if incoming[rank].numel()],
        )


@dataclass(frozen=True)
class Pairs(Channel):
    """A separate communicator for every two ranks that send each other messages.

    With one communicator for all ranks, a rank that has issued its next receive could not forward the
    previous message: the waiting kernel comes first in the queue. Validation over an interleaved pipeline
    would then deadlock (tests/cuda/test_standstills.py).
    """

    rank: int
    pairs: Mapping[int, Communicator]
    """Communicators by the number of the other rank."""

    def send(self, x: Tensor, to: int, tag: int) -> Launch:
        return self.pairs[to].send(x, self._other(to), tag)

    def receive(self, x: Tensor, source: int, tag: int) -> Launch:
        return self.pairs[source].receive(x, self._other(source), tag)

    def swap(self, x: Tensor, peer: int) -> Launch:
        return self.pairs[peer].swap(x, self._other(peer))

    def warm_up(self) -> None:
        """Warm up all pairs in at most three rounds: every second pair of the pipeline, then others."""
        for other in sorted(self.pairs, key=self._turn):
            self.pairs[other].warm_up()

    def _turn(self, other: int) -> int:
        """Return the round of a pair: 0, 1 or 2, another one for pairs with a common rank."""
        first, second = sorted((self.rank, other))
        if second - first == 1:
            return first % 2
        return 1 if second % 2 else 2  # first and last stage: with an odd number of stages, 0 and 1 are taken

    def _other(self, peer: int) -> int:
        """Return the number of rank ``peer`` in its pair with this rank."""
        return int(peer > self.rank)
