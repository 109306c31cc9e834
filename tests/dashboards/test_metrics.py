"""The table of metrics, and what the lines of a run's files become in Prometheus and in Ray."""

import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from braid.actors.controller.records.step_record import record_of
from braid.dashboards.metrics import METRICS, Exporter, PrometheusSink, RaySink
from braid.dashboards.metrics_feed import told_to_ray
from braid.scheduling.mesh.layout import ParallelLayout
from tests.dashboards.lines import fill, metrics_line, ranks_line
from tests.waiting import within

DOCUMENTATION = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
LAYOUT = {"parallel": {"pp": 2, "tp": 2}}
"""A configuration of two stages with two ranks each."""


def readings(sink: PrometheusSink) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample that a scrape would see, by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(generate_latest(sink.registry).decode())
        for sample in family.samples
    }


def value(sink: PrometheusSink, name: str, **labels: str) -> float | None:
    """One sample of the run ``demo``; None where there is none."""
    return readings(sink).get((name, frozenset({"run": "demo", **labels}.items())))


def exporter(config: dict[str, Any] = LAYOUT) -> tuple[Exporter, PrometheusSink]:
    sink = PrometheusSink()
    target = Exporter(sink, "demo")
    target.take("config.yaml", config)
    return target, sink


def test_names_fit_prometheus_and_ray_and_say_their_kind() -> None:
    for metric in METRICS.values():
        assert re.fullmatch(r"braid_[a-z][a-z_]*[a-z]", metric.name)  # Ray takes no colon, and no other sign
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert not re.search(r"_(bucket|count|sum|created|info)$", metric.name)


def test_every_metric_gets_a_value_from_complete_files() -> None:
    record_of(metrics_line(1, ranks=2))  # raises for a field that records do not have
    target, sink = exporter()
    fill(target)
    found = {name for name, _ in readings(sink)}
    for metric in METRICS.values():
        assert (f"{metric.name}_bucket" if metric.kind == "histogram" else metric.name) in found


def test_values_of_a_step() -> None:
    target, sink = exporter()
    line = metrics_line(3, ranks=4)
    target.take("metrics.jsonl", line)
    assert value(sink, "braid_step") == 3
    assert value(sink, "braid_loss_nats") == line["loss"]
    assert value(sink, "braid_tokens_per_second") == pytest.approx(line["tokens"] / line["wall_seconds"])
    assert value(sink, "braid_expert_imbalance_ratio") == line["experts"]["imbalance"]
    for name, loss in line["validation_losses"].items():
        assert value(sink, "braid_set_validation_loss_nats", set=name) == loss
    target.take("metrics.jsonl", metrics_line(4, ranks=4))
    assert value(sink, "braid_tokens_total") == 2 * line["tokens"]
    assert value(sink, "braid_step_duration_seconds_count") == 2
    assert value(sink, "braid_peak_memory_bytes", stage="1", rank="2") == line["peak_bytes"][2]


def test_ranks_have_the_stages_of_the_layout_and_sums_add_up() -> None:
    target, sink = exporter()
    for step in (1, 2):
        target.take("ranks.jsonl", ranks_line(step, ranks=4))
    for rank in range(4):
        stage = ParallelLayout(pp=2, tp=2).coordinate(rank)["pp"]
        labels = {"stage": str(stage), "rank": str(rank)}
        both = [ranks_line(step, ranks=4)["exposed_seconds"][rank] for step in (1, 2)]
        assert value(sink, "braid_step_exposed_seconds", **labels) == both[1]
        assert value(sink, "braid_exposed_seconds_total", **labels) == pytest.approx(sum(both))


def test_dropped_spans_are_sums_already_and_begin_anew_with_the_rank() -> None:
    target, sink = exporter({})
    for dropped in (5, 5, 8, 2):
        target.take("ranks.jsonl", {"dropped_spans": [dropped]})
    assert value(sink, "braid_dropped_spans_total", stage="0", rank="0") == 5 + 0 + 3 + 2


def test_missing_and_null_fields_leave_no_trace() -> None:
    target, sink = exporter()
    before = readings(sink)
    target.take("metrics.jsonl", {"step": 1, "loss": 2.0, "mfu": None, "validation_bits_per_byte": None})
    target.take("ranks.jsonl", {"step": 1, "slowdown_seconds": [None, 0.5], "seconds": "long"})
    new = {name for name, _ in readings(sink).keys() - before.keys()}
    assert {name for name in new if not name.endswith("_created")} == {
        "braid_step",
        "braid_loss_nats",
        "braid_step_slowdown_seconds",
        "braid_slowdown_seconds_total",
    }
    assert value(sink, "braid_step_slowdown_seconds", stage="0", rank="0") is None
    assert value(sink, "braid_step_slowdown_seconds", stage="0", rank="1") == 0.5


def test_gauges_show_what_is_not_a_number_and_sums_do_not() -> None:
    target, sink = exporter({})
    target.take("metrics.jsonl", {"loss": float("nan"), "tokens": float("inf"), "seconds": float("nan")})
    loss = value(sink, "braid_loss_nats")
    assert loss is not None
    assert loss != loss
    target.take("metrics.jsonl", {"tokens": 7})
    assert value(sink, "braid_tokens_total") == 7
    target.take("ranks.jsonl", {"slowdown_seconds": [-0.25]})
    assert value(sink, "braid_step_slowdown_seconds", stage="0", rank="0") == -0.25
    assert value(sink, "braid_slowdown_seconds_total", stage="0", rank="0") == 0


def test_ranks_that_are_gone_or_moved_to_another_stage_lose_their_gauges() -> None:
    target, sink = exporter()
    target.take("ranks.jsonl", ranks_line(1, ranks=4))
    target.take("config.yaml", {"parallel": {"pp": 2, "tp": "auto"}})
    target.take("ranks.jsonl", ranks_line(2, ranks=2))
    shown = {
        (dict(labels)["stage"], dict(labels)["rank"])
        for name, labels in readings(sink)
        if name == "braid_step_compute_seconds"
    }
    assert shown == {("0", "0"), ("1", "1")}


def test_events_count_from_zero_and_say_whether_the_run_goes_on() -> None:
    target, sink = exporter()
    assert value(sink, "braid_restarts_total") == 0
    for kind in ("started", "restarted", "resized", "straggler", "straggler", "saved"):
        target.take("events.jsonl", {"kind": kind, "step": 2, "seconds": 1.5})
    names = ("starts", "restarts", "resizes", "stragglers", "checkpoints")
    assert [value(sink, f"braid_{name}_total") for name in names] == [1, 1, 1, 2, 1]
    assert value(sink, "braid_checkpoint_seconds") == 1.5
    assert value(sink, "braid_running") == 1
    target.take("events.jsonl", {"kind": "failed"})
    assert value(sink, "braid_running") == 0


Calls = dict[str, list[tuple[float, dict[str, str]]]]


def recording() -> tuple[SimpleNamespace, Calls]:
    """What stands for ``ray.util.metrics``, and what the metrics made with it are told, by name."""
    told: Calls = {}

    def make(name: str, description: str = "", *, tag_keys: tuple[str, ...], boundaries: Any = None) -> Any:
        calls = told[name] = []

        def tell(value: float, tags: dict[str, str]) -> None:
            assert tuple(tags) == tag_keys
            calls.append((value, tags))

        return SimpleNamespace(set=tell, inc=tell, observe=tell)

    return SimpleNamespace(Gauge=make, Counter=make, Histogram=make), told


def test_ray_gets_the_same_readings() -> None:
    module, made = recording()
    target, sink = exporter()
    for one in (Exporter(RaySink(module), "demo"), target):
        one.take("config.yaml", LAYOUT)
        fill(one)
    seen = readings(sink)
    for metric in METRICS.values():
        calls = made[metric.name]
        assert calls, metric
        for labels in {frozenset(tags.items()) for _, tags in calls}:
            mine = [v for v, tags in calls if frozenset(tags.items()) == labels]
            match metric.kind:
                case "gauge":
                    assert seen[metric.name, labels] == mine[-1]
                case "counter":
                    assert min(mine) > 0, "Ray refuses it"
                    assert seen[metric.name, labels] == pytest.approx(sum(mine))
                case "histogram":
                    assert seen[f"{metric.name}_sum", labels] == pytest.approx(sum(mine))


def test_ray_hears_gauges_again_until_they_are_forgotten() -> None:
    module, made = recording()
    sink = RaySink(module)
    target = Exporter(sink, "demo")
    target.take("config.yaml", LAYOUT)
    fill(target)
    target.take("ranks.jsonl", ranks_line(3, ranks=2))
    before = {name: len(calls) for name, calls in made.items()}
    sink.refresh()
    for metric in METRICS.values():
        again = made[metric.name][before[metric.name] :]
        if metric.kind != "gauge":
            assert again == [], "sums and histograms would count twice"
        elif metric.source == "ranks.jsonl":
            assert sorted(tags["rank"] for _, tags in again) == ["0", "1"]
        else:
            assert len(again) == (4 if metric.per_rank else 2 if metric.label else 1)


def test_ray_is_told_of_a_run_until_the_block_ends(tmp_path: Path) -> None:
    module, made = recording()
    with told_to_ray(tmp_path, module, every_s=0.001):
        (tmp_path / "predicted.json").write_text('{"alpha": 0.5}')
        told = made["braid_alpha_ratio"]
        assert within(30, lambda: len(told) >= 3), "Ray drops a gauge that it does not hear again"
        (tmp_path / "events.jsonl").write_text(f'{{"kind": "started", "time": {time.time() + 1}}}\n')
    assert made["braid_starts_total"] == [(1, {"run": tmp_path.name})], "the last lines, too, and once"
    assert not any(thread.name == "braid-metrics" for thread in threading.enumerate())


def test_the_documentation_is_up_to_date(update_golden: bool) -> None:
    rows = ["| metric | kind | labels | from | meaning |", "| --- | --- | --- | --- | --- |"]
    for metric in METRICS.values():
        place = f"`{metric.source}`"
        place += f" `{metric.field}`" if metric.field else ""
        place += f" of `{metric.event}`" if metric.event else ""
        labels = ", ".join(metric.labels)
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {place} | {metric.help} |")
    text = DOCUMENTATION.read_text(encoding="utf-8")
    begin = text.index("| metric | kind")
    wanted = text[:begin] + "\n".join(rows) + text[text.index("\n\n", begin) :]
    if update_golden:
        DOCUMENTATION.write_text(wanted, encoding="utf-8")
    assert DOCUMENTATION.read_text(encoding="utf-8") == wanted, "renew it with --update-golden"
