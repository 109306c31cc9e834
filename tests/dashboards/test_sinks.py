"""What other tools read: TensorBoard's own reader, and the files of an offline run of Weights & Biases."""

import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest

from braid.dashboards import sinks as module
from braid.dashboards.sinks import Sinks, scalars

LINES: list[dict[str, Any]] = [
    {
        "step": step,
        "time": 1.7e9 + step,
        "loss": 5.0 / step,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "seconds": 0.5,
        "tokens": 1024,
        "communication_seconds": 0.25,
        "exposed_seconds": 0.1,
        "hidden_fraction": 0.6,
        "slowdown_seconds": None,
        "launch_gap_seconds": 0.0,
        "bubble_seconds": 0.01,
        "peak_bytes": [1, 2],
        "validation_bits_per_byte": 3.0 if step == 4 else None,
        "mfu": None,
    }
    for step in range(1, 5)
]


def test_what_is_not_known_is_not_written() -> None:
    assert "slowdown_seconds" not in scalars(LINES[0])
    assert scalars(LINES[0])["tokens_per_second"] == 2048
    assert scalars(LINES[3])["validation_bits_per_byte"] == 3.0


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sinks = Sinks(tensorboard=True, wandb="off")
    sinks.begin(tmp_path, "run", {})
    for line in LINES:
        sinks.step(line)
    sinks.close()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    losses = found.Scalars("loss")
    assert [event.step for event in losses] == [1, 2, 3, 4]
    assert [event.value for event in losses] == pytest.approx([line["loss"] for line in LINES])
    assert [event.wall_time for event in losses] == [line["time"] for line in LINES]
    assert [event.step for event in found.Scalars("validation_bits_per_byte")] == [4]
    assert set(found.Tags()["scalars"]) == {name for line in LINES for name in scalars(line)}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_an_offline_run_of_wandb(tmp_path: Path) -> None:
    sinks = Sinks(tensorboard=False, wandb="offline")
    sinks.begin(tmp_path, "run", {"train": {"lr": 1e-3}})
    for line in LINES:
        sinks.step(line)
    sinks.close()
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 30
    while b"tokens_per_second" not in (content := file.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.05)  # wandb's service closes the file a moment after it has said that it is done
    assert b"hidden_fraction" in content
    assert b"tokens_per_second" in content


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"telemetry\.wandb needs the package wandb: pip install wandb"):
        Sinks(tensorboard=False, wandb="online")
    Sinks(tensorboard=False, wandb="off").close()
