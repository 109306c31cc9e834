"""Copies between a GPU and pinned memory of its host in place of collectives: one GPU as one rank of two.

They load what collectives load (a link, memory bandwidth, a stream of its own), so that overlap can be
measured with one GPU. The peer is a buffer that never changes: its part of a result is the same every time.

Legend: t tokens of one rank, T = 2 t tokens of both.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from braid.actors.stage.accelerator import Accelerator, accelerator_of
from braid.kernels.collectives.primitives import Launch

RANKS = 2


class _Copied:
    """Copies that streams put in order."""

    def wait(self) -> None:
        """The stream that issued the copies waits for them anyway."""


@dataclass
class HostLink:
    """The link of one device to its host, full duplex; stands in the place of a line of two ranks.

    All collectives of a link are issued on one stream, since those of one size share their host buffers.
    Buffers are made on first use, which must not be while a CUDA graph is captured.
    """

    device: torch.device
    seed: int = 0
    accelerator: Accelerator | None = None
    """None: the device's own; a CPU has none."""
    _sent: dict[tuple[torch.Size, torch.dtype], Tensor] = field(default_factory=dict)
    _peer: dict[tuple[torch.Size, torch.dtype], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.accelerator is None:
            self.accelerator = accelerator_of(self.device)
        self._inbound = self.accelerator.stream() if self.accelerator is not None else None

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
        if self.accelerator is None or self._inbound is None:
            sent.copy_(mine)
            theirs.copy_(received)
            return
        outbound = self.accelerator.current()
        ready, arrived = self.accelerator.event(), self.accelerator.event()
        ready.record(outbound)
        self._inbound.wait_event(ready)
        with self.accelerator.on(self._inbound):
            theirs.copy_(received, non_blocking=True)
        arrived.record(self._inbound)
        sent.copy_(mine, non_blocking=True)
        outbound.wait_event(arrived)

    def all_gather(self, x: Tensor) -> Launch:
        """x (t, ...) goes out, the peer's t tokens come in behind it: (T, ...)."""
        x = x.contiguous()
        y = torch.empty((RANKS * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
        own, theirs = y.chunk(RANKS)

        def issue() -> _Copied:
            self.exchange(x, theirs)
            own.copy_(x)
            return _Copied()

        return Launch(y, issue)

    def reduce_scatter(self, x: Tensor) -> Launch:
        """x (T, ...) sends its second half and adds the peer's share to its first: (t, ...)."""
        x = x.contiguous()
        own, others = x.chunk(RANKS)
        y = torch.empty_like(own)

        def issue() -> _Copied:
            self.exchange(others, y)
            y.add_(own)
            return _Copied()

        return Launch(y, issue)
