"""Stages of collectives: over ranks along one dim of a mesh, with rows in the order of all dims.

What ranks along the dims of a mesh [N1, ..., Nd] have together stands in the order of these, the last one
fastest. A stage over dim k moves blocks of N(k+1) x ... x Nd ranks' rows; where dims before k are there, too,
(``outer`` blocks of them), what a collective delivers rank after rank has to change places.
"""

from dataclasses import replace

import torch
from torch import Tensor

from braid.kernels.collectives.primitives import Launch, Line


def gather_stage(line: Line, x: Tensor, outer: int, into: Tensor | None = None) -> Launch:
    """(outer x t, ...) of every rank -> (outer x ranks x t, ...), in memory of its own or ``into``."""
    if outer == 1:
        return line.all_gather(x, into=into)
    launch = line.all_gather(x)
    arrived, finish = launch.result, launch.finish
    y = torch.empty_like(arrived) if into is None else into

    def order() -> None:
        if finish is not None:
            finish()
        rows = x.shape[0] // outer
        y.view(outer, line.size, rows, *x.shape[1:]).copy_(
            arrived.view(line.size, outer, rows, *x.shape[1:]).transpose(0, 1)
        )

    return replace(launch, result=y, finish=order)


def scatter_stage(line: Line, x: Tensor, outer: int, into: Tensor | None = None) -> Launch:
    """(outer x ranks x t, ...) -> (outer x t, ...), summed over the ranks; as `gather_stage`."""
    if outer > 1:
        rows = x.shape[0] // (outer * line.size)
        x = x.reshape(outer, line.size, rows, *x.shape[1:]).transpose(0, 1).reshape(x.shape)
    return line.reduce_scatter(x, into=into)


def whole_shares(x: Tensor, ranks: int) -> Tensor:
    """x, of one dim, or where it cannot be divided among the ranks a copy with zeros behind it."""
    missing = -x.numel() % ranks
    return torch.cat([x, x.new_zeros(missing)]) if missing else x
