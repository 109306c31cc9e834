"""The linear map: one GEMM forward, one for each gradient.

Legend: T tokens, I input features, O output features (either of them may be this rank's share).

Column-parallel and row-parallel maps are this operator with fewer outputs or fewer inputs. The bias of a
row-parallel map is added after the reduction, by `braid.kernels.operators.residual.Residual`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from braid.kernels.operators.accumulation import accumulate_product, accumulate_sum, way_to_accumulate
from braid.kernels.operators.operator import ComputeOperator, empty_parameter

ALL = slice(None)
"""Columns, where it is not said which."""


class Linear(ComputeOperator):
    """y = x weightᵀ (+ bias), with weight_OI and bias_O."""

    bias: nn.Parameter | None

    def __init__(
        self,
        *,
        inputs: int,
        outputs: int,
        bias: bool,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(outputs, inputs, device=device, dtype=dtype)
        self.bias = empty_parameter(outputs, device=device, dtype=dtype) if bias else None
        if self.weight.dtype.itemsize < torch.float32.itemsize:  # asked now: in a step it would stall
            way_to_accumulate(self.weight.device.type, self.weight.dtype, torch.float32)

    def forward(self, x_TI: Tensor, *, inputs: slice = ALL, outputs: slice = ALL) -> tuple[Tensor]:
        """Return y_TO. ``inputs``: of which x has the columns, so that y is a part of the sum; with the first
        of them comes the bias. ``outputs``: of which y has the columns."""
        bias: Tensor | None = None if inputs.start else self.bias
        if bias is not None and outputs is not ALL:
            bias = bias[outputs]
        return (F.linear(x_TI, self._weight(outputs, inputs), bias),)

    def input_gradient(self, dy_TO: Tensor, *, inputs: slice = ALL, outputs: slice = ALL) -> tuple[Tensor]:
        """Return dx_TI; under column parallelism it is a partial sum over the ranks.

        ``outputs``: of which dy has the columns, so that dx is a part of the sum. ``inputs``: of which dx has
        the columns.
        """
        return (dy_TO @ self._weight(outputs, inputs),)

    def _weight(self, outputs: slice, inputs: slice) -> Tensor:
        """Of these; for all of both the weight itself, which costs no view."""
        return self.weight if outputs is ALL and inputs is ALL else self.weight[outputs, inputs]

    def weight_gradient(self, dy_TO: Tensor, x_TI: Tensor) -> None:
        """Accumulate dyᵀ x, and the sum of dy over the tokens if there is a bias."""
        accumulate_product(self.gradients["weight"], dy_TO, x_TI)
        if self.bias is not None:
            accumulate_sum(self.gradients["bias"], dy_TO)
