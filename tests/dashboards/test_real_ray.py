"""What Ray's own agent serves of our metrics, from a private cluster of one CPU in a process of its own."""

import json
import subprocess
import sys
import tempfile

import pytest
from prometheus_client.parser import text_string_to_metric_families

from braid.dashboards.metrics import METRICS
from tests.dashboards.lines import metrics_line
from tests.end_to_end.command import ROOT, environment

SCRIPT = """
import json, sys, time, urllib.request
from pathlib import Path
import ray
import ray.util.metrics
from braid.dashboards.metrics_feed import told_to_ray
from tests.dashboards.lines import EVENTS, PREDICTED, metrics_line, ranks_line

run = Path(sys.argv[1], "demo")
run.mkdir()
(run / "config.yaml").write_text("name: demo\\nparallel: {pp: 2, tp: 2}\\n")
(run / "predicted.json").write_text(json.dumps(PREDICTED))
def write(name, line):
    with (run / name).open("a") as file:
        file.write(json.dumps({**line, "time": time.time()}) + "\\n")

ray.init(
    address="local", num_cpus=1, include_dashboard=False, log_to_driver=False,
    _node_ip_address="127.0.0.1", _temp_dir=sys.argv[1],
)
page = f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics"
deadline, text = time.monotonic() + 60, ""
def settled():
    return "ray_braid_running" in text and not any(
        'rank="3"' in line for line in text.splitlines() if line.startswith("ray_braid_step_compute")
    )
with told_to_ray(run, ray.util.metrics, every_s=0.3):
    for step in (1, 2):
        write("metrics.jsonl", metrics_line(step, ranks=4))
        write("ranks.jsonl", ranks_line(step, ranks=4))
    write("ranks.jsonl", ranks_line(3, ranks=3))
    for event in EVENTS:
        write("events.jsonl", event)
    while not settled() and time.monotonic() < deadline:
        time.sleep(0.5)
        try:
            text = urllib.request.urlopen(page, timeout=5).read().decode()
        except OSError:
            pass
    time.sleep(5)  # more than two report intervals: what nobody repeats is gone
    text = urllib.request.urlopen(page, timeout=5).read().decode()
ray.shutdown()
print(json.dumps(text))
"""


@pytest.mark.slow
@pytest.mark.own_process
def test_names_labels_and_values_are_what_the_dashboards_expect() -> None:
    pytest.importorskip("ray")
    # Not pytest's folder: Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="braid-", dir="/tmp") as folder:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, folder],
            cwd=ROOT,
            env=environment() | {"RAY_metrics_report_interval_ms": "1000"},
            capture_output=True,
            text=True,
            timeout=200,
        )
    assert done.returncode == 0, done.stderr
    families = list(text_string_to_metric_families(json.loads(done.stdout)))
    samples = [sample for family in families for sample in family.samples]
    kinds = {family.name: family.type for family in families}
    for metric in METRICS.values():
        name = f"ray_{metric.name}"
        found = [s for s in samples if s.name == (f"{name}_sum" if metric.kind == "histogram" else name)]
        assert kinds[name.removesuffix("_total") if metric.kind == "counter" else name] == metric.kind
        left = metric.kind == "gauge" and metric.source == "ranks.jsonl"
        assert len(found) == ((3 if left else 4) if metric.per_rank else 1), metric
        assert all({"run"} <= set(metric.labels) <= s.labels.keys() for s in found)
        assert {s.labels["run"] for s in found} == {"demo"}
    values = {(s.name, s.labels.get("stage"), s.labels.get("rank")): s.value for s in samples}
    expected = metrics_line(2, ranks=4)
    assert values["ray_braid_loss_nats", None, None] == pytest.approx(expected["loss"])
    assert values["ray_braid_tokens_total", None, None] == 2 * expected["tokens"]
    assert values["ray_braid_peak_memory_bytes", "1", "2"] == expected["peak_bytes"][2]
