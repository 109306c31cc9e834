"""Collectives over flattened tokens: asynchronous, groups as arguments, one name for all torch versions.

Each returns the output tensor and the work to wait for before the output is read; the input must stay alive
until then. ``x`` is (tokens, ...) and contiguous.
"""

import torch
import torch.distributed as dist
from torch import Tensor

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""torch 2.13 renamed these and warns about the old names, older versions have only those."""


def all_gather(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Concatenate the tokens of all ranks of the group, in rank order: (t, ...) -> (t x ranks, ...)."""
    y = torch.empty((x.shape[0] * group.size(), *x.shape[1:]), dtype=x.dtype, device=x.device)
    return y, started(_gather(y, x.contiguous(), group=group, async_op=True))


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Sum over the ranks and keep this rank's part of the tokens: (T, ...) -> (T / ranks, ...)."""
    y = torch.empty((x.shape[0] // group.size(), *x.shape[1:]), dtype=x.dtype, device=x.device)
    return y, started(_scatter(y, x.contiguous(), group=group, async_op=True))


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Sum over the ranks, in place."""
    return x, started(dist.all_reduce(x, group=group, async_op=True))


def started(work: dist.Work | None) -> dist.Work:
    """The work of an asynchronous call; torch returns none to ranks outside the group."""
    assert work is not None, "this rank is not in the group it communicates in"
    return work
