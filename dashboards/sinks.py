"""Writes a run's numbers for existing tools: TensorBoard event files, Weights & Biases.

Both are optional packages, imported only on request.
"""

import contextlib
import importlib.util
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from braid.dashboards.run_files import flat, is_number, shown_config

_NO_CHARTS: Final = ("step", "time", "samples", "generation")  # fields of a step's record that need no chart


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of ``metrics.jsonl``; numbers of a section are named ``SECTION/NAME``, a
    group of charts."""
    seconds = line.get("wall_seconds") or line["seconds"]
    found = {**flat(line), "tokens_per_second": line["tokens"] / seconds if seconds else None}
    numbers = {name.replace(".", "/"): value for name, value in found.items() if is_number(value)}
    return {name: float(value) for name, value in numbers.items() if name not in _NO_CHARTS}


class TensorBoardSink:
    """Writes event files into a folder, for ``tensorboard --logdir``."""

    def __init__(self, folder: Path) -> None:
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._messages = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._writer = writer.EventFileWriter(str(folder))
        self._last = math.inf

    def step(self, line: Mapping[str, Any]) -> None:
        """Write one event with all scalars; a repeated step replaces all events from that step on."""
        step, when = line["step"], line.get("time") or time.time()
        if step <= self._last:
            log = self._messages.SessionLog(status=self._messages.SessionLog.START)
            self._writer.add_event(self._messages.Event(wall_time=when, step=step, session_log=log))
        self._last = step
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars(line).items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._messages.Event(wall_time=when, step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Logs to a run of Weights & Biases; ``options`` are ``wandb.init``'s, which writes all files into
    ``dir``.

    ``mark`` is the run's id there: a resumed run with the same id continues its former charts.
    """

    def __init__(self, mark: str, options: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        settings = wandb.Settings(silent=True, console="off", login_timeout=30)  # seconds, at a terminal
        resume = {"id": mark, "resume": "allow"} if mark else {}
        self._run = wandb.init(**options, **resume, settings=settings)
        if self._run.disabled:
            raise ValueError("nobody gave a key; set WANDB_API_KEY or use `wandb login`")
        # wandb drops rows whose step does not increase, as in repeated steps.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def step(self, line: Mapping[str, Any]) -> None:
        self._run.log({"step": line["step"], **scalars(line)})

    def close(self) -> None:
        self._run.finish()


class Sinks:
    """The tools that a run has asked for. A tool that fails is reported and no longer used: training
    continues."""

    def __init__(self, wanted: Mapping[str, Mapping[str, Any]], tell: Callable[[str], None]) -> None:
        """``wanted``: ``tensorboard`` without options, ``wandb`` with options of ``wandb.init``; ``tell``:
        receives failure messages. Raise `ValueError` if a package is missing."""
        self._wanted, self._tell = wanted, tell
        self._open: dict[str, TensorBoardSink | WandbSink] = {}
        for tool in wanted:
            if importlib.util.find_spec(tool) is None:
                raise ValueError(
                    f"telemetry.{tool} needs the package {tool}: pip install {tool}, or unset it"
                )

    def begin(self, folder: Path, mark: str, name: str, config: Mapping[str, Any]) -> None:
        """Start the tools, which write their files into ``folder``. ``mark``: unique id of this run."""
        for tool, options in self._wanted.items():
            with self._survived(tool):
                if tool == "tensorboard":
                    self._open[tool] = TensorBoardSink(folder / tool)
                else:
                    about = {"name": name, "dir": str(folder), "config": shown_config(config)}
                    self._open[tool] = WandbSink(mark, {**options, **about})

    def step(self, line: Mapping[str, Any]) -> None:
        """Report a finished step; ``line``: its line of ``metrics.jsonl``."""
        for tool in list(self._open):
            with self._survived(tool):
                self._open[tool].step(line)

    def close(self) -> None:
        for tool in list(self._open):
            with self._survived(tool):
                self._open.pop(tool).close()

    @contextlib.contextmanager
    def _survived(self, tool: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # no failure of a tool justifies losing a training run
            self._open.pop(tool, None)
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self._tell(f"telemetry.{tool} gets no more numbers of this run, which goes on: {reason}")
