"""A run's numbers for the tools that people have already: TensorBoard event files, Weights & Biases.

Both are optional packages; neither is imported before it is asked for.
"""

import importlib
import importlib.util
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

SCALARS = (
    "loss",
    "validation_bits_per_byte",
    "grad_norm",
    "lr",
    "seconds",
    "tokens_per_second",
    "mfu",
    "hidden_fraction",
    "communication_seconds",
    "exposed_seconds",
    "slowdown_seconds",
    "launch_gap_seconds",
    "bubble_seconds",
)
"""What is written of a step, under these names."""


class Sink(Protocol):
    """Takes the lines of ``metrics.jsonl``."""

    def step(self, line: Mapping[str, Any]) -> None:
        """A step is over."""

    def close(self) -> None:
        """The run is over; everything is on disk or sent."""


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a step that are known."""
    values = {**line, "tokens_per_second": line["tokens"] / line["seconds"] if line["seconds"] else None}
    return {name: float(values[name]) for name in SCALARS if values.get(name) is not None}


class TensorBoardSink:
    """Event files in a folder, for ``tensorboard --logdir``."""

    def __init__(self, folder: Path) -> None:
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._event = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        self._writer = writer.EventFileWriter(str(folder))

    def step(self, line: Mapping[str, Any]) -> None:
        """One event with all scalars."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars(line).items()]
        self._writer.add_event(
            self._event(
                wall_time=line.get("time") or time.time(),
                step=line["step"],
                summary=self._summary(value=values),
            )
        )

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WandbSink:
    """A run of Weights & Biases; ``offline`` sends nothing and keeps everything in the folder."""

    def __init__(self, folder: Path, name: str, mode: str, config: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project="braid",
            name=name,
            dir=str(folder),
            mode=mode,
            config=dict(config),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def step(self, line: Mapping[str, Any]) -> None:
        """One row with all scalars."""
        self._run.log(scalars(line), step=line["step"])

    def close(self) -> None:
        """End the run."""
        self._run.finish()


class Sinks:
    """Those that a run has asked for."""

    def __init__(self, *, tensorboard: bool, wandb: str) -> None:
        """``wandb``: off, offline or online. `ValueError` if a package is missing."""
        self._tensorboard, self._wandb = tensorboard, wandb
        self._open: list[Sink] = []
        for wanted, package in ((tensorboard, "tensorboard"), (wandb != "off", "wandb")):
            if wanted and importlib.util.find_spec(package) is None:
                raise ValueError(
                    f"telemetry.{package} needs the package {package}: pip install {package}, or unset it"
                )

    def begin(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        """The run has started; files go to folders in its own."""
        if self._tensorboard:
            self._open.append(TensorBoardSink(folder / "tensorboard"))
        if self._wandb != "off":
            self._open.append(WandbSink(folder, name, self._wandb, config))

    def step(self, line: Mapping[str, Any]) -> None:
        """A step is over."""
        for sink in self._open:
            sink.step(line)

    def close(self) -> None:
        """The run is over, however it ended."""
        while self._open:
            self._open.pop().close()
