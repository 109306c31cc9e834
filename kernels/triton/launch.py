"""What all launchers share: checks, block sizes, support of Triton's interpreter."""

from typing import Any, Final

import torch
import triton
from torch import Tensor
from triton.runtime import interpreter

FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)

INTERPRETING: Final[bool] = bool(triton.knobs.runtime.interpret)
"""Whether kernels are interpreted on the CPU, where no bf16 is multiplied: tiles are wider."""


def _mend_interpreter() -> None:
    """Let loops in kernels count with scalars of Triton 3.6's interpreter under NumPy 2.4.

    The interpreter keeps scalars as 1-dim arrays of one element, for which NumPy 2.4 refuses ``int(array)``.
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
    """Raise the ValueError that reports a wrong argument."""
    raise ValueError(f"{operator}: {argument} {problem}")


def check(operator: str, **arguments: tuple[Tensor | None, str]) -> None:
    """Raise ValueError for tensors that a kernel would misread, since kernels see only addresses and strides.

    ``arguments``: each tensor (None if not given), and a letter for each of its dims; equal letters stand for
    equal sizes. All tensors must be on one device and contiguous in their last dim, or entirely contiguous if
    a blank follows the letters. The first tensor's dtype must be one of `FLOATS`.
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
    """Return the smallest power of two that is at least ``size`` and at least ``least``."""
    return 1 << (max(size, least) - 1).bit_length()


def ceil_div(size: int, by: int) -> int:
    """Return the number of blocks of length ``by`` that cover ``size``."""
    return -(-size // by)


def warps_for(elements: int) -> int:
    """Return the number of warps for a tile of ``elements``: 16 elements per thread, 16 warps at most."""
    return max(1, min(16, elements // 512))
