"""Defines compute operators: `torch.nn.Module`s between two points of communication.

A layer is a graph of operators (`braid.scheduling.model.operators`). The executor knows nothing about what an
operator computes: it calls one of the three methods below with the values that the operator reads according
to the graph, in that order, and stores the results under the names that the graph gives them.

    forward         graph values read              -> tuple of graph values written
    input_gradient  gradients and saved values     -> tuple of gradients
    weight_gradient gradients and saved values     -> None; adds to `ComputeOperator.gradients`

None of the three runs under autograd: the executor calls them under `torch.no_grad` (not
`torch.inference_mode`, under which no local graph can be recorded). An operator that is easier to write with
autograd derives from, or wraps its module in, `braid.kernels.operators.autograd.AutogradOperator`.

Operators do not modify their inputs, unless their docstring says so. A method that an operator does not need
(``weight_gradient`` without parameters) is not in its graph, and raises if it is called.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, TypedDict

import torch
from torch import Tensor, nn


class Saved(ABC):
    """An output of an operator that is not a tensor, saved for its gradients and opaque to the executor."""

    @abstractmethod
    def tensors(self) -> Iterable[Tensor]:
        """Return the tensors that this value keeps alive, for accounts of memory."""


class Home(TypedDict, total=False):
    """Device and dtype of new parameters; torch's defaults where a key is missing."""

    device: torch.device | None
    dtype: torch.dtype | None


class ComputeOperator(nn.Module):
    """Base of all compute operators; see the module's docstring for the contract."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: dict[str, Tensor] = {}
        """Sums of gradients by parameter, perhaps of a wider dtype; set by the training code."""
        self.site = 0
        """Number of the operator's place in the model, which selects its random numbers."""

    def forward(self, *values: Any, **optional: Any) -> tuple[Any, ...]:
        """Return the values that the graph passes on, then the values that it saves."""
        raise NotImplementedError

    def input_gradient(self, *values: Any, **optional: Any) -> tuple[Any, ...]:
        """Return the gradients of the inputs, given the gradients of the outputs."""
        raise NotImplementedError

    def weight_gradient(self, *values: Any, **optional: Any) -> None:
        """Add the gradients of the parameters to ``gradients``."""
        raise NotImplementedError


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and statistics: fp32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def check_numbers(what: str, numbers: Tensor, end: int, of: str) -> None:
    """Raise ValueError for numbers outside [0, end), on a CPU only: a device would stall."""
    if numbers.device.type == "cpu" and numbers.numel():
        low, high = (int(bound) for bound in torch.aminmax(numbers))
        if low < 0 or high >= end:
            raise ValueError(f"{what} lie in [{low}, {high}], not in {of}")
