"""Copies between a GPU and its host in the place of collectives: one GPU as one rank of several.

Copies load what collectives load (a link, memory bandwidth, a stream of their own), so that overlap can be
measured with one GPU. What other ranks would give never changes, so results have the same bits every time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from braid.actors.stage.run.accelerator import accelerator_of
from braid.kernels.collectives.communicator import Communicator

COPIED = SimpleNamespace(wait=lambda: None)
"""Copies that streams put in order: the one that issued them waits anyway."""


@dataclass
class HostGroup:
    """A group of ranks (`braid.kernels.collectives.communicator.TorchGroup`) of which only this one exists.

    All transfers of one size share their buffers, which are made on first use; that must not be while a CUDA
    graph is captured. Messages between stages take no time and hold zeros.
    """

    device: torch.device
    own: int
    ranks: int
    free: bool
    """Collectives take no time either: nothing is sent, and others give zeros."""
    _buffers: dict[Any, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._accelerator = accelerator_of(self.device)
        self._inbound = self._accelerator.stream() if self._accelerator is not None else None

    def rank(self) -> int:
        return self.own

    def size(self) -> int:
        return self.ranks

    def all_gather(self, y: Tensor, x: Tensor) -> Any:
        others = [*y.chunk(self.ranks)]
        others.pop(self.own).copy_(x)
        for part in others:
            self._exchange(x, part)
        return COPIED

    def reduce_scatter(self, y: Tensor, x: Tensor) -> Any:
        others = [*x.chunk(self.ranks)]
        own = others.pop(self.own)
        for part in others:
            self._exchange(part, y)
        y.add_(own)
        return COPIED

    def all_reduce(self, x: Tensor) -> Any:
        """As if one other rank had the sum of all others."""
        self._exchange(x, landed := self._made(x)[2])
        x.add_(landed)
        return COPIED

    def messages(self, sends: Any, receives: Sequence[tuple[Tensor, int]]) -> Any:
        for x, _ in receives:
            x.zero_()
        return COPIED

    def _made(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """On the host: where what is sent goes, and where what arrives comes from; room on the device."""
        key, pinned = (like.shape, like.dtype), self.device.type == "cuda"
        if key not in self._buffers:
            # Positive and small: they may stand for sums of exponentials too.
            given = torch.rand(like.shape, generator=torch.Generator().manual_seed(0)).to(like.dtype) / 16
            sent = torch.empty(like.shape, dtype=like.dtype, pin_memory=pinned)
            self._buffers[key] = sent, given.pin_memory() if pinned else given, torch.empty_like(like)
        return self._buffers[key]

    def _exchange(self, mine: Tensor, theirs: Tensor) -> None:
        """Send to the host and receive from it, both at once, on the current stream."""
        if self.free:
            theirs.zero_()
            return
        sent, given, _ = self._made(mine)
        if self._accelerator is None or self._inbound is None:
            sent.copy_(mine)
            theirs.copy_(given)
            return
        outbound = self._accelerator.current()
        ready, arrived = self._accelerator.event(), self._accelerator.event()
        ready.record(outbound)
        self._inbound.wait_event(ready)
        with self._accelerator.on(self._inbound):
            theirs.copy_(given, non_blocking=True)
        arrived.record(self._inbound)
        sent.copy_(mine, non_blocking=True)
        outbound.wait_event(arrived)


@dataclass(frozen=True)
class HostGroups:
    """Makes communicators of `HostGroup` for one rank (`braid.actors.stage.rank.groups.Groups`)."""

    device: torch.device
    rank: int
    free: bool

    def line(self, axis: str, lines: Sequence[Sequence[int]]) -> Any:
        (own,) = (list(ranks) for ranks in lines if self.rank in ranks)
        return Communicator(HostGroup(self.device, own.index(self.rank), len(own), self.free))

    def channel(self, lines: Sequence[Sequence[int]]) -> Any:
        return self.line("pp", lines)

    def gather(self, own: Any) -> list[Any]:
        return [own]
