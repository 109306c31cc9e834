"""Every metric that Braid exports, as data: name, kind, labels, and the file and field it is read from."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    """What Prometheus may assume of a metric's values."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


class Source(StrEnum):
    """A file of a run, the one that a metric's values come from."""

    METRICS = "metrics.jsonl"
    RANKS = "ranks.jsonl"
    PREDICTED = "predicted.json"
    EVENTS = "events.jsonl"


RUN_LABELS: Final = ("run",)
"""Not ``job``: Prometheus sets that one itself and would rename ours to ``exported_job``."""

RANK_LABELS: Final = ("run", "stage", "rank")

STEP_BUCKETS: Final = tuple(round(10 ** (power / 5), 4) for power in range(-10, 13))
"""Upper bounds in seconds, five per decade, 10 ms to 250 s: a step that takes 1.6 times as long moves on."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric: name (with its unit), what it means, and the field of the file that it is read from.

    A counter adds the field's values; ``cumulative`` ones are sums in the file already. In ``events.jsonl``
    ``event`` names the kind of line; a counter of events has no field. A list has one value per rank.
    ``NAME.FIELD`` is a field inside another.
    """

    name: str
    kind: Kind
    help: str
    source: Source
    field: str = ""
    event: str = ""
    per_rank: bool = False
    cumulative: bool = False
    in_every_line: bool = False
    """Then null says that it was no number, which a gauge shows."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels, in order."""
        return RANK_LABELS if self.per_rank else RUN_LABELS


def _of_step(
    name: str,
    text: str,
    field: str,
    kind: Kind = Kind.GAUGE,
    per_rank: bool = False,
    in_every_line: bool = False,
) -> Metric:
    return Metric(
        name=name,
        kind=kind,
        help=text,
        source=Source.METRICS,
        field=field,
        per_rank=per_rank,
        in_every_line=in_every_line,
    )


_OF_RANKS: Final = {
    "communication": "Time in which some transfer was under way",
    "hidden": "Time in which a transfer was under way and a compute operator ran",
    "exposed": "Time in which a transfer was under way and no compute operator ran",
    "waiting": "Time in which nothing ran, as a peer had not issued a collective yet",
    "slowdown": "Time that compute lost to communication beside it, against solo times (below 0: 0 in sums)",
    "launch_gap": "Time in which nothing ran inside a block",
    "bubble": "Time between blocks",
    "compute": "Time in which a compute operator ran",
}
"""Times of a rank in a step: ``NAME_seconds`` in ranks.jsonl, and what they measure."""


def _of_ranks() -> Iterator[Metric]:
    kinds = (
        ("braid_step_{}_seconds", Kind.GAUGE, "last step"),
        ("braid_{}_seconds_total", Kind.COUNTER, "all steps"),
    )
    for field, text in _OF_RANKS.items():
        for name, kind, which in kinds:
            yield Metric(
                name=name.format(field),
                kind=kind,
                help=f"{text}; {which}",
                source=Source.RANKS,
                field=f"{field}_seconds",
                per_rank=True,
            )


def _of_experts() -> Iterator[Metric]:
    fullest, entropy = (
        "Visits of the fullest expert over the average",
        "Entropy of the load of experts over log E",
    )
    for name, text, field in (
        ("braid_expert_imbalance_ratio", f"{fullest}; mean over layers, last step", "imbalance"),
        ("braid_worst_expert_imbalance_ratio", f"{fullest}; worst layer, last step", "worst_imbalance"),
        ("braid_expert_entropy_ratio", f"{entropy}; mean over layers, last step", "entropy"),
        ("braid_worst_expert_entropy_ratio", f"{entropy}; worst layer, last step", "worst_entropy"),
        (
            "braid_expert_rank_imbalance_ratio",
            "Rows of the fullest rank of ep over the average; mean over layers, last step",
            "rank_imbalance",
        ),
        ("braid_dropped_visits_ratio", "Share of visits beyond experts' capacity; last step", "dropped"),
        ("braid_unvisited_experts", "Experts that no token visited, of all layers; last step", "unvisited"),
    ):
        yield _of_step(name, text, f"experts.{field}")


def _predicted(name: str, text: str, field: str) -> Metric:
    return Metric(name=name, kind=Kind.GAUGE, help=text, source=Source.PREDICTED, field=field)


def _count(name: str, text: str, event: str) -> Metric:
    return Metric(name=name, kind=Kind.COUNTER, help=text, source=Source.EVENTS, event=event)


METRICS: Final = (
    _of_step("braid_step", "Number of the last finished step, from 1", "step"),
    _of_step("braid_loss_nats", "Mean training loss of a token, in nats", "loss", in_every_line=True),
    _of_step(
        "braid_validation_loss_nats",
        "Mean loss of a token on the validation split, in nats",
        "validation_loss",
    ),
    _of_step(
        "braid_validation_bits_per_byte",
        "The same loss in bits per byte of text",
        "validation_bits_per_byte",
    ),
    _of_step(
        "braid_gradient_norm", "Global norm of the gradient, before clipping", "grad_norm", in_every_line=True
    ),
    _of_step("braid_learning_rate", "Learning rate of the last step", "lr"),
    _of_step(
        "braid_tokens_total",
        "Tokens trained on; steps that were repeated count again",
        "tokens",
        Kind.COUNTER,
    ),
    _of_step(
        "braid_tokens_per_second",
        "Tokens of the last step over wall-clock, from the end of the step before",
        "tokens / wall_seconds",
    ),
    _of_step("braid_step_seconds", "Time of the last step, of the slowest rank", "seconds"),
    _of_step("braid_step_duration_seconds", "Times of steps, of the slowest rank", "seconds", Kind.HISTOGRAM),
    _of_step("braid_mfu_ratio", "Model FLOPs (without recomputation) over what the devices could do", "mfu"),
    _of_step(
        "braid_hidden_ratio",
        "Communication during which compute ran, over all communication; mean over ranks, last step",
        "hidden_fraction",
    ),
    _of_step(
        "braid_generation", "Number of the ranks' membership: every restart or resize adds 1", "generation"
    ),
    _of_step("braid_last_progress_timestamp_seconds", "Unix time at the end of the last step", "time"),
    _of_step(
        "braid_peak_memory_bytes",
        "Most memory that a rank used at once in the last step: allocated on a GPU, else resident",
        "peak_bytes",
        per_rank=True,
    ),
    *_of_experts(),
    *_of_ranks(),
    Metric(
        name="braid_dropped_spans_total",
        kind=Kind.COUNTER,
        help="Spans that a rank could not keep, because nobody took them in time",
        source=Source.RANKS,
        field="dropped_spans",
        per_rank=True,
        cumulative=True,
    ),
    Metric(
        name="braid_span_sampling_steps",
        kind=Kind.GAUGE,
        help="Spans are recorded in one of so many steps",
        source=Source.RANKS,
        field="sampled_every",
        per_rank=True,
    ),
    _predicted("braid_predicted_step_seconds", "Simulated time of a step", "step_seconds"),
    _predicted(
        "braid_predicted_serial_seconds", "Simulated time of a step without overlap", "serial_seconds"
    ),
    _predicted("braid_predicted_hidden_ratio", "Hidden fraction of the simulated step", "hidden_fraction"),
    _predicted("braid_alpha_ratio", "Share of communication in the simulated step without overlap", "alpha"),
    _predicted(
        "braid_limit_speedup_ratio",
        "Most that overlap can win: min(1 / alpha, 1 / (1 - alpha))",
        "limit_speedup",
    ),
    _count("braid_starts_total", "Times that the ranks were ready to train", "started"),
    _count("braid_restarts_total", "Restarts after a failure", "restarted"),
    _count("braid_resizes_total", "Changes of the number of ranks", "resized"),
    _count("braid_stragglers_total", "Times that a rank was found to be slower than the others", "straggler"),
    _count("braid_telemetry_changes_total", "Times that recording was cut back or resumed", "telemetry"),
    _count("braid_failures_total", "Ends of the run by an error", "failed"),
    _count("braid_checkpoints_total", "Checkpoints that were published", "saved"),
    _count(
        "braid_failed_saves_total", "Tries of a save, or copies to the mirror, that failed", "save-failed"
    ),
    Metric(
        name="braid_checkpoint_seconds",
        kind=Kind.GAUGE,
        help="Time that the last checkpoint took",
        source=Source.EVENTS,
        field="seconds",
        event="saved",
    ),
    Metric(
        name="braid_running",
        kind=Kind.GAUGE,
        help="1 from the first step or start on, 0 once the run has finished or failed",
        source=Source.EVENTS,
        field="kind",
    ),
)
"""Every metric that Braid exports."""


def table() -> str:
    """`METRICS` as a table in Markdown."""
    lines = ["| metric | kind | labels | from | meaning |", "| --- | --- | --- | --- | --- |"]
    for metric in METRICS:
        place = f"`{metric.source}`"
        place += f" `{metric.field}`" if metric.field else ""
        place += f" of `{metric.event}`" if metric.event else ""
        labels = ", ".join(metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {place} | {metric.help} |")
    return "\n".join(lines) + "\n"


_BEGIN: Final = "<!-- made from dashboards/metric_table.py: begin -->\n"
_END: Final = "<!-- made from dashboards/metric_table.py: end -->\n"


def documented(text: str) -> str:
    """The text of ``docs/metrics.md`` with the table renewed; `ValueError` if its marks are missing."""
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"docs/metrics.md has lost its marks {_BEGIN.strip()} and {_END.strip()}")
    return f"{before}{_BEGIN}{table()}{_END}{after}"
