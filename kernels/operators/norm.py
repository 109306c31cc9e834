"""Normalisation over the hidden dim. RMSNorm: Zhang and Sennrich 2019; LayerNorm: Ba et al. 2016.

Legend: t this rank's tokens, D hidden, 1 and 2 statistics per token.

Statistics are at least fp32, whatever the dtype of the activations. Both gradients run on the kernels of
torch's native layer norm, which read each operand once.
"""

import torch
from torch import Tensor

from braid.kernels.operators.operator import ComputeOperator, empty_parameter

_native_layer_norm = torch.ops.aten.native_layer_norm.default
_native_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default


def _for_kernel(parameter: Tensor, x_tD: Tensor) -> Tensor:
    """The parameter in the dtype with which torch's layer-norm kernels keep fp32 statistics.

    Beside 16-bit activations the CPU kernels do so only if the parameters are fp32; CUDA's always do, and
    want parameters of the activations' dtype.
    """
    half = x_tD.dtype in (torch.bfloat16, torch.float16)
    return parameter.float() if half and x_tD.device.type == "cpu" else parameter


class RMSNorm(ComputeOperator):
    """y = x / sqrt(mean(x²) + eps) * weight."""

    def __init__(
        self, *, hidden: int, eps: float, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.hidden, self.eps = hidden, eps
        self.weight = empty_parameter(hidden, device=device, dtype=dtype)

    def forward(self, x_tD: Tensor) -> tuple[Tensor, Tensor]:
        """Return y_tD and rstd_t1, the reciprocal root mean square (fp32, or float64 if x is)."""
        wide = torch.promote_types(x_tD.dtype, torch.float32)
        norm_t1 = torch.linalg.vector_norm(x_tD, dim=-1, keepdim=True, dtype=wide)
        rstd_t1 = norm_t1.square_().div_(self.hidden).add_(self.eps).rsqrt_()
        y_tD = torch.mul(x_tD, rstd_t1, out=torch.empty_like(x_tD))
        return y_tD.mul_(self.weight), rstd_t1

    def input_gradient(
        self, dy_tD: Tensor, x_tD: Tensor, rstd_t1: Tensor, d_skip_tD: Tensor | None = None
    ) -> tuple[Tensor]:
        """Return dx_tD, plus ``d_skip_tD`` if given (the gradient that reaches x around the norm).

        Layer norm with mean 0 has RMSNorm's gradient minus rstd * mean(dy * weight), which is added back.
        """
        dx_tD = self._layer_norm_backward(dy_tD, x_tD, rstd_t1, 0)
        dx_tD.add_(torch.mv(dy_tD, self.weight).div_(self.hidden).unsqueeze(-1) * rstd_t1)
        return (dx_tD if d_skip_tD is None else dx_tD.add_(d_skip_tD),)

    def weight_gradient(
        self, dy_tD: Tensor, x_tD: Tensor, rstd_t1: Tensor, d_skip_tD: Tensor | None = None
    ) -> None:
        """Accumulate the sum over tokens of dy * x * rstd; takes what ``input_gradient`` takes."""
        self.gradients["weight"].add_(self._layer_norm_backward(dy_tD, x_tD, rstd_t1, 1))

    def _layer_norm_backward(self, dy_tD: Tensor, x_tD: Tensor, rstd_t1: Tensor, wanted: int) -> Tensor:
        """Gradient number ``wanted`` (0 input, 1 weight) of a layer norm whose means are all 0."""
        mean_t1 = torch.zeros_like(rstd_t1)
        weight_D = _for_kernel(self.weight, x_tD)
        mask = [wanted == 0, wanted == 1, False]
        gradients: tuple[Tensor, ...] = _native_layer_norm_backward(
            dy_tD, x_tD, [self.hidden], mean_t1, rstd_t1, weight_D, None, mask
        )
        return gradients[wanted]


class LayerNorm(ComputeOperator):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias."""

    def __init__(
        self, *, hidden: int, eps: float, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.hidden, self.eps = hidden, eps
        self.weight = empty_parameter(hidden, device=device, dtype=dtype)
        self.bias = empty_parameter(hidden, device=device, dtype=dtype)

    def forward(self, x_tD: Tensor) -> tuple[Tensor, Tensor]:
        """Return y_tD and statistics_t2: mean and reciprocal standard deviation (fp32, or float64 if x is).

        The statistics are stored column by column, so that the backward kernels take them without a copy.
        """
        weight_D, bias_D = _for_kernel(self.weight, x_tD), _for_kernel(self.bias, x_tD)
        y_tD, mean_t1, rstd_t1 = _native_layer_norm(x_tD, [self.hidden], weight_D, bias_D, self.eps)
        return y_tD, torch.stack((mean_t1.view(-1), rstd_t1.view(-1))).t()

    def input_gradient(
        self, dy_tD: Tensor, x_tD: Tensor, statistics_t2: Tensor, d_skip_tD: Tensor | None = None
    ) -> tuple[Tensor]:
        """Return dx_tD, plus ``d_skip_tD`` if given (the gradient that reaches x around the norm)."""
        dx_tD, _, _ = self._backward(dy_tD, x_tD, statistics_t2, [True, False, False])
        return (dx_tD if d_skip_tD is None else dx_tD.add_(d_skip_tD),)

    def weight_gradient(
        self, dy_tD: Tensor, x_tD: Tensor, statistics_t2: Tensor, d_skip_tD: Tensor | None = None
    ) -> None:
        """Accumulate the gradients of weight and bias; takes what ``input_gradient`` takes."""
        _, d_weight_D, d_bias_D = self._backward(dy_tD, x_tD, statistics_t2, [False, True, True])
        self.gradients["weight"].add_(d_weight_D)
        self.gradients["bias"].add_(d_bias_D)

    def _backward(
        self, dy_tD: Tensor, x_tD: Tensor, statistics_t2: Tensor, mask: list[bool]
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean_t1, rstd_t1 = (column.contiguous().unsqueeze(-1) for column in statistics_t2.unbind(1))
        weight_D, bias_D = _for_kernel(self.weight, x_tD), _for_kernel(self.bias, x_tD)
        gradients: tuple[Tensor, Tensor, Tensor] = _native_layer_norm_backward(
            dy_tD, x_tD, [self.hidden], mean_t1, rstd_t1, weight_D, bias_D, mask
        )
        return gradients
