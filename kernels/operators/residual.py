"""The residual connection, with the bias of the row-parallel map before it.

Legend: t this rank's tokens, D hidden.
"""

import torch
from torch import Tensor, nn

from braid.kernels.operators.accumulation import accumulate_sum
from braid.kernels.operators.operator import ComputeOperator, empty_parameter


class Residual(ComputeOperator):
    """y = x + branch (+ bias_D)."""

    bias: nn.Parameter | None

    def __init__(
        self,
        *,
        hidden: int,
        bias: bool,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.bias = empty_parameter(hidden, device=device, dtype=dtype) if bias else None

    def forward(self, branch_tD: Tensor, x_tD: Tensor) -> tuple[Tensor]:
        """Return y_tD."""
        y_tD = x_tD + branch_tD
        return (y_tD if self.bias is None else y_tD.add_(self.bias),)

    def input_gradient(self, dy_tD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of branch and x: dy itself, twice, without a copy."""
        return dy_tD, dy_tD

    def weight_gradient(self, dy_tD: Tensor) -> None:
        """Accumulate the bias's gradient; only an operator with a bias has one."""
        assert self.bias is not None, "a residual connection without bias has no weight gradient"
        accumulate_sum(self.gradients["bias"], dy_tD)
