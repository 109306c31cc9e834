"""What a compute operator is: a `torch.nn.Module` between two points of communication.

A layer is a graph of operators (`braid.scheduling.operators`). The executor knows nothing about what an
operator computes: it calls one of the three methods below with the values that the graph says the
operator reads, in that order, and stores what comes back under the names that the graph says it writes.

    forward         graph values read              -> tuple of graph values written
    input_gradient  gradients and saved values     -> tuple of gradients
    weight_gradient gradients and saved values     -> None; adds into ``parameter.main_grad``

None of the three runs under autograd: the executor calls them under `torch.no_grad` (not
`torch.inference_mode`, under which no local graph can be recorded). An operator that is easier to write
with autograd derives from, or wraps its module in, `braid.kernels.operators.autograd.AutogradOperator`.

Operators do not modify what they read, unless their docstring says so. A method that an operator has no
use for (``weight_gradient`` without parameters) is not in its graph, and raises if it is called.
"""

from typing import Any

import torch
from torch import Tensor, nn


class ComputeOperator(nn.Module):
    """Base of all compute operators; see the module's docstring for the contract."""

    def forward(self, *values: Any, **optional: Any) -> tuple[Any, ...]:
        """Compute the operator's outputs: first what the graph passes on, then what it saves."""
        raise NotImplementedError

    def input_gradient(self, *values: Any, **optional: Any) -> tuple[Any, ...]:
        """Turn gradients of the outputs into gradients of the inputs."""
        raise NotImplementedError

    def weight_gradient(self, *values: Any, **optional: Any) -> None:
        """Add the gradients of the operator's parameters to their ``main_grad``."""
        raise NotImplementedError


def main_grad(parameter: nn.Parameter) -> Tensor:
    """The buffer that the worker attached to the parameter: its shape, perhaps a wider dtype."""
    buffer: Tensor = parameter.main_grad  # type: ignore[attr-defined]
    return buffer


def accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add ``gradient`` to the parameter's ``main_grad`` (shape of the parameter, its own dtype)."""
    main_grad(parameter).add_(gradient)


def accumulate_product(parameter: nn.Parameter, dy_TO: Tensor, x_TI: Tensor) -> None:
    """Add dyᵀ x (outputs x inputs) to ``main_grad``, inside the GEMM where the dtypes allow it.

    T tokens, O output features, I input features.
    """
    total_OI = main_grad(parameter)
    if total_OI.dtype == dy_TO.dtype:
        total_OI.addmm_(dy_TO.t(), x_TI)
    else:
        total_OI.add_(dy_TO.t() @ x_TI)


def accumulate_sum(parameter: nn.Parameter, dy_TO: Tensor) -> None:
    """Add the sum of dy over the T tokens to ``main_grad`` (O), without a temporary where dtypes allow it."""
    total_O = main_grad(parameter)
    if total_O.dtype == dy_TO.dtype:
        total_O.addmv_(dy_TO.t(), dy_TO.new_ones(dy_TO.shape[0]))
    else:
        total_O.add_(dy_TO.sum(0, dtype=total_O.dtype))


def empty_parameter(*shape: int, device: torch.device | None, dtype: torch.dtype | None) -> nn.Parameter:
    """An uninitialised parameter: initial values are the worker's business."""
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
