"""Turns the measurements of `braid bench overlap` into rows and a table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from braid.actors.stage.rank.messages import SerialStep, StepResult
from braid.jobs.bench.rounds import Spread
from braid.scheduling.trace import figures


@dataclass(frozen=True, kw_only=True)
class OverlapRow:
    """Results of one schedule or peer; medians over the rounds. Peers have no numbers of overlap."""

    schedule: str
    seconds_per_step: float
    spread_seconds: float
    """Interquartile range of the seconds per step."""
    tokens_per_second: float
    speedup: float
    """Speed-up over `megatron`: median of the ratios round by round."""
    peak_bytes: int
    """Peak resident memory of the largest process."""
    loss: float
    """Loss of the last step, which should be equal for all sides."""
    alpha: float | None = None
    limit_speedup: float | None = None
    recovered: float | None = None
    hidden_fraction: float | None = None
    slowdown_fraction: float | None = None
    links_together_fraction: float | None = None
    """Share of a step in which links inside hosts and between hosts moved data at the same time."""
    launch_gap_fraction: float | None = None
    bubble_fraction: float | None = None
    waiting_fraction: float | None = None
    """Share of a step that a rank waited until its peer too had issued a collective."""
    communication_seconds: float | None = None
    """Seconds of a step in which some transfer was under way; mean over the ranks."""
    link_seconds: float | None = None
    """Seconds that the bytes of the busiest direction take at the rate of the link between hosts."""
    activation_bytes: int | None = None
    """Most bytes that activation slots and messages held at once."""
    predicted_seconds: float | None = None
    """Seconds of a step, simulated with the profile that was measured before any side ran."""
    beside_seconds: float | None = None
    """Seconds of a step, simulated with the profile measured after the rounds: its difference from the
    measured step shows the simulator's error more than the drift of the machine's speed."""


@dataclass(frozen=True, kw_only=True)
class OverlapResult:
    """The measured results of a case."""

    model: str
    link_mbit: float
    rounds: int
    rows: tuple[OverlapRow, ...]
    load_before: tuple[float, float, float]


Results = Sequence[Sequence[StepResult]]
"""Results of every rank, round by round."""


def row_of(name: str, results: Results, serial: Results, tokens: int, link_mbit: float) -> OverlapRow:
    """Summarise a side's rounds relative to the serial schedule; ``tokens``: tokens of a step."""
    seconds = Spread.of(_seconds(results))
    row = OverlapRow(
        schedule=name,
        seconds_per_step=seconds.median,
        spread_seconds=seconds.high - seconds.low,
        tokens_per_second=tokens / seconds.median,
        speedup=Spread.of_ratios(_seconds(serial), _seconds(results)).median,
        peak_bytes=max(result.peak_bytes for result in results[-1]),
        loss=sum(result.loss_sum for result in results[-1]) / tokens,
    )
    communication = _mean_seconds("communication", results)
    if not any(communication):
        return row  # a peer
    hidden = _mean_seconds("hidden", results)
    alpha = _median_share("communication", serial)
    step = SerialStep(seconds=median(_seconds(serial)), alpha=alpha)
    fullest = [max(result.overlap.fullest_bytes for result in step) for step in results]
    names = ["links_together", "launch_gap", "bubble", "waiting"]
    if all(result.overlap.slowdown_ns is not None for step in results for result in step):
        names.append("slowdown")
    shares: dict[str, Any] = {f"{name}_fraction": _median_share(name, results) for name in names}
    return replace(
        row,
        alpha=alpha,
        limit_speedup=step.limit_speedup,
        recovered=None if results is serial else step.recovered(seconds.median),
        hidden_fraction=median(h / c if c else 1.0 for h, c in zip(hidden, communication, strict=True)),
        **shares,
        communication_seconds=median(communication),
        link_seconds=median(fullest) * 8e-6 / link_mbit,
    )


def _seconds(results: Results) -> list[float]:
    """Return the seconds of the slowest rank, by round."""
    return [max(result.seconds for result in step) for step in results]


def _mean_seconds(name: str, results: Results) -> list[float]:
    """Return a time of `OverlapNumbers` in seconds, by round, as mean over the ranks; ``name`` omits the
    unit."""
    return [mean(getattr(result.overlap, f"{name}_ns") for result in step) / 1e9 for step in results]


def _median_share(name: str, results: Results) -> float:
    """Return the median over the rounds of a time's share of the step."""
    return Spread.of_ratios(_mean_seconds(name, results), _seconds(results)).median


def _number(value: float | None, places: int = 3, unit: float = 1) -> str:
    return "-" if value is None else f"{value / unit:.{places}f}"


_share = partial(figures.share, places=1)
_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("tokens/s", "tokens_per_second", partial(_number, places=0)),
    ("speed-up", "speedup", _number),
    ("recovered", "recovered", partial(figures.recovered, places=1)),
    ("hidden", "hidden_fraction", _share),
    ("both links", "links_together_fraction", _share),
    ("waiting", "waiting_fraction", _share),
    ("slowdown", "slowdown_fraction", partial(figures.lost, write=_share)),
    ("gap", "launch_gap_fraction", _share),
    ("bubble", "bubble_fraction", _share),
    ("link s", "communication_seconds", _number),
    ("bytes s", "link_seconds", _number),
    ("peak MiB", "peak_bytes", partial(_number, places=0, unit=2**20)),
    ("slots MiB", "activation_bytes", partial(_number, places=1, unit=2**20)),
    ("simulated s", "predicted_seconds", _number),
    ("again s", "beside_seconds", _number),
)


def show(console: Console, result: OverlapResult) -> None:
    """Print the result as a table."""
    say = partial(console.print, highlight=False, soft_wrap=True)
    say(
        f"{result.model}; two emulated hosts, link {result.link_mbit:g} Mbit/s; medians of {result.rounds} "
        f"alternating rounds, ± half the distance of the quartiles; load {result.load_before[0]:.1f}"
    )
    columns = [
        (title, key, write)
        for title, key, write in _COLUMNS
        if key != "links_together_fraction" or any(row.links_together_fraction for row in result.rows)
    ]
    titles = ("s/step", *(title for title, _, _ in columns))
    table = Table("schedule", *(Column(title, justify="right") for title in titles))
    for row in result.rows:
        step = f"{row.seconds_per_step:.3f} ±{row.spread_seconds / 2 / row.seconds_per_step:.1%}"
        table.add_row(row.schedule, step, *(write(getattr(row, key)) for _, key, write in columns))
    console.print(table)
    serial = next(row for row in result.rows if row.schedule == "megatron")
    say(f"alpha {serial.alpha:.3f}, so no schedule can be faster than {serial.limit_speedup:.2f}x")
