"""The linear map: one GEMM forward, one for each gradient; and the residual connection.

Column-parallel and row-parallel maps are `Linear` with fewer outputs or fewer inputs. The bias of a
row-parallel map is added after the reduction, by `Residual`.

Legend: T tokens, t this rank's, I input features, O output features (either may be a share), D hidden.
"""

from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from braid.kernels.operators.accumulation import accumulate_product, accumulate_sum, prepare_to_accumulate
from braid.kernels.operators.operator import ComputeOperator, Home

ALL = slice(None)
"""Columns, where it is not said which."""


class Linear(ComputeOperator):
    """y = x weightᵀ (+ bias), with weight_OI and bias_O."""

    def __init__(self, *, inputs: int, outputs: int, bias: bool, **home: Unpack[Home]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, **home))
        self.bias = nn.Parameter(torch.empty(outputs, **home)) if bias else None
        prepare_to_accumulate(self.weight)

    def forward(self, x_TI: Tensor, *, inputs: slice = ALL, outputs: slice = ALL) -> tuple[Tensor]:
        """Return y_TO. ``inputs``: of which x has the columns, so that y is a part of the sum; with the first
        of them comes the bias. ``outputs``: of which y has the columns."""
        bias: Tensor | None = None if inputs.start else self.bias
        if bias is not None and outputs is not ALL:
            bias = bias[outputs]
        return (F.linear(x_TI, self._weight(outputs, inputs), bias),)

    def input_gradient(self, dy_TO: Tensor, *, inputs: slice = ALL, outputs: slice = ALL) -> tuple[Tensor]:
        """Return dx_TI; under column parallelism it is a partial sum over the ranks, and a part of the sum
        where dy has the columns of some ``outputs`` only. ``inputs``: of which dx has the columns."""
        return (dy_TO @ self._weight(outputs, inputs),)

    def _weight(self, outputs: slice, inputs: slice) -> Tensor:
        """Some of it, or itself, which costs no view."""
        return self.weight if outputs is ALL and inputs is ALL else self.weight[outputs, inputs]

    def weight_gradient(self, dy_TO: Tensor, x_TI: Tensor) -> None:
        """Accumulate dyᵀ x, and the sum of dy over the tokens if there is a bias."""
        accumulate_product(self.gradients["weight"], dy_TO, x_TI)
        if self.bias is not None:
            accumulate_sum(self.gradients["bias"], dy_TO)


class Residual(ComputeOperator):
    """y = x + branch (+ bias_D)."""

    def __init__(self, *, hidden: int, bias: bool, **home: Unpack[Home]) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(hidden, **home)) if bias else None

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
