"""A real run and a real Prometheus that scrapes it: no query of any panel, variable or mark stays empty.

The run is exported twice, as it is and as Ray's agents would name it, with the labels that they add.
"""

import contextlib
import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from braid.dashboards.grafana import all_dashboards
from braid.dashboards.metrics import Exporter, PrometheusSink, layout_of
from braid.dashboards.prometheus import RULES
from braid.jobs.page import LivePage
from tests.dashboards.made_up_runs import MadeUpRun
from tests.end_to_end.command import braid, write_config, write_corpus

PROMETHEUS = shutil.which("prometheus")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed (Debian: prometheus)"),
]

Json = dict[str, Any]
PATIENCE_S = 60.0
ROOT = Path(__file__).parents[2]
RUNS = ("run", "run-by-ray")
DASHBOARDS = {made["uid"]: made for made in all_dashboards()}


@dataclass
class Files:
    """What a run left behind."""

    config: Json
    steps: list[Json]
    ranks: list[Json]
    predicted: Json
    events: list[Json] = field(default_factory=list)


def read_lines(path: Path) -> list[Json]:
    """The lines of a file of a run; none if it is not there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def files_of(path: Path) -> Files:
    """The files of a run as it wrote them."""
    return Files(
        config=yaml.safe_load((path / "config.yaml").read_text()),
        steps=read_lines(path / "metrics.jsonl"),
        ranks=read_lines(path / "ranks.jsonl"),
        predicted=json.loads((path / "predicted.json").read_text()),
        events=[event for event in read_lines(path / "events.jsonl") if event["kind"] == "saved"],
    )


class Page:
    """Serves what the exporters say, each at a path of its own."""

    def __init__(self) -> None:
        self.sinks = {name: PrometheusSink() for name in RUNS}
        page = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body, kind = page.body(self.path.strip("/"))
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    @property
    def address(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self.server.server_address[1]}"

    def body(self, name: str) -> tuple[bytes, str]:
        """The text of one exporter; of the second one as Ray says it, which shows no counter of 0."""
        body, kind = self.sinks[name].render()
        if name == "run-by-ray":
            text = re.sub(r"^(# (?:HELP|TYPE) )?braid_", r"\1ray_braid_", body.decode(), flags=re.MULTILINE)
            text = re.sub(r"^\w+_total{.*} 0\.0\n", "", text, flags=re.MULTILINE)
            # Nothing need have been slowed down in a run; that panel must not be empty then.
            text = re.sub(r"^ray_braid_slowdown_seconds_total{.*\n", "", text, flags=re.MULTILINE)
            body = text.replace("{", '{Component="core_worker",NodeAddress="10.0.0.1",').encode()
        return body, kind

    def close(self) -> None:
        """Serve no more."""
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@dataclass
class Server:
    """A Prometheus that runs."""

    url: str

    def get(self, path: str, **parameters: object) -> Any:
        """The data of an answer of its HTTP interface."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=20) as answer:
            found = json.load(answer)
        assert found["status"] == "success"
        return found["data"]

    def now(self, expr: str) -> list[Json]:
        """An instant query's series."""
        found = self.get("query", query=expr)["result"]
        assert isinstance(found, list)
        return found

    def course(self, expr: str) -> list[Json]:
        """A range query's series over the last minute."""
        end = time.time()
        found = self.get("query_range", query=expr, start=end - 60, end=end, step=1)["result"]
        assert isinstance(found, list)
        return found

    def wait(self, what: Callable[[], bool]) -> None:
        """Until something is true of it."""
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            assert time.monotonic() < deadline, "Prometheus has not seen in time what it should see"
            time.sleep(0.2)


@pytest.fixture(scope="module")
def run_files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Of a mixture of experts on two stages, profiled, whose ranks' peak rate is given: all is known."""
    folder = tmp_path_factory.mktemp("training")
    write_corpus(folder)
    config = write_config(
        folder,
        model={"family": "moe", "experts": 4, "top_k": 2, "capacity_factor": 1.0},
        parallel={"pp": 2},
        train={"steps": 5, "validation_samples": 4},
        overlap={"schedule": "braid"},
        cluster={"peak_tflops": 0.05},
    )
    done = braid(folder, "train", str(config))
    assert done.code == 0, done.errors
    files = files_of(folder / "runs" / "run")
    for line in files.steps:
        line["experts"]["rank_imbalance"] = 1.2  # of ranks without capacity, while others drop visits
    return files


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """The endpoint that is scraped."""
    made = Page()
    yield made
    made.close()


@contextlib.contextmanager
def prometheus(folder: Path, config: Json) -> Iterator[Server]:
    """Prometheus with a configuration and our rules, which look every second; it ends with the context."""
    rules = RULES.read_text(encoding="utf-8")
    assert "interval: 30s" in rules
    (folder / "rules.yaml").write_text(rules.replace("interval: 30s", "interval: 1s"))
    every = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump({"global": every, **config}))
    port = free_port()
    assert PROMETHEUS is not None
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                PROMETHEUS,
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    made = Server(f"http://127.0.0.1:{port}")

    def ready() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        try:
            with urllib.request.urlopen(f"{made.url}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    try:
        made.wait(ready)
        yield made
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    """A port of loopback that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, page: Page) -> Iterator[Server]:
    """Prometheus that scrapes both exporters."""
    scrapes = [
        {"job_name": job, "metrics_path": f"/{name}", "static_configs": [{"targets": [page.address]}]}
        for job, name in zip(("braid", "ray"), RUNS, strict=True)
    ]
    config = {"rule_files": ["rules.yaml"], "scrape_configs": scrapes}
    with prometheus(tmp_path_factory.mktemp("prometheus"), config) as made:
        yield made


def test_the_scrape_configuration_of_the_documentation(tmp_path: Path) -> None:
    """Prometheus takes it as it stands, but for the port, and sees the page of a run at that port."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n# prometheus.yml\n(.*?)```", text, flags=re.DOTALL)
    assert block.count("8470") == 1
    port = free_port()
    config = yaml.safe_load(block.replace("8470", str(port)))
    assert [(ROOT / name).read_text() for name in config["rule_files"]] == [RULES.read_text()]
    page = LivePage(port)  # tells what happens from now on
    run = MadeUpRun(tmp_path / "run", 2, begin_ns=time.time_ns() + 10**9)
    run.step()
    try:
        assert page.open(tmp_path / "run") == f"http://127.0.0.1:{port}/"
        with prometheus(tmp_path, {**config, "rule_files": ["rules.yaml"]}) as server:
            server.wait(lambda: bool(server.now("up{job='braid'} == 1")))
            server.wait(lambda: bool(server.now("braid:running")))
    finally:
        page.close()


@pytest.fixture(scope="module")
def fed(server: Server, page: Page, run_files: Files) -> Server:
    """Prometheus after it has seen every step of the run, and then its events."""
    layout = layout_of(run_files.config)
    assert layout.pp == 2
    exporters = [Exporter(sink, name, layout) for name, sink in page.sinks.items()]
    for exporter in exporters:
        exporter.predicted(run_files.predicted)
    for step, (line, ranks) in enumerate(zip(run_files.steps, run_files.ranks, strict=True), start=1):
        for exporter in exporters:
            exporter.metrics(line)
            exporter.ranks(ranks)
        server.wait(lambda step=step: len(server.now(f'{{__name__=~"(ray_)?braid_step"}} == {step}')) == 2)
    for dashboard in DASHBOARDS.values():
        for mark in dashboard["annotations"]["list"]:
            assert not server.course(filled(mark["expr"], "run")), "nothing has happened yet"
    for event in (*run_files.events, {"kind": "restarted"}, {"kind": "resized"}, {"kind": "straggler"}):
        for exporter in exporters:
            exporter.event(event)
    server.wait(lambda: len(server.now('{__name__=~"(ray_)?braid_stragglers_total"} == 1')) == 2)
    server.wait(lambda: len(server.now("braid:seconds_since_progress")) == 2)
    return server


def filled(expr: str, run: str) -> str:
    """An expression with Grafana's variables replaced as Grafana would."""
    made = expr.replace("$job", run).replace("$stage", ".*").replace("$__rate_interval", "30s")
    assert "$" not in made, f"{expr} has a variable that the dashboards do not define"
    return made


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("uid", DASHBOARDS)
def test_every_panel_has_something_to_show(fed: Server, uid: str, run: str) -> None:
    for panel in DASHBOARDS[uid]["panels"]:
        for target in panel["targets"]:
            expr = filled(target["expr"], run)
            found = fed.now(expr) if target["instant"] else fed.course(expr)
            assert found, f"{panel['title']}: {expr}"
            points = [p for s in found for p in (s["values"] if "values" in s else [s["value"]])]
            assert any(value not in ("NaN", "+Inf", "-Inf") for _, value in points), (
                f"{panel['title']}: {expr}"
            )
            for name in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert all(name in s["metric"] for s in found), f"{panel['title']}: no label {name}"
            if panel["type"] == "stat" or (
                not re.search("{{", target["legendFormat"]) and not target["instant"]
            ):
                assert len(found) == 1, f"{panel['title']} shows one series"


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("uid", DASHBOARDS)
def test_every_mark_is_set_by_its_event(fed: Server, uid: str, run: str) -> None:
    for mark in DASHBOARDS[uid]["annotations"]["list"]:
        (found,) = fed.course(filled(mark["expr"], run))
        assert found["metric"] == {"run": run}
        assert {value for _, value in found["values"]} == {"1"}


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_variables_offer_the_runs_and_their_stages(fed: Server, uid: str) -> None:
    _, job, stage = DASHBOARDS[uid]["templating"]["list"]
    for variable, run, expected in ((job, "", list(RUNS)), *((stage, run, ["0", "1"]) for run in RUNS)):
        query = filled(variable["query"]["query"], run)
        match = re.fullmatch(r"label_values\((.*), (\w+)\)", query)
        assert match is not None
        assert sorted(fed.get(f"label/{match[2]}/values", **{"match[]": match[1]})) == sorted(expected)


def test_values_are_the_runs(fed: Server, run_files: Files) -> None:
    for run in RUNS:
        (loss,) = fed.now(f'{{__name__=~"(ray_)?braid_loss_nats",run="{run}"}}')
        assert float(loss["value"][1]) == pytest.approx(run_files.steps[-1]["loss"])
        (tokens,) = fed.now(f'{{__name__=~"(ray_)?braid_tokens_total",run="{run}"}}')
        assert float(tokens["value"][1]) == sum(line["tokens"] for line in run_files.steps)
        peaks = fed.now(f'{{__name__=~"(ray_)?braid_peak_memory_bytes",run="{run}"}}')
        assert {(p["metric"]["stage"], p["metric"]["rank"]): float(p["value"][1]) for p in peaks} == {
            (str(rank), str(rank)): value for rank, value in enumerate(run_files.steps[-1]["peak_bytes"])
        }


def test_rules_are_evaluated(fed: Server) -> None:
    rules = [rule for group in fed.get("rules")["groups"] for rule in group["rules"]]
    expected = [r for group in yaml.safe_load(RULES.read_text())["groups"] for r in group["rules"]]
    assert len(rules) == len(expected)
    assert {rule["health"] for rule in rules} == {"ok"}, [rule.get("lastError") for rule in rules]
    for rule in expected:
        if "record" in rule:
            found = {s["metric"]["run"] for s in fed.now(rule["record"])}
            assert found == set(RUNS), rule["record"]
    fed.wait(lambda: {s["metric"]["run"] for s in fed.now('ALERTS{alertname="BraidStraggler"}')} == set(RUNS))
