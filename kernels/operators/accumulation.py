"""How gradients of parameters are added up: inside the matrix product, wherever torch can do that.

Main gradients are fp32 while operands have 16 bits. A 16-bit product that is added afterwards is rounded
first, and moves 12 bytes per parameter through memory that a sum inside the product does not.

Legend: T tokens, O output features, I input features.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

Way = Callable[[Tensor, Tensor, Tensor], object]
"""Function that adds the product of two narrow matrices, O x T and T x I, to a sum (O x I) of wider dtype."""


def accumulate_product(total_OI: Tensor, dy_TO: Tensor, x_TI: Tensor) -> None:
    """Add dyᵀ x (outputs x inputs) to a sum of gradients, as precisely as the device allows."""
    if total_OI.dtype == dy_TO.dtype:
        total_OI.addmm_(dy_TO.t(), x_TI)
    else:
        way_to_accumulate(dy_TO.device.type, dy_TO.dtype, total_OI.dtype)(total_OI, dy_TO.t(), x_TI)


def accumulate_sum(total_O: Tensor, dy_TO: Tensor) -> None:
    """Add the sum of dy over the T tokens to a sum of gradients, without a temporary if both dtypes are
    equal.
    """
    if total_O.dtype == dy_TO.dtype:
        total_O.addmv_(dy_TO.t(), dy_TO.new_ones(dy_TO.shape[0]))
    else:
        total_O.add_(dy_TO.sum(0, dtype=total_O.dtype))


def prepare_to_accumulate(weight: Tensor) -> None:
    """Choose the `Way` for a weight's gradient before training begins; its trial would stall a training
    step.
    """
    if weight.dtype.itemsize < torch.float32.itemsize:
        way_to_accumulate(weight.device.type, weight.dtype, torch.float32)


@lru_cache(maxsize=16)
def way_to_accumulate(device_type: str, narrow: torch.dtype, wide: torch.dtype) -> Way:
    """Return the best way to accumulate that torch offers on a kind of device; ways are tried once.

    A CPU always uses `rounded_first`, since recorded losses must be reproduced bit for bit.
    """
    if device_type == "cpu":
        return rounded_first
    best_first = (inside_the_product, beside_the_product)
    return next((way for way in best_first if _works(way, device_type, narrow, wide)), rounded_first)


def inside_the_product(total_OI: Tensor, a_OT: Tensor, b_TI: Tensor) -> None:
    """Add the product inside one kernel, which begins its sums with the present total; needs no memory."""
    torch.addmm(total_OI, a_OT, b_TI, out_dtype=total_OI.dtype, out=total_OI)


def beside_the_product(total_OI: Tensor, a_OT: Tensor, b_TI: Tensor) -> None:
    """Compute the product unrounded, in memory of its own, then add it."""
    total_OI.add_(torch.mm(a_OT, b_TI, out_dtype=total_OI.dtype))


def rounded_first(total_OI: Tensor, a_OT: Tensor, b_TI: Tensor) -> None:
    """Compute the product rounded to the operands' dtype, then add it."""
    total_OI.add_(a_OT @ b_TI)


_SIZE = 16
_FACTOR = 1 + 2**-7
"""A number that is exact in 16 bits, while its square and the sum of `_SIZE` squares are exact in fp32
only.
"""


def _works(way: Way, device_type: str, narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Return whether a way runs on the current device of this type, rounds nothing, and keeps the present
    total.
    """
    try:
        total = torch.ones(_SIZE, _SIZE, dtype=wide, device=device_type)
        factors = torch.full((_SIZE, _SIZE), _FACTOR, dtype=narrow, device=device_type)
        way(total, factors.t(), factors)
        return bool((total == 1 + _SIZE * _FACTOR**2).all())
    except (RuntimeError, TypeError):  # torch has no such kernel, or does not know the argument
        return False
