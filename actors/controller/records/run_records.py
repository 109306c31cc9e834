"""Writes a run's files: ``runs/NAME`` with its lock, metrics and report; defines the events that a run
yields."""

import contextlib
import json
import secrets
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from braid.actors.config import Config, ConfigError
from braid.actors.controller.records.json_lines import WaitingLines, backwards, cut_off, last_line
from braid.actors.controller.records.step_record import StepRecord, read_metrics, record_of
from braid.actors.controller.state.locks import FileHold, HeldError
from braid.actors.controller.state.manifest import write_durably
from braid.actors.controller.state.mirror import RunIdentity
from braid.actors.controller.state.recovery import Interruption, failure_of
from braid.actors.stage.rank import log
from braid.actors.stage.rank.messages import RunPlan
from braid.scheduling.text.json_text import json_text


@dataclass(frozen=True, kw_only=True)
class Started:
    """The ranks are ready; training continues after ``first_step - 1`` finished steps."""

    first_step: int
    last_step: int
    ranks: int
    layout: str
    run_directory: str
    notes: tuple[str, ...] = ()
    at_risk: str = ""
    """Description of what a failure would cost."""


@dataclass(frozen=True, kw_only=True)
class StepDone:
    record: StepRecord
    ranks: dict[str, Any]
    """A line of ``ranks.jsonl``: lists with an entry per rank."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved:
    step: int
    path: str
    seconds: float
    """Seconds from the save's begin to its publication, most of it in the background."""
    stalled_seconds: float = 0.0
    """Seconds for which training waited."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The run is over, ``complete`` or stopped early; ``report`` is what ``report.json`` holds."""

    complete: bool
    report: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Incident:
    """An unusual event: a line of ``events.jsonl``."""

    kind: str
    """Kind of event, such as ``telemetry``, ``failed``, ``restarted``; the live page marks some kinds."""
    text: str
    step: int


Event = Started | StepDone | CheckpointSaved | Finished | Incident


_MARK, _CONFIG = "run-mark", "config.yaml"

WINDOW = 20
"""Number of newest step records that are kept in memory; all records are in the run's files."""


def check_run_directory(config: Config, *, resume: bool, overwrite: bool, mark: str = "") -> None:
    """Raise the errors of `RunDirectory` before anything starts; `HeldError` if another run is under way."""
    path = config.run_directory
    if path.resolve().parent != config.runs.resolve():
        raise ConfigError(f"name={config.name!r} leads out of runs={config.runs}")
    if resume and not path.is_dir() and not mark:
        raise ConfigError(f"there is no run in {path} to resume; start it without resume=True")
    if (path / ".lock").exists():
        _acquire(path).release()
    if (path / _CONFIG).exists() and not resume and not overwrite:
        raise ConfigError(
            f"run directory {path} already holds a run; continue it with resume=True, "
            f"choose another with name=..., or replace it with overwrite=True"
        )


def _acquire(path: Path) -> FileHold:
    lock = FileHold(path / ".lock")
    try:
        lock.take()
    except HeldError as error:
        raise HeldError(
            f"run directory {path} is in use by {error}; wait for it, or choose another with name=..."
        ) from None
    return lock


class RunDirectory:
    """The folder ``runs/NAME``, locked for as long as this object is open."""

    def __init__(self, config: Config, *, resume: bool, overwrite: bool, mark: str = "") -> None:
        """``mark``: mark of the resumed run, if its checkpoints are elsewhere (`homes.begun_mark`)."""
        self.path = config.run_directory
        check_run_directory(config, resume=resume, overwrite=overwrite, mark=mark)
        with _unwritable(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        self._lock = _acquire(self.path)
        self._replaces = not resume and (self.path / _CONFIG).exists()
        self.trouble = ""
        """Why a line could not be written; empty if all could."""
        self._description: dict[str, str | bytes] = {}
        """Files that `describe` wrote; empty before."""
        self.identity = identity_of(self.path, config.name, mark if resume else "")
        """Identity that distinguishes this run's checkpoints from others'."""
        self._waiting: dict[str, WaitingLines] = defaultdict(WaitingLines)
        if self._replaces and not overwrite:  # another command began a run first
            self.close()
            check_run_directory(config, resume=resume, overwrite=overwrite)

    def describe(self, plan: RunPlan, cluster: dict[str, Any]) -> None:
        """Write the run's description as it starts; only now remove a run that it replaces."""
        if self._replaces:
            begun = (self.path / ".lock").stat().st_mtime_ns
            for old in (self.path / log.FOLDER).glob("*"):
                if old.stat().st_mtime_ns < begun:  # other logs belong to ranks that have started
                    old.unlink()
            for path in self.path.iterdir():
                if path.name not in (".lock", log.FOLDER):
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            self._replaces = False
        description = {
            _MARK: "\n".join([self.identity.mark, *self.identity.replaces]),
            _CONFIG: plan.config.to_yaml(),
            "schedule.txt": plan.schedule,
            "cluster.json": json_text(cluster, indent=1),
            "model.json": json_text(asdict(plan.shape), indent=1),
            **plan.files,
        }
        for name, content in description.items():
            self._write(name, content)
        self._description = description

    def _make_anew(self) -> None:
        """Write the description again if somebody has removed the directory, as the run continues in it.

        Raise `HeldError` if another run has begun there. If the disk does not answer, wait as in every write.
        """
        try:
            locked = (self.path / ".lock").exists()
            if (self.path / _MARK).exists() and locked:
                return
            if not locked:
                self.path.mkdir(parents=True, exist_ok=True)
                self._lock.release()
                self._lock = _acquire(self.path)
        except HeldError:
            raise
        except (OSError, ConfigError) as error:
            self.trouble = f"{self.path} cannot be written: {error}"
            return
        for name, content in self._description.items():
            self._write(name, content)
        self.trouble = f"{self.path} was removed during the run; records of earlier steps are lost"

    def _write(self, name: str, content: str | bytes) -> None:
        """Replace a file; a run under way continues even if there is no room for it."""
        path = self.path / name
        content = content.encode() if isinstance(content, str) else content
        with self._telling(path) if self._description else _unwritable(path):
            path.parent.mkdir(exist_ok=True)
            if not path.exists() or path.read_bytes() != content:
                write_durably(path, content)

    @contextlib.contextmanager
    def _telling(self, path: Path) -> Iterator[None]:
        """Record in `trouble` if a file cannot be written in the block."""
        try:
            yield
        except OSError as error:
            self.trouble = f"{path} cannot be written: {error.strerror}"

    @property
    def last_generation(self) -> int:
        """Number of the resumed run's last generation; 0 for a new run. Generation numbers are never used
        again."""
        if self._replaces:
            return 0
        newest = 0
        for line, _ in backwards(self.path / "events.jsonl"):  # an older generation's saves may be told late
            newest = max(newest, line.get("generation", 0))
            if line.get("kind") == "started":
                break
        return newest

    def unfinished(self) -> Interruption | None:
        """Return how the previous controller ended, if it did not end properly."""
        event, step = last_line(self.path / "events.jsonl"), last_line(self.metrics)
        if not event or not step or event["kind"] in ("finished", "failed"):
            return None
        text = "the controller died, and with it the ranks; a new one goes on"
        return failure_of(None, text, step["step"], unwell_seconds=max(0.0, time.time() - step["time"]))

    @property
    def metrics(self) -> Path:
        """File with one JSON object per step."""
        return self.path / "metrics.jsonl"

    def rewind(self, first_step: int) -> list[StepRecord]:
        """Drop the metrics of steps that will run again; return the newest `WINDOW` records that remain."""
        for name in ("metrics.jsonl", "ranks.jsonl"):
            with contextlib.nullcontext() if self._description else _unwritable(self.path / name):
                cut_off(self.path / name, first_step)
            self._waiting[name].keep(lambda line: json.loads(line)["step"] < first_step)
        waiting = [json.loads(line) for line in list(self._waiting["metrics.jsonl"].lines)[-WINDOW:]]
        older = [line for line, _ in islice(backwards(self.metrics), WINDOW)]
        return [record_of(line) for line in [*reversed(older), *waiting][-WINDOW:]]

    def records(self) -> Iterator[StepRecord]:
        """Yield the records of all steps, read from disk one at a time: a long run's records do not fit in
        memory."""
        yield from read_metrics(self.metrics)
        yield from (record_of(json.loads(line)) for line in self._waiting["metrics.jsonl"].lines)

    def append(self, record: StepRecord, ranks: dict[str, Any]) -> None:
        self._make_anew()
        content = asdict(record)
        if record.experts is None:
            del content["experts"]
        self._add("metrics.jsonl", content)
        self._add("ranks.jsonl", ranks)

    def incident(self, **facts: Any) -> None:
        """Add a line to ``incidents.jsonl``: what failed, when it was noticed, and what it cost."""
        self._add("incidents.jsonl", facts)

    def note(
        self, kind: str, step: int, generation: int, text: str, shown_as: str = "", **facts: Any
    ) -> Incident:
        """Add a line to ``events.jsonl``: what happened when, for the live page and marks in its charts.

        Return the event, to be yielded if it is shown; its kind is ``shown_as`` if that is given.
        """
        line = {"time": time.time(), "kind": kind, "step": step, "generation": generation, "text": text}
        self._add("events.jsonl", {**line, **facts})
        return Incident(kind=shown_as or kind, text=text, step=step)

    def _add(self, name: str, content: dict[str, Any]) -> None:
        """Append a line to a file; keep it for later if the disk is full, and record that in `trouble`."""
        self._waiting[name].add(json_text(content) + "\n")
        if time.monotonic() >= self._waiting[name].again:
            self._flush(name)

    def _flush(self, name: str) -> None:
        with self._telling(self.path / name):
            self._waiting[name].write(self.path / name)

    def write_report(self, report: dict[str, Any]) -> str:
        """Write ``report.json``; return why it could not be written, or an empty string."""
        self.trouble = ""
        self._write("report.json", json_text(report, indent=1))
        return self.trouble

    def close(self) -> None:
        """Write waiting lines and release the lock; remove the directory if the run never started."""
        for name in [name for name, waiting in self._waiting.items() if waiting.lines]:
            self._flush(name)
        with contextlib.suppress(OSError):
            names = {path.name for path in self.path.iterdir()}
            if names <= {".lock", log.FOLDER} and not log.anything_said(self.path):
                shutil.rmtree(self.path / log.FOLDER, ignore_errors=True)
                (self.path / ".lock").unlink()
                self.path.rmdir()
                self.path.parent.rmdir()
        self._lock.release()


@contextlib.contextmanager
def _unwritable(path: Path) -> Iterator[None]:
    """Raise `ConfigError` if a run that begins cannot write a file in the block."""
    try:
        yield
    except OSError as error:
        remedy = "see to its rights, or name another folder with runs=..."
        raise ConfigError(f"{path} cannot be written: {error.strerror}; {remedy}") from None


def identity_of(directory: Path, name: str, mark: str) -> RunIdentity:
    """Return the identity of the run with a mark that is resumed in a directory, or, if the mark is empty, of
    a new run."""
    before = read_identity(directory)
    if mark:
        return RunIdentity(name, mark, before.replaces if before is not None else ())
    given_up = (before.mark, *before.replaces) if before is not None else ()
    return RunIdentity(name, secrets.token_hex(8), given_up)


def read_identity(directory: Path) -> RunIdentity | None:
    """Read the identity of the run that a directory holds; None if there is none."""
    try:
        mark, *replaces = (directory / _MARK).read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return None
    return RunIdentity(directory.name, mark, tuple(replaces))
