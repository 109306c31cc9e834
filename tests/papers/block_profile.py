"""Measured costs of a transformer layer's two blocks under tensor parallelism, read from somebody's CSV.

A row holds what one size costs: forward and backward of the attention and the MLP block, one tensor-parallel
all-reduce of a block's output, and the memory that running a layer takes. A size that was not run is an
error when it is asked for, never zero.
"""

import contextlib
import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from scipy.optimize import nnls

from braid.scheduling.plan.tensor_degrees import DegreeCosts, DegreeProblem, PassCosts

_SIZE: Final = ("hidden_size", "tp_degree", "batch_size")
_MEASURED: Final = ("attn_fp", "attn_bp", "mlp_fp", "mlp_bp", "comm", "runtime_memory")
HEADER: Final = (*_SIZE, *_MEASURED)
"""Columns of the file: a size, five times in milliseconds, memory in MiB."""

BLOCKS: Final = ("attention", "mlp")
"""Blocks of a layer in the order of the forward pass; each ends in a collective in every pass."""

NOT_RUN: Final = -1.0
"""What stands in every measured column of a size that was not run (out of memory, or not possible)."""


class BlockSize(NamedTuple):
    """What a row was measured for; ``batch`` is that of one tensor-parallel group."""

    hidden: int
    degree: int
    batch: int

    def __str__(self) -> str:
        return f"hidden {self.hidden}, degree {self.degree}, batch {self.batch}"


@dataclass(frozen=True, kw_only=True)
class BlockCosts:
    """Costs of one layer on one rank, times of blocks in the order of `BLOCKS`."""

    forward_ns: tuple[int, int]
    backward_ns: tuple[int, int]
    """Without recomputation."""
    collective_ns: int
    """Of one block in one pass."""
    runtime_bytes: int


_NOTHING: Final = BlockCosts(forward_ns=(0, 0), backward_ns=(0, 0), collective_ns=0, runtime_bytes=0)


@dataclass(frozen=True)
class BlockProfile:
    """All rows of a profile that were run."""

    source: str
    sequence: int
    activation_bytes: int
    measured: Mapping[BlockSize, BlockCosts]

    def costs(self, hidden: int, degree: int, batch: int) -> BlockCosts:
        """Costs of a size; `ValueError` names one that is missing."""
        size = BlockSize(hidden, degree, batch)
        if size not in self.measured:
            raise ValueError(f"{self.source}: {size} is not in the file")
        return self.measured[size]

    def split(self, hidden: int, degree: int, batch: int, *, parts: int) -> tuple[BlockCosts, ...]:
        """Costs of the sub-batches of a batch, the larger ones first; one without samples costs nothing."""
        sizes = [batch // parts + (part < batch % parts) for part in range(parts)]
        return tuple(self.costs(hidden, degree, size) if size else _NOTHING for size in sizes)

    def activation_size_bytes(self, hidden: int, batch: int) -> int:
        """Bytes of a block's input or output, which is also the message of its collective."""
        return batch * self.sequence * hidden * self.activation_bytes

    def fit_all_reduce(self) -> tuple[float, float]:
        """Latency in nanoseconds and nanoseconds per byte of all collectives of groups, neither below zero.

        Relative errors are minimised: milliseconds at 2 MB count as much as at 200.
        """
        groups = [(size, costs) for size, costs in self.measured.items() if size.degree > 1]
        payload = np.array([self.activation_size_bytes(size.hidden, size.batch) for size, _ in groups], float)
        time = np.array([costs.collective_ns for _, costs in groups], float)
        design = np.stack([1 / time, payload / time], axis=1)
        scale = design.max(axis=0)
        solution, _ = nnls(design / scale, np.ones(len(time)))
        latency, rate = solution / scale
        return float(latency), float(rate)


def read_block_profile(path: Path, *, sequence: int = 1024, activation_bytes: int = 4) -> BlockProfile:
    """Read a CSV with the columns of `HEADER`.

    ``sequence`` and ``activation_bytes`` (per element) are those of the measurement, which the file does not
    say: the public RTX 3090 profile was taken at 1024 tokens in 32-bit floats.

    A group of one has nobody to reduce with, so its collective costs nothing, whatever the file says: the
    profiler that wrote the public file calls the all-reduce without a group, that is on all ranks, and has
    a time for every degree.
    """
    header, *lines = csv.reader(path.read_text(encoding="utf-8").splitlines(), strict=True)
    if tuple(header) != HEADER:
        raise ValueError(f"{path}, line 1: header {','.join(header)!r} must be {','.join(HEADER)!r}")
    measured: dict[BlockSize, BlockCosts] = {}
    for cells in lines:
        size = BlockSize(*map(int, cells[: len(_SIZE)]))
        values = dict(zip(_MEASURED, map(float, cells[len(_SIZE) :]), strict=True))
        if NOT_RUN in values.values():
            continue
        ns = {column: max(1, round(value * 1e6)) for column, value in values.items()}
        measured[size] = BlockCosts(
            forward_ns=(ns["attn_fp"], ns["mlp_fp"]),
            backward_ns=(ns["attn_bp"], ns["mlp_bp"]),
            collective_ns=ns["comm"] if size.degree > 1 else 0,
            runtime_bytes=math.ceil(values["runtime_memory"] * 2**20),
        )
    return BlockProfile(str(path), sequence, activation_bytes, measured)


# -- the choice of degrees (Oases) ---------------------------------------------------------------------------

PARAMETER_STATE_BYTES: Final = 16
"""Bytes of a parameter's states with Adam: weight, gradient and two moments in 32 bits, or 16-bit weight
and gradient beside a 32-bit weight and moments."""


def problem_from_profile(
    profile: BlockProfile,
    *,
    hidden: int,
    layers: int,
    devices: int,
    global_batch: int,
    memory_limit_bytes: int,
    degrees: Sequence[int] | None = None,
) -> DegreeProblem:
    """The problem of equal layers with 12 hidden^2 weights on ``devices`` ranks.

    Degree t leaves ``devices / t`` replicas of ``global_batch x t / devices`` samples. That number must be
    whole. Two or more samples are split in two sub-batches, the first the larger; one sample is one
    sub-batch. The buffers are those of the whole batch of a replica, an upper bound.

    Degrees are those of ``degrees``, else powers of two, that were measured at the batches needed.

    The all-gather between degrees i < j moves the samples of a replica of degree j that a rank has not got,
    ``1 - i/j`` of them, at the latency and half the rate fitted to the profile's all-reduces: a ring moves
    every byte of those twice.
    """
    options = []
    for degree in degrees or [2**n for n in range(devices.bit_length())]:
        with contextlib.suppress(ValueError):
            options.append(
                _degree_costs(profile, hidden, degree, replica_batch(degree, devices, global_batch))
            )
    latency_ns, ns_per_byte = profile.fit_all_reduce()
    gathers = {}
    for low, high in combinations([option.degree for option in options], 2):
        whole = profile.activation_size_bytes(hidden, replica_batch(high, devices, global_batch))
        gathers[low, high] = round(latency_ns + (whole - whole * low // high) * ns_per_byte / 2)
    return DegreeProblem(
        layers=layers, options=tuple(options), gather_ns=gathers, memory_limit_bytes=memory_limit_bytes
    )


def replica_batch(degree: int, devices: int, global_batch: int) -> int:
    """Samples of a replica at a degree; `ValueError` where degree or batch do not divide."""
    batch, rest = divmod(global_batch * degree, devices)
    if rest or devices % degree:
        raise ValueError(f"global_batch={global_batch} and devices={devices} do not divide by it")
    return batch


def _degree_costs(profile: BlockProfile, hidden: int, degree: int, batch: int) -> DegreeCosts:
    first, second = profile.split(hidden, degree, batch, parts=2)
    forward = tuple(zip(first.forward_ns, second.forward_ns, strict=True))
    backward = tuple(zip(first.backward_ns, second.backward_ns, strict=True))
    collective = (first.collective_ns, second.collective_ns)
    weights = 12 * hidden * hidden
    return DegreeCosts(
        degree=degree,
        forward=tuple(PassCosts(compute_ns=f, collective_ns=collective) for f in forward),
        backward=tuple(
            PassCosts(compute_ns=(f[0] + b[0], f[1] + b[1]), collective_ns=collective)
            for f, b in zip(forward, backward, strict=True)
        ),
        resident_bytes=-(-weights * PARAMETER_STATE_BYTES // degree)
        + 2 * profile.activation_size_bytes(hidden, batch),
        runtime_bytes=profile.costs(hidden, degree, batch).runtime_bytes,
    )
