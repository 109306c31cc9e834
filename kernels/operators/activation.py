"""Activations of the feed-forward block. SwiGLU: Shazeer 2020; GELU: Hendrycks and Gimpel 2016.

Legend: T tokens, F local feed-forward width, 2F gate and up side by side.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from braid.kernels.operators.operator import ComputeOperator

_silu_into = torch.ops.aten.silu.out
_silu_backward_into = torch.ops.aten.silu_backward.grad_input
_gelu_backward = torch.ops.aten.gelu_backward.default


class SwiGLU(ComputeOperator):
    """SwiGLU: a = silu(gate) * up."""

    def forward(self, gu_T2F: Tensor) -> tuple[Tensor]:
        """Return a_TF; the first F columns of gu are the gate, the last F columns are up."""
        gate_TF, up_TF = gu_T2F.chunk(2, dim=-1)
        return (F.silu(gate_TF).mul_(up_TF),)

    def input_gradient(self, d_a_TF: Tensor, gu_T2F: Tensor) -> tuple[Tensor]:
        """Return d_gu_T2F; the half that is written last serves as scratch memory for the first half."""
        gate_TF, up_TF = gu_T2F.chunk(2, dim=-1)
        d_gu_T2F = torch.empty_like(gu_T2F)
        d_gate_TF, d_up_TF = d_gu_T2F.chunk(2, dim=-1)
        torch.mul(d_a_TF, up_TF, out=d_up_TF)
        _silu_backward_into(d_up_TF, gate_TF, grad_input=d_gate_TF)
        _silu_into(gate_TF, out=d_up_TF).mul_(d_a_TF)
        return (d_gu_T2F,)


class GELU(ComputeOperator):
    """The activation GELU, in its tanh approximation."""

    def forward(self, h_TF: Tensor) -> tuple[Tensor]:
        """Return a_TF, the activation of h."""
        return (F.gelu(h_TF, approximate="tanh"),)

    def input_gradient(self, d_a_TF: Tensor, h_TF: Tensor) -> tuple[Tensor]:
        """Return d_h_TF, the gradient of h."""
        return (_gelu_backward(d_a_TF, h_TF, approximate="tanh"),)
