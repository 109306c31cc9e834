"""What is measured: models, real text, plans; and how repeated measurements are summed up."""

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.stats import binom

from braid.actors.config import parse_config
from braid.actors.controller.planning import build_schedule
from braid.actors.stage.messages import RunPlan
from braid.jobs.data.prepare import prepare
from braid.jobs.data.tokenizer import tokenizer_of
from braid.jobs.identity import DataRequest
from braid.scheduling.schedule_text import write


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and batch to be measured; sections of a configuration."""

    name: str
    model: Mapping[str, Any]
    train: Mapping[str, Any]


CASES = (
    Case(
        name="llama 256 x 4",
        model={"hidden": 256, "layers": 4, "heads": 8, "kv_heads": 4, "sequence": 256},
        train={"global_batch": 8, "micro_batch": 4},
    ),
    Case(
        name="llama 512 x 4",
        model={"hidden": 512, "layers": 4, "heads": 8, "kv_heads": 4, "sequence": 512, "vocabulary": 8192},
        train={"global_batch": 4, "micro_batch": 2},
    ),
    Case(
        name="gpt 256 x 4",
        model={"family": "gpt", "hidden": 256, "layers": 4, "heads": 8, "sequence": 256},
        train={"global_batch": 8, "micro_batch": 4},
    ),
)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median, quartiles and number of some measurements, and how sure the median is.

    ``median_from`` and ``median_to``: where the median of endless measurements lies with 95 % confidence, by
    counting those above and below it (sign test), which asks nothing of their distribution; of fewer than
    six measurements the extremes, which are less sure than that.
    """

    median: float
    low: float
    high: float
    count: int
    median_from: float
    median_to: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Sum up at least one measurement."""
        low, median, high = (
            statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        )
        ordered = sorted(values)
        # No more than `first` values lie below the true median in less than 2.5 % of cases.
        first = max(0, int(binom.ppf(0.025, len(values), 0.5)) - 1)
        return cls(
            median=median,
            low=low,
            high=high,
            count=len(values),
            median_from=ordered[first],
            median_to=ordered[-1 - first],
        )

    @classmethod
    def of_ratios(cls, above: Sequence[float], below: Sequence[float]) -> "Spread":
        """Sum up the ratios of two series, round by round: load that comes and goes hits both of a round."""
        return cls.of([a / b for a, b in zip(above, below, strict=True)])


def prepare_text(folder: Path) -> Path:
    """Real text, some 1.5 MB of it."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))[:60]
    config = parse_config({"data": {"files": [str(path) for path in sources]}})
    return prepare(DataRequest.of(config), folder / "data", map).output


def plan_of(
    case: Case, data: Path, seed: int, *, threads: int, parallel: Mapping[str, int] | None = None
) -> RunPlan:
    """What the ranks of a case are told: by default one rank, on the CPU."""
    config = parse_config(
        {
            "model": dict(case.model),
            "train": {**case.train, "seed": seed, "steps": 10_000, "warmup_steps": 100},
            "parallel": dict(parallel or {}),
            "cluster": {"device": "cpu", "threads_per_rank": threads, "cpus_per_rank": 0.5},
        }
    )
    shape = config.check(tokenizer_of(config).vocabulary)
    schedule = write(build_schedule(config, shape))
    return RunPlan(config=config, shape=shape, schedule=schedule, data=str(data))


def tokens_per_step(plan: RunPlan) -> int:
    """Tokens of one optimizer step."""
    return plan.config.train.global_batch * plan.shape.sequence
