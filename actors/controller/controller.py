"""Drives a run: start ranks, rendezvous, step, validate, save, write down. Never touches a tensor.

A plain class: it runs in a Ray actor (`braid.actors.controller.actor`) or in the process of the command line.
A run is a sequence of generations: the first one, and one after every failure or change of membership, each
with process groups of its own. Who its ranks are and where their state comes from is decided at its begin.
"""

import contextlib
import math
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from braid.actors.config import Config
from braid.actors.controller.group import Collector, Launcher, WorkerError, WorkerGroup
from braid.actors.controller.manifest import CheckpointError, CheckpointStore, Manifest
from braid.actors.controller.mirror import Mirror
from braid.actors.controller.profiling import check_hardware
from braid.actors.controller.records import (
    Event,
    Finished,
    Incident,
    RunDirectory,
    Started,
    StepDone,
    StepRecord,
    build_report,
    overlap_fields,
    rank_fields,
)
from braid.actors.controller.recovery import Failure, newest_common, partner_shift
from braid.actors.controller.saving import Saver, manifest_facts
from braid.actors.controller.watch import Watch
from braid.actors.stage.messages import Rendezvous, RunPlan, StepResult
from braid.scheduling.memory import model_flops
from braid.scheduling.trace import Span

_STALL_STEPS = 3
"""Ranks may be without progress for as long as so many steps take, if ``failure.stall_s`` is less."""
_SPIKE_WINDOW = 20
"""Steps whose losses a spike is measured against."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run starts and ends, beside its configuration."""

    resume: bool = False
    overwrite: bool = False
    until: int | None = None
    """Stop, with a checkpoint, after this step instead of ``train.steps``."""


@dataclass(frozen=True)
class _Places:
    """Where a run keeps what it leaves behind."""

    directory: RunDirectory
    store: CheckpointStore
    saver: Saver
    collector: Collector


class Controller:
    """One run from start to end; `run` yields events as they happen."""

    def __init__(self, plan: RunPlan, launcher: Launcher, options: RunOptions) -> None:
        self._plan = plan
        self._config: Config = plan.config
        self._launcher = launcher
        self._options = options
        self._stop = threading.Event()
        self._generation = 0
        self._restarts = self._in_row = 0
        self._step_now = 0
        """Steps that are done."""
        self._failure: Failure | None = None
        """What the present generation was formed for."""
        self._spiked: set[int] = set()
        """Steps that were repeated because of their loss."""

    def stop(self) -> None:
        """Ask the run to end after the step under way, with a checkpoint; callable from any thread."""
        self._stop.set()

    def run(self) -> Iterator[Event]:
        """Train. Raises `ConfigError`, `CheckpointError` or `WorkerError`; leaves nothing running."""
        keeping = self._config.checkpoint
        mirror = Mirror(keeping.mirror) if keeping.mirror is not None else None
        directory = RunDirectory(self._config, resume=self._options.resume, overwrite=self._options.overwrite)
        try:
            self._generation = directory.last_generation
            store = CheckpointStore(directory.path / "checkpoints")
            saver = Saver(store, directory, keeping, mirror)
            found = self._find_checkpoint(store) if self._options.resume else None
            self._failure = directory.unfinished() if self._options.resume else None
            budget = self._config.telemetry.trace_mb_per_rank << 20
            try:
                with self._launcher.collector(directory.path / "trace", budget) as collector:
                    yield from self._generations(_Places(directory, store, saver, collector), found)
            finally:
                saver.close()
        finally:
            directory.close()

    def _generations(self, places: _Places, found: "_Found | None") -> Iterator[Event]:
        """One generation after the other, until the run is over."""
        group = self._launcher.start(self._config.layout().ranks)
        try:
            while (failure := (yield from self._generation_runs(group, places, found))) is not None:
                yield from self._prepare_restart(group, failure, places)
                found = None
        finally:
            group.shutdown()

    def _generation_runs(
        self, group: WorkerGroup, places: _Places, found: "_Found | None"
    ) -> Generator[Event, None, Failure | None]:
        """Train to the end or until a rank fails; returns the failure if there is another try."""
        try:
            yield from self._train(group, places, found)
        except WorkerError as error:
            failure = Failure(
                rank=error.rank,
                text=str(error).splitlines()[0],
                step=self._step_now,
                time=time.time(),
                unwell_seconds=error.unwell_seconds,
            )
            if error.user_error:
                raise
            if self._restarts >= self._config.failure.max_restarts or self._stop.is_set():
                places.directory.note("failed", self._step_now, self._generation, failure.text)
                raise
            return failure
        return None

    def _prepare_restart(self, group: WorkerGroup, failure: Failure, places: _Places) -> Iterator[Event]:
        """Stop what still runs and tell of it; lost ranks are replaced when the next generation meets.

        Failures in a row, none of which trained a step, are waited for longer and longer.
        """
        self._restarts += 1
        self._in_row += 1
        with _timed(failure, "interrupt"):
            gone = group.interrupt()
        failure.gone = tuple(gone)
        yield from places.saver.abandon()
        backoff = self._config.failure.backoff_s
        wait = backoff * 2 ** (self._in_row - 2) if self._in_row > 1 else 0.0
        text = f"{failure.text}; {_in_words(gone)}, all ranks go on as a new generation"
        text += f" (restart {self._restarts} of {self._config.failure.max_restarts})"
        places.directory.note("restarted", failure.step, self._generation, text)
        yield Incident(kind="restarted", text=text, step=failure.step)
        self._stop.wait(wait)
        self._failure = failure

    def _recovered(self, directory: RunDirectory, first_step: int) -> None:
        """A step is done: the first one after a failure, perhaps."""
        failure, self._failure = self._failure, None
        self._in_row = 0
        if failure is not None:
            now = time.time()
            failure.parts["first step"] = now - failure.time - sum(failure.parts.values())
            directory.incident(**failure.facts(now, first_step, self._generation))

    def _find_checkpoint(self, store: CheckpointStore) -> "_Found":
        path, manifest, complaints = store.newest_verified()
        notes = [f"{complaint}; falling back to step {manifest.step}" for complaint in complaints]
        shape = asdict(self._plan.shape)
        if manifest.shape != shape:
            odd = next(key for key in shape if manifest.shape.get(key) != shape[key])
            raise CheckpointError(
                f"checkpoint {path} is of a model with {odd}={manifest.shape.get(odd)}, "
                f"the configuration says {odd}={shape[odd]}"
            )
        return _Found(str(path), manifest, tuple(notes))

    def _train(self, group: WorkerGroup, places: _Places, found: "_Found | None") -> Iterator[Event]:
        directory, saver = places.directory, places.saver
        self._rendezvous(group)
        facts = group.call(0, "data_facts")
        with _timed(self._failure, "restore"):
            done, notes = self._restore(group, places.store, found, facts)
        saver.last_step = done or None
        plan, layout = self._plan, self._config.layout()
        directory.describe(self._config, plan.shape, plan.schedule, group.describe(), plan.files)
        records = directory.rewind(done + 1)
        group.call_all("stream_spans", places.collector.target, self._generation)
        last = min(self._config.train.steps, self._options.until or self._config.train.steps)
        yield Started(
            first_step=done + 1,
            last_step=last,
            ranks=layout.ranks,
            layout=layout.describe(),
            run_directory=str(directory.path),
            notes=notes,
        )
        directory.note("started", done, self._generation, f"{layout.ranks} ranks", notes=list(notes))
        watch = Watch(places.collector, directory, layout)
        described = manifest_facts(layout, self._data_cursor(facts), plan.shape)
        step = self._step_now = done
        while step < last and not self._stop.is_set():
            traced = directory if step + 1 == last else None
            event, told = self._step(
                group, step, facts, traced, records, validates=self._validates_after(step + 1, last)
            )
            directory.append(event.record, event.ranks)
            records.append(event.record)
            yield event
            step += 1
            self._step_now = step
            for incident in told:
                directory.note(incident.kind, step, self._generation, incident.text)
                yield incident
            self._recovered(directory, done)
            self._expect(group, records)
            yield from watch.look(step, self._generation, event.ranks)
            yield from saver.look(group)
            if saver.due(step):
                yield from saver.begin(group, step, self._generation, described)
        yield from saver.finish(group)
        if saver.last_step != step and step > done:
            yield from saver.begin(group, step, self._generation, described)
            yield from saver.finish(group)
            if saver.last_step != step:
                raise CheckpointError(
                    f"step {step} is done, but its checkpoint does not fit on the disk of "
                    f"{places.store.directory}; free some space and go on with --resume from the newest "
                    f"checkpoint there"
                )
        yield self._finish(directory, records, step)

    def _finish(self, directory: RunDirectory, records: list[StepRecord], step: int) -> Finished:
        validation = next(
            (r.validation_bits_per_byte for r in reversed(records) if r.validation_bits_per_byte is not None),
            None,
        )
        complete = step == self._config.train.steps
        report = build_report(records, self._config, validation, complete=complete, serial=self._plan.serial)
        directory.write_report(report)
        directory.note("finished", step, self._generation, "complete" if complete else "stopped early")
        return Finished(complete=complete, report=report)

    def _rendezvous(self, group: WorkerGroup) -> None:
        if self._failure is not None:
            with _timed(self._failure, "replace"):
                group.replace(self._failure.gone)
        with _timed(self._failure, "rendezvous"):
            self._meet(group)

    def _meet(self, group: WorkerGroup) -> None:
        if self._failure is not None:
            group.call_all("leave")
        self._generation += 1
        group.expect(self._config.cluster.group_timeout_s)
        port = group.call(0, "open_store", self._config.cluster.group_timeout_s)
        meeting = Rendezvous(
            address=group.addresses[0],
            port=port,
            generation=self._generation,
            copies_shift=partner_shift(group.addresses, self._config.layout()),
        )
        group.call_all("setup", self._plan, meeting)
        if self._config.overlap.profile is not None:
            check_hardware(group, self._plan.profile, str(self._config.overlap.profile))

    def _expect(self, group: WorkerGroup, records: list[StepRecord]) -> None:
        """How long ranks may be without progress, now that steps have been seen."""
        slowest = max(record.seconds for record in records[-10:])
        group.expect(max(self._config.failure.stall_s, _STALL_STEPS * slowest))

    def _restore(
        self, group: WorkerGroup, store: CheckpointStore, found: "_Found | None", facts: dict[str, Any]
    ) -> tuple[int, tuple[str, ...]]:
        """Bring the ranks to the newest state there is; returns its number of steps, and what to tell.

        After a failure that is the newest one among the copies in memory and the good checkpoints; else the
        checkpoint that the run goes on from, or initial weights.
        """
        copies = self._config.checkpoint.copies_every
        failure = self._failure
        notes: tuple[str, ...] = ()
        if failure is not None and copies:
            common = newest_common(group.call_all("copies_held"), self._config.layout())
            if common is not None and common[0] >= max(store.steps(), default=0):
                group.call_all("restore_copies", *common)
                failure.source = "copies in memory"
                return common[0], notes
        if failure is not None and store.steps():
            found = self._find_checkpoint(store)
            failure.source = f"checkpoint step-{found.manifest.step}"
        done = 0
        if found is not None:
            notes = found.notes
            self._check_cursor(found, facts)
            group.call_all("load", found.path, found.manifest.step)
            done = found.manifest.step
        elif self._config.model.initial is not None:
            group.call_all("load_initial", str(self._config.model.initial))
        if copies:
            group.call_all("keep_copy", done)
        return done, notes

    def _check_cursor(self, found: "_Found", facts: dict[str, Any]) -> None:
        here = self._data_cursor(facts)
        if odd := [key for key in here if found.manifest.data.get(key) != here[key]]:
            raise CheckpointError(
                f"checkpoint {found.path} was trained with {odd[0]}={found.manifest.data.get(odd[0])!r}, "
                f"this run has {here[odd[0]]!r}; the sample order would change"
            )

    def _data_cursor(self, facts: dict[str, Any]) -> dict[str, Any]:
        """What fixes, together with the step, which samples come next (design section 10, rule 3)."""
        return {
            "fingerprint": facts["fingerprint"],
            "seed": self._config.train.seed,
            "global_batch": self._config.train.global_batch,
        }

    def _validates_after(self, step: int, last: int) -> bool:
        every = self._config.train.validate_every
        due = step == last or (every > 0 and step % every == 0)
        return due and self._config.data.validation_fraction > 0

    def _step(
        self,
        group: WorkerGroup,
        step: int,
        facts: dict[str, Any],
        traced: RunDirectory | None,
        records: list[StepRecord],
        *,
        validates: bool,
    ) -> tuple[StepDone, list[Incident]]:
        """One step, and what was odd about it. Its trace goes to ``traced``; ``records``: of steps before."""
        results: list[StepResult] = group.call_all("train_step", step)
        train = self._config.train
        tokens = train.global_batch * self._plan.shape.sequence
        loss = sum(result.loss_sum for result in results) / tokens
        told = self._odd(step, loss, results[0], records)
        if traced is not None:
            traced.write_trace(self._trace(group, step))
        bits = self._validate(group, facts) if validates else None
        slowest = max(results, key=lambda result: result.seconds)
        now = time.time()
        record = StepRecord(
            step=step + 1,
            loss=loss,
            grad_norm=results[0].gradient_norm,
            lr=results[0].lr,
            seconds=slowest.seconds,
            tokens=tokens,
            **overlap_fields([result.overlap for result in results]),
            peak_bytes=tuple(result.peak_bytes for result in results),
            validation_bits_per_byte=bits,
            time=now,
            generation=self._generation,
            samples=sum(result.samples for result in results) % 2**64,
            mfu=self._mfu(tokens, slowest.seconds),
        )
        return StepDone(record=record, ranks={"step": step + 1, "time": now, **rank_fields(results)}), told

    def _odd(self, step: int, loss: float, result: StepResult, records: list[StepRecord]) -> list[Incident]:
        """What the guards make of a step: told, or a `WorkerError` that ends or repeats it."""
        failure = self._config.failure
        if failure.on_nan == "stop" and result.discarded:
            text = (
                f"the gradient norm of step {step + 1} is {result.gradient_norm}; the run ends as "
                f"failure.on_nan=stop asks; --resume goes on from the newest checkpoint"
            )
            raise WorkerError(0, text, user_error=True)
        told = []
        if result.discarded:
            what = "repeated" if result.applied else "skipped on all ranks"
            told.append(f"gradients of step {step + 1} were no numbers; the step was {what}")
        before = [record.loss for record in records[-_SPIKE_WINDOW:]]
        if failure.spike and len(before) >= 5 and loss > failure.spike * median(before):
            text = f"the loss of step {step + 1} is {loss:.4g}, {loss / median(before):.1f} times the median"
            if step not in self._spiked:
                self._spiked.add(step)
                raise WorkerError(0, f"{text} of the steps before it; it is repeated")
            told.append(f"{text} of the steps before it, twice: it belongs to the data")
        return [Incident(kind="guard", text=text, step=step + 1) for text in told]

    def _mfu(self, tokens: int, seconds: float) -> float | None:
        peak = self._config.cluster.peak_tflops
        if peak is None:
            return None
        ranks = self._config.layout().ranks
        return model_flops(self._plan.shape, tokens) / seconds / (peak * 1e12 * ranks)

    def _trace(self, group: WorkerGroup, step: int) -> list[Span]:
        """All ranks' spans of the step that ran last, from the first one's begin."""
        spans: list[Span] = [span for own in group.call_all("spans", step) for span in own]
        begin = min((span.start_ns for span in spans), default=0)
        return [replace(s, start_ns=s.start_ns - begin, end_ns=s.end_ns - begin) for s in spans]

    def _validate(self, group: WorkerGroup, facts: dict[str, Any]) -> float:
        results = group.call_all("validate")
        loss = sum(result[0] for result in results) / sum(result[1] for result in results)
        return float(loss / math.log(2) / facts["validation_bytes_per_token"])


@dataclass(frozen=True)
class _Found:
    """A good checkpoint, and what was wrong with newer ones."""

    path: str
    manifest: Manifest
    notes: tuple[str, ...] = ()


@contextlib.contextmanager
def _timed(failure: Failure | None, part: str) -> Iterator[None]:
    """Add the time of a block to a failure's recovery, if there is one."""
    begin = time.monotonic()
    yield
    if failure is not None:
        failure.parts[part] = time.monotonic() - begin


def _in_words(gone: list[int]) -> str:
    if not gone:
        return "no rank is lost"
    return f"rank{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))} replaced"
