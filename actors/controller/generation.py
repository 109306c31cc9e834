"""Runs one generation: its ranks meet, restore the newest state, and train.

A generation ends with the run, with a failure, or when the number of ranks should change; the controller
(`controller.py`) begins the next one.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from braid.actors.config import Config
from braid.actors.controller.profiling import check_hardware
from braid.actors.controller.ranks.elastic import Change, Resizing
from braid.actors.controller.ranks.failures import Interruptions
from braid.actors.controller.ranks.group import Collector, NoRoomError, StoppedError, WorkerGroup, rendezvous
from braid.actors.controller.records.run_records import WINDOW, Event, Incident, RunDirectory, Started
from braid.actors.controller.records.step_record import StepRecord
from braid.actors.controller.state.checkpoint_stores import AwayError, Found, Homes
from braid.actors.controller.state.manifest import CheckpointError
from braid.actors.controller.state.mirror import MirrorError
from braid.actors.controller.state.recovery import cost_of_a_failure, newest_common, partner_shift
from braid.actors.controller.state.saving import Saver, manifest_facts
from braid.actors.controller.steps import StepClock, Stepper, Watch
from braid.actors.stage.rank.interface import Rank
from braid.actors.stage.rank.messages import RunPlan
from braid.scheduling.mesh.topology import Topology

_STALL_STEPS = 3
"""Number of steps for whose time ranks may make no progress, if that is more than ``failure.stall_s``."""
_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 1.0, 30.0
"""Seconds between two tries to reach checkpoints: doubled each time, up to the second number."""


@dataclass(kw_only=True)
class RunState:
    """State of a run: where it keeps its files, and how far it is; generations continue it."""

    plan: RunPlan
    directory: RunDirectory
    homes: Homes
    saver: Saver
    collector: Collector
    interruptions: Interruptions
    resizing: Resizing
    stop: threading.Event
    """Set when the run is asked to stop."""
    last: int
    """Step after which the run stops, with a checkpoint."""
    generation: int = 0
    step: int = 0
    """Number of steps done."""
    trained: bool = False
    """Whether this controller, or the one whose run it takes over, has done a step: from then on, errors of
    ranks are not mistakes of the user."""
    resumed: bool = False
    """Whether the run began from a checkpoint."""
    shift: int | None = None
    """Difference between a rank and the rank that keeps its copies (`recovery.partner_shift`)."""
    clock: StepClock = field(default_factory=StepClock)
    drained: bool = False
    """Whether a checkpoint was saved since a node began to be drained."""

    @property
    def config(self) -> Config:
        return self.plan.config

    def tell(self, kind: str, text: str, shown_as: str = "", **facts: Any) -> Incident:
        """Record an event like `RunDirectory.note`, for the present step and generation."""
        return self.directory.note(kind, self.step, self.generation, text, shown_as, **facts)

    def on_what_is_left(self, error: NoRoomError, why: str, left: int = 0) -> Generator[Event, None, Change]:
        """Call `Resizing.what_is_left` for the present step."""
        fixed = self.config, self.step, self.stop.is_set
        return (yield from self.resizing.what_is_left(error, why, left, *fixed))


class Generation:
    """Trains with the ranks of a group, from their rendezvous on."""

    def __init__(self, run: RunState, group: WorkerGroup) -> None:
        self._run, self._group = run, group

    def train(self) -> Generator[Event, None, Change | None]:
        """Let ranks meet, restore and train: to the end, until the run is asked to stop, or until a change is
        due, which is returned. Raise `WorkerError` if a rank fails, `StoppedError` if the run was asked to
        stop before the first step, `CheckpointError` if the state cannot be restored or its last save failed.
        """
        run, group, saver, clock = self._run, self._group, self._run.saver, self._run.clock
        first_step, records, stepper = yield from self._begin()
        watch = Watch(run.collector, run.directory, run.config.layout())
        yield from saver.step_done(run.step)
        clock.goes_on(run.step)
        change: Change | None = None
        while run.step < run.last and not run.stop.is_set() and change is None:
            event, texts = stepper.run(run.step, run.last, list(records))
            with clock.part("records"):
                run.directory.append(event.record, event.ranks)
            records.append(event.record)
            yield event
            run.step, run.trained = run.step + 1, True
            for text in texts:
                yield run.tell("guard", text)
            self._recovered(first_step)
            stall_s = _STALL_STEPS * max(record.seconds for record in records)
            group.expect(max(run.config.failure.stall_s, stall_s))
            with clock.part("records"):
                yield from watch.look(run.step, run.generation, event.ranks)
            with clock.part("save"):
                yield from saver.step_done(run.step, event.record.validation_loss)
            if run.step < run.last:
                with clock.part("nodes"):
                    change = yield from self._look_around(watch, records)
        yield from saver.finish()
        if saver.last_step != run.step and run.step:
            yield from self._save()
            if saver.last_step != run.step:
                raise CheckpointError(
                    f"step {run.step} is done, but its checkpoint {saver.why_not}, in "
                    f"{run.homes.store.directory}; mend that and go on with resume=True from the newest "
                    f"checkpoint there"
                )
        if change is None:
            self._recovered(first_step)  # also from a failure after the last step
            yield from saver.settle()
        return change

    def _begin(self) -> Generator[Event, None, tuple[int, deque[StepRecord], Stepper]]:
        """Let ranks meet and restore; return how many steps are done, the newest of their records, and the
        object that runs the next steps."""
        run, group, directory = self._run, self._group, self._run.directory
        with group.heeding(run.stop.is_set):
            kernels = self._meet()
            facts = group.call(0, Rank.data_facts)
        plan, layout, config = run.plan, run.config.layout(), run.config
        yield from run.saver.late_ones()
        data = {  # determines, together with the step, which samples come next
            "fingerprint": facts["fingerprint"],
            "seed": config.train.seed,
            "global_batch": config.train.global_batch,
        }
        with run.interruptions.timed("restore"), group.heeding(run.stop.is_set):
            done, notes = yield from self._restore(data)
            self._pair_copies(done)
        stored = manifest_facts(layout, data, plan.shape, config.train.states)
        run.saver.goes_on(done, group, run.generation, stored)
        notes += [kernels] if kernels else []
        if config.cluster.emulated_link_mbit is None:  # else the slow link is what the user wants to see
            notes += Topology(layout.mesh, group.hosts).warnings()
        cluster = {"controller": os.getpid(), **group.describe()}
        directory.describe(plan, cluster)
        records = deque(directory.rewind(done + 1), WINDOW)
        if run.homes.mirror is not None:
            try:
                run.homes.mirror.begin()
            except MirrorError as error:  # the mirror may answer when the first checkpoint is copied
                yield run.tell("telemetry", str(error), shown_as="failed")
        group.call_all(Rank.stream_spans, run.collector.target, run.generation)
        yield Started(
            first_step=done + 1,
            last_step=run.last,
            ranks=layout.ranks,
            layout=layout.describe(),
            run_directory=str(directory.path),
            notes=tuple(notes),
            at_risk=cost_of_a_failure(config),
        )
        run.step = done
        run.tell("started", f"{layout.ranks} ranks", notes=notes)
        return done, records, Stepper(plan, group, run.generation, facts, run.interruptions, run.clock)

    def _save(self) -> Iterator[Event]:
        yield from self._run.saver.begin(self._run.step)
        yield from self._run.saver.finish()

    def _look_around(
        self, watch: Watch, records: Iterable[StepRecord]
    ) -> Generator[Event, None, Change | None]:
        """Return the change to make before the next step, if any; save a checkpoint if a node is being
        drained.

        A change that the run could do without is not made if its state cannot be saved because the disk is
        full.
        """
        run, saver, resizing = self._run, self._run.saver, self._run.resizing
        step_s = median(record.seconds for record in records)
        change = resizing.look(self._group, run.config, watch.slowest, step_s, run.last - run.step)
        if change is not None and not resizing.leaving:
            if not saver.failing and saver.last_step != run.step:
                yield from self._save()
            if saver.failing:
                change = None
        if resizing.leaving and change is None and not run.drained:
            run.drained = True
            yield run.tell("draining", "a node is being drained: a checkpoint is saved at once")
            yield from self._save()
        return change

    def _recovered(self, first_step: int) -> None:
        """After a step, record the failures and changes from which the run has thereby recovered."""
        run, now = self._run, time.time()
        for over in run.interruptions.step_done(run.step, now):
            run.directory.incident(**over.line(now, first_step, run.generation))
            if over.kind == "resized":
                run.resizing.cost_s = now - over.time

    def _meet(self) -> str:
        """Begin a new generation: replace lost ranks, and let all ranks form their process groups.

        Return the names of the kernels that they chose (`Rank.setup`).
        """
        run, group = self._run, self._group
        failure, timeout_s = run.interruptions.failure, run.config.cluster.group_timeout_s
        if failure is not None:
            with run.interruptions.timed("replace"):
                group.replace(failure.facts["replaced"])
        with run.interruptions.timed("rendezvous"):
            if failure is not None:
                group.call_all(Rank.leave)
            run.generation += 1
            group.expect(timeout_s)
            group.call_all(Rank.open_log, str(run.config.run_directory), run.generation)
            if failure is None or run.shift is None:
                run.shift = partner_shift(group.hosts, run.config.layout().mesh)
            # After a failure, copies stay in place until the state is restored from them.
            meeting = rendezvous(group, timeout_s, run.generation, run.shift)
            kernels, *_ = group.call_all(Rank.setup, run.plan, meeting)
            if run.config.overlap.profile is not None:
                check_hardware(group, run.plan.profile, str(run.config.overlap.profile))
        return kernels

    def _restore(self, data: dict[str, Any]) -> Generator[Incident, None, tuple[int, list[str]]]:
        """Bring the ranks to the newest available state; return its number of steps, and notes to report.

        After a failure that is the newest state among the copies in memory and the good checkpoints; else the
        newest good checkpoint if the run is resumed, or initial weights. ``data``: facts that determine the
        sample order. Raise `CheckpointError` if the run is resumed and there is no good checkpoint, or none
        becomes reachable in time.
        """
        run, group, config, homes = self._run, self._group, self._run.config, self._run.homes
        failure, copies = run.interruptions.failure, config.checkpoint.copies_every
        goes_on = run.resumed or run.saver.published or bool(homes.steps())
        if failure is not None and copies:
            common = newest_common(group.call_all(Rank.copies_held), config.layout().mesh, failure.step)
            # Checkpoints of later steps are damaged ones from which the run once fell back.
            saved = max((step for step in homes.steps() if step <= failure.step), default=0)
            if common is not None and common[0] >= saved:
                group.call_all(Rank.restore_copies, *common)
                failure.facts["restored_from"] = "copies in memory"
                return common[0], []
        done, notes = 0, list[str]()
        if goes_on:
            checkpoint = yield from self._newest_checkpoint(failure.step if failure is not None else 0)
            done, notes = checkpoint.manifest.step, [*checkpoint.notes]
            if failure is not None:
                failure.facts["restored_from"] = f"checkpoint step-{done}"
            checkpoint.check_data(data)
            group.call_all(Rank.load, checkpoint.path, done)
        elif config.model.initial is not None:
            group.call_all(Rank.load_initial, str(config.model.initial))
        if copies:
            group.call_all(Rank.keep_copy, done)
        return done, notes

    def _newest_checkpoint(self, step: int) -> Generator[Incident, None, Found]:
        """Return the newest good checkpoint. Once a step is done, wait if checkpoints are unreachable: a
        missing disk may be mounted again, but a new beginning would lose the steps done."""
        run, told = self._run, False
        wait_s = run.config.elastic.wait_s if run.trained else 0.0
        deadline, pause = time.monotonic() + wait_s, _LOOK_SECONDS
        while True:
            try:
                return run.homes.newest_of(run.plan.shape, self._verify)
            except AwayError as error:
                left = deadline - time.monotonic()
                if not wait_s:
                    raise
                what = error.what
                if left <= 0:
                    waited = f"waited {wait_s:g} s for it to come back (elastic.wait_s)"
                    end = f"{what}; {waited}; bring it back and go on with resume=True"
                    raise CheckpointError(end) from None
            if not told:
                told = True
                yield Incident(kind="waiting", text=f"{what}; waiting for it to come back", step=step)
            if run.stop.wait(min(pause, left)):
                raise StoppedError
            pause = min(2 * pause, _LONGEST_LOOK_SECONDS)

    def _verify(self, checkpoint: Path) -> None:
        """Let each rank read its share of a checkpoint's files; raise `CheckpointError`, which names a
        damaged file."""
        damages: list[str | None] = self._group.call_all(Rank.damage, str(checkpoint))
        if texts := sorted({text for text in damages if text is not None}):
            raise CheckpointError(f"checkpoint {checkpoint}: {texts[0]}")

    def _pair_copies(self, done: int) -> None:
        """If lost ranks were replaced on other hosts, send copies to new partners from now on."""
        run, group = self._run, self._group
        shift = partner_shift(group.hosts, run.config.layout().mesh)
        if run.config.checkpoint.copies_every and shift != run.shift:
            group.call_all(Rank.pair_copies, shift)
            group.call_all(Rank.keep_copy, done)
        run.shift = shift
