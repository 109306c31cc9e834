"""Finds ranks that delay others: they repeatedly compute longer than the other ranks of their stage."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

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
    medians = np.median(np.array(recent, np.float64).reshape(STRETCHES, STRETCH, len(stages)), axis=1)
    slow = []
    for stage in sorted(set(stages)):
        members = np.flatnonzero(np.array(stages) == stage)
        if len(members) < 2:
            continue
        for rank in members.tolist():
            others = np.median(medians[:, members[members != rank]], axis=1)
            if (others > 0).all() and (medians[:, rank] > TIMES * others).all():
                times = float(np.median(medians[:, rank] / others))
                slow.append(Straggler(rank=rank, stage=stage, times=times))
    return sorted(slow, key=lambda straggler: -straggler.times)
