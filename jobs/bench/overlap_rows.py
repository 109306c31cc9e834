"""What `braid bench overlap` measured, as rows and as a table."""

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
    """One schedule or peer; medians over the rounds."""

    schedule: str
    seconds_per_step: float
    spread_seconds: float
    """Distance of the quartiles."""
    tokens_per_second: float
    speedup: float
    """Over `megatron`: median of the ratios round by round."""
    alpha: float | None = None
    limit_speedup: float | None = None
    recovered: float | None = None
    hidden_fraction: float | None = None
    slowdown_fraction: float | None = None
    links_together_fraction: float | None = None
    """Of a step, when links inside hosts and between them moved data at the same time."""
    launch_gap_fraction: float | None = None
    bubble_fraction: float | None = None
    waiting_fraction: float | None = None
    """Of a step, waiting until a peer too had issued a collective."""
    communication_seconds: float | None = None
    """Of a step, with some transfer under way; mean over the ranks."""
    link_seconds: float | None = None
    """What the bytes of the fullest direction take at the rate of the link between hosts."""
    peak_bytes: int = 0
    """Of the largest process."""
    activation_bytes: int | None = None
    """Most that slots and messages held at once."""
    predicted_seconds: float | None = None
    """Simulated with the profile that was measured before anything ran."""
    beside_seconds: float | None = None
    """Simulated with profiles that were measured after the rounds, the median of all starts: its difference
    from the measured step is more the simulator's error and less the machine's, whose speed drifts."""
    loss: float = 0.0
    """Of the last step: the same for all."""


FEWEST = 3
"""Steps that a rank correlation needs at least."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Of one schedule, seconds."""

    simulated: float
    measured: float
    spread: float
    """Distance of the quartiles."""

    @property
    def error(self) -> float:
        """Share of the measured step."""
        return abs(self.simulated - self.measured) / self.measured

    def ties(self, other: "StepTimes") -> bool:
        """Whether the measured steps differ by less than their spread."""
        return abs(self.measured - other.measured) <= (self.spread + other.spread) / 2


def rank_correlation(steps: Sequence[StepTimes]) -> float | None:
    """Spearman's, of simulated and measured steps. None where all tie, so that nothing was told apart.

    Neither order of steps that tie is wrong: they have the mean of their ranks on both sides.
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
    """A case, measured."""

    model: str
    link_mbit: float
    rounds: int
    """Of all starts."""
    starts: int
    """How often all ranks were started."""
    ray: bool
    rows: tuple[OverlapRow, ...]
    seed: int
    load_before: tuple[float, float, float]
    paced: bool = False
    """Whether hosts were emulated by pacing the connections of ranks on one host, for want of root."""
    exact_seconds: float | None = None
    """Simulated step of braid:w with layers paired in the best order there is for the measured profile, by
    branch and bound; None where that takes too long. Units of several layers may be faster."""
    spans_price: Spread | None = None
    """Step time with recorded spans over that without, round by round; None: not asked for."""

    @property
    def simulated(self) -> tuple[float, float | None] | None:
        """Of the simulator: median error, and `rank_correlation` with what was measured.

        With the profile that was taken after the rounds. None for fewer than three schedules.
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
        """Plain containers, for ``--json``."""
        return {**asdict(self), "simulated": self.simulated}


@dataclass(eq=False)
class Contender:
    """The ranks of a schedule or a peer, and what was measured of them.

    They may be started anew: equal ones may differ by some percent as long as they live.
    """

    name: str
    launcher: Launcher
    plan: RunPlan | PeerPlan
    target: Any = None
    """Where Braid's ranks stream their spans, as in a run."""
    predict: Callable[[Profile], float] | None = None
    """Seconds of its step by a profile."""
    predicted: float | None = None
    shares: "Contender | None" = None
    """The side whose ranks these are, too."""
    results: list[list[StepResult]] = field(default_factory=list)
    """Of the rounds, of every rank."""
    beside: list[float] = field(default_factory=list)
    """Predicted by the profiles that were measured after the rounds, one of each start."""
    activation_bytes: int | None = None
    records: bool | None = None
    """Whether its steps record spans, where another side of the same ranks does otherwise."""
    group: WorkerGroup = field(init=False)

    def start(self) -> None:
        """Start ranks, in the place of those that were shut down, and let them meet."""
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
        """The second step of two, of every rank. The first step may leave work under way for it (gathers,
        ZeRO 1), which must not end while other sides run."""
        if self.records is not None:
            self.group.call_all(Rank.record_spans, self.records)
        return [self.group.call_all(Rank.train_step, step) for step in steps][-1]

    @property
    def seconds(self) -> list[float]:
        """Of the rounds, of the slowest rank."""
        return [max(result.seconds for result in step) for step in self.results]

    def mean_seconds(self, name: str) -> list[float]:
        """Of the rounds, mean over the ranks of a time of `OverlapNumbers`, without its unit."""
        return [mean(getattr(result.overlap, f"{name}_ns") for result in step) / 1e9 for step in self.results]


def row_of(side: Contender, serial: Contender, tokens: int, link_mbit: float) -> OverlapRow:
    """What a side's rounds came to, beside the serial schedule's; tokens: of a step."""
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
    """Print the table."""
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
