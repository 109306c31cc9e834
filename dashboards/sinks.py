"""Tells a run's numbers and events to existing tools: TensorBoard event files, Weights & Biases, MLflow, a
webhook.

The tools' packages are optional, and imported only on request. A thread talks to servers, so that training
never waits for them.
"""

import contextlib
import importlib
import importlib.util
import json
import math
import os
import queue
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from braid.dashboards.run_files import flat, is_number, shown_config, tokens_per_second

_PACKAGES: Final = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}
_NO_CHARTS: Final = ("step", "time", "samples", "generation")
"""Fields of a step's record that need no chart."""
_MOST_WAITING: Final = 10_000
"""Calls that may wait for a slow server; the tool is given up beyond that."""
_CLOSE_SECONDS: Final = 15.0
"""Seconds to wait at the end of a run until everything is told."""
_MOST_PARAMS: Final = 100
"""Limit of MLflow's servers for one call."""
_POST_SECONDS: Final = 10.0
_TRIES: Final = 3
_AGAIN_SECONDS: Final = 1.0
"""Seconds between two tries of a POST."""


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of ``metrics.jsonl``; numbers of a section are named ``SECTION/NAME``, a
    group of charts."""
    fields = {**flat(line), "tokens_per_second": tokens_per_second(line)}
    numbers = {name.replace(".", "/"): value for name, value in fields.items() if is_number(value)}
    return {name: float(value) for name, value in numbers.items() if name not in _NO_CHARTS}


class Tracker:
    """A tool that is told of a run; by default it takes nothing."""

    def tell(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Take a step, whose facts are its line of ``metrics.jsonl``, or an event of kind start, failure,
        checkpoint or end. The facts of an end have the key ``error`` if the run has failed."""

    def close(self) -> None:
        """End: all has been told."""


class GoesOnError(Exception):
    """A tracker could not take something; it is told what comes next nevertheless."""


class TensorBoardSink(Tracker):
    """Writes event files into a folder, for ``tensorboard --logdir``."""

    def __init__(self, folder: Path) -> None:
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._messages = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._writer = writer.EventFileWriter(str(folder))
        self._last = math.inf

    def tell(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Write an event with all scalars of a step; a repeated step replaces all events from that step
        on."""
        if kind != "step":
            return
        event = partial(self._messages.Event, wall_time=facts.get("time") or time.time(), step=facts["step"])
        if facts["step"] <= self._last:
            log = self._messages.SessionLog(status=self._messages.SessionLog.START)
            self._writer.add_event(event(session_log=log))
        self._last = facts["step"]
        numbers = scalars(facts).items()
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers]
        self._writer.add_event(event(summary=self._summary(value=values)))

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

    def tell(self, kind: str, facts: Mapping[str, Any]) -> None:
        if kind == "step":
            self._run.log({"step": facts["step"], **scalars(facts)})

    def close(self) -> None:
        self._run.finish()


class MlflowSink(Tracker):
    """Logs to a run of MLflow. The tag ``braid.mark`` finds the run that a resumed run continues."""

    def __init__(self, mark: str, options: Mapping[str, Any]) -> None:
        """``options``: ``uri`` and ``experiment``, the run's ``name`` and ``config``."""
        if options["uri"].startswith("file:"):  # MLflow asks for a word of consent to folders
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        entities = importlib.import_module("mlflow.entities")
        self._client = importlib.import_module("mlflow.tracking").MlflowClient(tracking_uri=options["uri"])
        self._metric = entities.Metric
        known = self._client.get_experiment_by_name(options["experiment"])
        experiment = known.experiment_id if known else self._client.create_experiment(options["experiment"])
        runs = self._client.search_runs([experiment], f"tags.`braid.mark` = '{mark}'") if mark else []
        if runs:
            self._run = runs[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        tags = {"braid.mark": mark}
        self._run = self._client.create_run(experiment, run_name=options["name"], tags=tags).info.run_id
        values = flat(options["config"]).items()
        params = [entities.Param(name, str(v)) for name, v in values if not isinstance(v, Mapping)]
        for begin in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run, params=params[begin : begin + _MOST_PARAMS])

    def tell(self, kind: str, facts: Mapping[str, Any]) -> None:
        if kind == "step":
            at = round((facts.get("time") or time.time()) * 1000)
            numbers = scalars(facts).items()
            metrics = [self._metric(name, value, at, facts["step"]) for name, value in numbers]
            self._client.log_batch(self._run, metrics=metrics)
        elif kind == "end":
            self._client.set_terminated(self._run, "FAILED" if facts.get("error") else "FINISHED")


class WebhookSink(Tracker):
    """Tells an address what happens to a run: a POST with a JSON object for every event."""

    def __init__(self, mark: str, options: Mapping[str, Any]) -> None:
        """``options``: ``url`` and ``events``, the run's ``name``."""
        self._url = webhook_url(options["url"])
        self._events, self._about = options["events"], {"run": options["name"], "mark": mark}

    def tell(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Raise `GoesOnError` if an event could not be told in three tries; the next one is tried again."""
        if kind not in self._events:
            return
        content = json.dumps({"event": kind, "time": time.time(), **self._about, **facts}).encode()
        request = urllib.request.Request(self._url, content, {"Content-Type": "application/json"})
        for tried in range(1, _TRIES + 1):
            try:
                with urllib.request.urlopen(request, timeout=_POST_SECONDS):
                    return
            except OSError as error:
                if tried == _TRIES:
                    raise GoesOnError(f"could not be told of {kind!r}: {error}") from None
                time.sleep(_AGAIN_SECONDS)


def webhook_url(url: str) -> str:
    """Return the address, from the environment for ``$NAME``; raise `ValueError` if that is no address."""
    if not url.startswith("$"):
        return url
    value = os.environ.get(url[1:], "")
    if not value.startswith(("http://", "https://")):
        raise ValueError(
            f"telemetry.webhook.url={url!r}: the variable {url[1:]} holds no http:// or https:// address "
            f"here; set it for the run's command"
        )
    return value


class InBackground(Tracker):
    """Passes calls to a tracker in a thread. An error of the tracker is raised by the next call."""

    def __init__(self, make: Callable[[], Tracker]) -> None:
        """``make``: makes the tracker, in the thread."""
        self._calls: queue.Queue[tuple[str, Mapping[str, Any]] | None] = queue.Queue(_MOST_WAITING)
        self._errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(make,), name="tracker", daemon=True)
        self._thread.start()

    def tell(self, kind: str, facts: Mapping[str, Any]) -> None:
        try:
            self._calls.put_nowait((kind, facts))
        except queue.Full:
            raise TimeoutError(f"{_MOST_WAITING} calls wait for it") from None
        self._raise()

    def close(self) -> None:
        """Wait up to `_CLOSE_SECONDS` until the tracker has all numbers; raise its first error, or
        `TimeoutError`."""
        with contextlib.suppress(queue.Full):
            self._calls.put_nowait(None)
        self._thread.join(_CLOSE_SECONDS)
        self._raise()
        if self._thread.is_alive():
            raise TimeoutError(f"it did not take everything within {_CLOSE_SECONDS:g} s after the run")

    def _raise(self) -> None:
        with contextlib.suppress(queue.Empty):
            raise self._errors.get_nowait()

    def _run(self, make: Callable[[], Tracker]) -> None:
        try:
            tracker = make()
            while (call := self._calls.get()) is not None:
                try:
                    tracker.tell(*call)
                except GoesOnError as error:
                    self._errors.put(error)
            tracker.close()
        except Exception as error:  # it is raised where the tool's failures are told
            self._errors.put(error)


class Sinks:
    """The tools that a run has asked for. A tool that fails is reported and no longer used: training
    continues."""

    def __init__(self, wanted: Mapping[str, Mapping[str, Any]], warn: Callable[[str], None]) -> None:
        """``wanted``: ``tensorboard`` without options, ``wandb`` with options of ``wandb.init``, ``mlflow``
        and ``webhook`` with their keys; ``warn``: receives failure messages. Raise `ValueError` if a package
        or a webhook's address is missing."""
        self._wanted, self._warn = wanted, warn
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
            given = {**options, "name": name, "config": shown_config(config)}
            with self._survived(tool):
                match tool:
                    case "tensorboard":
                        self._open[tool] = TensorBoardSink(folder / tool)
                    case "wandb":
                        self._open[tool] = WandbSink(mark, {**given, "dir": str(folder)})
                    case "mlflow":
                        self._open[tool] = InBackground(partial(MlflowSink, mark, given))
                    case "webhook":
                        self._open[tool] = InBackground(partial(WebhookSink, mark, given))

    def tell(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Report a finished step or an event (`Tracker.tell`)."""
        for tool in list(self._open):
            with self._survived(tool):
                self._open[tool].tell(kind, facts)

    def __enter__(self) -> "Sinks":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the tools; if the run has failed, report that first."""
        if isinstance(error, Exception):
            text = str(error).strip() or type(error).__name__
            self.tell("failure", {"kind": "failed", "text": text})
            self.tell("end", {"complete": False, "error": text})
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
                self._warn(f"telemetry.{tool} {error}; the run goes on, and further trouble is not told")
        except Exception as error:  # no failure of a tool justifies losing a training run
            self._open.pop(tool, None)
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self._warn(f"telemetry.{tool} gets no more numbers of this run, which goes on: {reason}")
