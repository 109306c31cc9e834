"""A Ray cluster that a command starts for itself: whom it serves, what runs there, what its agent tells."""

import json
import os
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from braid.actors.config import parse_config
from braid.dashboards.metrics import METRICS, PrometheusSink
from braid.dashboards.metrics_feed import MetricsFeed, told_to_ray
from braid.jobs.cluster import doors
from braid.jobs.data.prepare import prepare
from tests.dashboards.lines import EVENTS, PREDICTED, metrics_line, ranks_line
from tests.dashboards.test_metrics import readings
from tests.end_to_end.command import BASE, processes_mentioning, write_corpus
from tests.jobs.corpora import DOCUMENTS, contents, hidden, request_of, write_lines
from tests.waiting import within

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.own_process, pytest.mark.timeout(400)]


def authentication() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH_")}


@pytest.fixture(scope="module")
def token() -> Iterator[Path]:
    """The file with the token of a cluster that this process is connected to."""
    from braid.jobs.cluster.session import ray_session

    with pytest.MonkeyPatch.context() as patch:
        for name in authentication():
            patch.delenv(name)
        patch.setenv("RAY_metrics_report_interval_ms", "1000")
        with ray_session(parse_config({})):
            file = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
            yield file
        assert authentication() == {}
        assert not file.parent.exists()


def test_it_turns_strangers_away_and_tells_nobody_its_token(token: Path) -> None:
    assert [node["NodeManagerAddress"] for node in ray.nodes()] == ["127.0.0.1"], "on loopback only"
    address = ray.get_runtime_context().gcs_address
    assert doors._status(address) not in doors._ANSWERED
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert token.stat().st_mode & 0o077 == 0
    assert token.parent.stat().st_mode & 0o077 == 0
    assert processes_mentioning(str(token.parent)) != []
    secret = token.read_text()
    assert len(secret) == 64
    assert processes_mentioning(secret) == []
    files = [path for path in token.parent.rglob("*") if path.is_file()]
    assert [path for path in files if secret.encode() in path.read_bytes()] == [token]


@pytest.mark.usefixtures("token", "small_items")
def test_tasks_prepare_the_same_bytes(tmp_path: Path) -> None:
    from braid.jobs.data.executors import ray_map

    request = request_of(write_lines(tmp_path / "a.jsonl", DOCUMENTS))
    bad = tmp_path / "bad.jsonl"
    bad.write_text((tmp_path / "a.jsonl").read_text() + "{")
    local = prepare(request, tmp_path / "local")
    remote = prepare(request, tmp_path / "remote", ray_map)
    assert contents(remote.output) == contents(local.output)
    assert sorted(ray_map(abs, range(-20, 0))) == list(range(1, 21))
    with pytest.raises(ValueError, match=r"^data.files: .*bad.jsonl:61 is not JSON") as fault:
        prepare(request_of(bad), tmp_path / "bad", ray_map)
    assert "\n" not in str(fault.value)
    assert not (tmp_path / "bad").exists()
    assert not hidden(tmp_path)


@pytest.mark.usefixtures("token")
def test_training_runs_inside_a_task(tmp_path: Path) -> None:
    """Of an actor with two threads, neither of which hears signals."""
    data = {"files": [str(write_corpus(tmp_path))], "validation_fraction": 0.1}
    content = {**BASE, "runs": str(tmp_path / "runs"), "data": data, "telemetry": {"page": False}}

    @ray.remote(num_cpus=0, max_concurrency=2)
    class Task:
        def train(self) -> bool:
            import braid
            from braid.actors.config import parse_config

            return braid.train(parse_config(content)).complete

    task = Task.remote()
    assert ray.get(task.train.remote())
    ray.kill(task)


def page() -> str:
    """What the agent of the cluster's node serves."""
    port = ray.nodes()[0]["MetricsExportPort"]
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


@pytest.mark.usefixtures("token")
def test_ray_tells_what_prometheus_is_told_until_the_block_ends(tmp_path: Path) -> None:
    """Names, labels and values; gauges are told again and again, sums and events once."""
    import ray.util.metrics

    def write(name: str, line: dict[str, Any]) -> None:
        with (tmp_path / name).open("a") as file:
            file.write(json.dumps({**line, "time": time.time()}) + "\n")

    def settled() -> bool:
        lines = page().splitlines()
        old = any('rank="3"' in line for line in lines if line.startswith("ray_braid_step_compute"))
        return any("ray_braid_running" in line for line in lines) and not old

    (tmp_path / "config.yaml").write_text("name: demo\nparallel: {pp: 2, tp: 2}\n")
    (tmp_path / "predicted.json").write_text(json.dumps(PREDICTED))
    with told_to_ray(tmp_path, ray.util.metrics, every_s=0.3):
        for step in (1, 2):
            write("metrics.jsonl", metrics_line(step, ranks=4))
            write("ranks.jsonl", ranks_line(step, ranks=4))
        write("ranks.jsonl", ranks_line(3, ranks=3))
        for event in EVENTS:
            write("events.jsonl", event)
        assert within(60, settled, every=0.5)
        time.sleep(5)  # more than two report intervals: what nobody repeats is gone
        families = list(text_string_to_metric_families(page()))
        sink = PrometheusSink()
        MetricsFeed(tmp_path, sink).refresh()
        write("events.jsonl", {"kind": "resized"})
    assert not any(thread.name == "braid-metrics" for thread in threading.enumerate())
    assert within(30, lambda: re.search(r"ray_braid_resizes_total{.*} 2\.0", page()), every=0.5)
    told = readings(sink)
    samples = [sample for family in families for sample in family.samples]
    kinds = {family.name: family.type for family in families}
    for metric in METRICS.values():
        name = f"{metric.name}_sum" if metric.kind == "histogram" else metric.name
        found = [sample for sample in samples if sample.name == f"ray_{name}"]
        family = metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name
        assert kinds[f"ray_{family}"] == metric.kind
        several = 3 if metric.source == "ranks.jsonl" and metric.kind == "gauge" else 4
        assert len(found) == (several if metric.per_rank else 2 if metric.label == "set" else 1), metric
        for sample in found:
            labels = frozenset((label, sample.labels[label]) for label in metric.labels)
            rounded = 1e-2 if metric.kind == "histogram" else None
            assert sample.value == pytest.approx(told[name, labels], rel=rounded), metric
