"""What all launchers share: checks of arguments, block sizes, and where kernels can run."""

import math
from typing import Final

import torch
import triton
from torch import Tensor

from braid.kernels.triton import interpreter

FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)

INTERPRETING: Final[bool] = bool(triton.knobs.runtime.interpret)
"""Whether kernels are interpreted on the CPU. It multiplies no bf16, so tiles are widened there."""

if INTERPRETING:
    interpreter.mend()


def fail(operator: str, argument: str, problem: str) -> None:
    """Raise the ValueError of a wrong argument."""
    raise ValueError(f"{operator}: {argument} {problem}")


def check(
    operator: str,
    argument: str,
    tensor: Tensor,
    shape: tuple[int | None, ...],
    *,
    like: Tensor | None = None,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
    contiguous: bool = False,
) -> None:
    """ValueError unless a tensor has a shape (None: any size), one of the dtypes, and unit stride at its end.

    With ``like``, it must also be on that tensor's device. Rows may have any stride unless ``contiguous``.
    """
    if tensor.dim() != len(shape) or any(
        wanted is not None and size != wanted for size, wanted in zip(tensor.shape, shape, strict=True)
    ):
        wanted_text = " x ".join("any" if size is None else str(size) for size in shape) or "0-dim"
        fail(operator, argument, f"has shape {tuple(tensor.shape)}, not {wanted_text}")
    if tensor.dtype not in dtypes:
        fail(operator, argument, f"has dtype {tensor.dtype}, not one of {', '.join(map(str, dtypes))}")
    if like is not None and tensor.device != like.device:
        fail(operator, argument, f"is on {tensor.device}, not on {like.device}")
    if tensor.device.type == "cpu" and not INTERPRETING:
        fail(operator, argument, "is on the CPU, where Triton runs only with TRITON_INTERPRET=1")
    if contiguous and not tensor.is_contiguous():
        fail(operator, argument, f"has strides {tensor.stride()}, but must be contiguous")
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        fail(operator, argument, f"has strides {tensor.stride()}, but its last dim must be contiguous")


def check_indices(operator: str, argument: str, index: Tensor, limit: int) -> None:
    """ValueError for an index outside [0, limit), on the CPU only: elsewhere the check would stall.

    There, the operators neither read nor write out of bounds for such an index, and the result that it
    belongs to is NaN.
    """
    if index.device.type != "cpu" or index.numel() == 0 or is_fake(index):
        return
    low, high = (int(bound) for bound in torch.aminmax(index))
    if low < 0 or high >= limit:
        fail(operator, argument, f"holds indices in [{low}, {high}], outside [0, {limit})")


def is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.FakeTensor)


def power_of_two(size: int, least: int = 1) -> int:
    """The smallest power of two that is at least ``size`` and ``least``."""
    return 1 << max(math.ceil(math.log2(max(size, 1))), math.ceil(math.log2(least)))


def ceil_div(size: int, by: int) -> int:
    """The number of blocks of ``by`` that cover ``size``."""
    return -(-size // by)


def warps_for(elements: int) -> int:
    """Warps of a program whose tile has so many elements: 16 of them a thread, 16 warps at most."""
    return max(1, min(16, elements // 512))
