"""What the fused kernels compute, by PyTorch; its autograd is the reference of gradients."""

import torch
from torch import Tensor
from torch.nn import functional as F


def reference_norm(z: Tensor, weight: Tensor, shift: Tensor | None, eps: float) -> Tensor:
    """LayerNorm with a ``shift``, RMSNorm without."""
    if shift is None:
        return z / (z.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight
    centred = z - z.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight + shift


def reference_swiglu(gu: Tensor) -> Tensor:
    """silu(gate) * up."""
    gate, up = gu.chunk(2, dim=-1)
    return F.silu(gate) * up


def reference_rotary(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries and keys turned, and values, side by side; sin of the other sign turns back."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = []
    for x in (q, k):
        first, second = x.chunk(2, dim=-1)
        turned.append(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
    return torch.cat((*turned, v), dim=2).flatten(2).flatten(0, 1)


def reference_cross_entropy_statistics(logits: Tensor, targets: Tensor, first_row: int) -> Tensor:
    """Maximum, sum of exp(logit - maximum), and the target's logit, 0 where it lies in other columns."""
    maximum = logits.amax(-1)
    total = (logits - maximum.unsqueeze(-1)).exp().sum(-1)
    local = targets - first_row
    here = (local >= 0) & (local < logits.shape[1])
    chosen = logits.gather(1, local.clamp(0, logits.shape[1] - 1).unsqueeze(-1)).squeeze(-1)
    return torch.stack((maximum, total, torch.where(here, chosen, 0)), dim=-1)


def reference_cross_entropy_gradient(
    logits: Tensor, log_partition: Tensor, targets: Tensor, first_row: int
) -> Tensor:
    """softmax - onehot, in a new tensor."""
    columns = torch.arange(first_row, first_row + logits.shape[1], device=logits.device)
    onehot = (targets.unsqueeze(-1) == columns).to(logits.dtype)
    return (logits - log_partition.unsqueeze(-1)).exp() - onehot
