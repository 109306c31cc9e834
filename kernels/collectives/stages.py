"""Single stages of collectives: over the ranks along one dim of a mesh, with rows in the order of all dims.

Rows of ranks along the dims of a mesh [N1, ..., Nd] are ordered by these dims, the last dim fastest. A stage
over dim k moves blocks of N(k+1) x ... x Nd ranks' rows. If a tensor also spans dims before k (``outer``
blocks), the blocks that a collective returns in rank order must be reordered.
"""

from dataclasses import replace

import torch
from torch import Tensor

from braid.kernels.collectives.primitives import Launch, Line


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
