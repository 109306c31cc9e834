"""The linear maps of a rank's experts; each expert maps its own rows.

On GPUs in bf16, one grouped product maps all experts' rows, and one computes their input gradient. Otherwise,
and for weight gradients, which are summed in fp32, there is one product per expert.

Legend: E local experts, n rows in the order of the experts, I input features, O output features (I or O may
be this rank's share).
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm

from braid.kernels.operators.accumulation import accumulate_product
from braid.kernels.operators.operator import ComputeOperator, Home


class GroupedLinear(ComputeOperator):
    """Computes y = x weight[e]ᵀ for the rows of expert e, with weight_EOI.

    ``sizes`` of every method: number of rows of each expert; ValueError if they do not add up to x's rows.
    """

    def __init__(self, *, experts: int, inputs: int, outputs: int, **home: Unpack[Home]) -> None:
        super().__init__()
        self.experts = experts
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs, **home))
        self._told: tuple[list[int], Tensor] | None = None
        """The sizes of the last call, and the index at which each expert's rows end, both on the host."""

    def forward(self, x_nI: Tensor, sizes: Sequence[int] | Tensor) -> tuple[Tensor]:
        if self._at_once(x_nI):
            return (grouped_mm(x_nI, self.weight.transpose(1, 2), offs=self._ends(x_nI, sizes)),)
        y_nO = x_nI.new_empty(x_nI.shape[0], self.weight.shape[1])
        for expert, rows in self._segments(x_nI, sizes):
            torch.mm(x_nI[rows], self.weight[expert].t(), out=y_nO[rows])
        return (y_nO,)

    def input_gradient(self, dy_nO: Tensor, sizes: Sequence[int] | Tensor) -> tuple[Tensor]:
        """Return dx_nI; if this rank has a share of the outputs, dx is a term of a sum over ranks."""
        if self._at_once(dy_nO):
            return (grouped_mm(dy_nO, self.weight, offs=self._ends(dy_nO, sizes)),)
        dx_nI = dy_nO.new_empty(dy_nO.shape[0], self.weight.shape[2])
        for expert, rows in self._segments(dy_nO, sizes):
            torch.mm(dy_nO[rows], self.weight[expert], out=dx_nI[rows])
        return (dx_nI,)

    def weight_gradient(self, dy_nO: Tensor, x_nI: Tensor, sizes: Sequence[int] | Tensor) -> None:
        """Accumulate dyᵀ x of every expert's rows; experts without rows keep their sums of gradients."""
        for expert, rows in self._segments(dy_nO, sizes):
            accumulate_product(self.gradients["weight"][expert], dy_nO[rows], x_nI[rows])

    def _at_once(self, x: Tensor) -> bool:
        """Return whether one kernel can multiply the rows of all experts: torch has such a kernel for bf16,
        row sizes that are multiples of 16 bytes, and Hopper and Blackwell; elsewhere torch would copy the
        ends to the host."""
        if not x.is_cuda or x.dtype != torch.bfloat16 or not x.shape[0]:
            return False
        if torch.cuda.get_device_capability(x.device)[0] not in (9, 10):
            return False
        whole = all(count % 8 == 0 for count in (x.stride(0), *self.weight.shape[1:]))
        return whole and x.data_ptr() % 16 == self.weight.data_ptr() % 16 == 0

    def _ends(self, x: Tensor, sizes: Sequence[int] | Tensor) -> Tensor:
        """Return the index at which each expert's rows end, on the device of x.

        The ends are copied on the stream that reads them, from pinned memory, so the host does not wait. The
        pinned memory is kept while sizes stay the same (with a capacity), since every replay of a captured
        step copies from it again.
        """
        rows_E = self._checked(x, sizes)
        if self._told is None or self._told[0] != rows_E:
            ends = torch.tensor(list(accumulate(rows_E)), dtype=torch.int32, pin_memory=x.is_cuda)
            self._told = rows_E, ends
        return self._told[1].to(x.device, non_blocking=True)

    def _segments(self, x: Tensor, sizes: Sequence[int] | Tensor) -> Iterator[tuple[int, slice]]:
        """Yield the number and the rows of every expert that has rows."""
        end = 0
        for expert, size in enumerate(self._checked(x, sizes)):
            first, end = end, end + size
            if size:
                yield expert, slice(first, end)

    def _checked(self, x: Tensor, sizes: Sequence[int] | Tensor) -> list[int]:
        """Return the sizes as numbers; raise ValueError unless they divide x's rows."""
        numbers = [int(size) for size in (sizes.tolist() if isinstance(sizes, Tensor) else sizes)]
        if len(numbers) != self.experts or min(numbers) < 0 or sum(numbers) != x.shape[0]:
            raise ValueError(f"sizes={numbers} are not the {x.shape[0]} rows of experts={self.experts}")
        return numbers
