"""Compiles every kernel for several GPUs, without one, and reads what the machine code takes.

Runs as a process of its own, since Triton decides when it is imported whether kernels are interpreted:
``python -m tests.kernels.fused.compiled`` prints a table, one line per kernel, configuration and GPU.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from braid.kernels.fused import (
    activation,
    columns,
    cross_entropy,
    gemm,
    grouped_gemm,
    norm,
    norm_gradient,
    permute,
    rotary,
    router,
)
from braid.kernels.fused.launch import power_of_two, warps_for
from braid.kernels.fused.tiles import Tiles, candidates

CAPABILITIES = (80, 90, 100)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
FLOAT_ARGUMENTS = {"eps", "keep_scale", "factor"}
UNALIGNED = {"rows", "M", "tokens", "count", "first_row", "programs"}
"""Sizes of batches: not multiples of 16, whereas widths and strides are."""


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """A kernel with a configuration; pointers are to ``element`` unless ``pointers`` says otherwise."""

    name: str
    kernel: Any
    element: str
    constants: dict[str, Any]
    pointers: dict[str, str] = field(default_factory=dict)
    ones: tuple[str, ...] = ()
    """Arguments that are 1: strides along a contiguous dim."""
    warps: int = 4
    stages: int = 3
    since: int = 80
    """The first GPUs for which it is chosen."""


def compilations() -> Iterator[Compilation]:
    """Every kernel as the launchers start it for a Llama-8B layer in bf16, products in fp32 too."""
    yield from _norms()
    yield from _elementwise()
    yield from _experts()
    for element, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        count = 1 if element == "fp32" else None
        for tiles in candidates(dtype)[:count]:
            yield from _products(element, tiles)
        for tiles in candidates(dtype, accumulates=True)[:count]:
            yield from _accumulating_products(element, tiles)


def _norms() -> Iterator[Compilation]:
    backward_flags = ("NORM", "CENTRED", "SKIP", "DROPOUT", "WANT_INPUT", "WANT_WEIGHT", "WANT_BIAS")
    alone = {"BRANCH": False, "BIAS": False, "DROPOUT": False, "NORM": True, "CENTRED": False}
    all_flags = {**dict.fromkeys(alone, True)}
    for name, kernel, width, flags in (
        ("rms_norm", norm.forward_kernel, 4096, alone),
        ("bias_dropout_add_layer_norm", norm.forward_kernel, 8192, all_flags),
        ("rms_norm_input_gradient", norm_gradient.backward_kernel, 4096, "NORM SKIP WANT_INPUT"),
        ("rms_norm_weight_gradient", norm_gradient.backward_kernel, 4096, "NORM WANT_WEIGHT"),
        (
            "bias_dropout_add_layer_norm_gradient",
            norm_gradient.backward_kernel,
            8192,
            " ".join(backward_flags),
        ),
    ):
        if isinstance(flags, str):
            flags = {flag: flag in flags.split() for flag in backward_flags}
        rows, block, warps = norm.tile_of(width)
        yield Compilation(
            name=f"{name} {width}",
            kernel=kernel,
            element="bf16",
            constants={**flags, "ROWS": rows, "BLOCK": block},
            pointers={"statistics_ptr": "fp32", "key_ptr": "i64", "partials_ptr": "fp32"},
            warps=warps,
        )
    yield Compilation(
        name="add_columns",
        kernel=columns.add_columns_kernel,
        element="fp32",
        constants={"ROWS": columns.ROWS, "COLUMNS": columns.COLUMNS},
    )


def _elementwise() -> Iterator[Compilation]:
    rows, block = activation.tile_of(14336)
    tile = {"ROWS": rows, "BLOCK": block}
    for kernel, flags in (
        (activation.swiglu_kernel, {}),
        (activation.swiglu_gradient_kernel, {}),
        (activation.gelu_kernel, {"BIAS": True}),
        (activation.gelu_gradient_kernel, {"BIAS": True, "WANT_BIAS": True}),
    ):
        yield Compilation(
            name=kernel.__name__.removesuffix("_kernel"),
            kernel=kernel,
            element="bf16",
            constants={**flags, **tile},
            pointers={"partials_ptr": "fp32"},
        )
    heads, kv_heads, half = 32, 8, 64
    yield Compilation(
        name="rotary",
        kernel=rotary.rotary_kernel,
        element="bf16",
        constants={"HALF": half, "HEADS": heads, "KV_HEADS": kv_heads, "BLOCK": half, "BACK": True},
        pointers={"cos_ptr": "fp32", "sin_ptr": "fp32"},
        warps=warps_for(2 * power_of_two(heads) * half),
    )
    block, warps = cross_entropy.tile_of(128256)
    pointers = {"targets_ptr": "i64", "statistics_ptr": "fp32", "log_partition_ptr": "fp32"}
    for kernel, flags in (
        (cross_entropy.statistics_kernel, {}),
        (cross_entropy.gradient_kernel, {"SCALED": True}),
    ):
        yield Compilation(
            name=f"cross_entropy_{kernel.__name__.removesuffix('_kernel')}",
            kernel=kernel,
            element="bf16",
            constants={**flags, "BLOCK": block},
            pointers={**pointers, "scale_ptr": "fp32"},
            warps=warps,
        )


def _experts() -> Iterator[Compilation]:
    rows, block = router.tile_of(64)
    floats = ("weights_ptr", "sums_ptr", "d_weights_ptr", "d_means_ptr")
    integers = ("choices_ptr", "counts_ptr", "before_ptr", "offsets_ptr", "slots_ptr", "sources_ptr")
    pointers = {**dict.fromkeys(floats, "fp32"), **dict.fromkeys(integers, "i32")}
    for kernel, flags in (
        (router.choose_kernel, {"NORMALISE": True}),
        (router.place_kernel, {}),
        (router.route_gradient_kernel, {"NORMALISE": True}),
    ):
        yield Compilation(
            name=f"route_{kernel.__name__.removesuffix('_kernel')}",
            kernel=kernel,
            element="fp32",
            constants={**flags, "CHOICES": 2, "ROWS": rows, "BLOCK": block},
            pointers=pointers,
        )
    for kernel, flags in (
        (permute.gather_kernel, {"WEIGHTED": True}),
        (permute.combine_kernel, {"WEIGHTED": True, "CHOICES": 2}),
        (permute.combine_weight_gradient_kernel, {}),
    ):
        yield Compilation(
            name=kernel.__name__.removesuffix("_kernel"),
            kernel=kernel,
            element="bf16",
            constants={**flags, "BLOCK": 1024},
            pointers=pointers,
        )


def _products(element: str, tiles: Tiles) -> Iterator[Compilation]:
    name = f"{element} {tiles.m}x{tiles.n}x{tiles.k}"
    blocks = {"BLOCK_M": tiles.m, "BLOCK_N": tiles.n, "BLOCK_K": tiles.k, "WIDEN": False}
    shared: dict[str, Any] = {"element": element, "warps": tiles.warps, "stages": tiles.stages}
    flags = {"BIAS": True, "ACCUMULATE": False, "SIGNAL": True, "GROUP": tiles.group}
    yield Compilation(
        name=f"linear {name}",
        kernel=gemm.gemm_kernel,
        constants={**flags, **blocks},
        pointers={"done_ptr": "i32"},
        ones=("a_k", "b_k"),
        **shared,
    )
    yield Compilation(
        name=f"grouped_linear {name}",
        kernel=grouped_gemm.grouped_kernel,
        constants=blocks,
        pointers={"offsets_ptr": "i32"},
        ones=("w_k",),
        since=90 if element == "bf16" and tiles not in candidates(torch.bfloat16, few_registers=True) else 80,
        **shared,
    )


def _accumulating_products(element: str, tiles: Tiles) -> Iterator[Compilation]:
    name = f"{element} {tiles.m}x{tiles.n}x{tiles.k}"
    blocks = {"BLOCK_M": tiles.m, "BLOCK_N": tiles.n, "BLOCK_K": tiles.k, "WIDEN": False}
    shared: dict[str, Any] = {"element": element, "warps": tiles.warps, "stages": tiles.stages}
    flags = {"BIAS": False, "ACCUMULATE": True, "SIGNAL": False, "GROUP": tiles.group}
    yield Compilation(
        name=f"accumulate_product {name}",
        kernel=gemm.gemm_kernel,
        constants={**flags, **blocks},
        pointers={"c_ptr": "fp32", "done_ptr": "i32"},
        ones=("a_m", "b_n"),
        **shared,
    )
    yield Compilation(
        name=f"grouped_weight_gradient {name}",
        kernel=grouped_gemm.grouped_weight_kernel,
        constants=blocks,
        pointers={"offsets_ptr": "i32", "total_ptr": "fp32"},
        **shared,
    )


def machine_code(one: Compilation, capability: int) -> Any:
    """What Triton makes of it for GPUs of a compute capability (80: 8.0)."""
    signature: dict[str, str] = {}
    constants = dict(one.constants)
    aligned = {}
    for place, name in enumerate(one.kernel.arg_names):
        if name in constants or name in one.ones:
            signature[name] = "constexpr"
            constants.setdefault(name, 1)
            continue
        if name.endswith("_ptr"):
            signature[name] = "*" + one.pointers.get(name, one.element)
        else:
            signature[name] = "fp32" if name in FLOAT_ARGUMENTS else "i32"
        if name not in UNALIGNED | FLOAT_ARGUMENTS:
            aligned[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(one.kernel, signature, constants, aligned)
    options = {"num_warps": one.warps, "num_stages": one.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def line(one: Compilation, capability: int) -> str:
    """Registers per thread, bytes of stack (spilled registers) per thread, bytes of shared memory."""
    compiled = machine_code(one, capability)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        done = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    usage = dict(entry.split(":") for entry in done.stdout.splitlines()[-1].split())
    spilled = int(usage["STACK"]) + int(usage["LOCAL"])
    registers, shared = int(usage["REG"]), compiled.metadata.shared
    return f"{one.name:<48} sm_{capability:<4} {one.warps:>2} {registers:>4} {spilled:>4} {shared:>7}"


def table() -> str:
    """All of them."""
    head = f"# triton {triton.__version__}\n# kernel, GPU, warps, registers, spilled bytes, shared bytes\n"
    work = [
        (one, capability) for one in compilations() for capability in CAPABILITIES if capability >= one.since
    ]
    with ThreadPoolExecutor(2) as pool:
        return head + "".join(f"{text}\n" for text in pool.map(lambda job: line(*job), work))


if __name__ == "__main__":
    sys.stdout.write(table())
