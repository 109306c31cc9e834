"""Measured costs of a transformer layer's two blocks under tensor parallelism, read from somebody's CSV.

A row holds what one size costs: forward and backward of the attention and the MLP block, one tensor-parallel
all-reduce of a block's output, and the memory that running a layer takes. A size that was not run is an
error when it is asked for, never zero.
"""

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from scipy.optimize import nnls

HEADER: Final = (
    "hidden_size",
    "tp_degree",
    "batch_size",
    "attn_fp",
    "attn_bp",
    "mlp_fp",
    "mlp_bp",
    "comm",
    "runtime_memory",
)
"""Columns of the file: a size, five times in milliseconds, memory in MiB."""

BLOCKS: Final = ("attention", "mlp")
"""Blocks of a layer in the order of the forward pass; each ends in a collective in every pass."""

SIZES: Final = 3
"""The first columns are the size; the others were measured."""

NOT_RUN: Final = -1.0
"""What stands in every measured column of a size that was not run (out of memory, or not possible)."""


_DECIMAL: Final = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?")
"""Stricter than `float`, which takes 1_0, nan and blanks."""


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


@dataclass(frozen=True, kw_only=True)
class AllReduceFit:
    """Time of an all-reduce over the bytes of the reduced tensor: latency + bytes x rate."""

    latency_ns: float
    ns_per_byte: float
    worst_relative_error: float
    """Largest distance from a measured time, as a share of it."""

    def all_gather_ns(self, received_bytes: int) -> int:
        """Time of an all-gather in which every rank receives that many bytes; none takes none.

        A ring all-reduce moves every byte twice (reduce-scatter, then all-gather), hence half the rate.
        """
        return round(self.latency_ns + received_bytes * self.ns_per_byte / 2) if received_bytes else 0


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """All rows of a profile. ``measured`` leaves out the sizes of ``not_run``."""

    source: str
    sequence: int
    activation_bytes: int
    measured: Mapping[BlockSize, BlockCosts]
    not_run: frozenset[BlockSize] = frozenset()

    def costs(self, hidden: int, degree: int, batch: int) -> BlockCosts:
        """Costs of a size; `ValueError` names what is missing and what there is instead."""
        size = BlockSize(hidden, degree, batch)
        if size not in self.measured:
            why = "was not run (-1 in the file)" if size in self.not_run else "is not in the file"
            raise ValueError(f"{self.source}: {size} {why}; {self._nearest(size)}")
        return self.measured[size]

    def split(self, hidden: int, degree: int, batch: int, *, parts: int) -> tuple[BlockCosts, ...]:
        """Costs of the sub-batches of a batch, the larger ones first; one without samples costs nothing."""
        sizes = [batch // parts + (part < batch % parts) for part in range(parts)]
        return tuple(self.costs(hidden, degree, size) if size else _NOTHING for size in sizes)

    def _nearest(self, size: BlockSize) -> str:
        """What of a missing size is there, from the coarsest column that has to change."""
        hidden = sorted({known.hidden for known in self.measured})
        degrees = self.degrees(size.hidden)
        batches = sorted(k.batch for k in self.measured if k[:2] == size[:2])
        if size.hidden not in hidden:
            return f"measured hidden sizes: {_listed(hidden)}"
        if size.degree not in degrees:
            return f"measured degrees of hidden {size.hidden}: {_listed(degrees)}"
        return f"measured batches of hidden {size.hidden}, degree {size.degree}: {_listed(batches)}"

    def degrees(self, hidden: int) -> tuple[int, ...]:
        """Degrees of which some batch was measured."""
        return tuple(sorted({known.degree for known in self.measured if known.hidden == hidden}))

    def activation_size_bytes(self, hidden: int, batch: int) -> int:
        """Bytes of a block's input or output, which is also the message of its collective."""
        return batch * self.sequence * hidden * self.activation_bytes

    def fit_all_reduce(self) -> AllReduceFit:
        """The collectives of all groups of two and more as latency + bytes x rate, neither below zero.

        Relative errors are minimised: milliseconds at 2 MB count as much as at 200. Raises `ValueError` if
        fewer than two message sizes were measured.
        """
        points = [
            (self.activation_size_bytes(size.hidden, size.batch), costs.collective_ns)
            for size, costs in self.measured.items()
            if size.degree > 1
        ]
        if len({size for size, _ in points}) < 2:
            raise ValueError(
                f"{self.source}: a latency and a bandwidth need collectives of two message sizes, "
                f"found {len({size for size, _ in points})}; measure another batch of a degree above 1"
            )
        payload, time = np.array(points, dtype=float).T
        design = np.stack([1 / time, payload / time], axis=1)
        scale = design.max(axis=0)
        solution, _ = nnls(design / scale, np.ones(len(time)))
        latency, rate = solution / scale
        error = np.abs(design @ (latency, rate) - 1).max()
        return AllReduceFit(
            latency_ns=float(latency), ns_per_byte=float(rate), worst_relative_error=float(error)
        )


def read_block_profile(path: Path, *, sequence: int = 1024, activation_bytes: int = 4) -> BlockProfile:
    """Read a CSV with the columns of `HEADER`; `ValueError` names file, line, column, value and remedy.

    ``sequence`` and ``activation_bytes`` (per element) are those of the measurement, which the file does not
    say: the public RTX 3090 profile was taken at 1024 tokens in 32-bit floats.

    A group of one has nobody to reduce with, so its collective costs nothing, whatever the file says: the
    profiler that wrote the public file calls the all-reduce without a group, that is on all ranks, and has
    a time for every degree.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as text ({error}); give the path of a profile") from None
    lines = csv.reader(text.splitlines(), strict=True)
    measured: dict[BlockSize, BlockCosts] = {}
    first_line: dict[BlockSize, int] = {}
    try:
        _check_header(path, next(lines, []))
        for cells in lines:
            row = _Row(f"{path}, line {lines.line_num}", cells)
            if row.size in first_line:
                raise ValueError(
                    f"{row.where}: {row.size} stands in line {first_line[row.size]} too; remove one of them"
                )
            first_line[row.size] = lines.line_num
            costs = row.costs()
            if costs is not None:
                measured[row.size] = costs
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {lines.line_num}: {error}; write plain comma-separated text"
        ) from None
    if not measured:
        raise ValueError(f"{path}: no measured row; give a profile with rows of {', '.join(HEADER)}")
    return BlockProfile(
        source=str(path),
        sequence=sequence,
        activation_bytes=activation_bytes,
        measured=measured,
        not_run=frozenset(first_line.keys() - measured.keys()),
    )


def _check_header(path: Path, cells: Sequence[str]) -> None:
    if tuple(cells) != HEADER:
        raise ValueError(f"{path}, line 1: header {','.join(cells)!r} must be {','.join(HEADER)!r}")


class _Row:
    """One line of the file while it is read."""

    def __init__(self, where: str, cells: Sequence[str]) -> None:
        self.where = where
        if len(cells) != len(HEADER):
            raise ValueError(f"{where}: {len(cells)} columns, must be {len(HEADER)}: {', '.join(HEADER)}")
        self._cells = dict(zip(HEADER, cells, strict=True))
        self.size = BlockSize(*(self._count(column) for column in HEADER[:SIZES]))

    def _count(self, column: str) -> int:
        text = self._cells[column]
        if not (text.isascii() and text.isdecimal() and int(text)):
            raise ValueError(f"{self.where}: {column}={text!r} must be a whole number of at least 1")
        return int(text)

    def _number(self, column: str) -> float:
        text = self._cells[column]
        value = float(text) if _DECIMAL.fullmatch(text) else math.nan
        if not (math.isfinite(value) and (value > 0 or value == NOT_RUN)):
            unit = "MiB" if column == "runtime_memory" else "milliseconds"
            raise ValueError(
                f"{self.where}: {column}={text!r} must be {unit} above zero, or -1 for what was not run"
            )
        return value

    def costs(self) -> BlockCosts | None:
        """The measured columns; None where all of them say that the size was not run."""
        columns = HEADER[SIZES:]
        values = {column: self._number(column) for column in columns}
        missing = [column for column in columns if values[column] == NOT_RUN]
        if len(missing) == len(columns):
            return None
        if missing:
            raise ValueError(
                f"{self.where}: {missing[0]}=-1 beside measured columns; "
                f"measure it, or write -1 in all of {', '.join(columns)}"
            )
        times = {column: max(1, round(values[column] * 1e6)) for column in columns[:-1]}
        return BlockCosts(
            forward_ns=(times["attn_fp"], times["mlp_fp"]),
            backward_ns=(times["attn_bp"], times["mlp_bp"]),
            collective_ns=times["comm"] if self.size.degree > 1 else 0,
            runtime_bytes=math.ceil(values["runtime_memory"] * 2**20),
        )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"
