"""How operators are compared with plain autograd; the references are written with torch functions only.

Legend: T or t tokens, D hidden, I and O input and output features, F feed-forward width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from braid.kernels.operators.activation import GELU, SwiGLU
from braid.kernels.operators.embedding import PositionEmbedding, VocabularyEmbedding
from braid.kernels.operators.linear import Linear, Residual
from braid.kernels.operators.norm import HeadNorm, LayerNorm, RMSNorm
from braid.kernels.operators.operator import ComputeOperator

Values = Sequence[Tensor]
Reads = Callable[[Tensor, Values, Values], Values]
"""What a gradient method reads: of dy, the inputs of forward, and what forward saved."""

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where Triton's kernels run: in its interpreter without a GPU (`tests/conftest.py`)."""
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}
EPSILON = 1e-5


@dataclass(frozen=True)
class Case:
    """An operator with inputs, the function that it should equal, and what its gradients read."""

    operator: ComputeOperator
    inputs: Values
    reference: Callable[..., Tensor]
    input_reads: Reads | None
    weight_reads: Reads | None


def gradient_alone(dy: Tensor, inputs: Values, saved: Values) -> Values:
    return (dy,)


def with_inputs(dy: Tensor, inputs: Values, saved: Values) -> Values:
    return (dy, *inputs)


def with_all(dy: Tensor, inputs: Values, saved: Values) -> Values:
    return (dy, *inputs, *saved)


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(shape, dtype=dtype)


def prepare(operator: ComputeOperator, main_dtype: torch.dtype) -> dict[str, Tensor]:
    """Give every parameter random values and a random sum of gradients; return copies of the latter."""
    before = {}
    for name, parameter in operator.named_parameters():
        torch.nn.init.normal_(parameter)
        operator.gradients[name] = torch.randn(parameter.shape, dtype=main_dtype)
        before[name] = operator.gradients[name].clone()
    return before


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE[torch.float64]) -> None:
    """Equal within ``tolerance`` of the largest expected element (of 1, if that is larger)."""
    assert actual.shape == expected.shape
    scale = max(1.0, float(expected.detach().abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=tolerance * scale)


def wide_leaf(x: Tensor) -> Tensor:
    """A float64 copy that autograd differentiates by; indices as they are."""
    return x.detach().double().requires_grad_() if x.is_floating_point() else x


def check(case: Case, dtype: torch.dtype) -> None:
    """Compare outputs, input gradients and twice accumulated weight gradients with float64 autograd."""
    tolerance = TOLERANCE[dtype]
    main_dtype = torch.promote_types(dtype, torch.float32)
    before = prepare(case.operator, main_dtype)
    leaves = [wide_leaf(x) for x in case.inputs]
    parameters = {name: wide_leaf(p) for name, p in case.operator.named_parameters()}
    y_reference = case.reference(*leaves, **parameters)
    dy = normal(*y_reference.shape, dtype=dtype)
    differentiable = [x for x in leaves if x.is_floating_point()]
    gradients = torch.autograd.grad(y_reference, [*differentiable, *parameters.values()], dy.double())
    kept = [x.clone() for x in case.inputs]

    with torch.no_grad():
        y, *saved = case.operator(*case.inputs)
        assert y.dtype == dtype
        assert_close(y, y_reference, tolerance)
        if case.input_reads is not None:
            d_inputs = case.operator.input_gradient(*case.input_reads(dy, case.inputs, saved))
            for actual, expected in zip(d_inputs, gradients[: len(differentiable)], strict=True):
                assert actual.dtype == dtype
                assert_close(actual, expected, tolerance)
        if case.weight_reads is not None:
            for _ in range(2):
                case.operator.weight_gradient(*case.weight_reads(dy, case.inputs, saved))
            for name, gradient in zip(parameters, gradients[len(differentiable) :], strict=True):
                expected = before[name].double() + 2 * gradient
                assert_close(case.operator.gradients[name], expected, tolerance)
    assert all(map(torch.equal, case.inputs, kept)), "an input was modified"


def rms_norm(tokens: int, width: int, dtype: torch.dtype) -> Case:
    def reference(x_tD: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x_tD, (width,), weight, EPSILON)

    operator = RMSNorm(hidden=width, eps=EPSILON, dtype=dtype)
    return Case(operator, (normal(tokens, width, dtype=dtype),), reference, with_all, with_all)


def layer_norm(tokens: int, width: int, dtype: torch.dtype) -> Case:
    def reference(x_tD: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x_tD, (width,), weight, bias, EPSILON)

    operator = LayerNorm(hidden=width, eps=EPSILON, dtype=dtype)
    return Case(operator, (normal(tokens, width, dtype=dtype),), reference, with_all, with_all)


def head_norm(tokens: int, width: int, dtype: torch.dtype) -> Case:
    """Norms of heads of ``width``: four of queries, two of keys, and as many of values that stay."""

    def reference(qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> Tensor:
        q, k, v = qkv.unflatten(-1, (8, width)).split((4, 2, 2), dim=1)
        q, k = (F.rms_norm(x, (width,), weight, EPSILON) for x, weight in ((q, q_weight), (k, k_weight)))
        return torch.cat((q, k, v), dim=1).flatten(1)

    operator = HeadNorm(heads=4, kv_heads=2, head_dim=width, eps=EPSILON, dtype=dtype)
    return Case(operator, (normal(tokens, 8 * width, dtype=dtype),), reference, with_all, with_all)


def linear(tokens: int, width: int, dtype: torch.dtype) -> Case:
    """A linear map from ``width`` to 5 features; with a bias if ``width`` is odd."""
    operator = Linear(inputs=width, outputs=5, bias=bool(width % 2), dtype=dtype)
    return Case(operator, (normal(tokens, width, dtype=dtype),), F.linear, gradient_alone, with_inputs)


def swiglu(tokens: int, width: int, dtype: torch.dtype) -> Case:
    """SwiGLU of 2 x ``width`` columns."""

    def reference(gu_T2F: Tensor) -> Tensor:
        return F.silu(gu_T2F[:, :width]) * gu_T2F[:, width:]

    return Case(SwiGLU(), (normal(tokens, 2 * width, dtype=dtype),), reference, with_inputs, None)


def gelu(tokens: int, width: int, dtype: torch.dtype) -> Case:
    reference = partial(F.gelu, approximate="tanh")
    return Case(GELU(), (normal(tokens, width, dtype=dtype),), reference, with_inputs, None)


def residual(tokens: int, width: int, dtype: torch.dtype) -> Case:
    """A residual addition; with a bias if ``width`` is odd."""

    def reference(branch_tD: Tensor, x_tD: Tensor, bias: Tensor | float = 0.0) -> Tensor:
        return x_tD + branch_tD + bias

    inputs = [normal(tokens, width, dtype=dtype) for _ in range(2)]
    operator = Residual(hidden=width, bias=bool(width % 2), dtype=dtype)
    return Case(operator, inputs, reference, gradient_alone, gradient_alone if width % 2 else None)


def token_embedding(tokens: int, width: int, dtype: torch.dtype) -> Case:
    """Embedding of a vocabulary of 7: of all its rows, or, if ``width`` is odd, by rows 2, 3 and 4."""
    first, rows = (2, 3) if width % 2 else (0, 7)

    def reference(tokens_T: Tensor, weight: Tensor) -> Tensor:
        return F.one_hot(tokens_T, 7)[:, first : first + rows].double() @ weight

    operator = VocabularyEmbedding(rows=rows, hidden=width, first_row=first, vocabulary=7, dtype=dtype)
    return Case(operator, (torch.randint(7, (tokens,)),), reference, None, with_inputs)


def position_embedding(tokens: int, width: int, dtype: torch.dtype) -> Case:
    """Positions of sequences of 4 tokens, from the third token on."""

    def reference(x_tD: Tensor, weight: Tensor) -> Tensor:
        return x_tD + torch.stack([weight[(i + 2) % 4] for i in range(tokens)])

    operator = PositionEmbedding(sequence=4, hidden=width, token_offset=2, dtype=dtype)
    return Case(operator, (normal(tokens, width, dtype=dtype),), reference, gradient_alone, gradient_alone)


def turned(x_bsnd: Tensor, positions_bs: Tensor, base: float) -> Tensor:
    """Rotary embedding by its formula: dimension i turns with i + d/2."""
    half = x_bsnd.shape[-1] // 2
    angle = positions_bs[..., None, None] * base ** (-torch.arange(half, dtype=torch.float64) / half)
    low, high = x_bsnd.split(half, dim=-1)
    return torch.cat((low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()), dim=-1)


def attention_by_scores(
    qkv_bsX: Tensor, heads: int, kv_heads: int, base: float | None, mask_bss: Tensor, positions_bs: Tensor
) -> Tensor:
    """o_bsQ: every score of the whole sample, softmax, weighted values; b samples, s tokens, Q widths."""
    q, k, v = qkv_bsX.unflatten(-1, (heads + 2 * kv_heads, -1)).split((heads, kv_heads, kv_heads), dim=2)
    if base is not None:
        q, k = turned(q, positions_bs, base), turned(k, positions_bs, base)
    k, v = (x.repeat_interleave(heads // kv_heads, dim=2) for x in (k, v))
    scores = torch.einsum("bsnd,brnd->bnsr", q, k) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~mask_bss[:, None], -torch.inf)
    return torch.einsum("bnsr,brnd->bsnd", scores.softmax(-1), v).flatten(2)


CASES: tuple[Callable[[int, int, torch.dtype], Case], ...]
CASES = (rms_norm, head_norm, layer_norm, linear, swiglu, gelu, residual, token_embedding, position_embedding)
