"""One generation of a run: its ranks meet, restore the state, and train.

A generation ends with the run, with a failure, or when the number of ranks should change; the controller
(`controller.py`) begins the next one.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from braid.actors.config import Config
from braid.actors.controller.elastic import Change
from braid.actors.controller.group import Collector, WorkerGroup
from braid.actors.controller.homes import Homes
from braid.actors.controller.interruptions import Interruptions
from braid.actors.controller.manifest import CheckpointError
from braid.actors.controller.meeting import placement_notes, rendezvous
from braid.actors.controller.mirror import MirrorError
from braid.actors.controller.profiling import check_hardware
from braid.actors.controller.records import WINDOW, Event, Incident, RunDirectory, Started
from braid.actors.controller.recovery import Changed, cost_of_a_failure, partner_shift
from braid.actors.controller.resizing import Resizing
from braid.actors.controller.restoring import Patience, data_cursor, restore
from braid.actors.controller.saving import Saver, manifest_facts
from braid.actors.controller.step_record import StepRecord
from braid.actors.controller.steps import StepClock, Stepper
from braid.actors.controller.watch import Watch
from braid.actors.stage.messages import RunPlan
from braid.actors.stage.rank import Rank
from braid.scheduling.topology import Topology

_STALL_STEPS = 3
"""Ranks may be without progress for as long as so many steps take, if ``failure.stall_s`` is less."""


@dataclass(frozen=True)
class Places:
    """Where a run keeps what it leaves behind."""

    directory: RunDirectory
    homes: Homes
    saver: Saver
    collector: Collector


@dataclass(kw_only=True)
class RunState:
    """How far a run is; generations continue it."""

    plan: RunPlan
    interruptions: Interruptions
    resizing: Resizing
    stop: threading.Event
    """Set when the run is asked to stop."""
    until: int | None
    """The run stops, with a checkpoint, after this step instead of ``train.steps``."""
    generation: int = 0
    step: int = 0
    """Steps that are done."""
    trained: bool = False
    """Whether a step was done since this controller began, or the controller whose run it takes over did
    one: what ranks raise from then on is no mistake of the user's."""
    resumed: bool = False
    """Whether the run began from a checkpoint."""
    shift: int | None = None
    """How much further the rank is that keeps a rank's copies (`recovery.partner_shift`)."""
    clock: StepClock = field(default_factory=StepClock)
    described: dict[str, Any] = field(default_factory=dict)
    """What manifests of checkpoints say beside their files, once the ranks have met."""
    drained: bool = False
    """Whether a checkpoint was saved since a node is being drained."""

    @property
    def config(self) -> Config:
        """The configuration, with the present layout."""
        return self.plan.config


class Generation:
    """The ranks of a group from their meeting on."""

    def __init__(self, run: RunState, places: Places, group: WorkerGroup) -> None:
        self._run, self._places, self._group = run, places, group

    def train(self) -> Generator[Event, None, Change | None]:
        """Meet, restore and train: to the end, until the run is asked to stop, or until the change that is
        returned is due. Raises `WorkerError` if a rank fails, `StoppedError` if the run was asked to stop
        before the first step, `CheckpointError` if the state cannot be restored or its last save failed."""
        run, group, places = self._run, self._group, self._places
        directory, saver = places.directory, places.saver
        with group.heeding(run.stop.is_set):
            kernels = self._meet()
            facts = group.call(0, Rank.data_facts)
        plan, layout = run.plan, run.config.layout()
        failure = run.interruptions.failure
        yield from saver.late_ones()
        goes_on = run.resumed or saver.published or bool(places.homes.steps())
        patience = Patience(
            seconds=run.config.elastic.wait_s if run.trained else 0.0, stopped=run.stop.is_set
        )
        with run.interruptions.timed("restore"), group.heeding(run.stop.is_set):
            done, notes = yield from restore(
                group, places.homes, plan, facts, failure, goes_on=goes_on, patience=patience
            )
            self._pair_copies(done)
        notes = (*notes, kernels) if kernels else notes
        saver.resumed(done)
        if run.config.cluster.emulated_link_mbit is None:  # else it is what the user wants to see
            notes = (*notes, *placement_notes(Topology(layout.mesh, group.hosts), plan.streams))
        cluster = {"controller": os.getpid(), **group.describe()}
        directory.describe(run.config, plan.shape, plan.schedule, cluster, plan.files)
        records = deque(directory.rewind(done + 1), WINDOW)
        yield from self._claim_mirror()
        group.call_all(Rank.stream_spans, places.collector.target, run.generation)
        last = min(run.config.train.steps, run.until or run.config.train.steps)
        yield Started(
            first_step=done + 1,
            last_step=last,
            ranks=layout.ranks,
            layout=layout.describe(),
            run_directory=str(directory.path),
            notes=notes,
            at_risk=cost_of_a_failure(run.config),
        )
        directory.note("started", done, run.generation, f"{layout.ranks} ranks", notes=list(notes))
        watch = Watch(places.collector, directory, layout)
        described = run.described = manifest_facts(layout, data_cursor(run.config, facts), plan.shape)
        step = run.step = done
        yield from saver.step_done(group, step, run.generation, described)
        clock = run.clock
        clock.goes_on(done)
        stepper = Stepper(plan, group, run.generation, facts, run.interruptions.spikes, clock)
        change: Change | None = None
        while step < last and not run.stop.is_set() and change is None:
            event, told = stepper.run(step, last, list(records))
            with clock.part("records"):
                directory.append(event.record, event.ranks)
            records.append(event.record)
            yield event
            step += 1
            run.step, run.trained = step, True
            for incident in told:
                directory.note(incident.kind, step, run.generation, incident.text)
                yield incident
            self._recovered(done)
            self._expect(records)
            with clock.part("records"):
                yield from watch.look(step, run.generation, event.ranks)
            with clock.part("save"):
                yield from saver.step_done(group, step, run.generation, described)
            if step < last:
                with clock.part("nodes"):
                    change = yield from self._look_around(watch, records, last, described)
        yield from saver.finish(group)
        if saver.last_step != step and step:
            yield from saver.begin(group, step, run.generation, described)
            yield from saver.finish(group)
            if saver.last_step != step:
                raise CheckpointError(
                    f"step {step} is done, but its checkpoint {saver.why_not}, in "
                    f"{places.homes.store.directory}; mend that and go on with --resume from the newest "
                    f"checkpoint there"
                )
        if change is None:
            self._recovered(done)  # from a failure after the last step, too
            yield from saver.settle()
        return change

    def _claim_mirror(self) -> Iterator[Incident]:
        """Say in the mirror that this run has begun, once it has."""
        run, places = self._run, self._places
        if places.homes.mirror is not None:
            try:
                places.homes.mirror.begin()
            except MirrorError as error:  # the mirror may answer when the first checkpoint is copied
                places.directory.note("telemetry", run.step, run.generation, str(error))
                yield Incident(kind="failed", text=str(error), step=run.step)

    def _look_around(
        self,
        watch: Watch,
        records: Sequence[StepRecord],
        last: int,
        described: dict[str, Any],
    ) -> Generator[Event, None, Change | None]:
        """The change to make before the next step, if one is due; a drained node asks for a checkpoint."""
        run, group, places = self._run, self._group, self._places
        step, saver = run.step, places.saver
        change = run.resizing.look(
            group,
            run.config,
            watch.slowest,
            lambda: median(record.seconds for record in records),
            last - step,
        )
        if change is not None and not run.resizing.leaving:
            change = yield from self._affordable(change, described)
        if run.resizing.leaving and change is None and not run.drained:
            run.drained = True
            text = "a node is being drained: a checkpoint is saved at once"
            places.directory.note("draining", step, run.generation, text)
            yield Incident(kind="draining", text=text, step=step)
            yield from saver.begin(group, step, run.generation, described)
            yield from saver.finish(group)
        return change

    def _affordable(self, change: Change, described: dict[str, Any]) -> Generator[Event, None, Change | None]:
        """A change that the run could do without, if its state can be saved; None where the disk is full."""
        run, saver = self._run, self._places.saver
        if not saver.failing and saver.last_step != run.step:
            yield from saver.begin(self._group, run.step, run.generation, described)
            yield from saver.finish(self._group)
        return None if saver.failing else change

    def _recovered(self, first_step: int) -> None:
        """After a step, record the failures and changes that the run has recovered from with it."""
        run, directory = self._run, self._places.directory
        now = time.time()
        for over in run.interruptions.step_done(run.step, now):
            directory.incident(**over.facts(now, first_step, run.generation))
            if isinstance(over, Changed) and run.resizing.membership is not None:
                run.resizing.membership.cost_s = now - over.time

    def _meet(self) -> str:
        """A new generation: lost ranks are replaced, and all of them find each other.

        Returns which kernels they chose (`Rank.setup`).
        """
        run, group = self._run, self._group
        failure, timeout_s = run.interruptions.failure, run.config.cluster.group_timeout_s
        if failure is not None:
            with run.interruptions.timed("replace"):
                group.replace(failure.gone)
        with run.interruptions.timed("rendezvous"):
            if failure is not None:
                group.call_all(Rank.leave)
            run.generation += 1
            group.expect(timeout_s)
            group.call_all(Rank.open_log, str(run.config.run_directory), run.generation)
            if failure is None or run.shift is None:
                run.shift = partner_shift(group.hosts, run.config.layout().mesh)
            # After a failure copies stay where they are until the state is restored from them.
            meeting = rendezvous(group, timeout_s, run.generation, run.shift)
            kernels, *_ = group.call_all(Rank.setup, run.plan, meeting)
            if run.config.overlap.profile is not None:
                check_hardware(group, run.plan.profile, str(run.config.overlap.profile))
        return kernels

    def _pair_copies(self, done: int) -> None:
        """Where lost ranks were replaced on other hosts, copies go to other partners from now on."""
        run, group = self._run, self._group
        shift = partner_shift(group.hosts, run.config.layout().mesh)
        if run.config.checkpoint.copies_every and shift != run.shift:
            group.call_all(Rank.pair_copies, shift)
            group.call_all(Rank.keep_copy, done)
        run.shift = shift

    def _expect(self, records: Sequence[StepRecord]) -> None:
        """How long ranks may be without progress, now that steps have been seen."""
        run, group = self._run, self._group
        slowest = max(record.seconds for record in records)
        group.expect(max(run.config.failure.stall_s, _STALL_STEPS * slowest))
