"""Whether the Triton kernels are right on this card: each against PyTorch on widened operands.

Errors are the largest difference of any element over the largest element of the reference, the worst of a
kernel's results. References compute 16-bit operands in fp32 and fp32 ones in float64.

Legend: T tokens, D hidden, F the feed-forward width, V vocabulary, E experts, S sorted tokens.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from braid.jobs.benchmarks.kernel_cases import Shapes
from braid.kernels.fused import (
    activation,
    cross_entropy,
    gemm,
    grouped_gemm,
    linear_cross_entropy,
    norm,
    norm_gradient,
    permute,
    rotary,
    router,
)
from braid.kernels.fused.dropout import dropout_key, reference_keep_mask

TOLERANCES: Final = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest error of a right kernel, by the dtype of its operands."""

_EPS: Final = 1e-5
_DROPOUT: Final = 0.1
_FEW: Final = 1024
"""Tokens are as many at most where references hold their logits, in the wider dtype."""
_CHUNK: Final = 1024

Pairs = Iterator[tuple[Tensor, Tensor]]
"""What a kernel gives, and what it should give."""


@dataclass(frozen=True)
class Operands:
    """Random ones of the benchmark's shapes."""

    shapes: Shapes
    device: torch.device
    dtype: torch.dtype

    def random(self, *shape: int) -> Tensor:
        """Standard normal."""
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def zeros(self, *shape: int) -> Tensor:
        """A main gradient: fp32."""
        return torch.zeros(shape, device=self.device)

    def wide(self, x: Tensor) -> Tensor:
        """In the reference's dtype."""
        return x.to(torch.float64 if self.dtype == torch.float32 else torch.float32)

    def leaves(self, *xs: Tensor) -> list[Tensor]:
        """Widened, to be differentiated."""
        return [self.wide(x).requires_grad_() for x in xs]

    @property
    def fewer(self) -> "Operands":
        """With no more tokens than logits can be held of."""
        return replace(self, shapes=replace(self.shapes, tokens=min(_FEW, self.shapes.tokens)))


def error(pairs: Pairs) -> float:
    """The worst error of a kernel's results; infinite for one that is not a number."""
    worst = 0.0
    for ours, reference in pairs:
        size = float(reference.abs().max()) or 1.0
        off = float((ours.to(reference.dtype) - reference).abs().max()) / size
        worst = max(worst, math.inf if math.isnan(off) else off)
    return worst


def _rms_norm(make: Operands) -> Pairs:
    T, D = make.shapes.tokens, make.shapes.hidden
    x, weight = make.random(T, D), make.random(D)
    yield norm.norm(x, weight, None, _EPS)[0], F.rms_norm(make.wide(x), (D,), make.wide(weight), _EPS)


def _add_rms_norm(make: Operands) -> Pairs:
    T, D = make.shapes.tokens, make.shapes.hidden
    x, branch, weight = make.random(T, D), make.random(T, D), make.random(D)
    y, z, _ = norm.add_norm(x, branch, None, weight, None, None, _EPS, 0.0)
    total = make.wide(x) + make.wide(branch)
    yield z, total
    yield y, F.rms_norm(total, (D,), make.wide(weight), _EPS)


def _whole_norm(make: Operands, *, gradients: bool) -> Pairs:
    """Bias, dropout, addition, LayerNorm; with ``gradients`` those instead of the results."""
    T, D = make.shapes.tokens, make.shapes.hidden
    x, branch, dy = (make.random(T, D) for _ in range(3))
    bias, weight, shift = (make.random(D) for _ in range(3))
    key = dropout_key(seed=0, step=0, site=0, first_token=0, device=make.device)
    y, z, statistics = norm.add_norm(x, branch, bias, weight, shift, key, _EPS, _DROPOUT)
    leaves = make.leaves(x, branch, weight, shift, bias)
    x_, branch_, weight_, shift_, bias_ = leaves
    keep = reference_keep_mask(key, T, D, _DROPOUT)
    z_ = x_ + torch.where(keep, (branch_ + bias_) / (1 - _DROPOUT), 0)
    y_ = F.layer_norm(z_, (D,), weight_, shift_, _EPS)
    if not gradients:
        yield from ((z, z_.detach()), (y, y_.detach()))
        return
    totals = [make.zeros(D) for _ in range(3)]
    found = norm_gradient.add_norm_gradient(dy, z, statistics, weight, None, key, _DROPOUT, *totals)
    yield from zip((*found, *totals), torch.autograd.grad(y_, leaves, make.wide(dy)), strict=True)


def _swiglu(make: Operands, *, gradients: bool) -> Pairs:
    T, width = make.shapes.tokens, make.shapes.ffn
    gu, da = make.random(T, 2 * width), make.random(T, width)
    (gu_,) = make.leaves(gu)
    a_ = activation.reference_swiglu(gu_)
    yield activation.swiglu(gu), a_.detach()
    if gradients:
        yield activation.swiglu_gradient(da, gu), torch.autograd.grad(a_, gu_, make.wide(da))[0]


def _bias_gelu(make: Operands) -> Pairs:
    T, width = make.shapes.tokens, make.shapes.ffn
    h, da, bias, total = make.random(T, width), make.random(T, width), make.random(width), make.zeros(width)
    h_, bias_ = make.leaves(h, bias)
    a_ = activation.reference_bias_gelu(h_, bias_)
    yield activation.bias_gelu(h, bias), a_.detach()
    dh = activation.bias_gelu_gradient(da, h, bias, total)
    yield from zip((dh, total), torch.autograd.grad(a_, (h_, bias_), make.wide(da)), strict=True)


def _rotary(make: Operands) -> Pairs:
    shapes = make.shapes
    width = shapes.hidden // shapes.heads
    heads = [shapes.heads, shapes.kv_heads, shapes.kv_heads]
    qkv = make.random(1, shapes.tokens, sum(heads), width).split(heads, dim=2)
    cos, sin = (torch.randn(shapes.tokens, width // 2, device=make.device) for _ in range(2))
    q, k, v = qkv
    q_, k_, v_, cos_, sin_ = (make.wide(x) for x in (q, k, v, cos, sin))
    for back in (False, True):
        ours = rotary.rotary(q, k, v, cos, sin, back)
        yield ours, rotary.reference_rotary(q_, k_, v_, cos_, sin_, back)


def _cross_entropy(make: Operands) -> Pairs:
    T, V = make.shapes.tokens, make.shapes.vocabulary
    logits, targets = make.random(T, V), torch.randint(V, (T,), device=make.device)
    (logits_,) = make.leaves(logits)
    loss_ = F.cross_entropy(logits_, targets, reduction="sum")
    maximum, total, chosen = cross_entropy.cross_entropy_statistics(logits, targets, 0, V).unbind(-1)
    log_partition = maximum + total.log()
    yield (log_partition - chosen).sum(), loss_.detach()
    cross_entropy.cross_entropy_gradient(logits, log_partition, targets, None, 1.0, 0)
    yield logits, torch.autograd.grad(loss_, logits_)[0]


def _linear_cross_entropy(make: Operands) -> Pairs:
    T, D, V = make.shapes.tokens, make.shapes.hidden, make.shapes.vocabulary
    x, weight, targets = (
        make.random(T, D),
        make.random(V, D) * 0.02,
        torch.randint(V, (T,), device=make.device),
    )
    total = make.zeros(V, D)
    loss, dx = linear_cross_entropy.linear_cross_entropy(x, weight, targets, total, 1.0, _CHUNK)
    x_, weight_ = make.leaves(x, weight)
    loss_ = linear_cross_entropy.reference_linear_cross_entropy(x_, weight_, targets)
    dx_, total_ = torch.autograd.grad(loss_, (x_, weight_))
    yield from ((loss, loss_.detach()), (dx, dx_), (total, total_))


def _linear(make: Operands) -> Pairs:
    x, weight = make.random(make.shapes.tokens, make.shapes.hidden), make.random(*_weight(make))
    yield gemm.linear(x, weight, None, 0, 1, None), make.wide(x) @ make.wide(weight).t()


def _linear_input_gradient(make: Operands) -> Pairs:
    dy, weight = make.random(make.shapes.tokens, make.shapes.ffn), make.random(*_weight(make))
    yield gemm.linear_input_gradient(dy, weight, 0, 1, None), make.wide(dy) @ make.wide(weight)


def _accumulate_product(make: Operands) -> Pairs:
    T = make.shapes.tokens
    dy, x, total = (
        make.random(T, make.shapes.ffn),
        make.random(T, make.shapes.hidden),
        make.zeros(*_weight(make)),
    )
    once = make.wide(dy).t() @ make.wide(x)
    for times in (1, 2):
        gemm.accumulate_product(total, dy, x, 0)
        yield total, once * times


def _weight(make: Operands) -> tuple[int, int]:
    return make.shapes.ffn, make.shapes.hidden


@dataclass(frozen=True)
class _Routed:
    """Random tokens, sent to their experts."""

    logits: Tensor
    weights: Tensor
    chosen: Tensor
    slots: Tensor
    sources: Tensor
    offsets: Tensor
    choices: int

    @property
    def parts(self) -> list[slice]:
        """Places of every expert's tokens."""
        return [slice(first, end) for first, end in pairwise(self.offsets.tolist())]


def _routed(make: Operands) -> _Routed:
    T, E = make.shapes.tokens, make.shapes.experts
    logits, choices = torch.randn(T, E, device=make.device), min(2, E)
    weights, chosen, slots, sources, offsets, *_ = router.route(logits, choices, T, True)
    return _Routed(logits, weights, chosen, slots, sources, offsets, choices)


def _route(make: Operands) -> Pairs:
    routed = _routed(make)
    best = routed.logits.double().softmax(-1).topk(routed.choices).values
    yield routed.weights, best / best.sum(-1, keepdim=True)
    counts = torch.bincount(routed.chosen.flatten().long(), minlength=make.shapes.experts)
    yield routed.offsets[1:], counts.cumsum(0).double()
    places = routed.slots.flatten().long()
    yield routed.sources[places], torch.arange(len(places), device=make.device).double()


def _gather_rows(make: Operands) -> Pairs:
    routed, x = _routed(make), make.random(make.shapes.tokens, make.shapes.hidden)
    rows = permute.gather_rows(x, routed.sources, routed.choices, None)
    yield rows, make.wide(x)[routed.sources.long() // routed.choices]


def _combine_rows(make: Operands) -> Pairs:
    routed = _routed(make)
    x = make.random(len(routed.sources), make.shapes.hidden)
    weighted = make.wide(x)[routed.slots.long()] * make.wide(routed.weights).unsqueeze(-1)
    yield permute.combine_rows(x, routed.slots, routed.weights), weighted.sum(1)


def _grouped(make: Operands, which: str) -> Pairs:
    """Products of every expert's tokens with its own weight."""
    routed, width, D = _routed(make), make.shapes.ffn // 2, make.shapes.hidden
    S, E = len(routed.sources), make.shapes.experts
    x, dy, weight = make.random(S, D), make.random(S, width), make.random(E, width, D)
    x_, dy_, weight_ = make.wide(x), make.wide(dy), make.wide(weight)
    parts = [*enumerate(routed.parts)]
    if which == "linear":
        ours = grouped_gemm.grouped_linear(x, weight, routed.offsets, 0)
        yield ours, torch.cat([x_[rows] @ weight_[e].t() for e, rows in parts])
    elif which == "input":
        ours = grouped_gemm.grouped_input_gradient(dy, weight, routed.offsets, 0)
        yield ours, torch.cat([dy_[rows] @ weight_[e] for e, rows in parts])
    else:
        total = make.zeros(E, width, D)
        grouped_gemm.grouped_weight_gradient(total, dy, x, routed.offsets, 0)
        yield total, torch.stack([dy_[rows].t() @ x_[rows] for _, rows in parts])


CHECKS: Final[Mapping[str, Callable[[Operands], Pairs]]] = {
    "rms_norm": _rms_norm,
    "add, rms_norm": _add_rms_norm,
    "bias, dropout, add, layer_norm": lambda make: _whole_norm(make, gradients=False),
    "the same and its gradients": lambda make: _whole_norm(make, gradients=True),
    "swiglu": lambda make: _swiglu(make, gradients=False),
    "swiglu and its gradient": lambda make: _swiglu(make, gradients=True),
    "bias_gelu and its gradients": _bias_gelu,
    "rotary": _rotary,
    "cross_entropy and its gradient": lambda make: _cross_entropy(make.fewer),
    "linear_cross_entropy, all gradients": lambda make: _linear_cross_entropy(make.fewer),
    "linear": _linear,
    "linear_input_gradient": _linear_input_gradient,
    "accumulate_product": _accumulate_product,
    "route": _route,
    "gather_rows": _gather_rows,
    "combine_rows": _combine_rows,
    "grouped_linear": lambda make: _grouped(make, "linear"),
    "grouped_input_gradient": lambda make: _grouped(make, "input"),
    "grouped_weight_gradient": lambda make: _grouped(make, "weight"),
}
"""By the names of `braid.jobs.benchmarks.kernel_cases`."""
