"""Tools that are told over a network: MLflow and a webhook. A thread talks to them, so that training never
waits for them."""

import contextlib
import importlib
import json
import os
import queue
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, Final

from braid.dashboards.run_files import flat
from braid.dashboards.tracker import GoesOnError, Tracker, scalars

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


class InBackground(Tracker):
    """Passes calls to a tracker in a thread. An error of the tracker is raised by the next call."""

    def __init__(self, make: Callable[[], Tracker]) -> None:
        """``make``: makes the tracker, in the thread."""
        self._calls: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(_MOST_WAITING)
        self._errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(make,), name="tracker", daemon=True)
        self._thread.start()

    def step(self, line: Mapping[str, Any]) -> None:
        self._add(lambda tracker: tracker.step(line))

    def event(self, kind: str, facts: Mapping[str, Any]) -> None:
        self._add(lambda tracker: tracker.event(kind, facts))

    def close(self) -> None:
        """Wait until all is told, but not long; raise the first error, or `TimeoutError`."""
        with contextlib.suppress(queue.Full):
            self._calls.put_nowait(None)
        self._thread.join(_CLOSE_SECONDS)
        self._raise()
        if self._thread.is_alive():
            raise TimeoutError(f"it did not take everything within {_CLOSE_SECONDS:g} s after the run")

    def _add(self, call: Callable[[Tracker], None]) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            raise TimeoutError(f"{_MOST_WAITING} calls wait for it") from None
        self._raise()

    def _raise(self) -> None:
        with contextlib.suppress(queue.Empty):
            raise self._errors.get_nowait()

    def _run(self, make: Callable[[], Tracker]) -> None:
        try:
            tracker = make()
            while (call := self._calls.get()) is not None:
                try:
                    call(tracker)
                except GoesOnError as error:
                    self._errors.put(error)
            tracker.close()
        except Exception as error:  # it is raised where the tool's failures are told
            self._errors.put(error)


class MlflowSink(Tracker):
    """Logs to a run of MLflow. The tag ``braid.mark`` finds the run that a resumed run continues."""

    def __init__(self, mark: str, options: Mapping[str, Any]) -> None:
        """``options``: ``uri`` and ``experiment``, the run's ``name`` and ``config``."""
        if options["uri"].startswith("file:"):  # MLflow asks for a word of consent to folders
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        entities = importlib.import_module("mlflow.entities")
        self._client = importlib.import_module("mlflow.tracking").MlflowClient(tracking_uri=options["uri"])
        self._metric = entities.Metric
        found = self._client.get_experiment_by_name(options["experiment"])
        made = None if found is not None else self._client.create_experiment(options["experiment"])
        experiment = found.experiment_id if found is not None else made
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

    def step(self, line: Mapping[str, Any]) -> None:
        at = round((line.get("time") or time.time()) * 1000)
        numbers = [self._metric(name, value, at, line["step"]) for name, value in scalars(line).items()]
        self._client.log_batch(self._run, metrics=numbers)

    def event(self, kind: str, facts: Mapping[str, Any]) -> None:
        if kind == "end":
            self._client.set_terminated(self._run, "FAILED" if facts.get("error") else "FINISHED")

    def close(self) -> None:
        """Do nothing: the end of the run has been told."""


class WebhookSink(Tracker):
    """Tells an address what happens to a run: a POST with a JSON object for every event."""

    def __init__(self, mark: str, options: Mapping[str, Any]) -> None:
        """``options``: ``url`` and ``events``, the run's ``name``."""
        self._url = webhook_url(options["url"])
        self._events, self._about = options["events"], {"run": options["name"], "mark": mark}

    def event(self, kind: str, facts: Mapping[str, Any]) -> None:
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
