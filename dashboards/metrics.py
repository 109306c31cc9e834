"""Exports a run's metrics to Prometheus: an `Exporter` of its files' lines, and two sinks for the readings.

The metrics are defined in ``metrics.yaml``. `PrometheusSink` keeps readings until the page is scraped;
`RaySink` passes them to Ray's metrics agents.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from braid.dashboards.run_files import flat, tokens_per_second
from braid.scheduling.text.yaml_text import parse_yaml

STEP_BUCKETS: Final = tuple(round(10 ** (power / 5), 4) for power in range(-10, 13))
"""Upper bounds in seconds, five per decade, 10 ms to 250 s: a step that takes 1.6 times as long moves to the
next bucket."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """An entry of ``metrics.yaml``, which explains the fields; ``source`` is the run's file that holds the
    values."""

    name: str
    source: str
    help: str
    kind: Literal["gauge", "counter", "histogram"] = "gauge"
    field: str = ""
    event: str = ""
    per_rank: bool = False
    label: str = ""
    cumulative: bool = False
    always: bool = False

    @property
    def labels(self) -> tuple[str, ...]:
        return ("run", "stage", "rank") if self.per_rank else tuple(filter(None, ("run", self.label)))


_TABLE: Final = parse_yaml(Path(__file__).with_name("metrics.yaml").read_text("utf-8"), "metrics.yaml")
METRICS: Final = {
    row["name"]: Metric(source=source, **{"per_rank": source == "ranks.jsonl", **row})
    for source, rows in _TABLE.items()
    for row in rows
}
"""Every metric, by name."""

_METHODS: Final = {"gauge": "set", "counter": "inc", "histogram": "observe"}
"""Method that sets a metric's value, in prometheus_client and in Ray."""


class PrometheusSink:
    """Keeps readings in its own registry, which prometheus_client formats as text."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        buckets = partial(Histogram, buckets=STEP_BUCKETS)
        makers: dict[str, Any] = {"gauge": Gauge, "counter": Counter, "histogram": buckets}
        self._metrics: dict[str, Any] = {
            metric.name: makers[metric.kind](metric.name, metric.help, metric.labels, registry=self.registry)
            for metric in METRICS.values()
        }

    def tell(self, metric: Metric, labels: tuple[str, ...], value: float) -> None:
        """Take a gauge's value, a counter's increment (0 creates it), or a histogram's next value."""
        getattr(self._metrics[metric.name].labels(*labels), _METHODS[metric.kind])(value)

    def clear(self, metric: Metric) -> None:
        """Remove all values of a gauge, as some of its ranks may be gone."""
        self._metrics[metric.name].clear()


class RaySink:
    """Passes readings to Ray, whose agents serve them on every node; Ray prefixes the names with ``ray_``.

    ``module`` is ``ray.util.metrics``, passed in by callers that have Ray, as dashboards do not import it.
    Ray never shows NaN values.
    """

    def __init__(self, module: Any) -> None:
        buckets = partial(module.Histogram, boundaries=list(STEP_BUCKETS))
        makers = {"gauge": module.Gauge, "counter": module.Counter, "histogram": buckets}
        self._metrics = {
            metric.name: makers[metric.kind](metric.name, metric.help, tag_keys=metric.labels)
            for metric in METRICS.values()
        }
        self._gauges: dict[Metric, dict[tuple[str, ...], float]] = defaultdict(dict)

    def tell(self, metric: Metric, labels: tuple[str, ...], value: float) -> None:
        """Take a value like `PrometheusSink.tell`; Ray refuses 0 for a counter, which appears with its first
        increment."""
        if metric.kind == "gauge":
            self._gauges[metric][labels] = value
        if metric.kind != "counter" or value > 0:
            tags = dict(zip(metric.labels, labels, strict=True))
            getattr(self._metrics[metric.name], _METHODS[metric.kind])(value, tags=tags)

    def clear(self, metric: Metric) -> None:
        """Forget all values of a gauge; Ray drops them two report intervals later."""
        self._gauges[metric] = {}

    def refresh(self) -> None:
        """Send all gauges again: Ray (2.60) drops a gauge that is silent for two report intervals, 20 s."""
        for metric, values in self._gauges.items():
            for labels, value in list(values.items()):
                self.tell(metric, labels, value)


class Exporter:
    """Turns the lines of one run's files into readings; missing fields and null are skipped."""

    def __init__(self, sink: PrometheusSink | RaySink, run: str) -> None:
        self._sink, self._run = sink, run
        self._ranks_of_a_stage = 1
        self._sums: dict[tuple[str, int], float] = {}
        """Last values of cumulative fields, by metric and rank."""
        for metric in METRICS.values():
            if metric.source == "events.jsonl" and metric.kind == "counter":
                sink.tell(metric, (run,), 0)  # else the first event would raise no alert

    def take(self, source: str, line: Mapping[str, Any]) -> None:
        """Process the next line of a run's file, or the whole content of ``predicted.json`` or
        ``config.yaml``."""
        kind, values = line.get("kind"), flat(line)
        values["tokens / wall_seconds"] = tokens_per_second(line)
        if source == "config.yaml":  # its degrees give ranks their stages
            degrees = [(line.get("parallel") or {}).get(axis) for axis in ("dp", "tp", "cp")]
            self._ranks_of_a_stage = math.prod(degree for degree in degrees if isinstance(degree, int))
        elif kind in ("started", "finished", "failed"):
            values["kind"] = int(kind == "started")
        for metric in METRICS.values():
            if metric.source != source or metric.event not in ("", kind):
                continue
            value = values.get(metric.field) if metric.field else 1
            if metric.always and value is None and metric.field in line:
                value = math.nan
            if metric.label:
                for name, number in value.items() if isinstance(value, Mapping) else ():
                    self._tell(metric, number, (str(name),))
            elif not metric.per_rank:
                self._tell(metric, value)
            elif isinstance(value, list | tuple):
                self._tell_ranks(metric, value)

    def _tell_ranks(self, metric: Metric, values: Sequence[Any]) -> None:
        if metric.kind == "gauge":
            self._sink.clear(metric)
        for rank, value in enumerate(values):
            if metric.cumulative and _finite(value):
                before = self._sums.get((metric.name, rank), 0.0)
                self._sums[metric.name, rank] = value
                value -= before if value >= before else 0  # a rank that was restarted counts from 0 again
            # Ranks are numbered through a stage before the next one.
            self._tell(metric, value, (str(rank // self._ranks_of_a_stage), str(rank)))

    def _tell(self, metric: Metric, value: Any, where: tuple[str, ...] = ()) -> None:
        """Pass on a number; NaN and infinities only to gauges, as a sum would never recover from them."""
        if _finite(value) or (metric.kind == "gauge" and isinstance(value, float)):
            value = max(value, 0) if metric.kind == "counter" else value
            self._sink.tell(metric, (self._run, *where), value)


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
