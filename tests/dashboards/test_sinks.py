"""What other tools read: TensorBoard, Weights & Biases, MLflow, and a server that listens to a webhook."""

import contextlib
import importlib.util
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from braid.actors.config import Config, ConfigError, parse_config
from braid.actors.config.machines import WandbConfig
from braid.actors.controller.records.run_records import CheckpointSaved, Finished, Incident
from braid.dashboards import sinks as module
from braid.dashboards.sinks import Sinks, scalars
from braid.jobs.training.tracking import network_tools, tell_event
from tests.dashboards.lines import metrics_line
from tests.servers import Asked, served
from tests.waiting import within

LINES: list[dict[str, Any]] = [
    {**metrics_line(step, ranks=2), "mfu": None, "loss": 5.1007 / step} for step in range(1, 5)
]
AGAIN = [{**line, "loss": line["loss"] + 1.62519, "time": line["time"] + 10} for line in LINES[2:]]
"""Steps 3 and 4 once more, as after a recovery."""
WANDB = {"mode": "offline", "project": "mine", "group": "tests", "tags": ("small", "cpu")}
SAVED = CheckpointSaved(step=3, path="/x/step-3", seconds=1.5)
FAILED = Incident(kind="restarted", text="rank 1: its process ended", step=3)
OVER = Finished(complete=True, report={"steps": [{"loss": 2.5}] * 4})


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


@contextlib.contextmanager
def opened(folder: Path, tools: dict[str, Any], mark: str = "a1b2") -> Iterator[tuple[Sinks, list[str]]]:
    """The sinks of a run that has started, and their warnings."""
    warnings: list[str] = []
    with Sinks(tools, warnings.append) as sinks:
        sinks.begin(folder, mark, "mine", {"train": {"lr": 0.00125}})
        yield sinks, warnings


def tell_steps(sinks: Sinks, lines: list[dict[str, Any]]) -> None:
    for line in lines:
        sinks.tell("step", line)


def test_numbers_of_a_step_that_are_known() -> None:
    numbers = scalars(LINES[0])
    assert "mfu" not in numbers, "not known"
    assert not numbers.keys() & {"step", "time", "generation", "peak_bytes", "experts/visits"}
    assert numbers["tokens_per_second"] == LINES[0]["tokens"] / LINES[0]["wall_seconds"]
    assert numbers["experts/imbalance"] == LINES[0]["experts"]["imbalance"]
    assert numbers["exposed_by_axis/tp"] == 0.05


@needs("tensorboard")
def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    """Of steps that ran twice, in this command or in the one that resumed it, the later ones."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for lines in (LINES + AGAIN[:1], AGAIN):
        with opened(tmp_path, {"tensorboard": {}}) as (sinks, warnings):
            tell_steps(sinks, lines)
        assert warnings == []
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    last = [*LINES[:2], *AGAIN]
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx([line["loss"] for line in last])
    assert [event.wall_time for event in events.Scalars("loss")] == [line["time"] for line in last]
    assert set(events.Tags()["scalars"]) == {name for line in LINES for name in scalars(line)}


@pytest.mark.slow
@needs("wandb")
def test_an_offline_run_of_wandb(tmp_path: Path) -> None:
    """Under the run's own id, with the rows of steps that were repeated."""
    with opened(tmp_path, {"wandb": WANDB}, mark="0123456789abcdef") as (sinks, warnings):
        tell_steps(sinks, LINES + AGAIN)
    assert warnings == []
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-0123456789abcdef.wandb")
    last = json.dumps(AGAIN[-1]["loss"]).encode()
    within(30, lambda: last in file.read_bytes())  # wandb closes it a moment after it has said so
    content = file.read_bytes()
    for line in LINES + AGAIN:
        assert json.dumps(line["loss"]).encode() in content, line
    for word in (b"hidden_fraction", b"tokens_per_second", b"mine", b"tests", b"small", b"cpu"):
        assert word in content


@pytest.mark.slow
@needs("mlflow")
def test_mlflow_reads_what_was_written(tmp_path: Path) -> None:
    """Also of a run that was resumed: its numbers go on in the same run. A failed one is marked."""
    from mlflow.tracking import MlflowClient

    uri = f"file:{tmp_path}/mlruns"
    tools = {"mlflow": {"uri": uri, "experiment": "tests"}}
    for lines, status in ((LINES[:2], "FAILED"), (LINES[2:], "FINISHED")):
        with contextlib.suppress(OSError), opened(tmp_path, tools) as (sinks, warnings):
            tell_steps(sinks, lines)
            if status == "FAILED":
                raise OSError("no space")
            tell_event(sinks, OVER)
        assert warnings == []
        client = MlflowClient(uri)  # the sink has allowed folders
        (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
        assert run.info.status == status
    assert run.info.run_name == "mine"
    assert run.data.params["train.lr"] == "0.00125"
    for name in scalars(LINES[0]):
        history = client.get_metric_history(run.info.run_id, name)
        told = [(line["step"], scalars(line)[name], round(line["time"] * 1000)) for line in LINES]
        assert [(point.step, point.value, point.timestamp) for point in history] == told, name
    with opened(tmp_path, tools, mark="c3d4"):
        pass
    assert len(client.search_runs([run.info.experiment_id])) == 2, "another run is another one there"


@pytest.mark.parametrize(
    "tool", [pytest.param(name, marks=needs(name)) for name in ("tensorboard", "mlflow")]
)
def test_a_sink_that_cannot_begin_is_told_of_once_and_left_out(tmp_path: Path, tool: str) -> None:
    (tmp_path / tool).touch()
    options = {"uri": f"file:{tmp_path}/mlflow", "experiment": "x"} if tool == "mlflow" else {}
    with opened(tmp_path, {tool: options}) as (sinks, warnings):
        tell_steps(sinks, LINES)
    (text,) = warnings
    assert text.startswith(f"telemetry.{tool} gets no more numbers of this run, which goes on: ")


@needs("tensorboard")
@pytest.mark.parametrize("failing", ["tell", "close"])
def test_a_sink_that_fails_later_is_told_of_once_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(module.TensorBoardSink, failing, full)
    with opened(tmp_path, {"tensorboard": {}}) as (sinks, warnings):
        tell_steps(sinks, LINES[:2])
    assert full.call_count == 1
    assert [text.rpartition("] ")[2] for text in warnings] == ["No space left on device"]


def test_trackers_are_told_names_of_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(module, "WandbSink", lambda mark, options: given.append(options))
    sinks = Sinks({"wandb": WANDB}, print)
    sinks.begin(tmp_path, "", "run", {"cluster": {"env": {"TWO": "canary", "ONE": None}, "spread": True}})
    assert [options["config"] for options in given] == [{"cluster": {"env": ["ONE", "TWO"], "spread": True}}]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for tool, package in (("wandb", "wandb"), ("mlflow", "mlflow-skinny")):
        with pytest.raises(ValueError, match=rf"telemetry\.{tool} needs the package {package}: pip install"):
            Sinks({tool: {}}, print)


class Listener:
    """A server that keeps what is posted, and answers with a status, perhaps late."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.status, self.answers = 200, threading.Event()
        self.answers.set()
        self.url = ""

    def take(self, asked: Asked) -> tuple[int, str]:
        self.answers.wait(30)
        assert asked.headers["Content-Type"] == "application/json"
        self.told.append(json.loads(asked.body))
        return self.status, ""

    @property
    def kinds(self) -> list[str]:
        return [told["event"] for told in self.told]


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    monkeypatch.setattr(module, "_AGAIN_SECONDS", 0.01)
    made = Listener()
    with served(made.take) as port:
        made.url = f"http://127.0.0.1:{port}/hook"
        yield made
        made.answers.set()


def asking(**telemetry: Any) -> Config:
    return parse_config({"name": "mine", "telemetry": telemetry})


def hook(url: str, **options: Any) -> dict[str, Any]:
    return network_tools(asking(webhook={"url": url, **options}).telemetry)


def test_a_webhook_is_told_what_it_asks_for(tmp_path: Path, listener: Listener) -> None:
    with opened(tmp_path, hook(listener.url, events=["failure", "end"])) as (sinks, warnings):
        for event in (SAVED, FAILED, Incident(kind="straggler", text="slow", step=3), OVER):
            tell_event(sinks, event)
    assert warnings == []
    failure, end = listener.told
    assert (failure["text"], failure["step"]) == (FAILED.text, 3)
    assert end == {**end, "event": "end", "run": "mine", "mark": "a1b2", "complete": True, "loss": 2.5}


def test_a_webhook_is_told_of_the_error_that_ends_a_run(tmp_path: Path, listener: Listener) -> None:
    with contextlib.suppress(RuntimeError), opened(tmp_path, hook(listener.url)) as (sinks, _):
        tell_event(sinks, SAVED)
        raise RuntimeError("out of luck")
    assert listener.kinds == ["checkpoint", "failure", "end"]
    assert listener.told[1]["text"] == listener.told[2]["error"] == "out of luck"


def test_trouble_with_a_webhook_is_told_once_and_later_events_are_tried(
    tmp_path: Path, listener: Listener
) -> None:
    with opened(tmp_path, hook(listener.url)) as (sinks, warnings):
        listener.status = 500
        tell_event(sinks, SAVED)
        tell_event(sinks, FAILED)
        assert within(20, lambda: len(listener.told) == 6), "three tries of each"
        listener.status = 200
        tell_event(sinks, OVER)
    (text,) = warnings
    assert text.startswith("telemetry.webhook could not be told of 'checkpoint': HTTP Error 500")
    assert listener.url not in text
    assert listener.kinds[-1] == "end"


@pytest.mark.parametrize(
    ("most_waiting", "why"),
    [(1000, "it did not take everything within 0.5 s after the run"), (3, "3 calls wait for it")],
)
def test_a_silent_server_never_holds_training_up(
    tmp_path: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch, most_waiting: int, why: str
) -> None:
    monkeypatch.setattr(module, "_MOST_WAITING", most_waiting)
    monkeypatch.setattr(module, "_CLOSE_SECONDS", 0.5)
    listener.answers.clear()
    with opened(tmp_path, hook(listener.url)) as (sinks, warnings):
        for _ in range(100):
            tell_event(sinks, SAVED)
    assert warnings == [f"telemetry.webhook gets no more numbers of this run, which goes on: {why}"]


def test_a_secret_address_comes_from_the_environment(
    tmp_path: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("", "ftp://x"):
        monkeypatch.setenv("HOOK", value)
        with pytest.raises(ValueError, match=r"telemetry.webhook.url='\$HOOK': the variable HOOK holds no"):
            Sinks(hook("$HOOK"), print)
    monkeypatch.setenv("HOOK", listener.url)
    with opened(tmp_path, hook("$HOOK")) as (sinks, warnings):
        tell_event(sinks, OVER)
    assert (listener.kinds, warnings) == (["end"], [])


REFUSED = {
    "telemetry.mlflow.uri=mlruns": "must begin with http: or https: or file:",
    "telemetry.mlflow.uri=http://me:secret@host": "leave it out and set MLFLOW_TRACKING_USERNAME and MLFLOW_",
    "telemetry.mlflow=http://host": "write them as telemetry.mlflow: {uri: ...}",
    "telemetry.webhook.url=ftp://host/x": "url='ftp://host/x': must begin with http: or https:",
    "telemetry.webhook.url=http:///x": "names no host; write it as http://HOST:PORT",
    "telemetry.webhook.events=[begin]": "must be one of start, failure, checkpoint, end",
    "telemetry.webhook.adress=x": "unknown key 'telemetry.webhook.adress'",
    "telemetry.wandb=on": "online",
    "telemetry.wandb.projct=x": "did you mean 'telemetry.wandb.project'",
    "telemetry.profile.steps=[12,10]": "steps=[12, 10] names the last step first; set it to [10, 12]",
    "telemetry.profile.steps=[0,1]": "telemetry.profile.steps[0]=0",
    "telemetry.profile.steps=[3]": "must be a list of 2 whole numbers at least 1, or null",
    "telemetry.profile.steps=[900,901]": "does not go with train.steps=100; profile earlier, or raise",
    "telemetry.profile.ranks=[]": "names no rank; set it to [0]",
    "telemetry.profile.step=[1,2]": "did you mean 'telemetry.profile.steps'?",
}


def test_wrong_keys() -> None:
    for setting, wanted in REFUSED.items():
        with pytest.raises(ConfigError) as refused:
            parse_config({"train": {"steps": 100}}, [setting])
        (line,) = str(refused.value).splitlines()
        assert wanted in line
    config = parse_config(
        {"telemetry": {"profile": {"steps": [1, 2], "ranks": [0, 2]}}, "parallel": {"tp": 2}}
    )
    with pytest.raises(ConfigError, match=r"telemetry.profile.ranks=\[0, 2\] .* ranks 0 to 1"):
        config.check(257)


def test_words_and_sections() -> None:
    assert network_tools(asking(mlflow=None, webhook=None).telemetry) == {}
    assert asking(profile=None).telemetry.profile.steps is None

    def wandb(value: Any) -> WandbConfig:
        return asking(wandb=value).telemetry.wandb

    assert wandb("online") == WandbConfig(mode="online")
    assert wandb("off") == wandb(False) == WandbConfig()  # YAML 1.1 reads the word so
    assert wandb({"mode": "offline", "tags": ["a"]}) == WandbConfig(mode="offline", tags=("a",))
    again = yaml.safe_load(asking(wandb="offline").to_yaml())
    assert parse_config(again).telemetry.wandb == WandbConfig(mode="offline")
