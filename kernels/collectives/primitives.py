"""Collectives over flattened tokens: asynchronous, one name for all torch versions and devices.

Each prepares its tensors on the current stream and returns a `Launch`: the tensor that will hold the result
and a function that issues the collective, perhaps on another stream. The result must not be read until the
issued work is done and `Launch.finish` was called. ``x`` is (tokens, ...).

A stage of a collective goes over the ranks along one dim of a mesh. Rows of ranks along the dims of a mesh
[N1, ..., Nd] are ordered by these dims, the last dim fastest. A stage over dim k moves blocks of N(k+1) x ...
x Nd ranks' rows. If a tensor also spans dims before k (``outer`` blocks), the blocks that a collective
returns in rank order must be reordered.

On CPUs collectives are messages between ranks (`messages`), on GPUs kernels of a communicator
(`communicator`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Work(Protocol):
    """Communication in progress."""

    def wait(self) -> object:
        """Wait for the end, on a GPU on the current stream; raise `RuntimeError` if it failed."""


@dataclass(frozen=True)
class Works:
    """Several works that are waited for together."""

    works: Sequence[Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def started(work: dist.Work | None) -> dist.Work:
    """Return the work of an asynchronous call, checked: torch returns None to ranks outside the group."""
    assert work is not None, "this rank is not in the group it communicates in"
    return work


@dataclass(frozen=True)
class Launch:
    """A transfer to be issued; it holds the tensors that it reads until the work is done."""

    result: Tensor
    issue: Callable[[], Work]
    finish: Callable[[], object] | None = None
    """What to do once the work is done, before the result is read; None: nothing."""
    sends: int = 0
    """Number of bytes that this rank sends, if the issuing thread has to write them (CPU)."""

    def then(self, more: Callable[[], object]) -> "Launch":
        """Return a launch that also calls ``more`` once its result has arrived."""

        def finish() -> None:
            if self.finish is not None:
                self.finish()
            more()

        return replace(self, finish=finish)


@dataclass(frozen=True)
class Extents:
    """Numbers of tokens that are sent to and received from every rank."""

    sends: tuple[int, ...]
    receives: tuple[int, ...]

    @property
    def back(self) -> "Extents":
        """The extents of the transfer in the opposite direction."""
        return Extents(self.receives, self.sends)


def gathered(x: Tensor, ranks: int, shares: Sequence[int] | None = None) -> Tensor:
    """Return memory for all ranks' tensors like x; ``shares``: tokens of each rank."""
    tokens = x.shape[0] * ranks if shares is None else sum(shares)
    return torch.empty((tokens, *x.shape[1:]), dtype=x.dtype, device=x.device)


def scattered(x: Tensor, ranks: int, share: int | None = None) -> Tensor:
    """Return empty memory for one rank's part of x."""
    tokens = x.shape[0] // ranks if share is None else share
    return torch.empty((tokens, *x.shape[1:]), dtype=x.dtype, device=x.device)


def _parts(x: Tensor, ranks: int, shares: Sequence[int] | None) -> Sequence[Tensor]:
    """Return every rank's part of x, as views."""
    return x.chunk(ranks) if shares is None else x.split(list(shares))


class Channel(ABC):
    """Ranks that send each other messages, numbered from 0 in their order, as seen by one of these ranks."""

    @abstractmethod
    def send(self, x: Tensor, to: int, tag: int) -> Launch:
        """Send ``x`` to rank ``to``."""

    @abstractmethod
    def receive(self, x: Tensor, source: int, tag: int) -> Launch:
        """Receive into ``x`` from rank ``source``."""

    @abstractmethod
    def swap(self, x: Tensor, peer: int) -> Launch:
        """Send ``x`` to a rank and receive a tensor of the same shape from this rank."""

    @abstractmethod
    def warm_up(self) -> None:
        """Establish all connections that transfers will use; all ranks call this."""


class Line(Channel):
    """The ranks of one collective."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This rank's number in the line."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of ranks in the line."""

    @abstractmethod
    def all_gather(
        self, x: Tensor, into: Tensor | None = None, shares: Sequence[int] | None = None
    ) -> Launch:
        """Concatenate the tokens of all ranks, in rank order: (t, ...) -> (t x ranks, ...).

        ``into``: memory for the result; x may be this rank's part of it. ``shares``: number of tokens of
        every rank, if ranks have different numbers.
        """

    @abstractmethod
    def reduce_scatter(
        self, x: Tensor, into: Tensor | None = None, shares: Sequence[int] | None = None
    ) -> Launch:
        """Sum over the ranks and keep this rank's part of the tokens: (T, ...) -> (T / ranks, ...).

        ``into``: memory for the result; it may be this rank's part of x. ``shares``: as for `all_gather`.
        """

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Launch:
        """Sum over the ranks, in place."""

    @abstractmethod
    def meet(self) -> None:
        """Return when all ranks have called this."""

    @abstractmethod
    def align(self) -> None:
        """Let the work issued next on the current stream begin at the same time on all ranks."""

    @abstractmethod
    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Work:
        """Send ``outgoing[peer]`` to every other rank and receive ``incoming[peer]`` from it. Empty tensors
        are not transferred; both sides know which are empty."""

    @abstractmethod
    def _trade(self, x: Tensor, y: Tensor, to: int, source: int) -> Work:
        """Send x to rank ``to`` and receive y from rank ``source``."""

    def all_to_all(self, x: Tensor, extents: Extents) -> Launch:
        """Send every rank its tokens; x and the received tokens are in rank order."""
        x = x.contiguous()
        y = x.new_empty(sum(extents.receives), *x.shape[1:])
        outgoing, incoming = x.split(extents.sends), y.split(extents.receives)
        sent, own = outgoing[self.rank], incoming[self.rank]
        sends = x.nbytes - sent.nbytes
        return Launch(y, lambda: self._exchange(outgoing, incoming), lambda: own.copy_(sent), sends)

    def swap(self, x: Tensor, peer: int) -> Launch:
        return self._traded(x, peer, peer)

    def shift(self, x: Tensor, by: int) -> Launch:
        """Send x to the rank ``by`` positions further on, cyclically; receive from the other side."""
        return self._traded(x, (self.rank + by) % self.size, (self.rank - by) % self.size)

    def _traded(self, x: Tensor, to: int, source: int) -> Launch:
        x = x.contiguous()
        y = torch.empty_like(x)
        return Launch(y, lambda: self._trade(x, y, to, source), sends=x.nbytes)

    def _gather_rows(self, x: Tensor, into: Tensor | None, shares: Sequence[int] | None) -> Launch:
        """Implement `all_gather` with messages."""
        x = x.contiguous()
        y = into if into is not None else gathered(x, self.size, shares)
        parts = _parts(y, self.size, shares)
        own = parts[self.rank]
        finish = None if own.data_ptr() == x.data_ptr() else lambda: own.copy_(x)
        return Launch(y, lambda: self._exchange([x] * self.size, parts), finish, x.nbytes * (self.size - 1))

    def _scatter_rows(self, x: Tensor, into: Tensor | None, shares: Sequence[int] | None) -> Launch:
        """Implement `reduce_scatter` with messages; terms are added in rank order."""
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


def gather_stage(line: Line, x: Tensor, outer: int, into: Tensor | None = None) -> Launch:
    """Gather (outer x t, ...) of every rank to (outer x ranks x t, ...), in new memory or ``into``."""
    if outer == 1:
        return line.all_gather(x, into=into)
    launch = line.all_gather(x)
    arrived = launch.result
    y = torch.empty_like(arrived) if into is None else into

    def order() -> None:
        rows = x.shape[0] // outer
        y.view(outer, line.size, rows, *x.shape[1:]).copy_(
            arrived.view(line.size, outer, rows, *x.shape[1:]).transpose(0, 1)
        )

    return replace(launch.then(order), result=y)


def scatter_stage(line: Line, x: Tensor, outer: int, into: Tensor | None = None) -> Launch:
    """Sum over the ranks and scatter (outer x ranks x t, ...) to (outer x t, ...) or ``into``."""
    if outer > 1:
        rows = x.shape[0] // (outer * line.size)
        x = x.reshape(outer, line.size, rows, *x.shape[1:]).transpose(0, 1).reshape(x.shape)
    return line.reduce_scatter(x, into=into)


def whole_shares(x: Tensor, ranks: int) -> Tensor:
    """Return x (1-dim), if ``ranks`` do not divide its length a copy with zeros at the end."""
    missing = -x.numel() % ranks
    return torch.cat([x, x.new_zeros(missing)]) if missing else x
