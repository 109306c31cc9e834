"""Grouped matrix products over ragged batches of experts: forward, input gradient, weight gradient.

The tokens lie sorted by expert; ``offsets`` (E + 1 of them, on the device: the host waits for nothing) are
the first token of every expert and the end of the last one's. Kernels are persistent over the tiles of all
experts and take ``num_sms`` as those of `braid.kernels.fused.gemm` do; tiles come in the order of tokens.
What lies after the last offset (places that no token took) gives zeros.

Legend: S sorted tokens, E experts, I input features, O output features.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from braid.kernels.fused.gemm import product, programs_for, store_tile
from braid.kernels.fused.launch import INTEGERS, INTERPRETING, ceil_div, check, fail, is_fake
from braid.kernels.fused.tiles import Tiles, tiles_for


@triton.jit
def grouped_kernel(
    x_ptr,
    weight_ptr,
    offsets_ptr,
    y_ptr,
    rows,
    N,
    K,
    experts,
    x_m,
    w_e,
    w_k,
    w_n,
    programs,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y[r] = x[r] W[expert of r]; the rows after the last expert's are an expert whose sums have no terms."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    tiles_before = 0
    end = 0
    for expert in range(experts + 1):
        first = end
        depth = K
        if expert < experts:
            end = tl.load(offsets_ptr + expert + 1).to(tl.int32)
            end = tl.minimum(tl.maximum(end, first), rows)
        else:
            end = rows
            depth = 0
        tiles = tl.cdiv(end - first, BLOCK_M) * tiles_n
        while tile < tiles_before + tiles:
            inside = tile - tiles_before
            row = first + inside // tiles_n * BLOCK_M
            column = inside % tiles_n * BLOCK_N
            sums = product(
                x_ptr,
                weight_ptr + tl.cast(expert, tl.int64) * w_e,
                row,
                column,
                end,
                N,
                depth,
                x_m,
                1,
                w_k,
                w_n,
                WIDEN,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
            )
            store_tile(sums, y_ptr, row, column, end, N, N, False, BLOCK_M, BLOCK_N)
            tile += programs
        tiles_before += tiles


@triton.jit
def grouped_weight_kernel(
    dy_ptr,
    x_ptr,
    offsets_ptr,
    total_ptr,
    rows,
    M,
    N,
    experts,
    dy_k,
    x_k,
    programs,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """total[e] (M x N) += dy[rows of e]ᵀ x[rows of e]."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tl.cdiv(M, BLOCK_M) * tiles_n
    for tile in range(tl.program_id(0), experts * tiles, programs):
        expert, inside = tile // tiles, tile % tiles
        first = tl.load(offsets_ptr + expert).to(tl.int32)
        first = tl.minimum(tl.maximum(first, 0), rows)
        end = tl.minimum(tl.load(offsets_ptr + expert + 1).to(tl.int32), rows)
        if end > first:
            row = inside // tiles_n * BLOCK_M
            column = inside % tiles_n * BLOCK_N
            sums = product(
                dy_ptr + tl.cast(first, tl.int64) * dy_k,
                x_ptr + tl.cast(first, tl.int64) * x_k,
                row,
                column,
                M,
                N,
                end - first,
                1,
                dy_k,
                x_k,
                1,
                WIDEN,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
            )
            total = total_ptr + tl.cast(expert, tl.int64) * M * N
            store_tile(sums, total, row, column, M, N, N, True, BLOCK_M, BLOCK_N)


def check_offsets(name: str, offsets: Tensor, experts: int, rows: Tensor) -> None:
    """ValueError unless offsets rise from 0 to at most the number of rows (values: on the CPU only)."""
    check(name, "offsets", offsets, (experts + 1,), like=rows, dtypes=INTEGERS, contiguous=True)
    if offsets.device.type == "cpu" and not is_fake(offsets):
        values = offsets.tolist()
        if values[0] != 0 or sorted(values) != values or values[-1] > rows.shape[0]:
            fail(name, "offsets", f"is {values}, not rising from 0 to at most {rows.shape[0]}")


def _launch(
    name: str, x: Tensor, weight_EKN: Tensor, offsets: Tensor, num_sms: int, tiles: Tiles | None = None
) -> Tensor:
    rows, (experts, K, N) = x.shape[0], weight_EKN.shape
    y = x.new_empty(rows, N)
    if not y.numel():
        return y
    sizes = (ceil_div(rows, max(1, experts)), N * max(1, experts), K)
    narrow = x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) < (9, 0)
    tiles = tiles or tiles_for(name, sizes, x.dtype, x.device, few_registers=narrow)
    most = (ceil_div(rows, tiles.m) + experts) * ceil_div(N, tiles.n)
    programs = programs_for(name, num_sms, x.device, most)
    grouped_kernel[(programs,)](
        x,
        weight_EKN,
        offsets,
        y,
        rows,
        N,
        K,
        experts,
        x.stride(0),
        *weight_EKN.stride(),
        programs,
        WIDEN=INTERPRETING,
        BLOCK_M=tiles.m,
        BLOCK_N=tiles.n,
        BLOCK_K=tiles.k,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return y


def _check(name: str, argument: str, x: Tensor, weight: Tensor, features: int, offsets: Tensor) -> None:
    check(name, argument, x, (None, None))
    size = (None, None, x.shape[1]) if features == 2 else (None, x.shape[1], None)
    check(name, "weight", weight, size, like=x, dtypes=(x.dtype,))
    check_offsets(name, offsets, weight.shape[0], x)


@custom_op("braid::grouped_linear", mutates_args=())
def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor, num_sms: int) -> Tensor:
    """Return y (S x O): x (S x I) times the transposed weight (E x O x I) of each token's expert."""
    _check("grouped_linear", "x", x, weight, 2, offsets)
    return _launch("grouped_linear", x, weight.transpose(1, 2), offsets, num_sms)


@grouped_linear.register_fake
def _(x: Tensor, weight: Tensor, offsets: Tensor, num_sms: int) -> Tensor:
    _check("grouped_linear", "x", x, weight, 2, offsets)
    return x.new_empty(x.shape[0], weight.shape[1])


@custom_op("braid::grouped_input_gradient", mutates_args=())
def grouped_input_gradient(dy: Tensor, weight: Tensor, offsets: Tensor, num_sms: int) -> Tensor:
    """Return dx (S x I): dy (S x O) times the weight (E x O x I) of each token's expert."""
    _check("grouped_input_gradient", "dy", dy, weight, 1, offsets)
    return _launch("grouped_input_gradient", dy, weight, offsets, num_sms)


@grouped_input_gradient.register_fake
def _(dy: Tensor, weight: Tensor, offsets: Tensor, num_sms: int) -> Tensor:
    _check("grouped_input_gradient", "dy", dy, weight, 1, offsets)
    return dy.new_empty(dy.shape[0], weight.shape[2])


def _check_weight(total: Tensor, dy: Tensor, x: Tensor, offsets: Tensor) -> None:
    name = "grouped_weight_gradient"
    check(name, "dy", dy, (None, None))
    check(name, "x", x, (dy.shape[0], None), like=dy, dtypes=(dy.dtype,))
    check(name, "total", total, (None, dy.shape[1], x.shape[1]), like=dy, contiguous=True)
    check_offsets(name, offsets, total.shape[0], dy)


@custom_op("braid::grouped_weight_gradient", mutates_args=("total",))
def grouped_weight_gradient(total: Tensor, dy: Tensor, x: Tensor, offsets: Tensor, num_sms: int) -> None:
    """total (E x O x I, usually the fp32 main gradient) += dyᵀ x of every expert's tokens."""
    _check_weight(total, dy, x, offsets)
    experts, M, N = total.shape
    if not (total.numel() and dy.shape[0]):
        return
    name = "grouped_weight_gradient"
    sizes = (M * experts, N, ceil_div(dy.shape[0], experts))
    tiles = tiles_for(name, sizes, dy.dtype, dy.device, accumulates=True)
    programs = programs_for(name, num_sms, dy.device, experts * ceil_div(M, tiles.m) * ceil_div(N, tiles.n))
    grouped_weight_kernel[(programs,)](
        dy,
        x,
        offsets,
        total,
        dy.shape[0],
        M,
        N,
        experts,
        dy.stride(0),
        x.stride(0),
        programs,
        WIDEN=INTERPRETING,
        BLOCK_M=tiles.m,
        BLOCK_N=tiles.n,
        BLOCK_K=tiles.k,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


@grouped_weight_gradient.register_fake
def _(total: Tensor, dy: Tensor, x: Tensor, offsets: Tensor, num_sms: int) -> None:
    _check_weight(total, dy, x, offsets)
