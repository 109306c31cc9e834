"""Computes the progress of tasks that run at the same time on a rank; no other file defines it.

A rank has a compute stream and lanes of transfers. The first transfer of each lane runs. While several tasks
run, each advances at 1 / (1 + sum of its slowdowns by the others); two transfers on one link share it, which
is a slowdown of 1. Tasks are numbers; ``slow[a][b]`` is the fraction by which a takes longer while b runs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

EPSILON: Final = 1e-6
"""Nanoseconds of remaining work up to which a task counts as finished."""

FloatArray = NDArray[np.float64]
Lane = list[tuple[int, float]]
"""Queue of transfers: (task, its remaining ns if it ran alone) of each that was issued and has not
finished."""


Slowdowns = Sequence[Sequence[float] | Mapping[int, float]]
"""Table of slowdowns, a row for each task."""
Ended = Callable[[int, float], None]
"""Callback for every transfer that ends: it gets the lane's number and the ns since the begin of the call."""


def run_lanes(
    lanes: Sequence[Lane], slow: Slowdowns, limit: float, compute: int = -1, ended: Ended | None = None
) -> float:
    """Advance the first task of each lane, in place, until one ends or ``limit`` ns have passed.

    Returns the ns that have passed. ``compute``: task that runs on the compute stream meanwhile, -1 for none.
    """
    busy = [number for number, lane in enumerate(lanes) if lane]
    paces = []
    passed = limit
    for number in busy:
        task, remaining = lanes[number][0]
        row, pace = slow[task], 1.0
        for other_lane in busy:
            if other_lane != number:
                pace += row[lanes[other_lane][0][0]]
        if compute >= 0:
            pace += row[compute]
        paces.append(pace)
        if remaining * pace < passed:
            passed = remaining * pace
    for number, pace in zip(busy, paces, strict=True):
        lane = lanes[number]
        task, remaining = lane[0]
        remaining -= passed / pace
        if remaining > EPSILON:
            lane[0] = (task, remaining)
        else:
            del lane[0]
            if ended is not None:
                ended(number, passed)
    return passed


def run_compute(
    lanes: Sequence[Lane], slow: Slowdowns, task: int, ns: float, ended: Ended | None = None
) -> float:
    """Run a compute task of ``ns`` solo time while transfers are under way; return the ns that it takes.

    The lanes advance in place.
    """
    remaining, total = ns, 0.0
    row = slow[task]
    while remaining > EPSILON:
        pace, alone = 1.0, True
        for lane in lanes:
            if lane:
                pace += row[lane[0][0]]
                alone = False
        if alone:
            return total + remaining
        before = total
        later = None if ended is None else _later(ended, before)
        passed = run_lanes(lanes, slow, remaining * pace, task, later)
        remaining -= passed / pace
        total += passed
    return total


def _later(ended: Ended, by: float) -> Ended:
    return lambda lane, time: ended(lane, by + time)


STREAM_PAIRS: Final = ((0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1))
"""Pairs (stream, another stream that slows it down), by number: 0 computes, 1 and 2 communicate."""


def fluid_ns(loads: FloatArray, slowdowns: FloatArray) -> FloatArray:
    """Return the ns in which three streams that start together have all finished their loads, for n cases.

    ``loads``: ns per stream, shape (n, 3). ``slowdowns``: of one stream by another in the order of
    `STREAM_PAIRS`, shape (n, 6). The result has the shape (n,).
    """
    remaining = loads.astype(float, copy=True)
    total = np.zeros(len(loads))
    s01, s10, s02, s20, s12, s21 = slowdowns.T
    for _ in range(3):
        a0, a1, a2 = (remaining > 1e-9).T.astype(float)
        pace = np.stack([1 + a1 * s01 + a2 * s02, 1 + a0 * s10 + a2 * s12, 1 + a0 * s20 + a1 * s21], axis=1)
        active = remaining > 1e-9
        elapsed = np.where(active, remaining * pace, np.inf).min(axis=1)
        elapsed = np.where(np.isfinite(elapsed), elapsed, 0.0)
        total += elapsed
        remaining = np.where(active, remaining - elapsed[:, None] / pace, 0.0)
        remaining[remaining < EPSILON] = 0.0
    return total
