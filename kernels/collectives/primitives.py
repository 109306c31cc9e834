"""Collectives over flattened tokens: asynchronous, groups as arguments, one name for all torch versions.

Each prepares what it needs on the current stream and returns the tensor that will hold the result together
with a function that issues the collective, perhaps on another stream, and returns its work. The input must
stay alive, and the result unread, until that work is done. ``x`` is (tokens, ...).
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

Issue = Callable[[], dist.Work]

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""torch 2.13 renamed these and warns about the old names, older versions have only those."""


def all_gather(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Issue]:
    """Concatenate the tokens of all ranks of the group, in rank order: (t, ...) -> (t x ranks, ...)."""
    x = x.contiguous()
    y = torch.empty((x.shape[0] * group.size(), *x.shape[1:]), dtype=x.dtype, device=x.device)
    return y, lambda: started(_gather(y, x, group=group, async_op=True))


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Issue]:
    """Sum over the ranks and keep this rank's part of the tokens: (T, ...) -> (T / ranks, ...)."""
    x = x.contiguous()
    y = torch.empty((x.shape[0] // group.size(), *x.shape[1:]), dtype=x.dtype, device=x.device)
    return y, lambda: started(_scatter(y, x, group=group, async_op=True))


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Issue]:
    """Sum over the ranks, in place."""
    return x, lambda: started(dist.all_reduce(x, group=group, async_op=True))


def send(x: Tensor, rank: int, group: dist.ProcessGroup, tag: int) -> tuple[Tensor, Issue]:
    """Send to one rank, named by its number in the whole run."""
    x = x.contiguous()
    return x, lambda: started(dist.isend(x, rank, group=group, tag=tag))


def receive(x: Tensor, rank: int, group: dist.ProcessGroup, tag: int) -> tuple[Tensor, Issue]:
    """Receive into ``x`` from one rank."""
    return x, lambda: started(dist.irecv(x, rank, group=group, tag=tag))


def started(work: dist.Work | None) -> dist.Work:
    """The work of an asynchronous call; torch returns none to ranks outside the group."""
    assert work is not None, "this rank is not in the group it communicates in"
    return work
