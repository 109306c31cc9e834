"""Collectives over flattened tokens: asynchronous, one name for all torch versions and devices.

Each prepares what it needs on the current stream and returns a `Launch`: the tensor that will hold the result
and a function that issues the collective, perhaps on another stream. The result must stay unread until that
work is done and `Launch.finish` was called. ``x`` is (tokens, ...).

How they travel: as messages between ranks on CPU (`messages`), as kernels of a communicator on GPUs
(`communicator`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Work(Protocol):
    """Something under way."""

    def wait(self) -> object:
        """Block until it is complete, on a GPU the current stream; raises `RuntimeError` if it failed."""


@dataclass(frozen=True)
class Works:
    """Several as one."""

    works: Sequence[Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def started(work: dist.Work | None) -> dist.Work:
    """The work of an asynchronous call; torch returns none to ranks outside the group."""
    assert work is not None, "this rank is not in the group it communicates in"
    return work


@dataclass(frozen=True)
class Launch:
    """A transfer that is ready to go. What it reads lives as long as this: keep it until the work is done."""

    result: Tensor
    issue: Callable[[], Work]
    finish: Callable[[], object] | None = None
    """What remains to be computed once the work is done, before the result may be read."""
    sends: int = 0
    """Bytes that this rank sends, where whoever issues has to write them (CPU)."""


@dataclass(frozen=True)
class Extents:
    """How many tokens go to every rank, and come from it."""

    sends: tuple[int, ...]
    receives: tuple[int, ...]

    @property
    def back(self) -> "Extents":
        """The other way."""
        return Extents(self.receives, self.sends)


def gathered(x: Tensor, ranks: int, shares: Sequence[int] | None = None) -> Tensor:
    """Memory for what all ranks' tensors like x are together."""
    tokens = x.shape[0] * ranks if shares is None else sum(shares)
    return torch.empty((tokens, *x.shape[1:]), dtype=x.dtype, device=x.device)


def scattered(x: Tensor, ranks: int, share: int | None = None) -> Tensor:
    """Memory for one rank's part of x."""
    tokens = x.shape[0] // ranks if share is None else share
    return torch.empty((tokens, *x.shape[1:]), dtype=x.dtype, device=x.device)


def _parts(x: Tensor, ranks: int, shares: Sequence[int] | None) -> Sequence[Tensor]:
    """Every rank's part of x, views."""
    return x.chunk(ranks) if shares is None else x.split(list(shares))


class Channel(ABC):
    """Ranks that send each other messages, numbered from 0 in their order, as one of them sees them."""

    @abstractmethod
    def send(self, x: Tensor, to: int, tag: int) -> Launch:
        """Send to one rank."""

    @abstractmethod
    def receive(self, x: Tensor, source: int, tag: int) -> Launch:
        """Receive into ``x`` from one rank."""

    @abstractmethod
    def swap(self, x: Tensor, peer: int) -> Launch:
        """Send ``x`` to a rank and receive as much from it."""

    @abstractmethod
    def warm_up(self) -> None:
        """Let every connection be there that transfers will take; all ranks call this."""


class Line(Channel):
    """The ranks that a collective spans."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This rank's number."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many there are."""

    @abstractmethod
    def all_gather(
        self, x: Tensor, into: Tensor | None = None, shares: Sequence[int] | None = None
    ) -> Launch:
        """Concatenate the tokens of all ranks, in rank order: (t, ...) -> (t x ranks, ...).

        ``into``: the memory for that; x may be its part that is this rank's. ``shares``: tokens of every
        rank, where they have not as many.
        """

    @abstractmethod
    def reduce_scatter(
        self, x: Tensor, into: Tensor | None = None, shares: Sequence[int] | None = None
    ) -> Launch:
        """Sum over the ranks and keep this rank's part of the tokens: (T, ...) -> (T / ranks, ...).

        ``into``: the memory for that; it may be the part of x that is this rank's. ``shares``: as above.
        """

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Launch:
        """Sum over the ranks, in place."""

    @abstractmethod
    def meet(self) -> None:
        """Come back when all ranks have come here."""

    @abstractmethod
    def align(self) -> None:
        """Let what the current stream is given next begin when it may begin on all ranks."""

    @abstractmethod
    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Work:
        """Send ``outgoing[peer]`` to every other rank and receive ``incoming[peer]`` from it, if they are not
        empty, which both sides know."""

    @abstractmethod
    def _trade(self, x: Tensor, y: Tensor, to: int, source: int) -> Work:
        """Send x to one rank and receive y from one."""

    def all_to_all(self, x: Tensor, extents: Extents) -> Launch:
        """Send every rank its tokens, which stand in rank order, and receive as they will stand."""
        x = x.contiguous()
        y = x.new_empty(sum(extents.receives), *x.shape[1:])
        outgoing, incoming = x.split(extents.sends), y.split(extents.receives)
        sent, own = outgoing[self.rank], incoming[self.rank]
        sends = x.nbytes - sent.nbytes
        return Launch(y, lambda: self._exchange(outgoing, incoming), lambda: own.copy_(sent), sends)

    def swap(self, x: Tensor, peer: int) -> Launch:
        return self._traded(x, peer, peer)

    def shift(self, x: Tensor, by: int) -> Launch:
        """Send to the rank that comes ``by`` later, around the end; receive from the one before."""
        return self._traded(x, (self.rank + by) % self.size, (self.rank - by) % self.size)

    def _traded(self, x: Tensor, to: int, source: int) -> Launch:
        x = x.contiguous()
        y = torch.empty_like(x)
        return Launch(y, lambda: self._trade(x, y, to, source), sends=x.nbytes)

    def _gather_rows(self, x: Tensor, into: Tensor | None, shares: Sequence[int] | None) -> Launch:
        """`all_gather` as messages."""
        x = x.contiguous()
        y = into if into is not None else gathered(x, self.size, shares)
        parts = _parts(y, self.size, shares)
        own = parts[self.rank]
        finish = None if own.data_ptr() == x.data_ptr() else lambda: own.copy_(x)
        return Launch(y, lambda: self._exchange([x] * self.size, parts), finish, x.nbytes * (self.size - 1))

    def _scatter_rows(self, x: Tensor, into: Tensor | None, shares: Sequence[int] | None) -> Launch:
        """`reduce_scatter` as messages; the sum is in rank order."""
        x, own = x.contiguous(), self.rank
        y = into if into is not None else scattered(x, self.size, None if shares is None else shares[own])
        parts = _parts(x, self.size, shares)
        arrived = [parts[own] if peer == own else torch.empty_like(y) for peer in range(self.size)]

        def total() -> None:
            # y may be this rank's part of x: it is written last.
            so_far = arrived[0]
            for number, part in enumerate(arrived[1:], start=1):
                last = number == self.size - 1
                so_far = torch.add(so_far, part, out=y if last else arrived[int(own == 0)])

        return Launch(y, lambda: self._exchange(parts, arrived), total, x.nbytes - y.nbytes)
