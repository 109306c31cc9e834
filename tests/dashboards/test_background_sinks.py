"""What MLflow's client reads back, and what a server is told that listens to a webhook."""

import contextlib
import importlib.util
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from braid.actors.config import Config, ConfigError, parse_config
from braid.actors.controller.records.run_records import CheckpointSaved, Finished, Incident
from braid.dashboards import background_sinks as module
from braid.dashboards.background_sinks import InBackground
from braid.dashboards.sinks import Sinks
from braid.dashboards.tracker import GoesOnError, Tracker, scalars
from braid.jobs.training.tracking import network_tools, tell_event
from tests.dashboards.lines import metrics_line
from tests.waiting import within

LINES: list[dict[str, Any]] = [
    {**metrics_line(step, ranks=2), "mfu": None, "loss": 5.1007 / step} for step in range(1, 5)
]


class Listener:
    """A server that keeps what is posted, and answers with a status, perhaps late."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.status, self.waits = 200, threading.Event()
        self.waits.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.waits.wait(30)
                content = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.headers["Content-Type"] == "application/json"
                outer.told.append(json.loads(content))
                self.send_response(outer.status)
                self.end_headers()

            def log_message(self, *given: object) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/hook"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def kinds(self) -> list[str]:
        return [told["event"] for told in self.told]


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    monkeypatch.setattr(module, "_AGAIN_SECONDS", 0.01)
    made = Listener()
    yield made
    made.waits.set()
    made.server.shutdown()
    made.server.server_close()


def opened(folder: Path, config: Config, mark: str = "a1b2") -> tuple[Sinks, list[str]]:
    """The sinks of a run that has started, and what they tell."""
    told: list[str] = []
    sinks = Sinks(network_tools(config.telemetry), told.append)
    sinks.begin(folder, mark, config.name, config.model_dump(mode="json"))
    return sinks, told


def asking(**telemetry: Any) -> Config:
    return parse_config({"name": "mine", "telemetry": telemetry, "train": {"lr": 0.00125}})


SAVED = CheckpointSaved(step=3, path="/x/step-3", seconds=1.5)
FAILED = Incident(kind="restarted", text="rank 1: its process ended", step=3)
OVER = Finished(complete=True, report={"steps": [{"loss": 2.5}] * 4})


def test_a_webhook_is_told_what_it_asks_for(tmp_path: Path, listener: Listener) -> None:
    sinks, told = opened(tmp_path, asking(webhook={"url": listener.url, "events": ["failure", "end"]}))
    with sinks:
        for event in (SAVED, FAILED, Incident(kind="straggler", text="slow", step=3), OVER):
            tell_event(sinks, event)
    assert told == []
    failure, end = listener.told
    assert failure["text"] == FAILED.text
    assert failure["step"] == 3
    assert end == {**end, "event": "end", "run": "mine", "mark": "a1b2", "complete": True, "loss": 2.5}


def test_a_webhook_is_told_of_the_error_that_ends_a_run(tmp_path: Path, listener: Listener) -> None:
    sinks, _ = opened(tmp_path, asking(webhook={"url": listener.url}))
    tell_event(sinks, SAVED)
    with contextlib.suppress(RuntimeError), sinks:
        raise RuntimeError("out of luck")
    assert listener.kinds == ["checkpoint", "failure", "end"]
    assert listener.told[1]["text"] == listener.told[2]["error"] == "out of luck"


def test_trouble_with_a_webhook_is_told_once_and_later_events_are_tried(
    tmp_path: Path, listener: Listener
) -> None:
    sinks, told = opened(tmp_path, asking(webhook={"url": listener.url}))
    listener.status = 500
    tell_event(sinks, SAVED)
    tell_event(sinks, FAILED)
    assert within(20, lambda: len(listener.told) == 6), "three tries of each"
    listener.status = 200
    tell_event(sinks, OVER)
    sinks.close()
    (text,) = told
    assert text.startswith("telemetry.webhook could not be told of 'checkpoint': HTTP Error 500")
    assert listener.url not in text
    assert listener.kinds[-1] == "end"


def test_a_silent_server_never_holds_training_up(
    tmp_path: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CLOSE_SECONDS", 0.5)
    sinks, told = opened(tmp_path, asking(webhook={"url": listener.url}))
    listener.waits.clear()
    begin = time.monotonic()
    for _ in range(100):
        tell_event(sinks, SAVED)
    assert time.monotonic() - begin < 0.3
    sinks.close()
    assert time.monotonic() - begin < 3
    assert told == [
        "telemetry.webhook gets no more numbers of this run, which goes on: it did not take everything "
        "within 0.5 s after the run"
    ]


def test_calls_that_wait_for_a_server_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_WAITING", 3)
    gate = threading.Event()

    class Slow(Tracker):
        def step(self, line: Any) -> None:
            gate.wait(30)
            raise GoesOnError("late")

    tracker = InBackground(Slow)
    tracker.step({})
    assert within(5, lambda: tracker._calls.empty()), "one is under way"
    for _ in range(3):
        tracker.step({})
    with pytest.raises(TimeoutError, match="3 calls wait for it"):
        tracker.step({})
    gate.set()
    with pytest.raises(GoesOnError):
        tracker.close()


@pytest.mark.parametrize("value", [None, "ftp://x"])
def test_a_secret_address_comes_from_the_environment(
    tmp_path: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    config = asking(webhook={"url": "$HOOK"})
    monkeypatch.delenv("HOOK", raising=False)
    if value is not None:
        monkeypatch.setenv("HOOK", value)
    with pytest.raises(ValueError, match=r"telemetry.webhook.url='\$HOOK': the variable HOOK holds no http"):
        opened(tmp_path, config)
    monkeypatch.setenv("HOOK", listener.url)
    sinks, told = opened(tmp_path, config)
    tell_event(sinks, OVER)
    sinks.close()
    assert (listener.kinds, told) == (["end"], [])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow-skinny is not installed")
def test_mlflow_reads_what_was_written(tmp_path: Path) -> None:
    """Also of a run that was resumed: its numbers go on in the same run. A failed one is marked."""
    from mlflow.tracking import MlflowClient

    uri = f"file:{tmp_path}/mlruns"
    config = asking(mlflow={"uri": uri, "experiment": "tests"})
    for lines, fails in ((LINES[:2], True), (LINES[2:], False)):
        sinks, told = opened(tmp_path, config)
        try:
            with sinks:
                for line in lines:
                    sinks.step(line)
                if fails:
                    raise OSError("no space")
                tell_event(sinks, OVER)
        except OSError:
            assert fails
        assert told == []
        client = MlflowClient(uri)
        (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
        assert run.info.status == ("FAILED" if fails else "FINISHED")
    assert run.info.run_name == "mine"
    assert run.data.params["train.lr"] == "0.00125"
    for name in scalars(LINES[0]):
        history = client.get_metric_history(run.info.run_id, name)
        assert [(one.step, one.value) for one in history] == [
            (line["step"], scalars(line)[name]) for line in LINES
        ], name
    assert history[0].timestamp == round(LINES[0]["time"] * 1000)
    other, _ = opened(tmp_path, config, mark="c3d4")
    other.close()
    assert len(client.search_runs([run.info.experiment_id])) == 2, "another run is another one there"


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow-skinny is not installed")
def test_mlflow_that_does_not_answer_is_told_of_once(tmp_path: Path) -> None:
    (tmp_path / "mlruns").touch()
    sinks, told = opened(tmp_path, asking(mlflow={"uri": f"file:{tmp_path}/mlruns"}))
    for line in LINES:
        sinks.step(line)
    sinks.close()
    (text,) = told
    assert text.startswith("telemetry.mlflow gets no more numbers of this run, which goes on: ")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"telemetry\.mlflow needs the package mlflow-skinny: pip install"):
        Sinks({"mlflow": {}}, print)


REFUSED = {
    "telemetry.mlflow.uri=mlruns": "must begin with http: or https: or file:",
    "telemetry.mlflow.uri=http://me:secret@host": "leave it out and set MLFLOW_TRACKING_USERNAME and MLFLOW_",
    "telemetry.mlflow=http://host": "write them as telemetry.mlflow: {uri: ...}",
    "telemetry.webhook.url=ftp://host/x": "url='ftp://host/x': must begin with http: or https:",
    "telemetry.webhook.url=http:///x": "names no host; write it as http://HOST:PORT",
    "telemetry.webhook.events=[begin]": "must be one of start, failure, checkpoint, end",
    "telemetry.webhook.adress=x": "unknown key 'telemetry.webhook.adress'",
    "telemetry.profile.steps=[12,10]": "steps=[12, 10] names the last step first; set it to [10, 12]",
    "telemetry.profile.steps=[0,1]": "telemetry.profile.steps[0]=0",
    "telemetry.profile.steps=[3]": "must be a list of 2 whole numbers at least 1, or null",
    "telemetry.profile.steps=[900,901]": "end after train.steps=100; lower them, or raise train.steps",
    "telemetry.profile.ranks=[]": "names no rank; set it to [0]",
    "telemetry.profile.step=[1,2]": "did you mean 'telemetry.profile.steps'?",
}


@pytest.mark.parametrize("setting", REFUSED)
def test_wrong_keys(setting: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config({"train": {"steps": 100}}, [setting])
    (line,) = str(refused.value).splitlines()
    assert REFUSED[setting] in line


def test_a_profiled_rank_that_is_not_there() -> None:
    config = parse_config(
        {"telemetry": {"profile": {"steps": [1, 2], "ranks": [0, 2]}}, "parallel": {"tp": 2}}
    )
    with pytest.raises(ConfigError, match=r"telemetry.profile.ranks=\[0, 2\] .* ranks 0 to 1"):
        config.check(257)


def test_null_switches_off() -> None:
    config = parse_config({"telemetry": {"mlflow": None, "webhook": None, "profile": None}})
    assert network_tools(config.telemetry) == {}
    assert config.telemetry.profile.steps is None
