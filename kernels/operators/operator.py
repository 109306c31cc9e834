"""What a compute operator is: a `torch.nn.Module` between two points of communication.

A layer is a graph of operators (`braid.scheduling.operators`). The executor knows nothing about what an
operator computes: it calls one of the three methods below with the values that the graph says the
operator reads, in that order, and stores what comes back under the names that the graph says it writes.

    forward         graph values read              -> tuple of graph values written
    input_gradient  gradients and saved values     -> tuple of gradients
    weight_gradient gradients and saved values     -> None; adds into ``parameter.main_grad``

None of the three runs under autograd (the executor disables it); an operator that is easier to write with
autograd derives from `braid.kernels.operators.autograd.AutogradOperator`.
"""

from typing import Any

import torch
from torch import Tensor, nn


class ComputeOperator(nn.Module):
    """Base of all compute operators; see the module's docstring for the contract."""

    def forward(self, *values: Any) -> tuple[Any, ...]:
        """Compute the operator's outputs: first what the graph passes on, then what it saves."""
        raise NotImplementedError

    def input_gradient(self, *values: Any) -> tuple[Any, ...]:
        """Turn gradients of the outputs into gradients of the inputs."""
        raise NotImplementedError

    def weight_gradient(self, *values: Any) -> None:
        """Add the gradients of the operator's parameters to their ``main_grad``."""
        raise NotImplementedError


def accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add ``gradient`` to the parameter's ``main_grad`` (shape of the parameter, its own dtype)."""
    parameter.main_grad.add_(gradient)  # type: ignore[attr-defined]


def accumulate_product(parameter: nn.Parameter, dy_TO: Tensor, x_TI: Tensor) -> None:
    """Add dyᵀ x (outputs x inputs) to ``main_grad``, inside the GEMM where the dtypes allow it.

    T tokens, O output features, I input features.
    """
    main_grad: Tensor = parameter.main_grad  # type: ignore[attr-defined]
    if main_grad.dtype == dy_TO.dtype:
        torch.addmm(main_grad, dy_TO.t(), x_TI, out=main_grad)
    else:
        main_grad.add_(dy_TO.t() @ x_TI)
