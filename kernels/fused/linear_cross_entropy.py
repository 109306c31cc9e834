"""The last linear map and the cross-entropy together, chunk of tokens by chunk: all logits are never stored.

A chunk's logits are computed, reduced, turned into their own gradient in place, and multiplied into the
gradients of input and weight at once. So the gradient's scale must be known beforehand. For one rank that
holds the whole vocabulary: where columns are cut over ranks, they have to speak to each other between the
statistics and the gradient (`braid.kernels.fused.cross_entropy`).

Legend: T tokens, D hidden, V vocabulary, c tokens of a chunk.
"""

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn import functional as F

from braid.kernels.fused.cross_entropy import cross_entropy_gradient, cross_entropy_statistics
from braid.kernels.fused.gemm import accumulate_product
from braid.kernels.fused.launch import check, check_indices, fail

_NAME = "linear_cross_entropy"


def _check(x: Tensor, weight: Tensor, targets: Tensor, d_weight: Tensor, chunk: int) -> None:
    check(_NAME, "x", x, (None, None))
    check(_NAME, "weight", weight, (None, x.shape[1]), like=x, dtypes=(x.dtype,))
    check(_NAME, "targets", targets, (x.shape[0],), like=x, dtypes=(torch.int64,))
    check(_NAME, "d_weight", d_weight, tuple(weight.shape), like=x)
    check_indices(_NAME, "targets", targets, weight.shape[0])
    if chunk < 1:
        fail(_NAME, "chunk", f"is {chunk}, not at least 1 token")


@custom_op("braid::linear_cross_entropy", mutates_args=("d_weight",))
def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, d_weight: Tensor, scale: float, chunk: int
) -> tuple[Tensor, Tensor]:
    """Return the 0-dim sum of the tokens' losses (nats, fp32) and scale times its gradient dx (T x D).

    x is T x D, weight V x D, targets T (int64); scale times the weight's gradient is added to ``d_weight``
    (V x D, usually the fp32 main gradient). At any time there are logits of ``chunk`` tokens.
    """
    _check(x, weight, targets, d_weight, chunk)
    tokens, vocabulary = x.shape[0], weight.shape[0]
    loss = x.new_zeros((), dtype=torch.float32)
    dx = x.new_empty(x.shape)
    buffer = x.new_empty(min(chunk, tokens), vocabulary)
    for first in range(0, tokens, chunk):
        part = slice(first, min(first + chunk, tokens))
        logits = torch.mm(x[part], weight.t(), out=buffer[: part.stop - first])
        statistics = cross_entropy_statistics(logits, targets[part], 0, vocabulary)
        maximum, total, chosen = statistics.unbind(-1)
        log_partition = maximum + total.log()
        loss += (log_partition - chosen).sum()
        cross_entropy_gradient(logits, log_partition, targets[part], None, scale, 0)
        torch.mm(logits, weight, out=dx[part])
        accumulate_product(d_weight, logits, x[part], 0)
    return loss, dx


@linear_cross_entropy.register_fake
def _(
    x: Tensor, weight: Tensor, targets: Tensor, d_weight: Tensor, scale: float, chunk: int
) -> tuple[Tensor, Tensor]:
    _check(x, weight, targets, d_weight, chunk)
    return x.new_empty((), dtype=torch.float32), x.new_empty(x.shape)


def reference_linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The sum of the losses with all logits stored; autograd of it is the reference of the gradients."""
    return F.cross_entropy(x @ weight.t(), targets, reduction="sum")
