"""What a run tells Prometheus: an exporter that reads its files' lines, and two places for the readings.

`Exporter` takes the lines one by one and passes readings of the metrics in `METRICS` to a sink:
`PrometheusSink`, whose text any HTTP server can hand out, or `RaySink`, which passes them to Ray's metrics
agents. ``docs/metrics.md`` holds the table in words.
"""

import math
from collections.abc import Mapping, Sequence
from threading import Event, Lock, Thread
from typing import Any, Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from braid.dashboards.metric_table import METRICS, STEP_BUCKETS, Kind, Metric, Source
from braid.dashboards.run_files import value_of
from braid.scheduling.spec import ParallelLayout

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
        tokens, seconds = (
            _number(line.get("tokens")),
            _number(line.get("wall_seconds") or line.get("seconds")),
        )
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
            value = value_of(line, metric.field)
            if metric.in_every_line and value is None and metric.field in line:
                value = math.nan
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
