"""Finds ranks that delay others: they repeatedly compute longer than the other ranks of their stage."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

TIMES: Final = 1.2
"""Ratio to the compute time of its stage's other ranks above which a rank is slow."""
STRETCH: Final = 20
STRETCHES: Final = 3
LAST: Final = STRETCH * STRETCHES
"""Number of steps that are considered, in stretches: a rank must be slow in each stretch."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that computes longer than the other ranks of its stage."""

    rank: int
    stage: int
    times: float
    """Its compute time over the median of its stage's other ranks."""


def stragglers(steps: Sequence[Sequence[float]], stages: Sequence[int]) -> list[Straggler]:
    """Find ranks whose compute time exceeds `TIMES` that of their stage's other ranks, in all stretches.

    ``steps``: every rank's compute seconds, by step; ``stages``: the pipeline stage of every rank. A rank's
    median over a stretch is compared with the median of the others' medians, so that neither one slow step
    nor one noisy stretch singles out a rank. The result is empty before there are `LAST` steps. The slowest
    come first.
    """
    recent = [row for row in steps[-LAST:] if len(row) == len(stages)]
    if len(recent) < LAST:
        return []
    own = np.median(np.array(recent, np.float64).reshape(STRETCHES, STRETCH, len(stages)), axis=1)
    found = []
    for stage in sorted(set(stages)):
        members = np.flatnonzero(np.array(stages) == stage)
        if len(members) < 2:
            continue
        others = _medians_of_others(own[:, members])
        slow = np.flatnonzero((own[:, members] > TIMES * others).all(0) & (others > 0).all(0))
        times = np.median(own[:, members][:, slow] / others[:, slow], axis=0)
        found += [
            Straggler(rank=int(members[place]), stage=stage, times=float(ratio))
            for place, ratio in zip(slow, times, strict=True)
        ]
    return sorted(found, key=lambda one: -one.times)


def _medians_of_others(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return for each value of a row the median of the row's other values; (rows, values), at least two
    values."""
    ordered, places = np.sort(values, axis=1), np.argsort(np.argsort(values, axis=1), axis=1)
    count = values.shape[1] - 1

    def nth_of_others(n: int) -> NDArray[np.float64]:
        return np.take_along_axis(ordered, n + (places <= n), axis=1)

    middle: NDArray[np.float64] = (nth_of_others((count - 1) // 2) + nth_of_others(count // 2)) / 2
    return middle
