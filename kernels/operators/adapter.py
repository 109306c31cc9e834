"""A linear map with a frozen matrix and low-rank adapters (LoRA, Hu et al. 2021), which alone are trained.

Legend: T tokens, I input features, O output features (I or O may be a share), R rank x number of adapters.
"""

from collections.abc import Iterator, Sequence
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from braid.kernels.operators.accumulation import accumulate_product
from braid.kernels.operators.linear import ALL, Linear
from braid.kernels.operators.operator import Home


class AdaptedLinear(Linear):
    """Linear map y = x weightᵀ (+ bias) + scale (x aᵀ) bᵀ; weight and bias are frozen.

    Several matrices may lie in one weight, one below the other (queries, keys and values): each has factors
    of its own. ``a`` (R x I) holds their first factors, one below the other, and ``b`` their second factors.
    """

    def __init__(
        self,
        *,
        inputs: int,
        outputs: int,
        bias: bool,
        adapted: Sequence[range],
        rank: int,
        scale: float,
        **home: Unpack[Home],
    ) -> None:
        """``adapted``: ranges of output features that have adapters, in ascending order."""
        super().__init__(inputs=inputs, outputs=outputs, bias=bias, **home)
        self.a = nn.Parameter(torch.empty(rank * len(adapted), inputs, **home))
        self.b = nn.Parameter(torch.empty(sum(map(len, adapted)), rank, **home))
        self._adapted, self._rank, self._scale = tuple(adapted), rank, scale

    def forward(self, x_TI: Tensor, *, inputs: slice = ALL, outputs: slice = ALL) -> tuple[Tensor]:
        """Return y_TO. If x has only the columns of a range of ``inputs``, y is a term of a sum: also its
        part that comes from the adapters."""
        (y_TO,) = super().forward(x_TI, inputs=inputs, outputs=outputs)
        h_TR = F.linear(x_TI, self.a[:, inputs])
        for columns, inner, factor in self._adapters(outputs):
            y_TO[:, columns].addmm_(h_TR[:, inner], self.b[factor].t(), alpha=self._scale)
        return (y_TO,)

    def input_gradient(self, dy_TO: Tensor, *, inputs: slice = ALL, outputs: slice = ALL) -> tuple[Tensor]:
        """Return dx_TI, which like that of `Linear` may be a term of a sum."""
        (dx_TI,) = super().input_gradient(dy_TO, inputs=inputs, outputs=outputs)
        return (dx_TI.addmm_(self._inner_gradient(dy_TO, outputs), self.a[:, inputs]),)

    def weight_gradient(self, dy_TO: Tensor, x_TI: Tensor) -> None:
        """Accumulate the gradients of both factors; x aᵀ is computed again."""
        h_TR = F.linear(x_TI, self.a).mul_(self._scale)
        for columns, inner, factor in self._adapters(ALL):
            accumulate_product(self.gradients["b"][factor], dy_TO[:, columns], h_TR[:, inner])
        accumulate_product(self.gradients["a"], self._inner_gradient(dy_TO, ALL), x_TI)

    def _inner_gradient(self, dy_TO: Tensor, outputs: slice) -> Tensor:
        """Return the gradient of x aᵀ, from the columns ``outputs`` of y's gradient."""
        d_TR = dy_TO.new_zeros(dy_TO.shape[0], len(self.a))
        for columns, inner, factor in self._adapters(outputs):
            d_TR[:, inner] = (dy_TO[:, columns] @ self.b[factor]).mul_(self._scale)
        return d_TR

    def _adapters(self, outputs: slice) -> Iterator[tuple[slice, slice, slice]]:
        """Yield for every adapter of some ``outputs``: its columns in y (which has these outputs), its
        columns in x aᵀ, and its rows in ``b``."""
        low, high, _ = outputs.indices(len(self.weight))
        row = 0
        for number, adapted in enumerate(self._adapted):
            first, last = max(low, adapted.start), min(high, adapted.stop)
            if first < last:
                begin = row + first - adapted.start
                inner = slice(number * self._rank, (number + 1) * self._rank)
                yield slice(first - low, last - low), inner, slice(begin, begin + last - first)
            row += len(adapted)
