"""Collectives over flattened tokens: asynchronous, one name for all torch versions and devices.

Each prepares what it needs on the current stream and returns a `Launch`: the tensor that will hold the result
and a function that issues the collective, perhaps on another stream. The result must stay unread until that
work is done and `Launch.finish` was called. ``x`` is (tokens, ...).

How they travel: as messages between ranks on CPU (`messages`), as kernels of a communicator on GPUs
(`communicator`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Work(Protocol):
    """Something under way."""

    def wait(self) -> object:
        """Block until it is complete, on a GPU the current stream; raises `RuntimeError` if it failed."""


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


def parts_of(x: Tensor, ranks: int, shares: Sequence[int] | None) -> Sequence[Tensor]:
    """Every rank's part of x, views."""
    return x.chunk(ranks) if shares is None else x.split(list(shares))


Exchange = Callable[[Sequence[Tensor], Sequence[Tensor]], Work]
"""Sends the first ones to the other ranks, in rank order, and receives the second ones from them."""


def traded(x: Tensor, extents: Extents, own: int, exchange: Exchange) -> Launch:
    """An all-to-all of rank ``own``: what it keeps is copied once the others' have come."""
    x = x.contiguous()
    y = x.new_empty(sum(extents.receives), *x.shape[1:])
    outgoing, incoming = x.split(extents.sends), y.split(extents.receives)
    return Launch(
        y,
        lambda: exchange(outgoing, incoming),
        lambda: incoming[own].copy_(outgoing[own]),
        x.nbytes - outgoing[own].nbytes,
    )


class Channel(Protocol):
    """Ranks that send each other messages, numbered from 0 in their order, as one of them sees them."""

    def send(self, x: Tensor, to: int, tag: int) -> Launch:
        """Send to one rank."""

    def receive(self, x: Tensor, source: int, tag: int) -> Launch:
        """Receive into ``x`` from one rank."""

    def swap(self, x: Tensor, peer: int) -> Launch:
        """Send ``x`` to a rank and receive as much from it."""

    def warm_up(self) -> None:
        """Let every connection be there that transfers will take; all ranks call this."""


class Line(Channel, Protocol):
    """The ranks that a collective spans."""

    @property
    def rank(self) -> int:
        """This rank's number."""

    @property
    def size(self) -> int:
        """How many there are."""

    def all_gather(
        self, x: Tensor, into: Tensor | None = None, shares: Sequence[int] | None = None
    ) -> Launch:
        """Concatenate the tokens of all ranks, in rank order: (t, ...) -> (t x ranks, ...).

        ``into``: the memory for that; x may be its part that is this rank's. ``shares``: tokens of every
        rank, where they have not as many.
        """

    def reduce_scatter(
        self, x: Tensor, into: Tensor | None = None, shares: Sequence[int] | None = None
    ) -> Launch:
        """Sum over the ranks and keep this rank's part of the tokens: (T, ...) -> (T / ranks, ...).

        ``into``: the memory for that; it may be the part of x that is this rank's. ``shares``: as above.
        """

    def all_to_all(self, x: Tensor, extents: Extents) -> Launch:
        """Send every rank its tokens, which stand in rank order, and receive as they will stand."""

    def all_reduce(self, x: Tensor) -> Launch:
        """Sum over the ranks, in place."""

    def shift(self, x: Tensor, by: int) -> Launch:
        """Send to the rank that comes ``by`` later, around the end; receive from the one before."""

    def meet(self) -> None:
        """Come back when all ranks have come here."""

    def align(self) -> None:
        """Let what the current stream is given next begin when it may begin on all ranks."""
