"""How what runs at the same time on a rank advances: the one place that says it.

A rank has a compute stream and lanes of transfers. Of each lane the first transfer runs. While several tasks
run, each advances at 1 / (1 + sum of its slowdowns by the others); two transfers on one link share it, which
is a slowdown of 1. Tasks are numbers, ``slow[a][b]`` is how much longer a takes while b runs.
"""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

EPSILON: Final = 1e-6
"""Nanoseconds of work that count as none."""

FloatArray = NDArray[np.float64]
Lane = list[tuple[int, float]]
"""Tasks that were issued and have not finished, with the time alone that each still needs."""


class Slowdowns(Protocol):
    """``slow[a][b]``."""

    def __getitem__(self, task: int, /) -> "Sequence[float] | TaskSlowdowns": ...


class TaskSlowdowns(Protocol):
    """Slowdowns of one task."""

    def __getitem__(self, task: int, /) -> float: ...


Ended = Callable[[int, float], None]
"""Told of every transfer that ends: the number of its lane, the time since the call."""


def run_lanes(
    lanes: Sequence[Lane], slow: Slowdowns, limit: float, compute: int = -1, ended: Ended | None = None
) -> float:
    """Let the first of each lane advance until one is done or the limit is reached; the time that passes.

    compute: the task that runs on the compute stream meanwhile; -1: none.
    """
    busy = [number for number, lane in enumerate(lanes) if lane]
    paces = []
    passed = limit
    for number in busy:
        task, left = lanes[number][0]
        row, pace = slow[task], 1.0
        for other in busy:
            if other != number:
                pace += row[lanes[other][0][0]]
        if compute >= 0:
            pace += row[compute]
        paces.append(pace)
        if left * pace < passed:
            passed = left * pace
    for number, pace in zip(busy, paces, strict=True):
        lane = lanes[number]
        task, left = lane[0]
        left -= passed / pace
        if left > EPSILON:
            lane[0] = (task, left)
        else:
            del lane[0]
            if ended is not None:
                ended(number, passed)
    return passed


def run_compute(
    lanes: Sequence[Lane], slow: Slowdowns, task: int, ns: float, ended: Ended | None = None
) -> float:
    """Run a compute task beside what is under way; the time it takes."""
    left, total = ns, 0.0
    row = slow[task]
    while left > EPSILON:
        pace, alone = 1.0, True
        for lane in lanes:
            if lane:
                pace += row[lane[0][0]]
                alone = False
        if alone:
            return total + left
        before = total
        later = None if ended is None else _later(ended, before)
        passed = run_lanes(lanes, slow, left * pace, task, later)
        left -= passed / pace
        total += passed
    return total


def _later(ended: Ended, by: float) -> Ended:
    return lambda lane, time: ended(lane, by + time)


STREAM_PAIRS: Final = ((0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1))
"""A stream that suffers and the one that it suffers from."""


def fluid_ns(loads: FloatArray, slowdowns: FloatArray) -> FloatArray:
    """Time in which three streams finish their loads when all start together, of many cases at once.

    loads: (n, 3) in ns. slowdowns: (n, 6), of a stream by another as in `STREAM_PAIRS`.
    """
    remaining = loads.astype(float, copy=True)
    total = np.zeros(len(loads))
    s01, s10, s02, s20, s12, s21 = slowdowns.T
    for _ in range(3):
        a0, a1, a2 = (remaining > 1e-9).T.astype(float)
        pace = np.stack([1 + a1 * s01 + a2 * s02, 1 + a0 * s10 + a2 * s12, 1 + a0 * s20 + a1 * s21], axis=1)
        active = remaining > 1e-9
        left = np.where(active, remaining * pace, np.inf).min(axis=1)
        left = np.where(np.isfinite(left), left, 0.0)
        total += left
        remaining = np.where(active, remaining - left[:, None] / pace, 0.0)
        remaining[remaining < EPSILON] = 0.0
    return total
