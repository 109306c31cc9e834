"""Calls a Python caller's callbacks with what happens in a run (docs/python.md)."""

from collections.abc import Callable, Iterable
from typing import Any

from braid.actors.config import ConfigError
from braid.actors.controller.ranks.group import StoppedError
from braid.actors.controller.records.run_records import (
    CheckpointSaved,
    Finished,
    Incident,
    Started,
    StepDone,
)
from braid.actors.controller.records.step_record import StepRecord
from braid.scheduling.text.suggestions import hint


class StopTraining(Exception):  # noqa: N818 - like StopIteration, it reports no error
    """Raised by a callback: the run ends after the step under way, with a checkpoint. The text is the reason,
    which the result repeats."""


class Callback:
    """Receives what happens in a run. Any object with some of these methods is a callback; a method that is
    left out is not called.

    All methods are called in the thread that called `braid.train`. Plain processes wait for them; a run on
    Ray goes on meanwhile. `StopTraining` ends the run with a checkpoint. Any other exception ends the run
    with a checkpoint, and then `braid.train` raises it.
    """

    def on_event(self, event: Any) -> None:
        """Receive every event, also events of the preparation; a string is a line for people."""

    def on_start(self, event: Started) -> None:
        """The ranks are ready: at the run's begin, and again after every recovery."""

    def on_step(self, record: StepRecord) -> None:
        """A step is done. ``record``: a line of ``metrics.jsonl``."""

    def on_validation(self, record: StepRecord) -> None:
        """A validation is done, after ``on_step`` of its step. ``record``: that step's, with the loss."""

    def on_checkpoint(self, event: CheckpointSaved) -> None:
        """A checkpoint is published."""

    def on_incident(self, event: Incident) -> None:
        """Something unusual happened; the run goes on."""

    def on_failure(self, error: BaseException) -> None:
        """The run has ended with an error, which `braid.train` raises after this call."""

    def on_end(self, report: dict[str, Any]) -> None:
        """The run is complete or was stopped. ``report``: the content of ``report.json``."""


_METHODS = [name for name in vars(Callback) if name.startswith("on_")]


class Callbacks:
    """The callbacks of one run. After the first exception of a callback the run is asked to stop, and only
    ``on_failure`` is called."""

    def __init__(self, given: Iterable[object], stop: Callable[[], None]) -> None:
        """``stop``: asks the run to stop. Raise `ConfigError` for an object that is no callback."""
        if not isinstance(given, Iterable):
            raise ConfigError(f"callbacks={given!r} must be a list; write callbacks=[...]")
        self._all, self._stop = list(given), stop
        for number, callback in enumerate(self._all):
            _check(callback, f"callbacks[{number}]")
        self.reason: str | None = None
        """Why a callback has stopped the run; None if none has."""
        self.error: Exception | None = None
        """First exception that a callback raised."""

    def hear(self, event: Any) -> None:
        """Pass an event on."""
        self._call("on_event", event)
        match event:
            case Started():
                self._call("on_start", event)
            case StepDone(record=record):
                self._call("on_step", record)
                if "validation" in record.between_seconds:
                    self._call("on_validation", record)
            case CheckpointSaved():
                self._call("on_checkpoint", event)
            case Incident():
                self._call("on_incident", event)
            case Finished():
                self._call("on_end", event.report)

    def failed(self, error: BaseException) -> None:
        """Tell all callbacks that the run has ended with an error; a note on it names those that raise."""
        for callback in self._all:
            try:
                if hasattr(callback, "on_failure"):
                    callback.on_failure(error)
            except Exception as another:
                error.add_note(f"on_failure of {type(callback).__name__} raised {another!r}")

    def _call(self, method: str, argument: Any) -> None:
        for callback in self._all:
            if self.error is not None or not hasattr(callback, method):
                continue
            try:
                getattr(callback, method)(argument)
            except StoppedError:  # a signal came meanwhile
                raise
            except StopTraining as stop:
                if self.reason is None:
                    self.reason = str(stop) or f"{method} of {type(callback).__name__}"
                self._stop()
            except Exception as error:
                error.add_note(f"raised by {method} of the callback {type(callback).__name__}")
                self.error = error
                self._stop()


def _check(callback: object, where: str) -> None:
    name = type(callback).__name__
    if isinstance(callback, type):
        raise ConfigError(f"{where} is the class {callback.__name__}; give an object of it, with ()")
    own = [method for method in dir(callback) if method.startswith("on_")]
    for method in own:
        if method not in _METHODS:
            meant = hint(method, _METHODS) or f"a callback has {', '.join(_METHODS)}"
            raise ConfigError(f"{where}: {name}.{method} is no method of a callback; {meant}")
        if not callable(getattr(callback, method)):
            raise ConfigError(f"{where}: {name}.{method} must be a method")
    if not own:
        raise ConfigError(f"{where} ({name}) has no method of a callback; give it {', '.join(_METHODS)}")
