"""What `braid.jobs.benchmarks.kernels` times: every kernel on one layer's shapes, with its rivals.

Rivals compute the same with PyTorch as one would write it: eagerly, compiled, by cuBLAS alone where it is a
product, and by Liger where that is installed and has the kernel.

Bytes and FLOPs are the least that the operator needs: every operand read once, every result written once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from braid.kernels.fused import activation, cross_entropy, norm, rotary

OURS: Final = "triton"
_EPS: Final = 1e-5

Way = Callable[[], object]
Time = Callable[[Way], int]


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Sizes of the layer: one micro-batch of ``tokens``."""

    tokens: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    experts: int


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kernel and its rivals; every way can be called again and again."""

    name: str
    ways: dict[str, Way]
    bytes: int
    flops: int = 0
    notes: dict[str, str] = field(default_factory=dict)
    tune: Callable[[Time], object] | None = None


@dataclass(frozen=True)
class _Maker:
    """Random operands, and rivals from a function of PyTorch."""

    device: torch.device
    dtype: torch.dtype

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def case(
        self,
        name: str,
        ours: Way,
        eager: Way,
        *operands: Tensor,
        liger: tuple[str, Callable[[Any], Way]] | None = None,
        **more: Any,
    ) -> Case:
        """``operands``: what must be read and written at least once."""
        ways, notes = {OURS: ours, "eager": eager}, {}
        if self.device.type == "cuda":
            ways["compile"] = torch.compile(eager, dynamic=False)
        else:
            notes["compile"] = "needs a GPU"
        if liger is not None:
            function = _liger(liger[0])
            if function is None:
                notes["liger"] = "is not installed"
            else:
                ways["liger"] = liger[1](function)
        ways |= more.pop("ways", {})
        return Case(name=name, ways=ways, bytes=sum(x.nbytes for x in operands), notes=notes, **more)


def _liger(name: str) -> Any | None:
    try:
        from liger_kernel.transformers import functional
    except ImportError:
        return None
    return getattr(functional, name, None)


def cases(shapes: Shapes, device: torch.device) -> Iterator[Case]:
    """All kernels, one after the other, so that only one case's operands are in memory."""
    make = _Maker(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    yield from _norms(make, shapes)
    yield from _activations(make, shapes)
    yield from _rotary(make, shapes)
    yield from _cross_entropy(make, shapes)


def _gradients(function: Callable[..., Tensor], dy: Tensor, *inputs: Tensor) -> Way:
    """Forward and backward pass of a function by autograd."""
    leaves = [x.detach().requires_grad_() for x in inputs]

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(*leaves), leaves, dy)

    return run


def _norms(make: _Maker, shapes: Shapes) -> Iterator[Case]:
    T, D = shapes.tokens, shapes.hidden
    x, weight = make.random(T, D), make.random(D)
    yield make.case(
        "rms_norm",
        lambda: norm.norm(x, weight, None, _EPS),
        lambda: F.rms_norm(x, (D,), weight, _EPS),
        x,
        x,
        liger=("liger_rms_norm", lambda function: lambda: function(x, weight, _EPS)),
    )


def _activations(make: _Maker, shapes: Shapes) -> Iterator[Case]:
    T, width = shapes.tokens, shapes.ffn
    gu, da = make.random(T, 2 * width), make.random(T, width)
    gate, up = gu.chunk(2, dim=-1)
    yield make.case(
        "swiglu",
        lambda: activation.swiglu(gu),
        lambda: _swiglu(gu),
        gu,
        da,
        liger=("liger_swiglu", lambda function: lambda: function(gate, up)),
    )

    def ours_gated() -> None:
        activation.swiglu(gu)
        activation.swiglu_gradient(da, gu)

    eager = _gradients(_swiglu, da, gu)
    yield make.case("swiglu and its gradient", ours_gated, eager, gu, da, gu, da, gu)


def _rotary(make: _Maker, shapes: Shapes) -> Iterator[Case]:
    width = shapes.hidden // shapes.heads
    qkv = make.random(1, shapes.tokens, shapes.heads + 2 * shapes.kv_heads, width)
    q, k, v = qkv.split([shapes.heads, shapes.kv_heads, shapes.kv_heads], dim=2)
    cos, sin = (torch.randn(shapes.tokens, width // 2, device=make.device) for _ in range(2))
    yield make.case(
        "rotary",
        lambda: rotary.rotary(q, k, v, cos, sin, False),
        lambda: _turned(q, k, v, cos.to(q.dtype), sin.to(q.dtype)),
        qkv,
        qkv,
    )


def _cross_entropy(make: _Maker, shapes: Shapes) -> Iterator[Case]:
    T, V = shapes.tokens, shapes.vocabulary
    targets = torch.randint(V, (T,), device=make.device)
    own = make.random(T, V)
    leaf = own.clone().requires_grad_()

    def ours() -> None:
        maximum, total, _ = cross_entropy.cross_entropy_statistics(own, targets, 0, V).unbind(-1)
        cross_entropy.cross_entropy_gradient(own, maximum + total.log(), targets, None, 1.0, 0)

    def eager() -> object:
        return torch.autograd.grad(F.cross_entropy(leaf, targets, reduction="sum"), leaf)

    yield make.case("cross_entropy and its gradient", ours, eager, *(own,) * 3)


def _swiglu(gu: Tensor) -> Tensor:
    gate, up = gu.chunk(2, dim=-1)
    return F.silu(gate) * up


def _turned(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = []
    for x in (q, k):
        first, second = x.chunk(2, dim=-1)
        turned.append(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
    return torch.cat((*turned, v), dim=2).flatten(2).flatten(0, 1)
