"""Drives a run: start ranks, rendezvous, step, validate, save, write down. Never touches a tensor.

A plain class: it runs in a Ray actor (`braid.actors.controller.actor`) or in the process of the command line.
"""

import math
import shutil
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from braid.actors.config import Config
from braid.actors.controller.group import Collector, Launcher, WorkerError, WorkerGroup
from braid.actors.controller.manifest import (
    CheckpointError,
    CheckpointStore,
    DiskFullError,
    Manifest,
    disk_is_full,
)
from braid.actors.controller.profiling import check_hardware
from braid.actors.controller.records import (
    Event,
    Finished,
    Incident,
    RunDirectory,
    Saved,
    Started,
    StepDone,
    StepRecord,
    build_report,
    overlap_fields,
    rank_fields,
)
from braid.actors.controller.watch import Watch
from braid.actors.stage.messages import Rendezvous, RunPlan, StepResult
from braid.scheduling.memory import model_flops
from braid.scheduling.trace import Span


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run starts and ends, beside its configuration."""

    resume: bool = False
    overwrite: bool = False
    until: int | None = None
    """Stop, with a checkpoint, after this step instead of ``train.steps``."""


class Controller:
    """One run from start to end; `run` yields events as they happen."""

    def __init__(self, plan: RunPlan, launcher: Launcher, options: RunOptions) -> None:
        self._plan = plan
        self._config: Config = plan.config
        self._launcher = launcher
        self._options = options
        self._stop = threading.Event()
        self._generation = 0
        self._last_saved: int | None = None
        self._restarts = 0
        self._step_now = 0
        """Steps that are done."""
        self._failure: _Failure | None = None
        """What the present ranks were started for."""

    def stop(self) -> None:
        """Ask the run to end after the step under way, with a checkpoint; callable from any thread."""
        self._stop.set()

    def run(self) -> Iterator[Event]:
        """Train. Raises `ConfigError`, `CheckpointError` or `WorkerError`; leaves nothing running."""
        directory = RunDirectory(self._config, resume=self._options.resume, overwrite=self._options.overwrite)
        try:
            self._generation = directory.last_generation
            store = CheckpointStore(directory.path / "checkpoints")
            found = self._find_checkpoint(store) if self._options.resume else (None, [])
            traces = directory.path / "trace"
            budget = self._config.telemetry.trace_mb_per_rank << 20
            with self._launcher.collector(traces, budget) as collector:
                while (
                    failure := (yield from self._attempt(collector, directory, store, *found))
                ) is not None:
                    self._failure = failure
                    yield from self._back_off(failure, directory)
                    found = self._find_checkpoint(store) if store.steps() else (None, [])
        finally:
            directory.close()

    def _attempt(
        self,
        collector: Collector,
        directory: RunDirectory,
        store: CheckpointStore,
        resumed: tuple[str, Manifest] | None,
        notes: list[str],
    ) -> Generator[Event, None, "_Failure | None"]:
        """Train with new ranks to the end or until one fails; returns the failure if there is another try."""
        group = self._launcher.start(self._config.layout().ranks)
        try:
            yield from self._train(group, collector, directory, store, resumed, notes)
        except WorkerError as error:
            detected = time.time()
            group.abort()
            if error.user_error:
                raise
            text = str(error).splitlines()[0]
            if self._restarts >= self._config.failure.max_restarts or self._stop.is_set():
                directory.note("failed", self._step_now, self._generation, text)
                raise
            return _Failure(error.rank, text, self._step_now, detected)
        finally:
            group.shutdown()
        return None

    def _back_off(self, failure: "_Failure", directory: RunDirectory) -> Iterator[Event]:
        """Tell of a failure, and wait before the next try: the longer the more there were."""
        self._restarts += 1
        wait = self._config.failure.backoff_s * 2 ** (self._restarts - 1)
        text = f"{failure.text}; all ranks start anew in {wait:g} s"
        text += f" (restart {self._restarts} of {self._config.failure.max_restarts})"
        directory.note("restarted", failure.step, self._generation, text)
        yield Incident(kind="restarted", text=text, step=failure.step)
        self._stop.wait(wait)

    def _recovered(self, directory: RunDirectory, first_step: int) -> None:
        """The first step after a failure is done."""
        failure, self._failure = self._failure, None
        if failure is not None:
            directory.incident(
                kind="rank failed",
                rank=failure.rank,
                text=failure.text,
                time=failure.time,
                step=failure.step,
                recovered_after_seconds=time.time() - failure.time,
                steps_lost=failure.step - first_step,
                generation=self._generation,
            )

    def _find_checkpoint(self, store: CheckpointStore) -> tuple[tuple[str, Manifest] | None, list[str]]:
        path, manifest, complaints = store.newest_verified()
        notes = [f"{complaint}; falling back to step {manifest.step}" for complaint in complaints]
        shape = asdict(self._plan.shape)
        if manifest.shape != shape:
            odd = next(key for key in shape if manifest.shape.get(key) != shape[key])
            raise CheckpointError(
                f"checkpoint {path} is of a model with {odd}={manifest.shape.get(odd)}, "
                f"the configuration says {odd}={shape[odd]}"
            )
        return (str(path), manifest), notes

    def _train(
        self,
        group: WorkerGroup,
        collector: Collector,
        directory: RunDirectory,
        store: CheckpointStore,
        resumed: tuple[str, Manifest] | None,
        notes: list[str],
    ) -> Iterator[Event]:
        self._rendezvous(group)
        facts = group.call(0, "data_facts")
        done = self._restore(group, resumed, facts)
        plan = self._plan
        directory.describe(self._config, plan.shape, plan.schedule, group.describe(), plan.files)
        records = directory.rewind(done + 1)
        group.call_all("stream_spans", collector.target, self._generation)
        last = min(self._config.train.steps, self._options.until or self._config.train.steps)
        yield Started(
            first_step=done + 1,
            last_step=last,
            ranks=self._config.layout().ranks,
            layout=self._config.layout().describe(),
            run_directory=str(directory.path),
            notes=tuple(notes),
        )
        directory.note("started", done, self._generation, f"{self._config.layout().ranks} ranks", notes=notes)
        watch = Watch(collector, directory, self._config.layout())
        step = self._step_now = done
        while step < last and not self._stop.is_set():
            traced = directory if step + 1 == last else None
            event = self._step(group, step, facts, traced, validates=self._validates_after(step + 1, last))
            directory.append(event.record, event.ranks)
            records.append(event.record)
            yield event
            step += 1
            self._step_now = step
            self._recovered(directory, done)
            yield from watch.look(step, self._generation, event.ranks)
            every = self._config.checkpoint.every
            if every and step % every == 0:
                try:
                    yield self._save(group, store, step, facts, directory)
                except DiskFullError:
                    text = f"the checkpoint of step {step} does not fit on the disk; training goes on"
                    directory.note("telemetry", step, self._generation, text)
                    yield Incident(kind="failed", text=text, step=step)
        if self._last_saved != step and step > done:
            try:
                yield self._save(group, store, step, facts, directory)
            except DiskFullError:
                raise CheckpointError(
                    f"step {step} is done, but its checkpoint does not fit on the disk of {store.directory}; "
                    f"free some space and go on with --resume from the newest checkpoint there"
                ) from None
        validation = next(
            (r.validation_bits_per_byte for r in reversed(records) if r.validation_bits_per_byte is not None),
            None,
        )
        complete = step == self._config.train.steps
        report = build_report(records, self._config, validation, complete=complete, serial=self._plan.serial)
        directory.write_report(report)
        directory.note("finished", step, self._generation, "complete" if complete else "stopped early")
        yield Finished(complete=complete, report=report)

    def _rendezvous(self, group: WorkerGroup) -> None:
        self._generation += 1
        port = group.call(0, "open_store", self._config.cluster.group_timeout_s)
        meeting = Rendezvous(address=group.addresses[0], port=port, generation=self._generation)
        group.call_all("setup", self._plan, meeting)
        if self._config.overlap.profile is not None:
            check_hardware(group, self._plan.profile, str(self._config.overlap.profile))

    def _restore(
        self, group: WorkerGroup, resumed: tuple[str, Manifest] | None, facts: dict[str, Any]
    ) -> int:
        """Load the checkpoint if there is one, else initial weights; returns the number of finished steps."""
        if resumed is None:
            if self._config.model.initial is not None:
                group.call_all("load_initial", str(self._config.model.initial))
            return 0
        path, manifest = resumed
        here = {**self._data_cursor(facts)}
        if odd := [key for key in here if manifest.data.get(key) != here[key]]:
            raise CheckpointError(
                f"checkpoint {path} was trained with {odd[0]}={manifest.data.get(odd[0])!r}, "
                f"this run has {here[odd[0]]!r}; the sample order would change"
            )
        group.call_all("load", path, manifest.step)
        self._last_saved = manifest.step
        return manifest.step

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
        *,
        validates: bool,
    ) -> StepDone:
        """One step; its trace goes to ``traced``."""
        results: list[StepResult] = group.call_all("train_step", step)
        if traced is not None:
            traced.write_trace(self._trace(group, step))
        train = self._config.train
        tokens = train.global_batch * self._plan.shape.sequence
        bits = self._validate(group, facts) if validates else None
        slowest = max(results, key=lambda result: result.seconds)
        now = time.time()
        record = StepRecord(
            step=step + 1,
            loss=sum(result.loss_sum for result in results) / tokens,
            grad_norm=results[0].gradient_norm,
            lr=results[0].lr,
            seconds=slowest.seconds,
            tokens=tokens,
            **overlap_fields([result.overlap for result in results]),
            peak_bytes=tuple(result.peak_bytes for result in results),
            validation_bits_per_byte=bits,
            time=now,
            generation=self._generation,
            mfu=self._mfu(tokens, slowest.seconds),
        )
        return StepDone(record=record, ranks={"step": step + 1, "time": now, **rank_fields(results)})

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

    def _save(
        self,
        group: WorkerGroup,
        store: CheckpointStore,
        step: int,
        facts: dict[str, Any],
        directory: RunDirectory,
    ) -> Saved:
        begin = time.perf_counter()
        written = store.begin(step, self._generation)
        try:
            group.call_all("save", str(written))
            path = store.publish(
                written,
                step=step,
                layout=asdict(self._config.layout()),
                data=self._data_cursor(facts),
                shape=asdict(self._plan.shape),
            )
        except (OSError, WorkerError) as error:
            full = disk_is_full(store.directory, error)
            shutil.rmtree(written, ignore_errors=True)  # half a checkpoint only takes space
            if full:
                raise DiskFullError(str(error)) from None
            raise
        store.collect(self._config.checkpoint.keep)
        self._last_saved = step
        seconds = time.perf_counter() - begin
        directory.note("saved", step, self._generation, f"{path.name} in {seconds:.1f} s", seconds=seconds)
        return Saved(step=step, path=str(path), seconds=seconds)


@dataclass(frozen=True)
class _Failure:
    """A rank that died or raised."""

    rank: int
    text: str
    step: int
    """Steps that were done by then."""
    time: float
    """When it was known."""
