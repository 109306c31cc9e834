"""Whether the Triton kernels are right on this card: each against PyTorch on widened operands.

Errors are the largest difference of any element over the largest element of the reference, the worst of a
kernel's results. References compute 16-bit operands in fp32 and fp32 ones in float64.

Legend: T tokens, D hidden, F the feed-forward width, V vocabulary, E experts, S sorted tokens.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from braid.jobs.benchmarks.kernel_cases import Shapes, _swiglu, _turned
from braid.kernels.fused import activation, cross_entropy, norm, rotary

TOLERANCES: Final = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest error of a right kernel, by the dtype of its operands."""

_EPS: Final = 1e-5
_FEW: Final = 1024
"""Tokens are as many at most where references hold their logits, in the wider dtype."""

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


def _gated(make: Operands, *, gradients: bool) -> Pairs:
    T, width = make.shapes.tokens, make.shapes.ffn
    gu, da = make.random(T, 2 * width), make.random(T, width)
    (gu_,) = make.leaves(gu)
    a_ = _swiglu(gu_)
    yield activation.swiglu(gu), a_.detach()
    if gradients:
        yield activation.swiglu_gradient(da, gu), torch.autograd.grad(a_, gu_, make.wide(da))[0]


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
        yield ours, _turned(q_, k_, v_, cos_, -sin_ if back else sin_)


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


CHECKS: Final[Mapping[str, Callable[[Operands], Pairs]]] = {
    "rms_norm": _rms_norm,
    "swiglu": lambda make: _gated(make, gradients=False),
    "swiglu and its gradient": lambda make: _gated(make, gradients=True),
    "rotary": _rotary,
    "cross_entropy and its gradient": lambda make: _cross_entropy(make.fewer),
}
"""By the names of `braid.jobs.benchmarks.kernel_cases`."""
