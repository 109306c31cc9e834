"""What the fused kernels compute, by PyTorch and plain Python; its autograd is the reference of gradients."""

from itertools import pairwise

import torch
from torch import Tensor


def reference_grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Expert by expert; autograd of it is the reference of both gradients."""
    bounds = [int(offset) for offset in offsets]
    parts = [x[first:end] @ weight[e].t() for e, (first, end) in enumerate(pairwise(bounds))]
    return torch.cat([*parts, x.new_zeros(x.shape[0] - bounds[-1], weight.shape[1])])


def reference_bias_dropout_add(
    x: Tensor, branch: Tensor, bias: Tensor | None, keep: Tensor | None, probability: float
) -> Tensor:
    """x + dropout(branch + bias) with the mask given (`reference_keep_mask`; None: nothing is dropped)."""
    if bias is not None:
        branch = branch + bias
    return x + (branch if keep is None else torch.where(keep, branch / (1 - probability), 0))


def reference_norm(z: Tensor, weight: Tensor, shift: Tensor | None, eps: float) -> Tensor:
    """LayerNorm with a ``shift``, RMSNorm without."""
    if shift is None:
        return z / (z.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight
    centred = z - z.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight + shift


def reference_route(
    logits: Tensor, choices: int, capacity: int, normalise: bool
) -> tuple[Tensor, Tensor, list[list[int]], Tensor]:
    """Weights, experts, slots (token by token) and the auxiliary loss, by PyTorch and plain Python."""
    tokens, experts = logits.shape
    probability = logits.softmax(-1)
    order = probability.sort(dim=-1, descending=True, stable=True).indices[:, :choices]
    weights = probability.gather(1, order)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    queues: list[list[tuple[int, int]]] = [[] for _ in range(experts)]
    for token, row in enumerate(order.tolist()):
        for choice, expert in enumerate(row):
            queues[expert].append((token, choice))
    slots = [[-1] * choices for _ in range(tokens)]
    for slot, (token, choice) in enumerate(one for queue in queues for one in queue[:capacity]):
        slots[token][choice] = slot
    share = logits.new_tensor([len(queue) / max(1, tokens * choices) for queue in queues])
    loss = experts * (share * (probability.mean(0) if tokens else share)).sum()
    return weights, order, slots, loss


def reference_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weightᵀ + bias; autograd of it is the reference of both gradients."""
    return torch.nn.functional.linear(x, weight, bias)


def reference_gather_rows(x: Tensor, sources: Tensor, choices: int, weights: Tensor | None) -> Tensor:
    """The same by PyTorch."""
    index = sources.clamp(min=0).long()
    rows = x[index // choices]
    if weights is not None:
        rows = rows * weights.flatten()[index].unsqueeze(-1)
    return torch.where((sources >= 0).unsqueeze(-1), rows, 0)


def reference_combine_rows(x: Tensor, slots: Tensor, weights: Tensor | None) -> Tensor:
    """The same by PyTorch."""
    rows = torch.where((slots >= 0).unsqueeze(-1), x[slots.clamp(min=0).long()], 0)
    return (rows if weights is None else rows * weights.unsqueeze(-1)).sum(1)


def reference_cross_entropy_statistics(logits: Tensor, targets: Tensor, first_row: int) -> Tensor:
    """The same by PyTorch."""
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
