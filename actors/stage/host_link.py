"""Copies between a GPU and pinned memory of its host in place of collectives: one GPU as one rank of two.

They load what collectives load (a link, memory bandwidth, a stream of its own), so that overlap can be
measured with one GPU. The peer is a buffer that never changes: its part of a result is the same every time.

Legend: t tokens of one rank, T = 2 t tokens of both.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from braid.kernels.collectives.primitives import Launch
from braid.scheduling.operators import Kind

RANKS = 2


@dataclass(frozen=True)
class _Copied:
    """Copies that streams put in order; it keeps what they read until they are done."""

    read: Tensor

    def wait(self) -> None:
        """The stream that issued the copies waits for them anyway."""


@dataclass
class HostLink:
    """The link of one device to its host, full duplex; stands in the place of a process group of two ranks.

    All collectives of a link are issued on one stream, since those of one size share their host buffers.
    Buffers are made on first use, which must not be while a CUDA graph is captured.
    """

    device: torch.device
    seed: int = 0
    _sent: dict[tuple[torch.Size, torch.dtype], Tensor] = field(default_factory=dict)
    _peer: dict[tuple[torch.Size, torch.dtype], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._inbound = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    @property
    def name(self) -> str:
        """What the bytes cross."""
        if self.device.type == "cuda":
            return "copies over PCIe between the GPU and pinned host memory, both directions at once"
        return "copies within host memory: times of them mean nothing"

    def sent(self, like: Tensor) -> Tensor:
        """The host buffer that takes what tensors of this shape and dtype send."""
        return self._buffers(like)[0]

    def received(self, like: Tensor) -> Tensor:
        """The host buffer with the peer's part of this shape and dtype."""
        return self._buffers(like)[1]

    def _buffers(self, like: Tensor) -> tuple[Tensor, Tensor]:
        key = like.shape, like.dtype
        if key not in self._sent:
            generator = torch.Generator().manual_seed(self.seed)
            pinned = self.device.type == "cuda"
            peer = torch.randn(like.shape, generator=generator).to(like.dtype)
            self._peer[key] = peer.pin_memory() if pinned else peer
            self._sent[key] = torch.empty(like.shape, dtype=like.dtype, pin_memory=pinned)
        return self._sent[key], self._peer[key]

    def exchange(self, mine: Tensor, theirs: Tensor) -> None:
        """Copy ``mine`` to the host, the peer's part into ``theirs`` (same shape), on the current stream."""
        sent, received = self._buffers(mine)
        if self._inbound is None:
            sent.copy_(mine)
            theirs.copy_(received)
            return
        outbound = torch.cuda.current_stream(self.device)
        self._inbound.wait_stream(outbound)
        with torch.cuda.stream(self._inbound):
            theirs.copy_(received, non_blocking=True)
        sent.copy_(mine, non_blocking=True)
        outbound.wait_stream(self._inbound)


def gather_from_host(x: Tensor, link: HostLink) -> Launch:
    """All-gather: x (t, ...) goes out, the peer's t tokens come in behind it: (T, ...)."""
    x = x.contiguous()
    y = torch.empty((RANKS * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
    own, theirs = y.chunk(RANKS)

    def issue() -> _Copied:
        link.exchange(x, theirs)
        own.copy_(x)
        return _Copied(x)

    return Launch(y, issue)


def scatter_from_host(x: Tensor, link: HostLink) -> Launch:
    """Reduce-scatter: x (T, ...) sends its second half and adds the peer's share to its first: (t, ...)."""
    x = x.contiguous()
    own, others = x.chunk(RANKS)
    y = torch.empty_like(own)

    def issue() -> _Copied:
        link.exchange(others, y)
        y.add_(own)
        return _Copied(x)

    return Launch(y, issue)


HOST_COLLECTIVES: Mapping[Kind, Callable[[Tensor, Any], Launch]] = {
    Kind.ALL_GATHER: gather_from_host,
    Kind.REDUCE_SCATTER: scatter_from_host,
}
"""What a `Binder` calls instead of collectives, with a `HostLink` for a group."""
