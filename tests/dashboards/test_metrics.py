"""The table of metrics, and what the lines of a run's files become in Prometheus and in Ray."""

import ast
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from braid.dashboards.metric_table import METRICS, Kind, Source, documented
from braid.dashboards.metrics import Exporter, PrometheusSink, RaySink, layout_of
from braid.dashboards.run_files import value_of
from braid.scheduling.spec import ParallelLayout
from tests.dashboards.lines import EVENTS, PREDICTED, metrics_line, ranks_line

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = ParallelLayout(pp=2, tp=2)


def readings(sink: PrometheusSink) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample that a scrape would see, by name and labels."""
    body, kind = sink.render()
    assert kind.startswith("text/plain")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def value(sink: PrometheusSink, name: str, **labels: str) -> float | None:
    """One sample of the run ``demo``; None where there is none."""
    return readings(sink).get((name, frozenset({"run": "demo", **labels}.items())))


def exporter(layout: ParallelLayout = LAYOUT) -> tuple[Exporter, PrometheusSink]:
    """An exporter of the run ``demo``, and its sink."""
    sink = PrometheusSink()
    return Exporter(sink, "demo", layout), sink


def fill(target: Exporter) -> None:
    """Two steps with all fields, the prediction, and an event of every kind."""
    target.predicted(PREDICTED)
    for step in (1, 2):
        target.metrics(metrics_line(step, ranks=4))
        target.ranks(ranks_line(step, ranks=4))
    for line in EVENTS:
        target.event(line)


def test_names_fit_prometheus_and_ray_and_say_their_kind() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"braid_[a-z][a-z_]*[a-z]", metric.name)  # Ray takes no colon, and no other sign
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert not re.search(r"_(bucket|count|sum|created|info)$", metric.name)
        assert metric.help
        assert not set(metric.labels) & {"job", "instance"}, "Prometheus would rename them"


def test_every_metric_gets_a_value_from_complete_files() -> None:
    target, sink = exporter()
    fill(target)
    found = {name for name, _ in readings(sink)}
    for metric in METRICS:
        names = {metric.name} if metric.kind is not Kind.HISTOGRAM else {f"{metric.name}_bucket"}
        assert names <= found, metric


def test_values_of_a_step() -> None:
    target, sink = exporter()
    line = metrics_line(3, ranks=4)
    target.metrics(line)
    assert value(sink, "braid_step") == 3
    assert value(sink, "braid_loss_nats") == line["loss"]
    assert value(sink, "braid_tokens_per_second") == pytest.approx(line["tokens"] / line["wall_seconds"])
    assert value(sink, "braid_tokens_total") == line["tokens"]
    target.metrics(metrics_line(4, ranks=4))
    assert value(sink, "braid_tokens_total") == 2 * line["tokens"]
    assert value(sink, "braid_step_duration_seconds_count") == 2
    assert value(sink, "braid_peak_memory_bytes", stage="1", rank="2") == line["peak_bytes"][2]


def test_only_models_with_experts_have_their_numbers() -> None:
    target, sink = exporter()
    target.metrics(metrics_line(3, ranks=4))
    assert value(sink, "braid_expert_imbalance_ratio") == metrics_line(3, ranks=4)["experts"]["imbalance"]
    assert value(sink, "braid_unvisited_experts") == 1
    target, sink = exporter()
    target.metrics({name: it for name, it in metrics_line(3, ranks=4).items() if name != "experts"})
    assert not [name for name, _ in readings(sink) if "expert" in name or "visits" in name]


def test_ranks_have_the_stages_of_the_layout_and_sums_add_up() -> None:
    target, sink = exporter()
    for step in (1, 2):
        target.ranks(ranks_line(step, ranks=4))
    for rank in range(4):
        position = LAYOUT.coordinate(rank)["pp"]
        labels = {"stage": str(position), "rank": str(rank)}
        both = [ranks_line(step, ranks=4)["exposed_seconds"][rank] for step in (1, 2)]
        assert value(sink, "braid_step_exposed_seconds", **labels) == both[1]
        assert value(sink, "braid_exposed_seconds_total", **labels) == pytest.approx(sum(both))


def test_dropped_spans_are_sums_already_and_begin_anew_with_the_rank() -> None:
    target, sink = exporter(ParallelLayout())
    for dropped in (5, 5, 8, 2):
        target.ranks({"dropped_spans": [dropped]})
    assert value(sink, "braid_dropped_spans_total", stage="0", rank="0") == 5 + 0 + 3 + 2


def test_missing_and_null_fields_leave_no_trace() -> None:
    target, sink = exporter()
    before = readings(sink)
    target.metrics({"step": 1, "loss": 2.0, "mfu": None, "validation_bits_per_byte": None})
    target.ranks({"step": 1, "slowdown_seconds": [None, 0.5], "seconds": "long"})
    new = {name for name, _ in readings(sink).keys() - before.keys()}
    assert {name for name in new if not name.endswith("_created")} == {
        "braid_step",
        "braid_loss_nats",
        "braid_running",
        "braid_step_slowdown_seconds",
        "braid_slowdown_seconds_total",
    }
    assert value(sink, "braid_step_slowdown_seconds", stage="0", rank="0") is None
    assert value(sink, "braid_step_slowdown_seconds", stage="0", rank="1") == 0.5


def test_gauges_show_what_is_not_a_number_and_sums_do_not() -> None:
    target, sink = exporter(ParallelLayout())
    target.metrics({"loss": float("nan"), "tokens": float("inf"), "seconds": float("nan")})
    loss = value(sink, "braid_loss_nats")
    assert loss is not None
    assert loss != loss
    target.metrics({"tokens": 7})
    assert value(sink, "braid_tokens_total") == 7
    target.ranks({"slowdown_seconds": [-0.25]})
    assert value(sink, "braid_step_slowdown_seconds", stage="0", rank="0") == -0.25
    assert value(sink, "braid_slowdown_seconds_total", stage="0", rank="0") == 0


def test_ranks_that_are_gone_or_moved_to_another_stage_lose_their_gauges() -> None:
    target, sink = exporter()
    target.ranks(ranks_line(1, ranks=4))
    target.layout = ParallelLayout(pp=2)
    target.ranks(ranks_line(2, ranks=2))
    shown = {
        (dict(labels)["stage"], dict(labels)["rank"])
        for name, labels in readings(sink)
        if name == "braid_step_compute_seconds"
    }
    assert shown == {("0", "0"), ("1", "1")}


def test_events_count_from_zero_and_say_whether_the_run_goes_on() -> None:
    target, sink = exporter()
    assert value(sink, "braid_restarts_total") == 0
    for kind in ("started", "restarted", "resized", "straggler", "straggler"):
        target.event({"kind": kind, "step": 2})
    target.event({"kind": "saved", "seconds": 1.5})
    assert [
        value(sink, f"braid_{name}_total")
        for name in ("starts", "restarts", "resizes", "stragglers", "checkpoints")
    ] == [1, 1, 1, 2, 1]
    assert value(sink, "braid_checkpoint_seconds") == 1.5
    assert value(sink, "braid_running") == 1
    target.event({"kind": "failed"})
    target.metrics({"step": 9})  # of another file, read later
    assert value(sink, "braid_running") == 0


def test_layout_of_a_configuration() -> None:
    assert layout_of({"parallel": {"dp": 2, "tp": 2, "pp": 3, "layout": "x"}}) == ParallelLayout(
        dp=2, tp=2, pp=3
    )
    assert layout_of({}) == ParallelLayout()


class _Recorded:
    """A metric of Ray's interface that writes down what it is told."""

    def __init__(
        self, name: str, description: str = "", *, tag_keys: tuple[str, ...], boundaries: Any = None
    ):
        self.name, self.tag_keys, self.calls = name, tag_keys, list[tuple[float, dict[str, str]]]()

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert tuple(tags) == self.tag_keys
        self.calls.append((value, tags))

    inc = observe = set


def recording() -> tuple[SimpleNamespace, dict[str, _Recorded]]:
    """What stands for the module ``ray.util.metrics``, and the metrics made with it, by name."""
    made: dict[str, _Recorded] = {}

    def make(*args: Any, **kwargs: Any) -> _Recorded:
        metric = _Recorded(*args, **kwargs)
        made[metric.name] = metric
        return metric

    return SimpleNamespace(Gauge=make, Counter=make, Histogram=make), made


def test_ray_gets_the_same_readings() -> None:
    module, made = recording()
    ray_sink = RaySink(module, refresh_seconds=3600)
    fill(Exporter(ray_sink, "demo", LAYOUT))
    ray_sink.close()
    target, sink = exporter()
    fill(target)
    seen = readings(sink)
    for metric in METRICS:
        calls = made[metric.name].calls
        assert calls, metric
        for _, tags in calls:
            labels = frozenset(tags.items())
            mine = [v for v, t in calls if frozenset(t.items()) == labels]
            match metric.kind:
                case Kind.GAUGE:
                    assert seen[metric.name, labels] == mine[-1]
                case Kind.COUNTER:
                    assert min(mine) > 0, "Ray refuses it"
                    assert seen[metric.name, labels] == pytest.approx(sum(mine))
                case Kind.HISTOGRAM:
                    assert seen[f"{metric.name}_sum", labels] == pytest.approx(sum(mine))


def test_ray_itself_takes_the_metrics() -> None:
    """Of the real module, which needs no cluster to check names, tags and values."""
    ray_metrics = pytest.importorskip("ray.util.metrics")
    sink = RaySink(ray_metrics)
    target = Exporter(sink, "demo", LAYOUT)
    fill(target)
    target.ranks(ranks_line(3, ranks=2))
    sink.refresh()
    sink.close()


def test_ray_hears_gauges_again_until_they_are_forgotten() -> None:
    module, made = recording()
    sink = RaySink(module, refresh_seconds=3600)
    target = Exporter(sink, "demo", LAYOUT)
    fill(target)
    target.ranks(ranks_line(3, ranks=2))
    before = {name: len(metric.calls) for name, metric in made.items()}
    sink.refresh()
    sink.close()
    again = {name: metric.calls[before[name] :] for name, metric in made.items()}
    for metric in METRICS:
        if metric.kind is not Kind.GAUGE:
            assert again[metric.name] == [], "sums and histograms would count twice"
        elif metric.source is Source.RANKS:
            assert sorted(tags["rank"] for _, tags in again[metric.name]) == ["0", "1"]
        else:
            assert len(again[metric.name]) == (4 if metric.per_rank else 1)
    assert again["braid_step"] == [(2, {"run": "demo"})]


def test_ray_hears_gauges_again_by_itself_until_it_is_closed() -> None:
    module, made = recording()
    sink = RaySink(module, refresh_seconds=0.001)
    Exporter(sink, "demo", LAYOUT).predicted({"alpha": 0.5})
    told = made["braid_alpha_ratio"].calls
    deadline = time.monotonic() + 30
    while len(told) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    sink.close()
    assert len(told) >= 3
    assert not any(thread.name == "braid-metrics" for thread in threading.enumerate())


def test_the_module_knows_ray_only_by_hearsay() -> None:
    tree = ast.parse((ROOT / "dashboards" / "metrics.py").read_text(encoding="utf-8"))
    names = [n.name for node in ast.walk(tree) if isinstance(node, ast.Import) for n in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert "prometheus_client" in names
    assert not [name for name in names if name.split(".")[0] in ("ray", "importlib")]


def test_sources_are_files_of_a_run() -> None:
    lines = {
        Source.METRICS: metrics_line(1, ranks=2),
        Source.RANKS: ranks_line(1, ranks=2),
        Source.PREDICTED: PREDICTED,
        Source.EVENTS: {key: value for event in EVENTS for key, value in event.items()},
    }
    for metric in METRICS:
        for field in filter(None, metric.field.split(" / ")):
            assert value_of(lines[metric.source], field) is not None, metric
        if metric.per_rank:
            assert len(lines[metric.source][metric.field]) == 2


def test_the_documentation_is_up_to_date(update_golden: bool) -> None:
    path = ROOT / "docs" / "metrics.md"
    text = path.read_text(encoding="utf-8")
    if update_golden:
        path.write_text(documented(text), encoding="utf-8")
    assert path.read_text(encoding="utf-8") == documented(text), "renew it with --update-golden"
    with pytest.raises(ValueError, match="lost its marks"):
        documented("nothing")
