"""How benchmarks measure: sides take turns on real text; repeated measurements are summarised."""

import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from braid.actors.config import parse_config
from braid.jobs.data.identity import DataRequest
from braid.jobs.data.prepare import prepare

Progress = Callable[[str], None]
K = TypeVar("K")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median, quartiles and number of some measurements."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Summarise at least one measurement."""
        low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
        return cls(median=middle, low=low, high=high, count=len(values))

    @classmethod
    def of_ratios(cls, above: Sequence[float], below: Sequence[float]) -> "Spread":
        """Summarise the ratios of two series, round by round: passing load affects both values of a round."""
        return cls.of([a / b for a, b in zip(above, below, strict=True)])


def prepare_text(folder: Path) -> Path:
    """Tokenize some 1.5 MB of real text into a new data set below ``folder``, and return its path."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))[:60]
    config = parse_config({"data": {"files": [str(path) for path in sources]}})
    return prepare(DataRequest.of(config), folder / "data", map).output


def by_turns(
    sides: Mapping[K, Callable[[range], R]], rounds: int, progress: Progress = lambda text: None
) -> dict[K, list[R]]:
    """Run the next two steps of every side in each round, in a new random order, and return the results by
    side; the first round is not counted."""
    taken: dict[K, list[R]] = {side: [] for side in sides}
    for turn in range(rounds + 1):
        progress(f"round {turn} of {rounds}" + (" (not counted)" if turn == 0 else ""))
        for side in random.sample(list(sides), len(sides)):
            result = sides[side](range(2 * turn, 2 * turn + 2))
            if turn:
                taken[side].append(result)
    return taken
