"""The linear map, with one matrix product forward and one for each gradient; and the residual connection.

Column-parallel and row-parallel maps are `Linear` with fewer outputs or fewer inputs. The bias of a
row-parallel map is added after the reduction, by `Residual`.

Legend: T tokens, t tokens of this rank, I input features, O output features (I or O may be a share), D
hidden.
"""

from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from braid.kernels.operators.accumulation import accumulate_product, accumulate_sum
from braid.kernels.operators.dropout import dropped
from braid.kernels.operators.operator import ComputeOperator, Home

ALL = slice(None)


class Linear(ComputeOperator):
    """Linear map y = x weightᵀ (+ bias), with weight_OI and bias_O."""

    def __init__(self, *, inputs: int, outputs: int, bias: bool, **home: Unpack[Home]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, **home))
        self.bias = nn.Parameter(torch.empty(outputs, **home)) if bias else None

    def forward(self, x_TI: Tensor, *, inputs: slice = ALL, outputs: slice = ALL) -> tuple[Tensor]:
        """Return y_TO. ``inputs``: range of input features whose columns x has, so that y is a term of a sum;
        the first range adds the bias. ``outputs``: range of output features that y gets."""
        bias: Tensor | None = None if inputs.start else self.bias
        if bias is not None and outputs is not ALL:
            bias = bias[outputs]
        return (F.linear(x_TI, self._weight(outputs, inputs), bias),)

    def input_gradient(self, dy_TO: Tensor, *, inputs: slice = ALL, outputs: slice = ALL) -> tuple[Tensor]:
        """Return dx_TI; under column parallelism, or if dy has only the columns of some ``outputs``, dx is a
        term of a sum. ``inputs``: range of input features that dx gets."""
        return (dy_TO @ self._weight(outputs, inputs),)

    def _weight(self, outputs: slice, inputs: slice) -> Tensor:
        """Return the selected part of the weight, or the weight itself, which saves making a view."""
        return self.weight if outputs is ALL and inputs is ALL else self.weight[outputs, inputs]

    def weight_gradient(self, dy_TO: Tensor, x_TI: Tensor) -> None:
        """Accumulate dyᵀ x, and the sum of dy over the tokens if there is a bias."""
        accumulate_product(self.gradients["weight"], dy_TO, x_TI)
        if self.bias is not None:
            accumulate_sum(self.gradients["bias"], dy_TO)


class Residual(ComputeOperator):
    """Residual connection y = x + branch (+ bias_D).

    If ``token_numbers_t`` are given, branch and bias are subject to dropout at the rate ``dropout``, by the
    same mask in both directions (`braid.kernels.operators.dropout`).
    """

    def __init__(self, *, hidden: int, bias: bool, dropout: float = 0.0, **home: Unpack[Home]) -> None:
        super().__init__()
        self.rate = dropout
        self.bias = nn.Parameter(torch.empty(hidden, **home)) if bias else None

    def forward(
        self, branch_tD: Tensor, x_tD: Tensor, token_numbers_t: Tensor | None = None
    ) -> tuple[Tensor]:
        """Return y_tD, the sum of both inputs (and the bias)."""
        if token_numbers_t is None:
            y_tD = x_tD + branch_tD
            return (y_tD if self.bias is None else y_tD.add_(self.bias),)
        branch_tD = branch_tD if self.bias is None else branch_tD + self.bias
        return (self._dropped(branch_tD, token_numbers_t).add_(x_tD),)

    def input_gradient(self, dy_tD: Tensor, token_numbers_t: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the gradients of branch and x. Without dropout both are dy itself, without a copy."""
        return self._dropped(dy_tD, token_numbers_t), dy_tD

    def weight_gradient(self, dy_tD: Tensor, token_numbers_t: Tensor | None = None) -> None:
        """Accumulate the bias's gradient; must not be called without a bias."""
        assert self.bias is not None, "a residual connection without bias has no weight gradient"
        accumulate_sum(self.gradients["bias"], self._dropped(dy_tD, token_numbers_t))

    def _dropped(self, x_tD: Tensor, token_numbers_t: Tensor | None) -> Tensor:
        return x_tD if token_numbers_t is None else dropped(x_tD, token_numbers_t, self.site, self.rate)
