"""Compiles every kernel for several GPUs, without one, and reads what the machine code takes.

Runs as a process of its own, since Triton decides when it is imported whether kernels are interpreted:
``python -m tests.kernels.triton.compiled`` prints a table, one line per kernel, configuration and GPU.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from braid.kernels.triton import activation, cross_entropy, norm, permute, rotary
from braid.kernels.triton.launch import power_of_two, warps_for

CAPABILITIES = (80, 90, 100)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
FLOAT_ARGUMENTS = {"eps", "factor", "z_loss", "kept", "spread"}
UNALIGNED = {"rows", "count", "first_row", "scale_stride"}
"""Sizes of batches: not multiples of 16, whereas widths and strides are."""


@dataclass(frozen=True)
class Compilation:
    """A kernel with a configuration; pointers are to ``element`` unless ``pointers`` says otherwise."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    pointers: dict[str, str] = field(default_factory=dict)
    warps: int = 4
    element: str = "bf16"


def compilations() -> Iterator[Compilation]:
    """Every kernel as the launchers start it for a Llama-8B layer in bf16."""
    statistics = {"statistics_ptr": "fp32", "partials_ptr": "fp32"}
    for name, width, centred in (("rms_norm", 4096, False), ("layer_norm", 8192, True)):
        rows, block, warps = norm.tile_of(width)
        tile = {"CENTRED": centred, "ROWS": rows, "BLOCK": block}
        for part, kernel, flags in (
            ("", norm.forward_kernel, {}),
            ("_input_gradient", norm.input_gradient_kernel, {"SKIP": True}),
            ("_weight_gradient", norm.weight_gradient_kernel, {}),
        ):
            yield Compilation(f"{name}{part} {width}", kernel, {**flags, **tile}, statistics, warps=warps)
    tile = {"ROWS": norm.SUM_ROWS, "COLUMNS": norm.SUM_COLUMNS}
    yield Compilation("add_columns", norm.add_columns_kernel, tile, element="fp32")
    rows, block = activation.tile_of(14336)
    for kind in ("swiglu", "gelu"):
        tile = {"GATED": kind == "swiglu", "ROWS": rows, "BLOCK": block}
        yield Compilation(kind, activation.forward_kernel, tile)
        yield Compilation(f"{kind}_gradient", activation.gradient_kernel, tile)
    heads, kv_heads, half = 32, 8, 64
    sizes = {"HALF": half, "HEADS": heads, "KV_HEADS": kv_heads, "BLOCK": half, "BACK": True}
    tables, warps = {"cos_ptr": "fp32", "sin_ptr": "fp32"}, warps_for(2 * power_of_two(heads) * half)
    yield Compilation("rotary", rotary.rotary_kernel, sizes, tables, warps=warps)
    block, warps = cross_entropy.tile_of(128256)
    wide = dict.fromkeys(("statistics_ptr", "log_partition_ptr", "scale_ptr"), "fp32")
    pointers = {"targets_ptr": "i64", **wide}
    for part, kernel, flags in (
        ("statistics", cross_entropy.statistics_kernel, {}),
        ("gradient", cross_entropy.gradient_kernel, {"SCALED": True, "PLAIN": True}),
        ("gradient_smoothed", cross_entropy.gradient_kernel, {"SCALED": True, "PLAIN": False}),
    ):
        yield Compilation(f"cross_entropy_{part}", kernel, {**flags, "BLOCK": block}, pointers, warps=warps)
    floats, integers = ("weights_ptr", "d_weights_ptr"), ("slots_ptr", "sources_ptr")
    pointers = {**dict.fromkeys(floats, "fp32"), **dict.fromkeys(integers, "i32")}
    for kind, flags in (
        ("gather", {"WEIGHTED": True}),
        ("combine", {"WEIGHTED": True, "CHOICES": 2}),
        ("combine_weight_gradient", {}),
    ):
        yield Compilation(kind, getattr(permute, f"{kind}_kernel"), {**flags, "BLOCK": 1024}, pointers)


def machine_code(one: Compilation, capability: int) -> Any:
    """What Triton makes of it for GPUs of a compute capability (80: 8.0)."""
    signature: dict[str, str] = {}
    constants = dict(one.constants)
    aligned = {}
    for place, name in enumerate(one.kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        if name.endswith("_ptr"):
            signature[name] = "*" + one.pointers.get(name, one.element)
        else:
            signature[name] = "fp32" if name in FLOAT_ARGUMENTS else "i32"
        if name not in UNALIGNED | FLOAT_ARGUMENTS:
            aligned[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(one.kernel, signature, constants, aligned)
    options = {"num_warps": one.warps}
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
    work = [(one, capability) for one in compilations() for capability in CAPABILITIES]
    with ThreadPoolExecutor(2) as pool:
        return head + "".join(f"{text}\n" for text in pool.map(lambda job: line(*job), work))


if __name__ == "__main__":
    sys.stdout.write(table())
