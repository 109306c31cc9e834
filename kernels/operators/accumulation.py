"""How gradients of parameters are added up: inside the matrix product on GPUs.

Main gradients are fp32 while operands have 16 bits. A 16-bit product that is added afterwards is rounded
first, and moves 12 bytes per parameter through memory that a sum inside the product does not.

Legend: T tokens, O output features, I input features.
"""

import torch
from torch import Tensor


def accumulate_product(total_OI: Tensor, dy_TO: Tensor, x_TI: Tensor) -> None:
    """Add dyᵀ x (outputs x inputs) to a sum of gradients of the same or a wider dtype.

    On a GPU nothing is rounded before the sum. A CPU rounds the product to the operands' dtype, for which
    torch has no other kernel there.
    """
    if total_OI.dtype == dy_TO.dtype:
        total_OI.addmm_(dy_TO.t(), x_TI)
    elif total_OI.device.type == "cpu":
        total_OI.add_(dy_TO.t() @ x_TI)
    else:
        torch.addmm(total_OI, dy_TO.t(), x_TI, out_dtype=total_OI.dtype, out=total_OI)


def accumulate_sum(total_O: Tensor, dy_TO: Tensor) -> None:
    """Add the sum of dy over the tokens, without a temporary if both dtypes are equal."""
    if total_O.dtype == dy_TO.dtype:
        total_O.addmv_(dy_TO.t(), dy_TO.new_ones(dy_TO.shape[0]))
    else:
        total_O.add_(dy_TO.sum(0, dtype=total_O.dtype))
