"""Tells a run's numbers and events to existing tools: TensorBoard event files, Weights & Biases, MLflow, a
webhook.

Their packages are optional, and imported only on request.
"""

import contextlib
import importlib.util
import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from braid.dashboards.background_sinks import InBackground, MlflowSink, WebhookSink, webhook_url
from braid.dashboards.run_files import shown_config
from braid.dashboards.tracker import GoesOnError, Tracker, scalars

_PACKAGES: Final = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}


class TensorBoardSink(Tracker):
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


class WandbSink(Tracker):
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
        """``wanted``: ``tensorboard`` without options, ``wandb`` with options of ``wandb.init``, ``mlflow``
        and ``webhook`` with their keys; ``tell``: receives failure messages. Raise `ValueError` if a package
        or a webhook's address is missing."""
        self._wanted, self._tell = wanted, tell
        self._open: dict[str, Tracker] = {}
        self._troubled: set[str] = set()
        for tool in wanted:
            if (package := _PACKAGES.get(tool)) is not None and importlib.util.find_spec(tool) is None:
                raise ValueError(
                    f"telemetry.{tool} needs the package {package}: pip install {package}, or unset it"
                )
        if "webhook" in wanted:
            webhook_url(wanted["webhook"]["url"])

    def begin(self, folder: Path, mark: str, name: str, config: Mapping[str, Any]) -> None:
        """Start the tools, which write their files into ``folder``. ``mark``: unique id of this run."""
        for tool, options in self._wanted.items():
            with self._survived(tool):
                about = {"name": name, "config": shown_config(config)}
                match tool:
                    case "tensorboard":
                        self._open[tool] = TensorBoardSink(folder / tool)
                    case "wandb":
                        self._open[tool] = WandbSink(mark, {**options, **about, "dir": str(folder)})
                    case "mlflow":
                        self._open[tool] = InBackground(partial(MlflowSink, mark, {**options, **about}))
                    case "webhook":
                        self._open[tool] = InBackground(partial(WebhookSink, mark, {**options, **about}))

    def step(self, line: Mapping[str, Any]) -> None:
        """Report a finished step; ``line``: its line of ``metrics.jsonl``."""
        for tool in list(self._open):
            with self._survived(tool):
                self._open[tool].step(line)

    def event(self, kind: str, /, **facts: Any) -> None:
        """Report an event, see `Tracker.event`."""
        for tool in list(self._open):
            with self._survived(tool):
                self._open[tool].event(kind, facts)

    def __enter__(self) -> "Sinks":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the tools; if the run has failed, report that first."""
        if isinstance(error, Exception):
            text = str(error).strip() or type(error).__name__
            self.event("failure", kind="failed", text=text)
            self.event("end", complete=False, error=text)
        self.close()

    def close(self) -> None:
        for tool in list(self._open):
            with self._survived(tool):
                self._open.pop(tool).close()

    @contextlib.contextmanager
    def _survived(self, tool: str) -> Iterator[None]:
        try:
            yield
        except GoesOnError as error:
            if tool not in self._troubled:
                self._troubled.add(tool)
                self._tell(f"telemetry.{tool} {error}; the run goes on, and further trouble is not told")
        except Exception as error:  # no failure of a tool justifies losing a training run
            self._open.pop(tool, None)
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self._tell(f"telemetry.{tool} gets no more numbers of this run, which goes on: {reason}")
