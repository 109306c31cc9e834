"""What other tools read: TensorBoard's own reader, and the files of an offline run of Weights & Biases."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from braid.actors.config import ConfigError, parse_config
from braid.actors.config.machines import WandbConfig
from braid.dashboards import sinks as module
from braid.dashboards.sinks import Sinks, scalars
from tests.dashboards.lines import metrics_line
from tests.waiting import within

LINES: list[dict[str, Any]] = [
    {**metrics_line(step, ranks=2), "mfu": None, "loss": 5.1007 / step} for step in range(1, 5)
]


def test_numbers_of_a_step_that_are_known() -> None:
    found = scalars(LINES[0])
    assert "mfu" not in found, "not known"
    assert not found.keys() & {"step", "time", "generation", "peak_bytes", "experts/visits"}
    assert found["tokens_per_second"] == LINES[0]["tokens"] / LINES[0]["wall_seconds"]
    assert found["experts/imbalance"] == LINES[0]["experts"]["imbalance"]
    assert found["exposed_by_axis/tp"] == 0.05


needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
AGAIN = [{**line, "loss": line["loss"] + 1.62519, "time": line["time"] + 10} for line in LINES[2:]]
"""Steps 3 and 4 once more, as after a recovery."""


WANDB = {"mode": "offline", "project": "mine", "group": "tests", "tags": ("small", "cpu")}


def opened(run: Path, tool: str, mark: str = "a1b2", **options: Any) -> tuple[Sinks, list[str]]:
    """The sinks of a run that has started, and what they tell."""
    told: list[str] = []
    sinks = Sinks({tool: options}, told.append)
    sinks.begin(run, mark, "run", {"train": {"lr": 1e-3}})
    return sinks, told


@needs_tensorboard
def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    """Of steps that ran twice, in this command or in the one that resumed it, the later ones."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for lines in (LINES + AGAIN[:1], AGAIN):
        sinks, told = opened(tmp_path, "tensorboard")
        for line in lines:
            sinks.step(line)
        sinks.close()
        assert told == []
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    losses = found.Scalars("loss")
    last = [*LINES[:2], *AGAIN]
    assert [event.step for event in losses] == [1, 2, 3, 4]
    assert [event.value for event in losses] == pytest.approx([line["loss"] for line in last])
    assert [event.wall_time for event in losses] == [line["time"] for line in last]
    assert set(found.Tags()["scalars"]) == {name for line in LINES for name in scalars(line)}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_an_offline_run_of_wandb(tmp_path: Path) -> None:
    """Under the run's own id, with the rows of steps that were repeated."""
    sinks, told = opened(tmp_path, "wandb", mark="0123456789abcdef", **WANDB)
    for line in LINES + AGAIN:
        sinks.step(line)
    sinks.close()
    assert told == []
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-0123456789abcdef.wandb")
    last = json.dumps(AGAIN[-1]["loss"]).encode()
    within(
        30, lambda: last in file.read_bytes()
    )  # it is closed a moment after wandb has said that it is done
    content = file.read_bytes()
    for line in LINES + AGAIN:
        assert json.dumps(line["loss"]).encode() in content, line
    for word in (b"hidden_fraction", b"tokens_per_second", b"mine", b"tests", b"small", b"cpu"):
        assert word in content


def test_trackers_are_told_names_of_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(module, "WandbSink", lambda mark, options: given.append(options))
    sinks = Sinks({"wandb": WANDB}, print)
    sinks.begin(tmp_path, "", "run", {"cluster": {"env": {"TWO": "canary", "ONE": None}, "spread": True}})
    assert [options["config"] for options in given] == [{"cluster": {"env": ["ONE", "TWO"], "spread": True}}]


@needs_tensorboard
def test_a_sink_that_cannot_begin_is_told_of_once_and_left_out(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").touch()
    sinks, told = opened(tmp_path, "tensorboard")
    for line in LINES:
        sinks.step(line)
    sinks.close()
    (text,) = told
    assert text.startswith("telemetry.tensorboard gets no more numbers of this run, which goes on: ")
    assert "tensorboard" in text.partition("goes on: ")[2]


@pytest.mark.parametrize("failing", ["step", "close"])
def test_a_sink_that_fails_later_is_told_of_once_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    calls: list[str] = []

    def called(name: str) -> None:
        calls.append(name)
        if name == failing:
            raise OSError(28, "No space left on device")

    full = SimpleNamespace(step=lambda line: called("step"), close=lambda: called("close"))
    monkeypatch.setattr(module, "TensorBoardSink", lambda folder: full)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: True)
    sinks, told = opened(tmp_path, "tensorboard")
    for line in LINES[:2]:
        sinks.step(line)
    sinks.close()
    assert calls == (["step"] if failing == "step" else ["step", "step", "close"])
    assert [text.rpartition("] ")[2] for text in told] == ["No space left on device"]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"telemetry\.wandb needs the package wandb: pip install wandb"):
        Sinks({"wandb": WANDB}, print)
    Sinks({}, print).close()


def test_wandb_is_a_word_or_a_section() -> None:
    def wandb(value: Any) -> WandbConfig:
        return parse_config({"telemetry": {"wandb": value}}).telemetry.wandb

    assert wandb("online") == WandbConfig(mode="online")
    assert wandb("off") == wandb(False) == WandbConfig()  # YAML 1.1 reads the word so
    assert wandb({"mode": "offline", "tags": ["a"]}) == WandbConfig(mode="offline", tags=("a",))
    again = yaml.safe_load(parse_config({"telemetry": {"wandb": "offline"}}).to_yaml())
    assert parse_config(again).telemetry.wandb == WandbConfig(mode="offline")
    with pytest.raises(ConfigError, match=r"telemetry\.wandb\.mode='on'.*online"):
        wandb("on")
    with pytest.raises(ConfigError, match=r"did you mean 'telemetry\.wandb\.project'"):
        wandb({"projct": "x"})
