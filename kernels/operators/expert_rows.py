"""Computes how many rows of tokens go to each rank and expert, given the visits that every rank has counted.

Legend: E experts of all ranks, L of them on this rank; S = tp x ep ranks that rows come from.
"""

import torch
from torch import Tensor

from braid.kernels.collectives.primitives import Extents
from braid.kernels.operators.operator import ComputeOperator


class ExpertLoad(ComputeOperator):
    """Divides counts of visits by all visits of a micro-batch, for a sum over its ranks."""

    def __init__(self, visits: int, dtype: torch.dtype) -> None:
        """``visits``: number of visits of the micro-batch on all its ranks."""
        super().__init__()
        self.visits, self.dtype = visits, torch.promote_types(dtype, torch.float32)

    def forward(self, counts_E: Tensor) -> tuple[Tensor]:
        """Return counts_E divided by the micro-batch's visits, this rank's term of the sum load_E."""
        return (counts_E.to(self.dtype) / self.visits,)


class ExpertRows(ComputeOperator):
    """Numbers of rows by source rank and expert, for transfers. Every rank of ep has E / ep experts.

    ``capacity``: number of rows that each source has for every expert, whatever the counts; None: one row per
    visit.
    """

    def __init__(
        self, *, experts: int, tp: int, tp_rank: int, ep: int, ep_rank: int, capacity: int | None
    ) -> None:
        super().__init__()
        self.experts, self.tp, self.tp_rank, self.ep, self.ep_rank = experts, tp, tp_rank, ep, ep_rank
        full = None if capacity is None else torch.full((tp, ep, experts), capacity, dtype=torch.int64)
        self._static = None if full is None else self._extents(full)

    def forward(self, counts: Tensor) -> tuple[Extents, Extents, tuple[int, ...], Tensor, tuple[int, ...]]:
        """Map counts (tp x ep x E, flat; ignored with a capacity) to: numbers of rows sent to and received
        from every rank of ep; the same for the way back; rows of every rank of tp; rows_SL by source, on the
        host; rows of every expert of this rank. Without a capacity the host waits for the counts."""
        if self._static is not None:
            there, back, shares, sources, sizes = self._static
            return there, back, shares, sources.clone(), sizes  # a copy, since its receiver frees it
        return self._extents(_on_the_host(counts).view(self.tp, self.ep, self.experts))

    def _extents(self, counts: Tensor) -> tuple[Extents, Extents, tuple[int, ...], Tensor, tuple[int, ...]]:
        held = self.experts // self.ep
        own = slice(self.ep_rank * held, (self.ep_rank + 1) * held)
        sends = counts[self.tp_rank, self.ep_rank].view(self.ep, held).sum(1)
        receives = counts[self.tp_rank, :, own].sum(1)
        there = Extents(tuple(sends.tolist()), tuple(receives.tolist()))
        shares = tuple(counts[:, :, own].sum((1, 2)).tolist())
        sources = counts[:, :, own].reshape(self.tp * self.ep, held).contiguous()
        return there, there.back, shares, sources, tuple(sources.sum(0).tolist())


def _on_the_host(counts: Tensor) -> Tensor:
    """Return the counts on the host once they have arrived; meanwhile other threads can launch work on the
    GPU.

    A copy into memory that is not pinned, as `Tensor.cpu` makes it, would stop all threads.
    """
    if not counts.is_cuda:
        return counts
    found = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True).copy_(counts, non_blocking=True)
    torch.cuda.current_stream(counts.device).synchronize()
    return found
