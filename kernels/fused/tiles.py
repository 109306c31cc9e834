"""Tiles of the matrix products: few configurations, chosen by a table and never during a step.

A choice by the clock inside training could differ between ranks and runs, and with it the order of sums. So
the table below decides; `tune` (``python -m braid.jobs.bench kernels --tune``) measures the candidates of one
product and keeps the winner in Triton's own cache on disk, which later processes read once per product.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Final

import torch
import triton
from triton.runtime.cache import get_cache_manager

from braid.kernels.fused.launch import INTERPRETING, multiprocessors

_FILE: Final = "tiles.json"
_FORMAT: Final = "braid tiles 1"
"""Part of the key; changes with the fields of `Tiles`."""


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Block sizes of a product of M x K by K x N, and how a program runs."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    """Steps along K whose loads are in flight."""
    group: int = 8
    """Tiles along M that share a column of tiles in the cache."""


_WIDE: Final = (
    Tiles(m=128, n=256, k=64, warps=8, stages=3),
    Tiles(m=128, n=128, k=64, warps=8, stages=3),
    Tiles(m=64, n=128, k=64, warps=4, stages=4),
)
"""For 16-bit operands, tensor cores; at most 144 KiB of shared memory."""
_ACCUMULATING: Final = (
    Tiles(m=128, n=128, k=32, warps=8, stages=4),
    Tiles(m=64, n=128, k=32, warps=8, stages=4),
)
"""The same where a product is added to what is there: the old values need registers too."""
_FP32: Final = (
    Tiles(m=64, n=64, k=16, warps=4, stages=3),
    Tiles(m=32, n=64, k=32, warps=4, stages=3),
)
"""For fp32, whose products are exact and run without tensor cores."""
_INTERPRETED: Final = (Tiles(m=16, n=32, k=16, warps=1, stages=1, group=2),)


def candidates(
    dtype: torch.dtype, *, accumulates: bool = False, few_registers: bool = False
) -> Sequence[Tiles]:
    """All configurations for operands of a dtype; the first is the one for large matrices.

    ``few_registers``: without the widest, which grouped products spill on GPUs before Hopper.
    """
    if INTERPRETING:
        return _INTERPRETED
    if dtype == torch.float32:
        return _FP32[1:] if accumulates else _FP32
    if accumulates:
        return _ACCUMULATING
    return _WIDE[1:] if few_registers else _WIDE


def tiles_for(
    operator: str,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    accumulates: bool = False,
    few_registers: bool = False,
) -> Tiles:
    """The tuned tiles of a product of M, N, K if it was tuned on such a device, else the largest that fill
    the device."""
    m, n, _ = sizes
    options = candidates(dtype, accumulates=accumulates, few_registers=few_registers)
    if device.type == "cuda" and (tuned := _tuned(_key(operator, sizes, dtype, device))) is not None:
        return tuned
    enough = multiprocessors(device)
    for tiles in options:
        if triton.cdiv(m, tiles.m) * triton.cdiv(n, tiles.n) >= enough:
            return tiles
    return options[-1]


def tune(
    operator: str,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    time_ns: Callable[[Tiles], int],
    *,
    accumulates: bool = False,
    few_registers: bool = False,
) -> Tiles:
    """Keep the candidate with the least ``time_ns`` for a product of M, N, K on this kind of device."""
    options = candidates(dtype, accumulates=accumulates, few_registers=few_registers)
    best = min(options, key=time_ns)
    key = _key(operator, sizes, dtype, device)
    get_cache_manager(key).put(json.dumps(asdict(best)), _FILE, binary=False)
    _tuned.cache_clear()
    return best


def _key(operator: str, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    parts = (_FORMAT, triton.__version__, name, operator, str(dtype), *map(str, sizes))
    return hashlib.sha256("|".join(parts).encode()).hexdigest()


@lru_cache(maxsize=1024)
def _tuned(key: str) -> Tiles | None:
    file = get_cache_manager(key).get_file(_FILE)
    if file is None:
        return None
    with open(file, encoding="utf-8") as text:
        return Tiles(**json.load(text))
