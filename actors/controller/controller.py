"""Drives a run: start ranks, rendezvous, step, validate, save, write down. Never touches a tensor.

A plain class: it runs in a Ray actor (`braid.actors.controller.actor`) or in the process of the command line.
A run is a sequence of generations: the first one, and one after every failure or change of membership, each
with process groups of its own. Who its ranks are and where their state comes from is decided at its begin.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from braid.actors.config import Config
from braid.actors.controller.elastic import Change
from braid.actors.controller.group import Collector, Launcher, NoRoomError, WorkerError, WorkerGroup
from braid.actors.controller.homes import Homes, begun_mark
from braid.actors.controller.interruptions import Interruptions
from braid.actors.controller.last_trace import last_trace
from braid.actors.controller.manifest import CheckpointError
from braid.actors.controller.meeting import placement_notes, rendezvous
from braid.actors.controller.mirror import MirrorError
from braid.actors.controller.profiling import check_hardware
from braid.actors.controller.records import (
    WINDOW,
    Event,
    Finished,
    Incident,
    RunDirectory,
    Started,
    StepRecord,
)
from braid.actors.controller.recovery import Changed, Failure, cost_of_a_failure, in_words, partner_shift
from braid.actors.controller.reporting import build_report
from braid.actors.controller.rescue import rescue
from braid.actors.controller.resizing import Resizing
from braid.actors.controller.restoring import data_cursor, restore
from braid.actors.controller.saving import Saver, manifest_facts
from braid.actors.controller.steps import StepClock, Stepper
from braid.actors.controller.watch import Watch
from braid.actors.stage.messages import RunPlan
from braid.actors.stage.rank import Rank
from braid.scheduling.topology import Topology

_STALL_STEPS = 3
"""Ranks may be without progress for as long as so many steps take, if ``failure.stall_s`` is less."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run starts and ends, beside its configuration."""

    resume: bool = False
    overwrite: bool = False
    until: int | None = None
    """Stop, with a checkpoint, after this step instead of ``train.steps``."""
    again: bool = False
    """Where no home has a checkpoint, ``resume`` begins anew: for whoever starts a run again by itself."""


@dataclass(frozen=True)
class _Places:
    """Where a run keeps what it leaves behind."""

    directory: RunDirectory
    homes: Homes
    saver: Saver
    collector: Collector


Replan = Callable[[Config, Launcher], RunPlan]
"""Plans a run anew, for the layout of a configuration."""


class Controller:
    """One run from start to end; `run` yields events as they happen."""

    def __init__(
        self,
        plan: RunPlan,
        launcher: Launcher,
        options: RunOptions,
        replan: "Replan | None" = None,
    ) -> None:
        """``replan``: plans the run anew for another layout; without it the number of ranks is fixed."""
        self._plan = plan
        self._config: Config = plan.config
        self._replan = replan
        self._resizing = Resizing(plan.config, launcher, plan.shape.vocabulary)
        self._launcher = launcher
        self._options = options
        self._stop = threading.Event()
        self._generation = 0
        self._interruptions = Interruptions(plan.config.failure)
        self._step_now = 0
        """Steps that are done."""
        self._clock = StepClock()
        """Whether a step was done since this controller began."""
        self._goes_on = False
        """Whether there is a state to go on from."""
        self._drained = False

    def stop(self) -> None:
        """Ask the run to end after the step under way, with a checkpoint; callable from any thread."""
        self._stop.set()

    def run(self) -> Iterator[Event]:
        """Train. Raises `ConfigError`, `CheckpointError` or `WorkerError`; leaves nothing running."""
        options, config = self._options, self._config
        mark = begun_mark(config) if options.resume else ""
        resume = options.resume and not (options.again and not mark and not config.run_directory.is_dir())
        directory = RunDirectory(config, resume=resume, overwrite=options.overwrite, mark=mark)
        try:
            self._generation = directory.last_generation
            self._interruptions.failure = directory.unfinished() if resume else None
            homes = Homes.of(config, directory.identity)
            saver = Saver(homes, directory, config.checkpoint)
            try:
                self._goes_on = resume and (homes.begun() or not options.again)
                if self._goes_on:  # what is wrong shows before anything starts; what is good, ranks find out
                    self._step_now = homes.newest_of(self._plan.shape).manifest.step
                budget = config.telemetry.trace_mb_per_rank << 20
                with self._launcher.collector(directory.path / "trace", budget) as collector:
                    yield from self._generations(_Places(directory, homes, saver, collector))
                yield from self._finish(directory)
            finally:
                saver.close()
        finally:
            directory.close()

    def _generations(self, places: _Places) -> Iterator[Event]:
        """One generation after the other, until the run is over."""
        avoid: tuple[str, ...] = ()
        while True:
            change: Change | None
            try:
                group = self._launcher.start(self._config.layout().ranks, avoid)
            except NoRoomError as error:  # nodes left while nothing ran
                change = yield from self._on_what_is_left(error, "not all nodes are there")
            else:
                try:
                    change = yield from self._with_ranks(group, places)
                finally:
                    group.shutdown()
            if change is None:
                return
            yield from self._change(change, places)
            avoid = change.avoid
            self._goes_on = bool(places.homes.steps())

    def _with_ranks(self, group: WorkerGroup, places: _Places) -> Generator[Event, None, Change | None]:
        """Generations on as many ranks, until the run is over or should go on with other ranks."""
        while True:
            try:
                end = yield from self._generation_runs(group, places)
            except NoRoomError as error:
                left = len(group.left())
                yield from self._rescue(group, places)
                group.shutdown()
                return (yield from self._on_what_is_left(error, "a node is lost", left))
            if not isinstance(end, Failure):
                return end
            yield from self._prepare_restart(group, end, places)
            self._goes_on = bool(places.homes.steps())

    def _rescue(self, group: WorkerGroup, places: _Places) -> Iterator[Event]:
        """What survivors hold of all ranks becomes a checkpoint: the layout is about to change."""
        if self._resizing.membership is not None and self._config.checkpoint.copies_every:
            rescued = rescue(
                group,
                self._config,
                places.saver,
                places.directory,
                self._generation,
                self._step_now,
                self._described,
            )
            yield from rescued

    def _on_what_is_left(self, error: NoRoomError, why: str, left: int = 0) -> Generator[Event, None, Change]:
        stopped, step = self._stop.is_set, self._step_now
        return (yield from self._resizing.what_is_left(self._config, error, why, left, step, stopped))

    def _generation_runs(
        self, group: WorkerGroup, places: _Places
    ) -> Generator[Event, None, Failure | Change | None]:
        """Train to the end, or until a rank fails, or until the number of ranks should change."""
        try:
            return (yield from self._train(group, places))
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
            if self._stop.is_set() or not self._interruptions.goes_on_after(error):
                places.directory.note("failed", self._step_now, self._generation, failure.text)
                raise
            return failure

    # -- other numbers of ranks ----------------------------------------------------------------------------

    def _change(self, change: Change, places: _Places) -> Iterator[Event]:
        """Plan the run for another layout."""
        assert self._replan is not None
        before = self._config.layout()
        new = Changed(change.reason, self._step_now, time.time(), before.ranks, change.degrees.ranks)
        self._interruptions.change(new)
        config = change.degrees.of(self._config)
        text = f"{change.reason}; from {before.describe()} to {config.layout().describe()}"
        places.directory.note("resized", self._step_now, self._generation, text)
        yield Incident(kind="resized", text=text, step=self._step_now)
        with self._interruptions.timed("plan"):
            self._plan = self._replan(config, self._launcher)
        self._config = self._plan.config

    # -- failures --------------------------------------------------------------------------------------------

    def _prepare_restart(self, group: WorkerGroup, failure: Failure, places: _Places) -> Iterator[Event]:
        """Stop what still runs and tell of it; lost ranks are replaced when the next generation meets."""
        self._interruptions.failure = failure
        with self._interruptions.timed("interrupt"):
            failure.gone = tuple(group.interrupt())
        places.saver.abandon()
        text = f"{failure.text}; {in_words(failure.gone)}, all ranks go on as a new generation"
        text += self._interruptions.counted
        places.directory.note("restarted", failure.step, self._generation, text)
        yield Incident(kind="restarted", text=text, step=failure.step)
        self._stop.wait(self._interruptions.wait_s)

    def _recovered(self, directory: RunDirectory, first_step: int) -> None:
        """A step is done: the first one after a failure or change, perhaps."""
        now = time.time()
        for over in self._interruptions.step_done(self._step_now, now):
            directory.incident(**over.facts(now, first_step, self._generation))
            if isinstance(over, Changed) and self._resizing.membership is not None:
                self._resizing.membership.cost_s = now - over.time

    def _train(self, group: WorkerGroup, places: _Places) -> Generator[Event, None, Change | None]:
        directory, saver = places.directory, places.saver
        kernels = self._meet(group)
        facts = group.call(0, Rank.data_facts)
        plan, layout = self._plan, self._config.layout()
        failure = self._interruptions.failure
        with self._interruptions.timed("restore"):
            done, notes = restore(group, places.homes, plan, facts, failure, goes_on=self._goes_on)
        notes = (*notes, kernels) if kernels else notes
        saver.resumed(done)
        if self._config.cluster.emulated_link_mbit is None:  # else it is what the user wants to see
            notes = (*notes, *placement_notes(Topology(layout.mesh, group.hosts), plan.streams))
        cluster = {"controller": os.getpid(), **group.describe()}
        directory.describe(self._config, plan.shape, plan.schedule, cluster, plan.files)
        records = deque(directory.rewind(done + 1), WINDOW)
        yield from self._claim_mirror(places)
        group.call_all(Rank.stream_spans, places.collector.target, self._generation)
        last = min(self._config.train.steps, self._options.until or self._config.train.steps)
        yield Started(
            first_step=done + 1,
            last_step=last,
            ranks=layout.ranks,
            layout=layout.describe(),
            run_directory=str(directory.path),
            notes=notes,
            at_risk=cost_of_a_failure(self._config),
        )
        directory.note("started", done, self._generation, f"{layout.ranks} ranks", notes=list(notes))
        watch = Watch(places.collector, directory, layout)
        described = self._described(facts)
        step = self._step_now = done
        yield from saver.step_done(group, step, self._generation, described)
        clock = self._clock
        clock.goes_on(done)
        stepper = Stepper(plan, group, self._generation, facts, self._interruptions.spikes, clock)
        change: Change | None = None
        while step < last and not self._stop.is_set() and change is None:
            event, told = stepper.run(step, last, list(records))
            with clock.part("records"):
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
            with clock.part("records"):
                yield from watch.look(step, self._generation, event.ranks)
            with clock.part("save"):
                yield from saver.step_done(group, step, self._generation, described)
            if step < last:
                with clock.part("nodes"):
                    change = yield from self._look_around(group, places, watch, records, last, described)
        yield from saver.finish(group)
        if saver.last_step != step and step:
            yield from saver.begin(group, step, self._generation, described)
            yield from saver.finish(group)
            if saver.last_step != step:
                raise CheckpointError(
                    f"step {step} is done, but its checkpoint {saver.why_not}, in "
                    f"{places.homes.store.directory}; mend that and go on with --resume from the newest "
                    f"checkpoint there"
                )
        if change is None:
            self._recovered(directory, done)  # from a failure after the last step, too
            yield from saver.settle()
        return change

    def _claim_mirror(self, places: _Places) -> Iterator[Incident]:
        """Say in the mirror that this run has begun, once it has."""
        if places.homes.mirror is not None:
            try:
                places.homes.mirror.begin()
            except MirrorError as error:  # there may be one when the first checkpoint is to be copied
                places.directory.note("telemetry", self._step_now, self._generation, str(error))
                yield Incident(kind="failed", text=str(error), step=self._step_now)

    def _look_around(
        self,
        group: WorkerGroup,
        places: _Places,
        watch: Watch,
        records: Sequence[StepRecord],
        last: int,
        described: dict[str, Any],
    ) -> Generator[Event, None, Change | None]:
        """The change to make before the next step, if one is due; a drained node asks for a checkpoint."""
        step, saver = self._step_now, places.saver
        change = self._resizing.look(
            group,
            self._config,
            watch.slowest,
            lambda: median(record.seconds for record in records),
            last - step,
        )
        if self._resizing.leaving and change is None and not self._drained:
            self._drained = True
            text = "a node is being drained: a checkpoint is saved at once"
            places.directory.note("draining", step, self._generation, text)
            yield Incident(kind="draining", text=text, step=step)
            yield from saver.begin(group, step, self._generation, described)
            yield from saver.finish(group)
        return change

    def _finish(self, directory: RunDirectory) -> Iterator[Event]:
        """Nothing runs any more, and all spans that were streamed are in the files."""
        step = self._step_now
        if spans := last_trace(directory.path / "trace"):
            directory.write_trace(spans)
        complete = step == self._config.train.steps
        report = build_report(directory.records(), self._config, complete=complete, serial=self._plan.serial)
        if trouble := directory.write_report(report):
            yield Incident(kind="failed", text=trouble, step=step)
        directory.note("finished", step, self._generation, "complete" if complete else "stopped early")
        yield Finished(complete=complete, report=report)

    def _meet(self, group: WorkerGroup) -> str:
        """A new generation: lost ranks are replaced, and all of them find each other.

        Returns which kernels they chose (`Rank.setup`).
        """
        failure, timeout_s = self._interruptions.failure, self._config.cluster.group_timeout_s
        if failure is not None:
            with self._interruptions.timed("replace"):
                group.replace(failure.gone)
        with self._interruptions.timed("rendezvous"):
            if failure is not None:
                group.call_all(Rank.leave)
            self._generation += 1
            group.expect(timeout_s)
            group.call_all(Rank.open_log, str(self._config.run_directory), self._generation)
            shift = partner_shift(group.hosts, self._config.layout().mesh)
            meeting = rendezvous(group, timeout_s, self._generation, shift)
            kernels, *_ = group.call_all(Rank.setup, self._plan, meeting)
            if self._config.overlap.profile is not None:
                check_hardware(group, self._plan.profile, str(self._config.overlap.profile))
        return kernels

    def _expect(self, group: WorkerGroup, records: Sequence[StepRecord]) -> None:
        """How long ranks may be without progress, now that steps have been seen."""
        slowest = max(record.seconds for record in records)
        group.expect(max(self._config.failure.stall_s, _STALL_STEPS * slowest))

    def _described(self, facts: dict[str, Any]) -> dict[str, Any]:
        """What manifests of checkpoints say beside their files."""
        return manifest_facts(self._config.layout(), data_cursor(self._config, facts), self._plan.shape)
