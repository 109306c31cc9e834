"""What a run tells Prometheus: one table of metrics, filled from the lines of a run's files.

`METRICS` says for every metric where its values come from; `Exporter` takes the lines one by one and passes
readings to a sink: `PrometheusSink`, whose text any HTTP server can hand out, or `RaySink`, which passes them
to Ray's metrics agents. ``docs/metrics.md`` holds the table in words (`documented` makes it).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from threading import Event, Lock, Thread
from typing import Any, Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from braid.scheduling.spec import ParallelLayout


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
    """

    name: str
    kind: Kind
    help: str
    source: Source
    field: str = ""
    event: str = ""
    per_rank: bool = False
    cumulative: bool = False

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels, in order."""
        return RANK_LABELS if self.per_rank else RUN_LABELS


def _of_step(name: str, text: str, field: str, kind: Kind = Kind.GAUGE, per_rank: bool = False) -> Metric:
    return Metric(name=name, kind=kind, help=text, source=Source.METRICS, field=field, per_rank=per_rank)


_OF_RANKS: Final = {
    "communication": "Time in which some communication was in flight",
    "hidden": "Time in which communication was in flight and a compute operator ran",
    "exposed": "Time in which communication was in flight and no compute operator ran",
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


def _predicted(name: str, text: str, field: str) -> Metric:
    return Metric(name=name, kind=Kind.GAUGE, help=text, source=Source.PREDICTED, field=field)


def _count(name: str, text: str, event: str) -> Metric:
    return Metric(name=name, kind=Kind.COUNTER, help=text, source=Source.EVENTS, event=event)


METRICS: Final = (
    _of_step("braid_step", "Number of the last finished step, from 1", "step"),
    _of_step("braid_loss_nats", "Mean training loss of a token, in nats", "loss"),
    _of_step(
        "braid_validation_bits_per_byte",
        "Loss on the validation split, in bits per byte of text",
        "validation_bits_per_byte",
    ),
    _of_step("braid_gradient_norm", "Global norm of the gradient, before clipping", "grad_norm"),
    _of_step("braid_learning_rate", "Learning rate of the last step", "lr"),
    _of_step(
        "braid_tokens_total",
        "Tokens trained on; steps that were repeated count again",
        "tokens",
        Kind.COUNTER,
    ),
    _of_step("braid_tokens_per_second", "Tokens of the last step over its time", "tokens / seconds"),
    _of_step("braid_step_seconds", "Time of the last step, of the slowest rank", "seconds"),
    _of_step("braid_step_duration_seconds", "Times of steps, of the slowest rank", "seconds", Kind.HISTOGRAM),
    _of_step("braid_mfu_ratio", "Model FLOPs (without recomputation) over what the devices could do", "mfu"),
    _of_step(
        "braid_hidden_fraction",
        "Communication during which compute ran, over all communication; mean over ranks, last step",
        "hidden_fraction",
    ),
    _of_step(
        "braid_generation", "Number of the ranks' membership: every restart or resize adds 1", "generation"
    ),
    _of_step("braid_last_progress_timestamp_seconds", "Unix time at the end of the last step", "time"),
    _of_step("braid_peak_memory_bytes", "Most device memory in use at once", "peak_bytes", per_rank=True),
    Metric(
        name="braid_rank_step_seconds",
        kind=Kind.GAUGE,
        help="Time of the last step on this rank",
        source=Source.RANKS,
        field="seconds",
        per_rank=True,
    ),
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
    _predicted("braid_predicted_hidden_fraction", "Hidden fraction of the simulated step", "hidden_fraction"),
    _predicted("braid_alpha_ratio", "Share of communication in the simulated step without overlap", "alpha"),
    _predicted(
        "braid_limit_speedup_ratio",
        "Most that overlap can win: min(1 / alpha, 1 / (1 - alpha))",
        "limit_speedup",
    ),
    _count("braid_starts_total", "Times that the ranks were ready to train", "started"),
    _count("braid_restarts_total", "Restarts after a failure", "restarted"),
    _count("braid_resizes_total", "Changes of the number of ranks", "resized"),
    _count("braid_replans_total", "Times that a new plan took over", "replanned"),
    _count("braid_stragglers_total", "Times that a rank was found to be slower than the others", "straggler"),
    _count("braid_telemetry_changes_total", "Times that recording was cut back or resumed", "telemetry"),
    _count("braid_failures_total", "Ends of the run by an error", "failed"),
    _count("braid_checkpoints_total", "Checkpoints that were published", "saved"),
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

_BY_NAME: Final = {metric.name: metric for metric in METRICS}
_RUNNING: Final = _BY_NAME["braid_running"]
_TOKENS_PER_SECOND: Final = _BY_NAME["braid_tokens_per_second"]
_ENDS: Final = ("finished", "failed")


class Sink(Protocol):
    """Where readings go. Label values are strings, in the order of the metric's labels."""

    def set(self, metric: Metric, labels: Sequence[str], value: float) -> None:
        """A gauge's value."""

    def add(self, metric: Metric, labels: Sequence[str], value: float) -> None:
        """What a counter grew by, 0 or more; 0 says that the counter exists."""

    def observe(self, metric: Metric, labels: Sequence[str], value: float) -> None:
        """A histogram's next value."""

    def forget(self, metric: Metric, labels: Sequence[str]) -> None:
        """A gauge has no value any more, for its rank is gone."""


class PrometheusSink:
    """Keeps readings in a registry of its own; `render` gives them in Prometheus' text format."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        for metric in METRICS:
            match metric.kind:
                case Kind.GAUGE:
                    self._gauges[metric.name] = Gauge(
                        metric.name, metric.help, metric.labels, registry=self.registry
                    )
                case Kind.COUNTER:
                    self._counters[metric.name] = Counter(
                        metric.name, metric.help, metric.labels, registry=self.registry
                    )
                case Kind.HISTOGRAM:
                    self._histograms[metric.name] = Histogram(
                        metric.name, metric.help, metric.labels, buckets=STEP_BUCKETS, registry=self.registry
                    )

    def set(self, metric: Metric, labels: Sequence[str], value: float) -> None:
        """See `Sink`."""
        self._gauges[metric.name].labels(*labels).set(value)

    def add(self, metric: Metric, labels: Sequence[str], value: float) -> None:
        """See `Sink`."""
        self._counters[metric.name].labels(*labels).inc(value)

    def observe(self, metric: Metric, labels: Sequence[str], value: float) -> None:
        """See `Sink`."""
        self._histograms[metric.name].labels(*labels).observe(value)

    def forget(self, metric: Metric, labels: Sequence[str]) -> None:
        """See `Sink`."""
        self._gauges[metric.name].remove(*labels)

    def render(self) -> tuple[bytes, str]:
        """The body of an answer to a scrape, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


class RayMetrics(Protocol):
    """The part of the module ``ray.util.metrics`` that is used."""

    Gauge: Any
    Counter: Any
    Histogram: Any


class RaySink:
    """Passes readings on to Ray, whose agents serve them on every node; Ray puts ``ray_`` before the names.

    ``ray_metrics`` is the module ``ray.util.metrics``: who has Ray hands it over, dashboards do not know it.
    Ray (seen with 2.60) drops a gauge that is not recorded anew within two report intervals (10 s each): it
    would lose what is said once, and every gauge in a step that takes longer. So a thread repeats them every
    ``refresh_seconds`` until `close`. Ray never shows a value that is not a number.
    """

    def __init__(self, ray_metrics: RayMetrics, *, refresh_seconds: float = 5.0) -> None:
        makers = {Kind.GAUGE: ray_metrics.Gauge, Kind.COUNTER: ray_metrics.Counter}
        self._metrics: dict[str, Any] = {}
        for metric in METRICS:
            if metric.kind is Kind.HISTOGRAM:
                made = ray_metrics.Histogram(
                    metric.name, metric.help, boundaries=list(STEP_BUCKETS), tag_keys=metric.labels
                )
            else:
                made = makers[metric.kind](metric.name, metric.help, tag_keys=metric.labels)
            self._metrics[metric.name] = made
        self._last: dict[tuple[Metric, tuple[str, ...]], float] = {}
        self._lock = Lock()
        self._closed = Event()
        self._thread = Thread(target=self._repeat, args=(refresh_seconds,), name="braid-metrics", daemon=True)
        self._thread.start()

    def set(self, metric: Metric, labels: Sequence[str], value: float) -> None:
        """See `Sink`."""
        with self._lock:
            self._last[metric, tuple(labels)] = value
            self._metrics[metric.name].set(value, tags=_tags(metric, labels))

    def add(self, metric: Metric, labels: Sequence[str], value: float) -> None:
        """See `Sink`; Ray refuses 0, so a counter shows up with its first increment."""
        if value > 0:
            self._metrics[metric.name].inc(value, tags=_tags(metric, labels))

    def observe(self, metric: Metric, labels: Sequence[str], value: float) -> None:
        """See `Sink`."""
        self._metrics[metric.name].observe(value, tags=_tags(metric, labels))

    def forget(self, metric: Metric, labels: Sequence[str]) -> None:
        """See `Sink`; it is gone two report intervals later."""
        with self._lock:
            del self._last[metric, tuple(labels)]

    def refresh(self) -> None:
        """Record all gauges anew."""
        with self._lock:
            for (metric, labels), value in self._last.items():
                self._metrics[metric.name].set(value, tags=_tags(metric, labels))

    def close(self) -> None:
        """Repeat nothing any more: the gauges vanish, as those of a process that has ended do."""
        self._closed.set()
        self._thread.join()

    def _repeat(self, refresh_seconds: float) -> None:
        while not self._closed.wait(refresh_seconds):
            self.refresh()


def _tags(metric: Metric, labels: Sequence[str]) -> dict[str, str]:
    return dict(zip(metric.labels, labels, strict=True))


def layout_of(config: Mapping[str, Any]) -> ParallelLayout:
    """The degrees of a run's ``config.yaml`` (parsed), as far as ranks' stages need them."""
    parallel = config.get("parallel") or {}

    def degree(axis: str) -> int:
        value = parallel.get(axis)
        return value if isinstance(value, int) else 1

    return ParallelLayout(dp=degree("dp"), tp=degree("tp"), pp=degree("pp"), cp=degree("cp"))


class Exporter:
    """Turns the lines of one run's files into readings; fields that are missing or null are left out.

    ``layout`` gives ranks their stages; set `layout` anew when the run was resized.
    """

    def __init__(self, sink: Sink, run: str, layout: ParallelLayout) -> None:
        self.layout = layout
        self._sink = sink
        self._run = run
        self._sums: dict[tuple[str, int], float] = {}
        """What cumulative fields held last, by metric and rank."""
        self._told = False
        """Whether events have said that the run goes on, or that it is over."""
        self._gauges: dict[tuple[str, int], tuple[str, ...]] = {}
        """Labels of the gauges of ranks that have a value, by metric and rank."""
        for metric in METRICS:
            if metric.source is Source.EVENTS and metric.kind is Kind.COUNTER:
                sink.add(metric, (run,), 0)  # or the first event is no increase, and nobody is told

    def metrics(self, line: Mapping[str, Any]) -> None:
        """A line of ``metrics.jsonl``."""
        self._take(Source.METRICS, line)
        if not self._told:
            self._sink.set(_RUNNING, (self._run,), 1)  # a run without events
        tokens, seconds = _number(line.get("tokens")), _number(line.get("seconds"))
        if tokens is not None and seconds:
            self._sink.set(_TOKENS_PER_SECOND, (self._run,), tokens / seconds)

    def ranks(self, line: Mapping[str, Any]) -> None:
        """A line of ``ranks.jsonl``."""
        self._take(Source.RANKS, line)

    def predicted(self, content: Mapping[str, Any]) -> None:
        """The content of ``predicted.json``."""
        self._take(Source.PREDICTED, content)

    def event(self, line: Mapping[str, Any]) -> None:
        """A line of ``events.jsonl``."""
        kind = line.get("kind")
        if kind == "started" or kind in _ENDS:
            self._told = True
            self._sink.set(_RUNNING, (self._run,), 0 if kind in _ENDS else 1)
        for metric in METRICS:
            if metric.source is not Source.EVENTS or metric.event != kind:
                continue
            if metric.kind is Kind.COUNTER:
                self._sink.add(metric, (self._run,), 1)
            elif (value := _number(line.get(metric.field))) is not None:
                self._sink.set(metric, (self._run,), value)

    def _take(self, source: Source, line: Mapping[str, Any]) -> None:
        for metric in METRICS:
            if metric.source is not source:
                continue
            value = line.get(metric.field)
            if not metric.per_rank:
                self._record(metric, (self._run,), _number(value))
            elif isinstance(value, Sequence) and not isinstance(value, str):
                self._take_ranks(metric, value)

    def _take_ranks(self, metric: Metric, values: Sequence[Any]) -> None:
        per_stage = self.layout.ranks // self.layout.pp  # ranks count through a stage before the next one
        for rank, value in enumerate(values):
            labels = (self._run, str(rank // per_stage), str(rank))
            number = _number(value)
            if metric.cumulative and number is not None and math.isfinite(number):
                before = self._sums.get((metric.name, rank), 0.0)
                self._sums[metric.name, rank] = number
                # A rank that began anew counts from 0 again.
                number = number - before if number >= before else number
            if metric.kind is Kind.GAUGE:
                self._move(metric, rank, labels)
            self._record(metric, labels, number)
        if metric.kind is Kind.GAUGE:
            for rank in [r for name, r in self._gauges if name == metric.name and r >= len(values)]:
                self._sink.forget(metric, self._gauges.pop((metric.name, rank)))

    def _move(self, metric: Metric, rank: int, labels: tuple[str, ...]) -> None:
        """Forget a rank's gauge under the labels of a former layout."""
        before = self._gauges.get((metric.name, rank))
        if before is not None and before != labels:
            self._sink.forget(metric, self._gauges.pop((metric.name, rank)))

    def _record(self, metric: Metric, labels: tuple[str, ...], value: float | None) -> None:
        if value is None or (metric.kind is not Kind.GAUGE and not math.isfinite(value)):
            return  # a gauge shows a loss that is not a number; a sum would never recover from it
        match metric.kind:
            case Kind.GAUGE:
                if metric.per_rank:
                    self._gauges[metric.name, int(labels[-1])] = labels
                self._sink.set(metric, labels, value)
            case Kind.COUNTER:
                self._sink.add(metric, labels, max(value, 0.0))
            case Kind.HISTOGRAM:
                self._sink.observe(metric, labels, value)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


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


_BEGIN: Final = "<!-- made from dashboards/metrics.py: begin -->\n"
_END: Final = "<!-- made from dashboards/metrics.py: end -->\n"


def documented(text: str) -> str:
    """The text of ``docs/metrics.md`` with the table renewed; `ValueError` if its marks are missing."""
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"docs/metrics.md has lost its marks {_BEGIN.strip()} and {_END.strip()}")
    return f"{before}{_BEGIN}{table()}{_END}{after}"
