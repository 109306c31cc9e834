"""What `braid.jobs.benchmarks.kernels` times: every kernel on one layer's shapes, with its rivals.

Rivals compute the same with PyTorch as one would write it: eagerly, compiled, by cuBLAS alone where it is a
product, and by Liger where that is installed and has the kernel.

Bytes and FLOPs are the least that the operator needs: every operand read once, every result written once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

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
from braid.kernels.fused.dropout import dropout_key
from braid.kernels.fused.launch import multiprocessors
from braid.kernels.fused.tiles import Tiles, tune
from braid.kernels.operators import accumulation

OURS: Final = "triton"
_EPS: Final = 1e-5
_DROPOUT: Final = 0.1
_CHUNK: Final = 1024

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
    tune: Callable[[Time], Tiles] | None = None


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
    yield from _linear_cross_entropy(make, shapes)
    yield from _products(make, shapes)
    yield from _experts(make, shapes)


def _gradients(function: Callable[..., Tensor], dy: Tensor, *inputs: Tensor) -> Way:
    """Forward and backward pass of a function by autograd."""
    leaves = [x.detach().requires_grad_() for x in inputs]

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(*leaves), leaves, dy)

    return run


def _norms(make: _Maker, shapes: Shapes) -> Iterator[Case]:
    T, D = shapes.tokens, shapes.hidden
    x, branch, dy = (make.random(T, D) for _ in range(3))
    weight, shift, bias = (make.random(D) for _ in range(3))
    totals = [torch.zeros(D, device=make.device) for _ in range(3)]
    key = dropout_key(seed=0, step=0, site=0, first_token=0, device=make.device)
    yield make.case(
        "rms_norm",
        lambda: norm.norm(x, weight, None, _EPS),
        lambda: F.rms_norm(x, (D,), weight, _EPS),
        x,
        x,
        liger=("liger_rms_norm", lambda function: lambda: function(x, weight, _EPS)),
    )

    def both() -> tuple[Tensor, Tensor]:  # the sum goes on to the next layer
        z = x + branch
        return z, F.rms_norm(z, (D,), weight, _EPS)

    yield make.case(
        "add, rms_norm",
        lambda: norm.add_norm(x, branch, None, weight, None, None, _EPS, 0.0),
        both,
        *(x,) * 4,
    )

    def whole(x: Tensor, branch: Tensor, bias: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
        return F.layer_norm(x + F.dropout(branch + bias, _DROPOUT), (D,), weight, shift, _EPS)

    forward = partial(norm.add_norm, x, branch, bias, weight, shift, key, _EPS, _DROPOUT)
    yield make.case(
        "bias, dropout, add, layer_norm", forward, lambda: whole(x, branch, bias, weight, shift), *(x,) * 4
    )

    def ours() -> None:
        _, z, statistics = forward()
        norm_gradient.add_norm_gradient(dy, z, statistics, weight, None, key, _DROPOUT, *totals)

    yield make.case(
        "the same and its gradients",
        ours,
        _gradients(whole, dy, x, branch, bias, weight, shift),
        *(x,) * 8,
    )


def _activations(make: _Maker, shapes: Shapes) -> Iterator[Case]:
    T, width = shapes.tokens, shapes.ffn
    gu, da, bias = make.random(T, 2 * width), make.random(T, width), make.random(width)
    total = torch.zeros(width, device=make.device)
    gate, up = gu.chunk(2, dim=-1)
    yield make.case(
        "swiglu",
        lambda: activation.swiglu(gu),
        lambda: activation.reference_swiglu(gu),
        gu,
        da,
        liger=("liger_swiglu", lambda function: lambda: function(gate, up)),
    )

    def ours_gated() -> None:
        activation.swiglu(gu)
        activation.swiglu_gradient(da, gu)

    eager = _gradients(activation.reference_swiglu, da, gu)
    yield make.case("swiglu and its gradient", ours_gated, eager, gu, da, gu, da, gu)

    def ours() -> None:
        activation.bias_gelu(da, bias)
        activation.bias_gelu_gradient(da, da, bias, total)

    eager = _gradients(activation.reference_bias_gelu, da, da, bias)
    yield make.case("bias_gelu and its gradients", ours, eager, *(da,) * 5)


def _rotary(make: _Maker, shapes: Shapes) -> Iterator[Case]:
    width = shapes.hidden // shapes.heads
    qkv = make.random(1, shapes.tokens, shapes.heads + 2 * shapes.kv_heads, width)
    q, k, v = qkv.split([shapes.heads, shapes.kv_heads, shapes.kv_heads], dim=2)
    cos, sin = (torch.randn(shapes.tokens, width // 2, device=make.device) for _ in range(2))
    yield make.case(
        "rotary",
        lambda: rotary.rotary(q, k, v, cos, sin, False),
        lambda: rotary.reference_rotary(q, k, v, cos.to(q.dtype), sin.to(q.dtype), False),
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


def _linear_cross_entropy(make: _Maker, shapes: Shapes) -> Iterator[Case]:
    T, D, V = shapes.tokens, shapes.hidden, shapes.vocabulary
    targets = torch.randint(V, (T,), device=make.device)
    x, weight = make.random(T, D), make.random(V, D) * 0.02
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    total = torch.zeros(V, D, device=make.device)

    def eager() -> object:
        loss = linear_cross_entropy.reference_linear_cross_entropy(*leaves, targets)
        return torch.autograd.grad(loss, leaves)

    yield make.case(
        "linear_cross_entropy, all gradients",
        lambda: linear_cross_entropy.linear_cross_entropy(x, weight, targets, total, 1.0, _CHUNK),
        eager,
        x,
        weight,
        total,
        flops=6 * T * D * V,
        liger=(
            "liger_fused_linear_cross_entropy",
            lambda function: lambda: torch.autograd.grad(function(*leaves, targets, reduction="sum"), leaves),
        ),
    )


def _products(make: _Maker, shapes: Shapes) -> Iterator[Case]:
    T, D, width = shapes.tokens, shapes.hidden, shapes.ffn
    x, weight, dy = make.random(T, D), make.random(width, D), make.random(T, width)
    total, y, dx = torch.zeros(width, D, device=make.device), torch.empty_like(dy), torch.empty_like(x)
    part = max(1, multiprocessors(make.device) * 3 // 4)
    flops = 2 * T * D * width

    def case(
        name: str,
        run: Callable[[int], object],
        rival: Way,
        operands: tuple[Tensor, ...],
        tune: Any,
        cublas: Way | None = None,
    ) -> Case:
        ways = {f"{OURS} 3/4": partial(run, part), "cublas": cublas or rival}
        return make.case(name, partial(run, 0), rival, *operands, flops=flops, ways=ways, tune=tune)

    def tuned(name: str, a: Tensor, b: Tensor, c: Tensor, accumulates: bool) -> Callable[[Time], Tiles]:
        sizes = (a.shape[0], b.shape[1], a.shape[1])

        def find(time: Time) -> Tiles:
            run = partial(gemm.launch, name, a, b, c, accumulate=accumulates)
            return tune(
                name,
                sizes,
                a.dtype,
                a.device,
                lambda tiles: time(partial(run, tiles=tiles)),
                accumulates=accumulates,
            )

        return find

    yield case(
        "linear",
        lambda num_sms: gemm.linear(x, weight, None, num_sms, 1, None),
        lambda: torch.mm(x, weight.t()),
        (x, weight, dy),
        tuned("linear", x, weight.t(), y, False),
    )
    yield case(
        "linear_input_gradient",
        lambda num_sms: gemm.linear_input_gradient(dy, weight, num_sms, 1, None),
        lambda: torch.mm(dy, weight),
        (x, weight, dy),
        tuned("linear_input_gradient", dy, weight, dx, False),
    )
    yield case(
        "accumulate_product",
        lambda num_sms: gemm.accumulate_product(total, dy, x, num_sms),
        lambda: total.add_(torch.mm(dy.t(), x)),
        (x, dy, total, total),
        tuned("accumulate_product", dy.t(), x, total, True),
        cublas=partial(accumulation.accumulate_product, total, dy, x),
    )


def _experts(make: _Maker, shapes: Shapes) -> Iterator[Case]:
    T, D, width, E = shapes.tokens, shapes.hidden, shapes.ffn // 2, shapes.experts
    k = min(2, E)
    logits, x = make.random(T, E).float(), make.random(T, D)
    weights, _, slots, sources, offsets, *_ = router.route(logits, k, T, True)
    S, part = T * k, max(1, multiprocessors(make.device) * 3 // 4)

    def choose() -> object:
        probability = logits.softmax(-1)
        best, chosen = probability.topk(k, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        counts = F.one_hot(chosen, E).sum((0, 1))
        return (
            best / best.sum(-1, keepdim=True),
            order,
            counts.cumsum(0),
            (counts * probability.mean(0)).sum(),
        )

    yield make.case(
        "route", lambda: router.route(logits, k, T, True), choose, logits, weights, slots, sources
    )
    sorted_x = permute.gather_rows(x, sources, k, None)
    token = sources.long() // k
    yield make.case(
        "gather_rows", lambda: permute.gather_rows(x, sources, k, None), lambda: x[token], sorted_x, sorted_x
    )
    place, dtype = slots.long(), x.dtype
    yield make.case(
        "combine_rows",
        lambda: permute.combine_rows(sorted_x, slots, weights),
        lambda: (sorted_x[place] * weights.to(dtype).unsqueeze(-1)).sum(1),
        sorted_x,
        x,
    )
    weight, dy = make.random(E, width, D), make.random(S, width)
    total = torch.zeros(E, width, D, device=make.device)
    parts = [slice(first, end) for first, end in pairwise(offsets.tolist())]

    def backward_weight() -> None:
        for e, rows in enumerate(parts):
            total[e].add_(dy[rows].t() @ sorted_x[rows])

    for name, run, eager, operands in (
        (
            "grouped_linear",
            lambda num_sms: grouped_gemm.grouped_linear(sorted_x, weight, offsets, num_sms),
            lambda: [sorted_x[rows] @ weight[e].t() for e, rows in enumerate(parts)],
            (sorted_x, weight, dy),
        ),
        (
            "grouped_input_gradient",
            lambda num_sms: grouped_gemm.grouped_input_gradient(dy, weight, offsets, num_sms),
            lambda: [dy[rows] @ weight[e] for e, rows in enumerate(parts)],
            (sorted_x, weight, dy),
        ),
        (
            "grouped_weight_gradient",
            lambda num_sms: grouped_gemm.grouped_weight_gradient(total, dy, sorted_x, offsets, num_sms),
            backward_weight,
            (sorted_x, dy, total, total),
        ),
    ):
        ways = {f"{OURS} 3/4": partial(run, part)}
        yield make.case(name, partial(run, 0), eager, *operands, flops=2 * S * D * width, ways=ways)
