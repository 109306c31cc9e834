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
"""torch 2.13 renamed these and warns about the old names, older versions have only those."""


@dataclass(frozen=True)
class TorchGroup:
    """NCCL through torch: what a communicator asks of a library. Tests put models of it in its place.

    All calls return at once; the work runs on a stream of the group's own, after what the current stream was
    given so far. Ranks are numbers in the group. Single messages go in batches of one: outside a batch torch
    makes a communicator for every pair of ranks when it is first used, and the host waits for the other rank
    to do the same.
    """

    own: dist.ProcessGroup

    def rank(self) -> int:
        """This rank's number."""
        return self.own.rank()

    def size(self) -> int:
        """How many there are."""
        return self.own.size()

    @property
    def device(self) -> torch.device:
        """Of all tensors that it is given."""
        return torch.accelerator.current_accelerator() or torch.device("cpu")

    def all_gather(self, y: Tensor, x: Tensor) -> Work:
        """Into y: x of every rank, in rank order."""
        return started(_gather(y, x, group=self.own, async_op=True))

    def reduce_scatter(self, y: Tensor, x: Tensor) -> Work:
        """Into y: this rank's part of the sum of x over the ranks."""
        return started(_scatter(y, x, group=self.own, async_op=True))

    def all_reduce(self, x: Tensor) -> Work:
        """Into x: the sum of x over the ranks."""
        return started(dist.all_reduce(x, group=self.own, async_op=True))

    def messages(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Work:
        """Messages to and from single ranks, as one kernel; none if there are none."""
        both = ((dist.irecv, receives), (dist.isend, sends))
        batch = [
            dist.P2POp(kind, x, group=self.own, group_peer=peer)
            for kind, messages in both
            for x, peer in messages
        ]
        return Works(dist.batch_isend_irecv(batch) if batch else ())


@dataclass(frozen=True)
class Communicator(Line):
    """A line of ranks on GPUs."""

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
        """As messages where ranks have not as many tokens: the library's parts are of one length."""
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
        """Messages between two ranks arrive in order, so tags are not needed."""
        x = x.contiguous()
        return Launch(x, lambda: self.group.messages([(x, to)], []))

    def receive(self, x: Tensor, source: int, tag: int) -> Launch:
        return Launch(x, lambda: self.group.messages([], [(x, source)]))

    def meet(self) -> None:
        """With a sum whose result the host reads."""
        self._sum().item()

    def align(self) -> None:
        """With a sum, for which the host does not wait."""
        self._sum()

    def _sum(self) -> Tensor:
        one = torch.ones(1, device=self.group.device)
        self.group.all_reduce(one).wait()
        return one

    def warm_up(self) -> None:
        """A sum, and a message from every rank to every other: each batch has all ranks send as far on."""
        self.meet()
        x, y = (torch.zeros(1, device=self.group.device) for _ in range(2))
        for distance in range(1, self.size):
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            self._trade(x, y, to, source).wait()
        y.item()

    def _trade(self, x: Tensor, y: Tensor, to: int, source: int) -> Work:
        """Both messages are one kernel, so neither side waits for the other to go first."""
        return self.group.messages([(x, to)], [(y, source)])

    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Work:
        """All messages are one kernel."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        return self.group.messages(
            [(outgoing[rank], rank) for rank in others if outgoing[rank].numel()],
            [(incoming[rank], rank) for rank in others if incoming[rank].numel()],
        )


@dataclass(frozen=True)
class Pairs(Channel):
    """A communicator for every two ranks that send each other messages.

    On one for all, a rank that has asked for its next message could not send the one before on: the kernel
    that waits stands first. With it, validation over an interleaved pipeline comes to a standstill
    (tests/cuda/test_standstills.py).
    """

    rank: int
    pairs: Mapping[int, Communicator]
    """By the other rank."""

    def send(self, x: Tensor, to: int, tag: int) -> Launch:
        return self.pairs[to].send(x, self._other(to), tag)

    def receive(self, x: Tensor, source: int, tag: int) -> Launch:
        return self.pairs[source].receive(x, self._other(source), tag)

    def swap(self, x: Tensor, peer: int) -> Launch:
        return self.pairs[peer].swap(x, self._other(peer))

    def warm_up(self) -> None:
        """Pairs side by side: every second one around the pipeline, then the others, whatever its length."""
        for other in sorted(self.pairs, key=self._turn):
            self.pairs[other].warm_up()

    def _turn(self, other: int) -> int:
        """The round of a pair: 0, 1 or 2. Pairs with a common rank have different rounds; all ranks agree."""
        first, second = sorted((self.rank, other))
        if second - first == 1:
            return first % 2
        return 1 if second % 2 else 2  # first and last stage: if stages are odd in number, 0 and 1 are taken

    def _other(self, peer: int) -> int:
        """A rank's number in its pair with this one."""
        return int(peer > self.rank)
