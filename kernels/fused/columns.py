"""Sums over tokens, the same bits on every run and on any number of multiprocessors.

A kernel that has parameters' gradients leaves P partial sums, each of a share of the tokens; the kernel here
adds them to the main gradient, in a fixed order.
"""

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from braid.kernels.fused.launch import ceil_div

PARTIAL_SUMS: Final = 256
COLUMNS: Final = 32
ROWS: Final = 32


@triton.jit
def add_columns_kernel(
    partials_ptr, total_ptr, count, width, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Add the sum over the rows of partials (count x width) to total (width), in a fixed order."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_columns = column < width
    sums = tl.zeros((COLUMNS,), dtype=tl.float32)
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < count)[:, None] & in_columns[None, :]
        place = row[:, None].to(tl.int64) * stride + column[None, :]
        sums += tl.sum(tl.load(partials_ptr + place, mask=mask, other=0), axis=0)
    total = tl.load(total_ptr + column, mask=in_columns, other=0).to(tl.float32)
    tl.store(total_ptr + column, (total + sums).to(total_ptr.dtype.element_ty), mask=in_columns)


def add_columns(partials_PD: Tensor, total_D: Tensor) -> None:
    """Add the P rows of partials (fp32, rows may be strided) to total."""
    count, width = partials_PD.shape
    add_columns_kernel[(ceil_div(width, COLUMNS),)](
        partials_PD,
        total_D,
        count,
        width,
        partials_PD.stride(0),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=4,
    )


def partial_sums(rows: int, tile_rows: int) -> tuple[int, int]:
    """How many programs sum, and tiles of each: a function of the shape, so that results are the same on any
    number of multiprocessors."""
    tiles = ceil_div(rows, tile_rows)
    each = ceil_div(tiles, PARTIAL_SUMS)
    return ceil_div(tiles, each), each
