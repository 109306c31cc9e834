"""What a compute operator is: a `torch.nn.Module` between two points of communication.

A layer is a graph of operators (`braid.scheduling.model.operators`). The executor knows nothing about what an
operator computes: it calls one of the three methods below with the values that the graph says the
operator reads, in that order, and stores what comes back under the names that the graph says it writes.

    forward         graph values read              -> tuple of graph values written
    input_gradient  gradients and saved values     -> tuple of gradients
    weight_gradient gradients and saved values     -> None; adds to what `ComputeOperator.gradients` holds

None of the three runs under autograd: the executor calls them under `torch.no_grad` (not
`torch.inference_mode`, under which no local graph can be recorded). An operator that is easier to write
with autograd derives from, or wraps its module in, `braid.kernels.operators.autograd.AutogradOperator`.

Operators do not modify what they read, unless their docstring says so. A method that an operator has no
use for (``weight_gradient`` without parameters) is not in its graph, and raises if it is called.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, TypedDict

import torch
from torch import Tensor, nn


class Saved(ABC):
    """What an operator makes that is no tensor: opaque to everybody else."""

    @abstractmethod
    def tensors(self) -> Iterable[Tensor]:
        """What it keeps alive, for accounts of memory."""


class Home(TypedDict, total=False):
    """Where parameters are made, and of which kind they are; torch's defaults where nothing is said."""

    device: torch.device | None
    dtype: torch.dtype | None


class ComputeOperator(nn.Module):
    """Base of all compute operators; see the module's docstring for the contract."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: dict[str, Tensor] = {}
        """Where the gradient of every parameter is added up, by the parameter's name; whoever trains sets it:
        shape of the parameter, perhaps a wider dtype."""

    def forward(self, *values: Any, **optional: Any) -> tuple[Any, ...]:
        """Compute the operator's outputs: first what the graph passes on, then what it saves."""
        raise NotImplementedError

    def input_gradient(self, *values: Any, **optional: Any) -> tuple[Any, ...]:
        """Turn gradients of the outputs into gradients of the inputs."""
        raise NotImplementedError

    def weight_gradient(self, *values: Any, **optional: Any) -> None:
        """Add to ``gradients``."""
        raise NotImplementedError


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which sums and statistics are: fp32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def check_numbers(what: str, numbers: Tensor, end: int, of: str) -> None:
    """ValueError for numbers outside [0, end), on the CPU only: elsewhere it would stall the device."""
    if numbers.device.type == "cpu" and numbers.numel():
        low, high = (int(bound) for bound in torch.aminmax(numbers))
        if low < 0 or high >= end:
            raise ValueError(f"{what} lie in [{low}, {high}], not in {of}")
