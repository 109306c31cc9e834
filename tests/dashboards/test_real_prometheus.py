"""A real Prometheus that scrapes a run's metrics: no query of any panel, variable or mark stays empty.

The run is exported twice, as it is and as Ray's agents would name it, with the labels that they add.
"""

import contextlib
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest

from braid.dashboards.grafana import RULES, all_dashboards
from braid.dashboards.metrics import Exporter, PrometheusSink
from braid.jobs.training.page import LivePage
from tests.dashboards.lines import PREDICTED, metrics_line, ranks_line
from tests.dashboards.made_up_runs import MadeUpRun
from tests.servers import served
from tests.waiting import within

PROMETHEUS = shutil.which("prometheus")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed (Debian: prometheus)"),
]

Json = dict[str, Any]
ROOT = Path(__file__).parents[2]
RUNS = ("run", "run-by-ray")
STEPS = 5
DASHBOARDS = {made["uid"]: made for made in all_dashboards()}


@dataclass
class Server:
    url: str

    def get(self, path: str, **parameters: object) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=20) as answer:
            found = json.load(answer)
        assert found["status"] == "success"
        return found["data"]

    def now(self, expr: str) -> list[Json]:
        return list(self.get("query", query=expr)["result"])

    def course(self, expr: str) -> list[Json]:
        """A range query's series over the last minute."""
        end = time.time()
        return list(self.get("query_range", query=expr, start=end - 60, end=end, step=1)["result"])

    def wait(self, what: Callable[[], bool]) -> None:
        assert within(60, what, every=0.2), "Prometheus has not seen in time what it should see"


@contextlib.contextmanager
def prometheus(folder: Path, config: Json) -> Iterator[Server]:
    """Prometheus with a configuration and our rules, which look every second; it ends with the context."""
    rules = RULES.read_text(encoding="utf-8")
    assert "interval: 30s" in rules
    (folder / "rules.yaml").write_text(rules.replace("interval: 30s", "interval: 1s"))
    every = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump({"global": every, **config}))
    port = free_port()
    command = [
        str(PROMETHEUS),
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    made = Server(f"http://127.0.0.1:{port}")

    def ready() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{made.url}/-/ready", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as process,
    ):
        try:
            made.wait(ready)
            yield made
        finally:
            process.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def documented(port: int) -> Json:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n# prometheus.yml\n(.*?)```", text, flags=re.DOTALL)
    assert block.count("8470") == 1
    config = dict(yaml.safe_load(block.replace("8470", str(port))))
    assert [(ROOT / name).read_text() for name in config["rule_files"]] == [RULES.read_text()]
    return {**config, "rule_files": ["rules.yaml"]}


def as_of_ray(text: str) -> str:
    """The metrics as Ray's agents say them, which show no counter of 0."""
    text = re.sub(r"^(# (?:HELP|TYPE) )?braid_", r"\1ray_braid_", text, flags=re.MULTILINE)
    text = re.sub(r"^\w+_total{.*} 0\.0\n", "", text, flags=re.MULTILINE)
    # Nothing need have been slowed down in a run; that panel must not be empty then.
    text = re.sub(r"^ray_braid_slowdown_seconds_total{.*\n", "", text, flags=re.MULTILINE)
    return text.replace("{", '{Component="core_worker",NodeAddress="10.0.0.1",')


@pytest.fixture(scope="module")
def fed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Prometheus after it has seen every step of a run, and then its events."""
    texts: dict[str, str] = {}
    sinks = [PrometheusSink() for _ in RUNS]
    exporters = [Exporter(sink, run) for sink, run in zip(sinks, RUNS, strict=True)]

    def take(source: str, line: Json) -> None:
        for exporter in exporters:
            exporter.take(source, line)
        own, by_ray = (generate_latest(sink.registry).decode() for sink in sinks)
        texts.update(zip(RUNS, (own, as_of_ray(by_ray)), strict=True))

    take("config.yaml", {"parallel": {"pp": 2}})
    folder, config = tmp_path_factory.mktemp("prometheus"), documented(page_port := free_port())
    page = LivePage(page_port)  # tells what happens from now on
    MadeUpRun(folder / "run", 2, begin_ns=time.time_ns() + 10**9).step()
    with (
        contextlib.closing(page),
        served(lambda asked: (200, texts[asked.path[1:]]), "text/plain; version=0.0.4") as port,
    ):
        assert page.open(folder / "run") == f"http://127.0.0.1:{page_port}/"
        targets = [{"targets": [f"127.0.0.1:{port}"]}]
        config["scrape_configs"] += [
            {"job_name": run, "metrics_path": f"/{run}", "static_configs": targets} for run in RUNS
        ]
        with prometheus(folder, config) as server:
            take("predicted.json", PREDICTED)
            take("events.jsonl", {"kind": "started"})
            for step in range(1, STEPS + 1):
                take("ranks.jsonl", ranks_line(step, ranks=2))
                take("metrics.jsonl", metrics_line(step, ranks=2))
                seen = f'{{__name__=~"(ray_)?braid_step",run=~"run.*"}} == {step}'
                server.wait(lambda seen=seen: len(server.now(seen)) == 2)
            for dashboard in DASHBOARDS.values():
                for mark in dashboard["annotations"]["list"]:
                    assert not server.course(filled(mark["expr"], "run")), "nothing has happened yet"
            for kind in ("saved", "restarted", "resized", "straggler"):
                take("events.jsonl", {"kind": kind, "seconds": 0.25})
            server.wait(lambda: len(server.now('{__name__=~"(ray_)?braid_stragglers_total"} == 1')) == 2)
            server.wait(lambda: len(server.now('braid:seconds_since_progress{run=~"run.*"}')) == 2)
            yield server


def filled(expr: str, run: str) -> str:
    """An expression with Grafana's variables replaced as Grafana would."""
    made = expr.replace("$job", run).replace("$stage", ".*").replace("$__rate_interval", "30s")
    assert "$" not in made, f"{expr} has a variable that the dashboards do not define"
    return made


def test_the_scrape_configuration_of_the_documentation(fed: Server) -> None:
    """Prometheus takes it as it stands, but for the port, and sees the page of a run at that port."""
    fed.wait(lambda: bool(fed.now("up{job='braid'} == 1")))
    fed.wait(lambda: bool(fed.now("braid:hidden_ratio{run='made-up'}")))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("uid", DASHBOARDS)
def test_every_panel_mark_and_variable_has_something_to_show(fed: Server, uid: str, run: str) -> None:
    for panel in DASHBOARDS[uid]["panels"]:
        for target in panel["targets"]:
            expr = filled(target["expr"], run)
            where = f"{panel['title']}: {expr}"
            found = fed.now(expr) if target["instant"] else fed.course(expr)
            points = [p for s in found for p in (s["values"] if "values" in s else [s["value"]])]
            assert any(value not in ("NaN", "+Inf", "-Inf") for _, value in points), where
            labels = re.findall(r"{{(\w+)}}", target["legendFormat"])
            assert all(name in s["metric"] for name in labels for s in found), where
            if panel["type"] == "stat" or not (labels or target["instant"]):
                assert len(found) == 1, where
    for mark in DASHBOARDS[uid]["annotations"]["list"]:
        (series,) = fed.course(filled(mark["expr"], run))
        assert series["metric"] == {"run": run}
        assert {value for _, value in series["values"]} == {"1"}
    _, job, stage = DASHBOARDS[uid]["templating"]["list"]
    for variable, expected in ((job, ["made-up", *RUNS]), (stage, ["0", "1"])):
        match = re.fullmatch(r"label_values\((.*), (\w+)\)", filled(variable["query"]["query"], run))
        assert match is not None
        assert sorted(fed.get(f"label/{match[2]}/values", **{"match[]": match[1]})) == sorted(expected)
