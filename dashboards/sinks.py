"""A run's numbers for the tools that people have already: TensorBoard event files, Weights & Biases.

Both are optional packages; neither is imported before it is asked for.
"""

import contextlib
import importlib
import importlib.util
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from braid.dashboards.run_files import shown_config, value_of

SCALARS = (
    "loss",
    "validation_loss",
    "validation_bits_per_byte",
    "grad_norm",
    "lr",
    "seconds",
    "wall_seconds",
    "tokens_per_second",
    "mfu",
    "hidden_fraction",
    "communication_seconds",
    "exposed_seconds",
    "slowdown_seconds",
    "launch_gap_seconds",
    "bubble_seconds",
    "waiting_seconds",
    "experts.imbalance",
    "experts.worst_imbalance",
    "experts.rank_imbalance",
    "experts.entropy",
    "experts.worst_entropy",
    "experts.unvisited",
    "experts.dropped",
    "experts.balance_loss",
    "experts.z_loss",
)
"""What is written of a step, under these names; ``/`` for the dot, by which those tools group charts."""


class Sink(Protocol):
    """Takes the lines of ``metrics.jsonl``."""

    def step(self, line: Mapping[str, Any]) -> None:
        """A step is over."""

    def close(self) -> None:
        """The run is over; everything is on disk or sent."""


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a step that are known."""
    seconds = line.get("wall_seconds") or line["seconds"]
    values = {**line, "tokens_per_second": line["tokens"] / seconds if seconds else None}
    found = ((name.replace(".", "/"), value_of(values, name)) for name in SCALARS)
    return {name: float(value) for name, value in found if value is not None}


class TensorBoardSink:
    """Event files in a folder, for ``tensorboard --logdir``."""

    def __init__(self, folder: Path) -> None:
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._messages = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._writer = writer.EventFileWriter(str(folder))
        self._last = math.inf

    def step(self, line: Mapping[str, Any]) -> None:
        """One event with all scalars; a step that is repeated takes the place of all from it on."""
        step, when = line["step"], line.get("time") or time.time()
        if step <= self._last:
            log = self._messages.SessionLog(status=self._messages.SessionLog.START)
            self._writer.add_event(self._messages.Event(wall_time=when, step=step, session_log=log))
        self._last = step
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars(line).items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._messages.Event(wall_time=when, step=step, summary=summary))

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


@dataclass(frozen=True, kw_only=True)
class WandbRun:
    """Which run of Weights & Biases rows go to: names as in ``wandb.init``, ``mode`` offline or online."""

    mode: str
    project: str
    entity: str | None = None
    group: str | None = None
    tags: Sequence[str] = ()


class WandbSink:
    """A run of Weights & Biases; ``offline`` sends nothing and keeps everything in the folder.

    ``mark`` is the run's id there: with the same one, a run that is resumed goes on in its former charts.
    """

    def __init__(
        self, folder: Path, wanted: WandbRun, mark: str, name: str, config: Mapping[str, Any]
    ) -> None:
        wandb = importlib.import_module("wandb")
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=wanted.project,
            entity=wanted.entity,
            group=wanted.group,
            tags=list(wanted.tags),
            id=mark or None,
            resume="allow" if mark else None,
            name=name,
            dir=str(folder),
            mode=wanted.mode,
            config=dict(config),
            settings=wandb.Settings(silent=True, console="off", login_timeout=_LOGIN_SECONDS),
        )
        if self._run.disabled:
            raise ValueError("nobody gave a key; set WANDB_API_KEY or use `wandb login`")
        # wandb drops rows whose own step is not above the last one: steps that are repeated.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def step(self, line: Mapping[str, Any]) -> None:
        """One row with the step and all scalars."""
        self._run.log({"step": line["step"], **scalars(line)})

    def close(self) -> None:
        """End the run."""
        self._run.finish()


_LOGIN_SECONDS = 30.0
"""For so long wandb may wait at a terminal for its key."""


class Sinks:
    """Those that a run has asked for. One that fails is told of and left out: training goes on."""

    def __init__(self, *, tensorboard: bool, wandb: WandbRun | None, tell: Callable[[str], None]) -> None:
        """``tell`` takes what failed, a line each. `ValueError` if a package is missing."""
        self._tensorboard, self._wandb, self._tell = tensorboard, wandb, tell
        self._open: dict[str, Sink] = {}
        for package, wanted in (("tensorboard", tensorboard), ("wandb", wandb is not None)):
            if wanted and importlib.util.find_spec(package) is None:
                raise ValueError(
                    f"telemetry.{package} needs the package {package}: pip install {package}, or unset it"
                )

    def begin(self, folder: Path, mark: str, name: str, config: Mapping[str, Any]) -> None:
        """The run has started; files go to folders in its own. ``mark``: of this run and no other."""
        if self._tensorboard:
            with self._survived("tensorboard"):
                self._open["tensorboard"] = TensorBoardSink(folder / "tensorboard")
        if self._wandb is not None:
            with self._survived("wandb"):
                self._open["wandb"] = WandbSink(folder, self._wandb, mark, name, shown_config(config))

    def step(self, line: Mapping[str, Any]) -> None:
        """A step is over."""
        for name, sink in list(self._open.items()):
            with self._survived(name):
                sink.step(line)

    def close(self) -> None:
        """The run is over, however it ended."""
        while self._open:
            name, sink = self._open.popitem()
            with self._survived(name):
                sink.close()

    @contextlib.contextmanager
    def _survived(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever it is, it is not worth a training run
            self._open.pop(name, None)
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self._tell(f"telemetry.{name} gets no more numbers of this run, which goes on: {reason}")
