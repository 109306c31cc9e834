"""Which ranks hold the others up: they compute longer than the others of their stage."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

LAST: Final = 20
"""Steps that are looked at."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that computes longer than its stage's others."""

    rank: int
    stage: int
    times: float
    """Its compute time over the median of its stage."""


def stragglers(
    steps: Sequence[Sequence[float]], stages: Sequence[int], *, times: float = 1.2, last: int = LAST
) -> list[Straggler]:
    """Ranks whose compute takes more than ``times`` the median of their stage over the ``last`` steps.

    steps: every rank's compute seconds, by step; stages: the pipeline stage of every rank. A rank counts with
    its median over the steps, so that one slow step names nobody. The slowest come first.
    """
    recent = [row for row in steps[-last:] if len(row) == len(stages)]
    if not stages or not recent:
        return []
    own = [median(values) for values in zip(*recent, strict=True)]
    found = []
    for stage in sorted(set(stages)):
        members = [rank for rank, its in enumerate(stages) if its == stage]
        usual = median(own[rank] for rank in members)
        found += [
            Straggler(rank=rank, stage=stage, times=own[rank] / usual)
            for rank in members
            if usual > 0 and own[rank] > times * usual
        ]
    return sorted(found, key=lambda one: -one.times)
