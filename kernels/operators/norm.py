"""Normalisation: RMSNorm (Zhang and Sennrich 2019), also per head, and LayerNorm (Ba et al. 2016).

Statistics are at least fp32, whatever the dtype of the activations. Gradients over the hidden dim use the
kernels of torch's native layer norm, which read each operand once.

Legend: t tokens of this rank, D hidden, S statistics of a token. For heads: T tokens, C columns of q, k, v on
a rank, head by head; n query heads and key heads together, d the dimension of a head.
"""

from typing import Unpack

import torch
from torch import Tensor, nn

from braid.kernels.operators.operator import ComputeOperator, Home, wide

_native_layer_norm = torch.ops.aten.native_layer_norm.default
_native_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default


def _for_kernel(parameter: Tensor, x_tD: Tensor) -> Tensor:
    """Return the parameter in the dtype for which torch's layer-norm kernels keep fp32 statistics.

    With 16-bit activations the CPU kernels keep them only if parameters are fp32; CUDA's kernels always do,
    and need parameters of the activations' dtype.
    """
    half = x_tD.dtype in (torch.bfloat16, torch.float16)
    return parameter.float() if half and x_tD.device.type == "cpu" else parameter


class Norm(ComputeOperator):
    """Base of `RMSNorm` and `LayerNorm`. Gradients take dy, x, the statistics, and optionally ``d_skip``, the
    gradient that reaches x through the residual connection around the norm."""

    centred = False
    """Whether the mean is subtracted and a bias is added."""

    def __init__(self, *, hidden: int, eps: float, **home: Unpack[Home]) -> None:
        super().__init__()
        self.hidden, self.eps = hidden, eps
        self.weight = nn.Parameter(torch.empty(hidden, **home))
        self.bias = nn.Parameter(torch.empty(hidden, **home)) if self.centred else None

    def input_gradient(
        self, dy_tD: Tensor, x_tD: Tensor, statistics_tS: Tensor, d_skip_tD: Tensor | None = None
    ) -> tuple[Tensor]:
        """Return dx_tD, plus ``d_skip_tD`` if given."""
        dx_tD = self._backward(dy_tD, x_tD, statistics_tS, [True, False, False])[0]
        if not self.centred:
            # Layer norm with mean 0 has RMSNorm's gradient minus rstd * mean(dy * weight).
            dx_tD.add_(torch.mv(dy_tD, self.weight).div_(self.hidden).unsqueeze(-1) * statistics_tS)
        return (dx_tD if d_skip_tD is None else dx_tD.add_(d_skip_tD),)

    def weight_gradient(
        self, dy_tD: Tensor, x_tD: Tensor, statistics_tS: Tensor, d_skip_tD: Tensor | None = None
    ) -> None:
        """Accumulate the sums over tokens of dy * normalised x, and of dy if there is a bias."""
        _, *found = self._backward(dy_tD, x_tD, statistics_tS, [False, True, self.centred])
        for name, d_D in zip(("weight", "bias"), found[: 1 + self.centred], strict=False):
            self.gradients[name].add_(d_D)

    def _backward(
        self, dy_tD: Tensor, x_tD: Tensor, statistics_tS: Tensor, mask: list[bool]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a layer norm's gradients of input, weight and bias, computed where ``mask`` is True."""
        if self.centred:
            mean_t1, rstd_t1 = (column.contiguous().unsqueeze(-1) for column in statistics_tS.unbind(1))
        else:
            mean_t1, rstd_t1 = torch.zeros_like(statistics_tS), statistics_tS
        weight_D = _for_kernel(self.weight, x_tD)
        bias_D = None if self.bias is None else _for_kernel(self.bias, x_tD)
        gradients: tuple[Tensor, Tensor, Tensor] = _native_layer_norm_backward(
            dy_tD, x_tD, [self.hidden], mean_t1, rstd_t1, weight_D, bias_D, mask
        )
        return gradients


class RMSNorm(Norm):
    """Computes y = x / sqrt(mean(x²) + eps) * weight."""

    def forward(self, x_tD: Tensor) -> tuple[Tensor, Tensor]:
        """Return y_tD and rstd_t1, the reciprocal root mean square (fp32, or float64 if x is)."""
        norm_t1 = torch.linalg.vector_norm(x_tD, dim=-1, keepdim=True, dtype=wide(x_tD.dtype))
        rstd_t1 = norm_t1.square_().div_(self.hidden).add_(self.eps).rsqrt_()
        y_tD = torch.mul(x_tD, rstd_t1, out=torch.empty_like(x_tD))
        return y_tD.mul_(self.weight), rstd_t1


class LayerNorm(Norm):
    """Computes y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias."""

    centred = True

    def forward(self, x_tD: Tensor) -> tuple[Tensor, Tensor]:
        """Return y_tD and statistics_t2: mean and reciprocal standard deviation (fp32, or float64 if x is).

        The statistics are stored column by column, so that the backward kernels read them without a copy.
        """
        assert self.bias is not None
        weight_D, bias_D = _for_kernel(self.weight, x_tD), _for_kernel(self.bias, x_tD)
        y_tD, mean_t1, rstd_t1 = _native_layer_norm(x_tD, [self.hidden], weight_D, bias_D, self.eps)
        return y_tD, torch.stack((mean_t1.view(-1), rstd_t1.view(-1))).t()


class HeadNorm(ComputeOperator):
    """Computes x / sqrt(mean(x²) + eps) * weight for each head of q and k; q and k have different weights.

    The norm precedes rotary embedding (Henry et al. 2020, as in Qwen3). Values are copied unchanged. All
    arithmetic of the gradients is at least fp32.
    """

    def __init__(self, *, heads: int, kv_heads: int, head_dim: int, eps: float, **home: Unpack[Home]) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.eps = heads, kv_heads, head_dim, eps
        self.q_weight, self.k_weight = (nn.Parameter(torch.empty(head_dim, **home)) for _ in range(2))

    def forward(self, qkv_TC: Tensor) -> tuple[Tensor, Tensor]:
        """Return y_TC and rstd_Tn, the reciprocal root mean squares (fp32, or float64 if qkv is)."""
        x_Tnd, v = self._parts(qkv_TC)
        y_TC = torch.empty_like(qkv_TC)
        y_Tnd, v_out = self._parts(y_TC)
        norm_Tn = torch.linalg.vector_norm(x_Tnd, dim=-1, dtype=wide(qkv_TC.dtype))
        rstd_Tn = norm_Tn.square_().div_(self.head_dim).add_(self.eps).rsqrt_()
        torch.mul(x_Tnd, rstd_Tn.unsqueeze(-1), out=y_Tnd)
        y_Tnd.mul_(self._weights_nd())
        v_out.copy_(v)
        return y_TC, rstd_Tn

    def input_gradient(self, dy_TC: Tensor, qkv_TC: Tensor, rstd_Tn: Tensor) -> tuple[Tensor]:
        """Return d_qkv_TC: rstd * (w dy - x rstd * mean(w dy x rstd)) for a head of q or k with weight w."""
        dy_Tnd, d_v = self._parts(dy_TC)
        d_qkv_TC = torch.empty_like(dy_TC)
        dx_Tnd, v_out = self._parts(d_qkv_TC)
        normed_Tnd = self._normed(qkv_TC, rstd_Tn)
        scaled_Tnd = dy_Tnd * self._weights_nd().to(rstd_Tn.dtype)
        mean_Tn1 = (scaled_Tnd * normed_Tnd).mean(-1, keepdim=True)
        torch.mul(scaled_Tnd.sub_(normed_Tnd.mul_(mean_Tn1)), rstd_Tn.unsqueeze(-1), out=dx_Tnd)
        v_out.copy_(d_v)
        return (d_qkv_TC,)

    def weight_gradient(self, dy_TC: Tensor, qkv_TC: Tensor, rstd_Tn: Tensor) -> None:
        """Accumulate the sums over tokens and heads of dy * x * rstd; arguments as in `input_gradient`."""
        dy_Tnd, _ = self._parts(dy_TC)
        sums_nd = self._normed(qkv_TC, rstd_Tn).mul_(dy_Tnd).sum(0)
        self.gradients["q_weight"].add_(sums_nd[: self.heads].sum(0))
        self.gradients["k_weight"].add_(sums_nd[self.heads :].sum(0))

    def _normed(self, qkv_TC: Tensor, rstd_Tn: Tensor) -> Tensor:
        """Return queries and keys divided by their root mean squares, in the statistics' dtype."""
        return self._parts(qkv_TC)[0] * rstd_Tn.unsqueeze(-1)

    def _weights_nd(self) -> Tensor:
        return torch.cat((self.q_weight.expand(self.heads, -1), self.k_weight.expand(self.kv_heads, -1)))

    def _parts(self, columns_TC: Tensor) -> tuple[Tensor, Tensor]:
        """Return two views: the heads that are normalised, T x n x d, and the columns of the values."""
        normed = (self.heads + self.kv_heads) * self.head_dim
        first, values = columns_TC[:, :normed], columns_TC[:, normed:]
        return first.unflatten(1, (-1, self.head_dim)), values
