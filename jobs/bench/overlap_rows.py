"""Turns the measurements of `braid bench overlap` into rows and a table."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import mean, median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Column, Table
from scipy.stats import pearsonr, rankdata

from braid.actors.controller.ranks.group import Launcher, WorkerGroup, rendezvous
from braid.actors.stage.rank.interface import Rank
from braid.actors.stage.rank.messages import RunPlan, SerialStep, StepResult
from braid.jobs.bench.peers import PeerPlan, PeerRank
from braid.jobs.bench.rounds import Spread
from braid.scheduling.cost.profile import Profile
from braid.scheduling.trace import figures


@dataclass(frozen=True, kw_only=True)
class OverlapRow:
    """Results of one schedule or peer; medians over the rounds."""

    schedule: str
    seconds_per_step: float
    spread_seconds: float
    """Interquartile range of the seconds per step."""
    tokens_per_second: float
    speedup: float
    """Speed-up over `megatron`: median of the ratios round by round."""
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
    peak_bytes: int = 0
    """Peak resident memory of the largest process."""
    activation_bytes: int | None = None
    """Most bytes that activation slots and messages held at once."""
    predicted_seconds: float | None = None
    """Seconds of a step, simulated with the profile that was measured before any side ran."""
    beside_seconds: float | None = None
    """Seconds of a step, simulated with the profiles measured after the rounds (median over all starts): its
    difference from the measured step shows the simulator's error more than the drift of the machine's speed.
    """
    loss: float = 0.0
    """Loss of the last step, which should be equal for all sides."""


FEWEST = 3
"""Least number of schedules for which a rank correlation is computed."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Step times of one schedule, in seconds."""

    simulated: float
    measured: float
    spread: float
    """Interquartile range of the measured step."""

    @property
    def error(self) -> float:
        """Error of the simulated step, relative to the measured one."""
        return abs(self.simulated - self.measured) / self.measured

    def ties(self, other: "StepTimes") -> bool:
        """Return whether the measured steps differ by less than their spread."""
        return abs(self.measured - other.measured) <= (self.spread + other.spread) / 2


def rank_correlation(steps: Sequence[StepTimes]) -> float | None:
    """Compute Spearman's rank correlation of simulated and measured steps; None if all measured steps tie.

    Steps whose measured times tie get the mean of their ranks on both sides, since neither order is wrong.
    """
    simulated = rankdata([step.simulated for step in steps])
    measured = rankdata([step.measured for step in steps])
    left = sorted(range(len(steps)), key=lambda index: steps[index].measured)
    while left:
        alike = [index for index in left if steps[index].ties(steps[left[0]])]
        if len(alike) == len(steps):
            return None
        for ranks in (simulated, measured):
            ranks[alike] = ranks[alike].mean()
        left = left[len(alike) :]
    return 0.0 if np.ptp(simulated) == 0 else float(pearsonr(simulated, measured).statistic)


@dataclass(frozen=True, kw_only=True)
class OverlapResult:
    """The measured results of a case."""

    model: str
    link_mbit: float
    rounds: int
    """Number of measured rounds over all starts."""
    starts: int
    """Number of times that all ranks were started."""
    ray: bool
    rows: tuple[OverlapRow, ...]
    seed: int
    load_before: tuple[float, float, float]
    paced: bool = False
    """Whether hosts were emulated by paced connections on one host, because there was no root access."""
    exact_seconds: float | None = None
    """Simulated step of braid:w whose layers are paired in the optimal order for the measured profile, found
    by branch and bound; None if that takes too long. Units of several layers may be faster."""
    spans_price: Spread | None = None
    """Ratio of step times with and without recorded spans, round by round; None if not requested."""

    @property
    def simulated(self) -> tuple[float, float | None] | None:
        """The simulator's median error, and `rank_correlation` of simulated and measured steps.

        It uses the profiles taken after the rounds. None for fewer than three schedules.
        """
        steps = [
            StepTimes(simulated=row.beside_seconds, measured=row.seconds_per_step, spread=row.spread_seconds)
            for row in self.rows
            if row.beside_seconds
        ]
        if len(steps) < FEWEST:
            return None
        return median(step.error for step in steps), rank_correlation(steps)

    def as_json(self) -> dict[str, Any]:
        """Convert to plain containers, for ``--json``."""
        return {**asdict(self), "simulated": self.simulated}


@dataclass(eq=False)
class Contender:
    """The ranks of a schedule or a peer, and their measurements.

    Ranks may be started anew, since equal processes may differ by some percent for as long as they live.
    """

    name: str
    launcher: Launcher
    plan: RunPlan | PeerPlan
    target: Any = None
    """Destination of the spans of Braid's ranks, as in a training run."""
    predict: Callable[[Profile], float] | None = None
    """Predicts the seconds of this side's step from a profile."""
    predicted: float | None = None
    shares: "Contender | None" = None
    """Another side that uses the same ranks; None if this side has its own."""
    results: list[list[StepResult]] = field(default_factory=list)
    """Results of every rank, round by round."""
    beside: list[float] = field(default_factory=list)
    """Step times predicted from the profiles measured after the rounds, one per start."""
    activation_bytes: int | None = None
    records: bool | None = None
    """Whether its steps record spans; None if no other side with the same ranks differs in that."""
    group: WorkerGroup = field(init=False)

    def start(self) -> None:
        """Start ranks, replacing ones that were shut down, and let them form their process groups."""
        if self.shares is not None:
            self.group = self.shares.group
            return
        config = self.plan.config
        setup: Any = PeerRank.setup if isinstance(self.plan, PeerPlan) else Rank.setup
        self.group = self.launcher.start(config.layout().ranks)
        self.group.call_all(setup, self.plan, rendezvous(self.group, config.cluster.group_timeout_s))
        if self.target is not None:
            self.group.call_all(Rank.stream_spans, self.target, 1)

    def two_steps(self, steps: range) -> list[StepResult]:
        """Run two steps and return every rank's result of the second. The first step may leave work under way
        (gathers of ZeRO 1), which must not end while other sides run."""
        if self.records is not None:
            self.group.call_all(Rank.record_spans, self.records)
        return [self.group.call_all(Rank.train_step, step) for step in steps][-1]

    @property
    def seconds(self) -> list[float]:
        """Seconds of the slowest rank, by round."""
        return [max(result.seconds for result in step) for step in self.results]

    def mean_seconds(self, name: str) -> list[float]:
        """Return a time of `OverlapNumbers` in seconds, by round, as mean over the ranks; ``name`` omits the
        unit."""
        return [mean(getattr(result.overlap, f"{name}_ns") for result in step) / 1e9 for step in self.results]


def row_of(side: Contender, serial: Contender, tokens: int, link_mbit: float) -> OverlapRow:
    """Summarise a side's rounds relative to the serial schedule; ``tokens``: tokens of a step."""
    seconds = Spread.of(side.seconds)
    row = OverlapRow(
        schedule=side.name,
        seconds_per_step=seconds.median,
        spread_seconds=seconds.high - seconds.low,
        tokens_per_second=tokens / seconds.median,
        speedup=Spread.of_ratios(serial.seconds, side.seconds).median,
        peak_bytes=max(result.peak_bytes for result in side.results[-1]),
        loss=sum(result.loss_sum for result in side.results[-1]) / tokens,
    )
    communication = side.mean_seconds("communication")
    if not any(communication):
        return row  # a peer, or spans were not recorded
    hidden = side.mean_seconds("hidden")
    names = ["links_together", "launch_gap", "bubble", "waiting"]
    if all(result.overlap.slowdown_ns is not None for results in side.results for result in results):
        names.append("slowdown")
    shares: dict[str, Any] = {
        f"{name}_fraction": _median_ratio(side.mean_seconds(name), side.seconds) for name in names
    }
    alpha = _median_ratio(serial.mean_seconds("communication"), serial.seconds)
    step = SerialStep(seconds=median(serial.seconds), alpha=alpha)
    fullest = [max(result.overlap.fullest_bytes for result in results) for results in side.results]
    return replace(
        row,
        alpha=alpha,
        limit_speedup=step.limit_speedup,
        recovered=None if side is serial else step.recovered(seconds.median),
        hidden_fraction=median(h / c if c else 1.0 for h, c in zip(hidden, communication, strict=True)),
        **shares,
        communication_seconds=median(communication),
        link_seconds=median(fullest) * 8e-6 / link_mbit,
        activation_bytes=side.activation_bytes,
        predicted_seconds=side.predicted,
        beside_seconds=median(side.beside) if side.beside else None,
    )


def _median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return median(a / b for a, b in zip(above, below, strict=True))


def show(console: Console, result: OverlapResult) -> None:
    """Print the result as a table."""
    say = partial(console.print, highlight=False, soft_wrap=True)
    how = "Ray actors" if result.ray else "processes"
    starts = f" of ranks started {result.starts} times" if result.starts > 1 else ""
    hosts = "one host, paced connections," if result.paced else "two emulated hosts (network namespaces),"
    say(
        f"{result.model}; {hosts} link {result.link_mbit:g} Mbit/s, "
        f"{how}; medians of {result.rounds} alternating rounds{starts}, "
        f"± half the distance of the quartiles; load {result.load_before[0]:.1f}"
    )
    share = partial(figures.share, places=1)

    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    def cells(row: OverlapRow) -> dict[str, str]:
        cells = {
            "s/step": f"{row.seconds_per_step:.3f}",
            "±": f"{row.spread_seconds / 2 / row.seconds_per_step:.1%}",
            "tokens/s": f"{row.tokens_per_second:.0f}",
            "speed-up": f"{row.speedup:.3f}",
            "recovered": figures.recovered(row.recovered, 1),
            "hidden": share(row.hidden_fraction),
            "both links": share(row.links_together_fraction),
            "waiting": share(row.waiting_fraction),
            "slowdown": figures.lost(row.slowdown_fraction, share),
            "gap": share(row.launch_gap_fraction),
            "bubble": share(row.bubble_fraction),
            "link s": seconds(row.communication_seconds),
            "bytes s": seconds(row.link_seconds),
            "peak MiB": f"{row.peak_bytes / 2**20:.0f}",
            "slots MiB": "-" if row.activation_bytes is None else f"{row.activation_bytes / 2**20:.1f}",
            "simulated s": seconds(row.predicted_seconds),
            "again s": seconds(row.beside_seconds),
        }
        if not any(row.links_together_fraction for row in result.rows):
            del cells["both links"]
        return cells

    table = Table("schedule", *(Column(name, justify="right") for name in cells(result.rows[0])))
    for row in result.rows:
        table.add_row(row.schedule, *cells(row).values())
    console.print(table)
    serial = next(row for row in result.rows if row.schedule == "megatron")
    say(f"alpha {serial.alpha:.3f}, so no schedule can be faster than {serial.limit_speedup:.2f}x")
    if result.simulated is not None:
        error, correlation = result.simulated
        ranks = "all steps measured alike, within their spread"
        if correlation is not None:
            ranks = f"rank correlation {correlation:.3f}, of steps alike within their spread as equals"
        say(f"simulator: median error {error:.1%}, {ranks}")
    if result.exact_seconds is not None:
        say(f"simulated, layers paired in the best order (exact search): {result.exact_seconds:.3f} s")
    if (price := result.spans_price) is not None:
        say(
            f"recording spans: {price.median - 1:+.2%} of a step (95 % sure: {price.median_from - 1:+.2%} to "
            f"{price.median_to - 1:+.2%}; quartiles {price.low - 1:+.1%} to {price.high - 1:+.1%})"
        )
