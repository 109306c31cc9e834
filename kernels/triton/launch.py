"""What all launchers share: checks of arguments, block sizes, and where kernels can run."""

from typing import Any, Final

import torch
import triton
from torch import Tensor
from triton.runtime import interpreter

FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)

INTERPRETING: Final[bool] = bool(triton.knobs.runtime.interpret)
"""Whether kernels are interpreted on the CPU. It multiplies no bf16, so tiles are widened there."""


def _mend_interpreter() -> None:
    """Let scalars of Triton 3.6's interpreter count loops beside NumPy 2.4.

    It keeps them as arrays of one element and one dim, for which NumPy 2.4 refuses ``int(array)``.
    """
    original = getattr(interpreter, "_patch_lang_tensor", None)
    if original is None:
        return

    def mended(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = mended


if INTERPRETING:
    _mend_interpreter()


def fail(operator: str, argument: str, problem: str) -> None:
    """Raise the ValueError of a wrong argument."""
    raise ValueError(f"{operator}: {argument} {problem}")


def check(operator: str, **arguments: tuple[Tensor | None, str]) -> None:
    """ValueError for tensors that a kernel would read wrongly: it sees addresses and strides alone.

    ``arguments``: each tensor (None: it is not given), and a letter for each of its dims; equal letters stand
    for equal sizes. All are on one device, and the elements of their last dims lie side by side; with a blank
    behind the letters all elements do. The first tensor's dtype is one of `FLOATS`.
    """
    sizes: dict[str, int] = {}
    device = None
    for argument, (tensor, dims) in arguments.items():
        if tensor is None:
            continue
        if device is None:
            device = tensor.device
            if tensor.dtype not in FLOATS:
                fail(
                    operator, argument, f"has dtype {tensor.dtype}, not one of {', '.join(map(str, FLOATS))}"
                )
            if device.type == "cpu" and not INTERPRETING:
                fail(operator, argument, "is on the CPU, where Triton runs only with TRITON_INTERPRET=1")
        letters, blank, _ = dims.partition(" ")
        shape = tuple(tensor.shape)
        if len(shape) != len(letters) or any(
            sizes.setdefault(letter, size) != size for letter, size in zip(letters, shape, strict=True)
        ):
            wanted = " x ".join(str(sizes.get(letter, "any")) for letter in letters) or "0-dim"
            fail(operator, argument, f"has shape {shape}, not {wanted}")
        if tensor.device != device:
            fail(operator, argument, f"is on {tensor.device}, not on {device}")
        if blank and not tensor.is_contiguous():
            fail(operator, argument, f"has strides {tensor.stride()}, but must be contiguous")
        if shape and shape[-1] > 1 and tensor.stride(-1) != 1:
            fail(operator, argument, f"has strides {tensor.stride()}, but its last dim must be contiguous")


def power_of_two(size: int, least: int = 1) -> int:
    """The smallest power of two that is at least ``size`` and ``least``."""
    return 1 << (max(size, least) - 1).bit_length()


def ceil_div(size: int, by: int) -> int:
    """The number of blocks of ``by`` that cover ``size``."""
    return -(-size // by)


def warps_for(elements: int) -> int:
    """Warps of a program whose tile has so many elements: 16 of them a thread, 16 warps at most."""
    return max(1, min(16, elements // 512))
