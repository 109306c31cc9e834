"""The table of metrics, and what the lines of a run's files become in Prometheus."""

import math
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from braid.actors.controller.records.step_record import record_of
from braid.dashboards.metrics import METRICS, Exporter, PrometheusSink
from tests.dashboards.lines import EVENTS, PREDICTED, metrics_line, ranks_line

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


def exporter() -> tuple[Exporter, PrometheusSink]:
    sink = PrometheusSink()
    target = Exporter(sink, "demo")
    target.take("config.yaml", LAYOUT)
    return target, sink


def test_every_metric_gets_a_value_from_complete_files() -> None:
    record_of(metrics_line(1, ranks=2))  # raises for a field that records do not have
    target, sink = exporter()
    target.take("predicted.json", PREDICTED)
    target.take("metrics.jsonl", metrics_line(2, ranks=4))
    target.take("ranks.jsonl", ranks_line(2, ranks=4))
    for line in EVENTS:
        target.take("events.jsonl", line)
    found = {name for name, _ in readings(sink)}
    for metric in METRICS.values():
        assert (f"{metric.name}_bucket" if metric.kind == "histogram" else metric.name) in found


LINE = metrics_line(3, ranks=4)
BY_RANK = [ranks_line(step, ranks=4) for step in (1, 2)]
CASES: dict[str, tuple[list[tuple[str, dict[str, Any]]], dict[str, Any]]] = {
    "a step": (
        [("metrics.jsonl", LINE), ("metrics.jsonl", {**LINE, "step": 4})],
        {
            "step": 4,
            "loss_nats": LINE["loss"],
            "tokens_per_second": LINE["tokens"] / LINE["wall_seconds"],
            "expert_imbalance_ratio": LINE["experts"]["imbalance"],
            "set_validation_loss_nats web": LINE["validation_losses"]["web"],
            "tokens_total": 2 * LINE["tokens"],
            "step_duration_seconds_count": 2,
            "peak_memory_bytes 1 2": LINE["peak_bytes"][2],
        },
    ),
    "ranks have the stages of the layout, and sums add up": (
        [("ranks.jsonl", line) for line in BY_RANK],
        {
            **{f"step_exposed_seconds {n // 2} {n}": BY_RANK[1]["exposed_seconds"][n] for n in range(4)},
            "exposed_seconds_total 1 3": sum(line["exposed_seconds"][3] for line in BY_RANK),
        },
    ),
    "dropped spans are sums already, and begin anew with the rank": (
        [("ranks.jsonl", {"dropped_spans": [dropped]}) for dropped in (5, 5, 8, 2)],
        {"dropped_spans_total 0 0": 5 + 0 + 3 + 2},
    ),
    "ranks that are gone lose their gauges": (
        [("ranks.jsonl", BY_RANK[0]), ("ranks.jsonl", ranks_line(2, ranks=2))],
        {"step_compute_seconds 0 1": 0.4, "step_compute_seconds 1 2": None, "step_compute_seconds 1 3": None},
    ),
    "missing and null fields leave no trace": (
        [
            ("metrics.jsonl", {"step": 1, "loss": 2.0, "mfu": None, "validation_bits_per_byte": None}),
            ("ranks.jsonl", {"step": 1, "slowdown_seconds": [None, 0.5], "seconds": "long"}),
        ],
        {
            "step": 1,
            "loss_nats": 2,
            **dict.fromkeys(("mfu_ratio", "validation_bits_per_byte", "gradient_norm", "step_seconds")),
            "step_slowdown_seconds 0 0": None,
            "step_slowdown_seconds 0 1": 0.5,
        },
    ),
    "gauges show what is no number, and sums do not": (
        [
            ("metrics.jsonl", {"loss": math.nan, "tokens": math.inf, "seconds": math.nan}),
            ("metrics.jsonl", {"loss": None, "tokens": 7}),  # JSON has no NaN
            ("ranks.jsonl", {"slowdown_seconds": [-0.25]}),
        ],
        {
            "loss_nats": math.nan,
            "tokens_total": 7,
            "step_slowdown_seconds 0 0": -0.25,
            "slowdown_seconds_total 0 0": 0,
        },
    ),
    "events count from zero": ([], {"restarts_total": 0, "running": None}),
    "events say whether the run goes on": (
        [
            ("events.jsonl", {"kind": kind, "step": 2, "seconds": 1.5})
            for kind in ("started", "restarted", "straggler", "straggler", "saved")
        ],
        {
            "starts_total": 1,
            "restarts_total": 1,
            "resizes_total": 0,
            "stragglers_total": 2,
            "checkpoints_total": 1,
            "checkpoint_seconds": 1.5,
            "running": 1,
        },
    ),
    "a failed run is over": (
        [("events.jsonl", {"kind": kind}) for kind in ("started", "failed")],
        {"running": 0},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_lines_become(case: str) -> None:
    """Expected values by name without ``braid_``, followed by stage and rank, or by the name of a set."""
    lines, expected = CASES[case]
    target, sink = exporter()
    for source, line in lines:
        target.take(source, line)
    for text, wanted in expected.items():
        name, *places = text.split()
        labels = dict(zip(("stage", "rank") if len(places) == 2 else ("set",), places, strict=False))
        told = value(sink, f"braid_{name}", **labels)
        assert told == (None if wanted is None else pytest.approx(wanted, nan_ok=True)), text


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
