"""Matrix products that leave multiprocessors to others, finish in chunks, and accumulate main gradients.

Kernels are persistent: ``num_sms`` programs (0: one per multiprocessor) take tiles in turn, so that a paired
block can leave the rest of the device to a collective. The rows (tokens) are cut into ``chunks`` whose tiles
are taken one chunk after the other: chunk 0 is finished first, and a collective over it can start while the
others are computed (Centauri's workload partition, intra-batch). ``done`` counts the finished tiles of every
chunk; `tiles_of_chunks` says what it counts up to.

The sum over K has one order for a given shape, whatever ``num_sms`` and ``chunks`` are.

Legend: T tokens, I input features, O output features, M x K times K x N the product. Sums are in fp32; fp32
operands are multiplied exactly (no TF32).
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from braid.kernels.fused.launch import INTERPRETING, ceil_div, check, fail, multiprocessors
from braid.kernels.fused.tiles import Tiles, tiles_for

_DONE_DTYPE: Final = torch.int32


@triton.jit
def product(
    a_ptr,
    b_ptr,
    row,
    column,
    rows,
    columns,
    depth,
    a_m,
    a_k,
    b_k,
    b_n,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The tile at (row, column) of a (rows x depth) times b (depth x columns); x_m, x_k, x_n are strides.

    Addresses are computed from the tile's place: what did not depend on it, the compiler would keep in
    registers from tile to tile. ``WIDEN``: the interpreter multiplies no bf16.
    """
    m, n, k = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    a = a_ptr + m.to(tl.int64)[:, None] * a_m + k[None, :] * a_k
    b = b_ptr + k[:, None] * b_k + n.to(tl.int64)[None, :] * b_n
    in_rows, in_columns = (m < rows)[:, None], (n < columns)[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, depth, BLOCK_K):
        rest = depth - first
        left = tl.load(a, mask=in_rows & (k < rest)[None, :], other=0)
        right = tl.load(b, mask=in_columns & (k < rest)[:, None], other=0)
        if WIDEN:
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        sums = tl.dot(left, right, sums, input_precision="ieee")
        a += tl.cast(a_k, tl.int64) * BLOCK_K
        b += tl.cast(b_k, tl.int64) * BLOCK_K
    return sums


@triton.jit
def store_tile(
    sums,
    c_ptr,
    row,
    column,
    rows,
    columns,
    c_m,
    ACCUMULATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write sums to, or add them to, the tile at (row, column) of c (rows x columns)."""
    m, n = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    c = c_ptr + m.to(tl.int64)[:, None] * c_m + n[None, :]
    mask = (m < rows)[:, None] & (n < columns)[None, :]
    if ACCUMULATE:
        sums += tl.load(c, mask=mask, other=0).to(tl.float32)
    tl.store(c, sums.to(c_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gemm_kernel(
    a_ptr,
    b_ptr,
    bias_ptr,
    c_ptr,
    done_ptr,
    M,
    N,
    K,
    a_m,
    a_k,
    b_k,
    b_n,
    c_m,
    tiles_of_chunk,
    programs,
    BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    SIGNAL: tl.constexpr,
    WIDEN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """C = A B (+ bias), or C += A B. ``tiles_of_chunk``: tiles along M that make a chunk."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, programs):
        chunk = tile // (tiles_of_chunk * tiles_n)
        inside = tile % (tiles_of_chunk * tiles_n)
        tiles_here = tl.minimum(tiles_of_chunk, tiles_m - chunk * tiles_of_chunk)
        first = inside // (GROUP * tiles_n) * GROUP
        size = tl.minimum(GROUP, tiles_here - first)
        inside = inside % (GROUP * tiles_n)
        row = (chunk * tiles_of_chunk + first + inside % size) * BLOCK_M
        column = inside // size * BLOCK_N
        sums = product(
            a_ptr,
            b_ptr,
            row,
            column,
            M,
            N,
            K,
            a_m,
            a_k,
            b_k,
            b_n,
            WIDEN,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
        if BIAS:
            n = column + tl.arange(0, BLOCK_N)
            bias = tl.load(bias_ptr + n, mask=n < N, other=0).to(tl.float32)
            sums += bias[None, :]
        store_tile(sums, c_ptr, row, column, M, N, c_m, ACCUMULATE, BLOCK_M, BLOCK_N)
        if SIGNAL:
            tl.debug_barrier()  # all of the program's stores come before its signal
            tl.atomic_add(done_ptr + chunk, 1, sem="release", scope="sys")


def tiles_of_chunks(rows: int, columns: int, chunks: int, tiles: Tiles) -> list[int]:
    """How many tiles each chunk of the rows has; the last ones may have none."""
    along, across = ceil_div(rows, tiles.m), ceil_div(columns, tiles.n)
    each = _tiles_of_chunk(rows, chunks, tiles)
    return [max(0, min(each, along - chunk * each)) * across for chunk in range(chunks)]


def rows_of_chunk(rows: int, chunks: int, tiles: Tiles) -> int:
    """Rows of every chunk but the last ones."""
    return _tiles_of_chunk(rows, chunks, tiles) * tiles.m


def _tiles_of_chunk(rows: int, chunks: int, tiles: Tiles) -> int:
    return max(1, ceil_div(ceil_div(rows, tiles.m), chunks))


def programs_for(operator: str, num_sms: int, device: torch.device, tiles: int) -> int:
    """How many programs run: ``num_sms`` or all multiprocessors, not more than there are tiles."""
    limit = multiprocessors(device)
    if num_sms < 0:
        fail(operator, "num_sms", f"is {num_sms}; give 0 for all multiprocessors or a number of them")
    return max(1, min(num_sms or limit, limit, tiles))


def launch(
    operator: str,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    bias: Tensor | None = None,
    accumulate: bool = False,
    num_sms: int = 0,
    chunks: int = 1,
    done: Tensor | None = None,
    tiles: Tiles | None = None,
) -> None:
    """C (M x N) = A (M x K) B (K x N), or C += A B; A and B with any strides."""
    (M, K), N = a.shape, b.shape[1]
    if not c.numel() or (accumulate and not K):
        return
    tiles = tiles or tiles_for(operator, (M, N, K), a.dtype, a.device, accumulates=accumulate)
    programs = programs_for(operator, num_sms, a.device, ceil_div(M, tiles.m) * ceil_div(N, tiles.n))
    gemm_kernel[(programs,)](
        a,
        b,
        c if bias is None else bias,
        c,
        c if done is None else done,
        M,
        N,
        K,
        *a.stride(),
        *b.stride(),
        c.stride(0),
        _tiles_of_chunk(M, chunks, tiles),
        programs,
        BIAS=bias is not None,
        ACCUMULATE=accumulate,
        SIGNAL=done is not None,
        WIDEN=INTERPRETING,
        GROUP=tiles.group,
        BLOCK_M=tiles.m,
        BLOCK_N=tiles.n,
        BLOCK_K=tiles.k,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def _check_chunks(name: str, x: Tensor, num_sms: int, chunks: int, done: Tensor | None) -> None:
    if chunks < 1:
        fail(name, "chunks", f"is {chunks}, not at least 1")
    if num_sms < 0:
        fail(name, "num_sms", f"is {num_sms}; give 0 for all multiprocessors or a number of them")
    if done is not None:
        check(name, "done", done, (chunks,), like=x, dtypes=(_DONE_DTYPE,))


def _check_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, num_sms: int, chunks: int, done: Tensor | None
) -> None:
    check("linear", "x", x, (None, None))
    check("linear", "weight", weight, (None, x.shape[1]), like=x, dtypes=(x.dtype,))
    if bias is not None:
        check("linear", "bias", bias, (weight.shape[0],), like=x)
    _check_chunks("linear", x, num_sms, chunks, done)


@custom_op("braid::linear", mutates_args=("done",))
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, num_sms: int, chunks: int, done: Tensor | None
) -> Tensor:
    """Return y = x weightᵀ + bias (T x O) for x (T x I), weight (O x I) and bias (O).

    ``done`` (one int32 per chunk of tokens) is increased by the tiles of the chunk as they are finished.
    """
    _check_linear(x, weight, bias, num_sms, chunks, done)
    y = x.new_empty(x.shape[0], weight.shape[0])
    launch("linear", x, weight.t(), y, bias=bias, num_sms=num_sms, chunks=chunks, done=done)
    return y


@linear.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, num_sms: int, chunks: int, done: Tensor | None
) -> Tensor:
    _check_linear(x, weight, bias, num_sms, chunks, done)
    return x.new_empty(x.shape[0], weight.shape[0])


def _check_gradient(dy: Tensor, weight: Tensor, num_sms: int, chunks: int, done: Tensor | None) -> None:
    name = "linear_input_gradient"
    check(name, "dy", dy, (None, None))
    check(name, "weight", weight, (dy.shape[1], None), like=dy, dtypes=(dy.dtype,))
    _check_chunks(name, dy, num_sms, chunks, done)


@custom_op("braid::linear_input_gradient", mutates_args=("done",))
def linear_input_gradient(
    dy: Tensor, weight: Tensor, num_sms: int, chunks: int, done: Tensor | None
) -> Tensor:
    """Return dx = dy weight (T x I) for dy (T x O) and weight (O x I); the rest as for `linear`."""
    _check_gradient(dy, weight, num_sms, chunks, done)
    dx = dy.new_empty(dy.shape[0], weight.shape[1])
    launch("linear_input_gradient", dy, weight, dx, num_sms=num_sms, chunks=chunks, done=done)
    return dx


@linear_input_gradient.register_fake
def _(dy: Tensor, weight: Tensor, num_sms: int, chunks: int, done: Tensor | None) -> Tensor:
    _check_gradient(dy, weight, num_sms, chunks, done)
    return dy.new_empty(dy.shape[0], weight.shape[1])


def _check_product(total: Tensor, dy: Tensor, x: Tensor, num_sms: int) -> None:
    name = "accumulate_product"
    check(name, "dy", dy, (None, None))
    check(name, "x", x, (dy.shape[0], None), like=dy, dtypes=(dy.dtype,))
    check(name, "total", total, (dy.shape[1], x.shape[1]), like=dy)
    _check_chunks(name, dy, num_sms, 1, None)


@custom_op("braid::accumulate_product", mutates_args=("total",))
def accumulate_product(total: Tensor, dy: Tensor, x: Tensor, num_sms: int) -> None:
    """total += dyᵀ x (O x I, usually the fp32 main gradient) for dy (T x O) and x (T x I), in one pass."""
    _check_product(total, dy, x, num_sms)
    launch("accumulate_product", dy.t(), x, total, accumulate=True, num_sms=num_sms)


@accumulate_product.register_fake
def _(total: Tensor, dy: Tensor, x: Tensor, num_sms: int) -> None:
    _check_product(total, dy, x, num_sms)
