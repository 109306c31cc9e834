"""Drives a run: starts ranks, lets them meet, step, validate and save, and records it. Never touches a
tensor.

It is a plain class: it runs in a Ray actor (`braid.actors.controller.actor`) or in the process of the command
line. A run is a sequence of generations: the first one, and one after every failure or change of membership,
each with its own process groups. At its begin, the ranks and the source of their state are decided.
"""

import contextlib
import json
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial

from braid.actors.config import Config
from braid.actors.controller.generation import Generation, RunState
from braid.actors.controller.ranks.elastic import Change, Resizing, can_be_planned
from braid.actors.controller.ranks.failures import GuardError, Interruptions
from braid.actors.controller.ranks.group import (
    Launcher,
    NoRoomError,
    StoppedError,
    WorkerError,
    WorkerGroup,
)
from braid.actors.controller.records.reporting import build_report
from braid.actors.controller.records.run_records import (
    Event,
    Finished,
    Incident,
    RunDirectory,
    check_run_directory,
    identity_of,
)
from braid.actors.controller.state.checkpoint_stores import Homes, begun_mark
from braid.actors.controller.state.manifest import CheckpointError
from braid.actors.controller.state.recovery import Interruption, failure_of, rank_names
from braid.actors.controller.state.saving import Saver
from braid.actors.stage.rank.messages import RunPlan
from braid.scheduling.model.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of how a run starts and ends, which are not part of its configuration."""

    resume: bool = False
    overwrite: bool = False
    until: int | None = None
    """Step after which to stop, with a checkpoint, instead of after ``train.steps``."""
    again: bool = False
    """Whether ``resume`` begins a new run if there is no checkpoint; for schedulers that restart runs
    automatically."""
    takes_over: bool = False
    """Whether another controller of the same command has died and this one continues its run."""


Replan = Callable[[Config, Launcher], RunPlan]
"""Plans a run again, for the layout of a configuration."""


def check_begin(config: Config, options: RunOptions, shape: ModelShape) -> None:
    """Refuse a run that cannot begin or be resumed, before anything starts.

    Raise `ConfigError` for its directory; `CheckpointError` for checkpoints that are missing, damaged (by
    their manifests), or of another model or sample order; `MirrorError` for a mirror that does not answer.
    """
    resume, mark = _resumes(config, options)
    check_run_directory(config, resume=resume, overwrite=options.overwrite, mark=mark)
    if not resume:
        return
    homes = Homes.of(config, identity_of(config.run_directory, config.name, mark))
    if not options.again or homes.begun():
        train = config.train
        newest = homes.newest_of(shape)
        if (done := newest.manifest.step) > train.steps:
            raise CheckpointError(
                f"checkpoint {newest.path} is of step {done}, beyond train.steps={train.steps}; raise "
                f"train.steps above {done} to go on"
            )
        newest.check_data({"seed": train.seed, "global_batch": train.global_batch})
        newest.check_states(train)


def _resumes(config: Config, options: RunOptions) -> tuple[bool, str]:
    """Return whether the command resumes a run, and the mark of that run."""
    mark = begun_mark(config) if options.resume else ""
    begins_anew = options.again and not mark and not config.run_directory.is_dir()
    return options.resume and not begins_anew, mark


class Controller:
    def __init__(
        self, plan: RunPlan, launcher: Launcher, options: RunOptions, replan: Replan | None = None
    ) -> None:
        """``replan``: plans the run again for another layout; without it the number of ranks is fixed."""
        self._plan, self._replan, self._launcher, self._options = plan, replan, launcher, options
        self._stop = threading.Event()
        self._run: RunState

    def stop(self) -> None:
        """Ask the run to end after the current step, with a checkpoint; callable from any thread."""
        self._stop.set()

    def run(self) -> Iterator[Event]:
        """Train, and yield events as they happen. Raise `ConfigError`, `CheckpointError` or `WorkerError`,
        and `StoppedError` if the run was asked to stop before it began; leave no process running."""
        plan, options, config = self._plan, self._options, self._plan.config
        resume, mark = _resumes(config, options)
        with contextlib.ExitStack() as stack:
            directory = RunDirectory(config, resume=resume, overwrite=options.overwrite, mark=mark)
            stack.callback(directory.close)
            failure = directory.unfinished() if resume else None
            homes = Homes.of(config, directory.identity)
            saver = Saver(homes, directory, config.checkpoint)
            stack.callback(saver.close)
            resumed = resume and (not options.again or homes.begun())
            if options.takes_over and failure is not None:  # its checkpoints may be unreachable for a while
                step, trained = failure.step, True
            else:  # errors are raised before anything starts; ranks verify all files later
                step, trained = homes.newest_of(plan.shape).manifest.step if resumed else 0, False
            budget = config.telemetry.trace_mb_per_rank << 20
            fits = partial(can_be_planned, vocabulary=plan.shape.vocabulary)
            with self._launcher.collector(directory.path / "trace", budget) as collector:
                self._run = run = RunState(
                    plan=plan,
                    directory=directory,
                    homes=homes,
                    saver=saver,
                    collector=collector,
                    interruptions=Interruptions(config.failure, failure),
                    resizing=Resizing(config.elastic, self._launcher, fits),
                    stop=self._stop,
                    last=min(config.train.steps, options.until or config.train.steps),
                    generation=directory.last_generation,
                    step=step,
                    trained=trained,
                    resumed=resumed,
                )
                try:
                    yield from self._generations()
                except StoppedError:
                    if not run.step:
                        raise
                    saved = saver.last_step or 0
                    if run.trained and saved < run.step:  # no ranks were left to save the newest state
                        text = f"the newest checkpoint is of step {saved}, {run.step} were done"
                        yield run.tell("telemetry", f"stopped in a recovery; {text}", shown_as="failed")
                        run.step = saved
            yield from self._finish()

    def _generations(self) -> Iterator[Event]:
        """Run one set of ranks after the other, until the run is over."""
        change: Change | None = None
        avoid: tuple[str, ...] = ()
        while True:
            try:
                if change is not None:
                    yield from self._replanned(change)
                    avoid, change = change.avoid, None
                group = self._launcher.start(self._run.config.layout().ranks, avoid, self._stop.is_set)
            except NoRoomError as error:  # nodes left while no ranks ran
                change = yield from self._run.on_what_is_left(error, "not all nodes are there")
                continue
            except WorkerError as error:  # a rank failed while measuring, or did not start
                yield from self._restarts(self._survived(error))
                if change is not None:  # there may be fewer nodes by now
                    lost = NoRoomError(str(error).splitlines()[0])
                    change = yield from self._run.on_what_is_left(lost, "measuring for the new layout failed")
                continue
            self._run.resizing.started()
            try:
                change = yield from self._with_ranks(group)
            finally:
                group.shutdown()
            if change is None:
                return

    def _with_ranks(self, group: WorkerGroup) -> Generator[Event, None, Change | None]:
        """Run generations with a fixed number of ranks, until the run is over; return the change if it should
        continue with other ranks."""
        run = self._run
        while True:
            try:
                return (yield from Generation(run, group).train())
            except NoRoomError as error:
                left = len(group.left())
                yield from self._rescue(group)
                group.shutdown()
                return (yield from run.on_what_is_left(error, "a node is lost", left))
            except WorkerError as error:
                try:
                    failure = self._survived(error)
                except WorkerError:
                    yield from self._rescue(group)
                    raise
                with run.interruptions.timed("interrupt"):
                    failure.facts["replaced"] = group.interrupt(run.generation)
                run.saver.abandon()
                yield from self._restarts(failure)
            except (StoppedError, ValueError, OSError):
                yield from self._rescue(group)
                raise

    def _rescue(self, group: WorkerGroup) -> Iterator[Event]:
        """Save what ranks hold in memory as a checkpoint, before the run or its layout ends."""
        run = self._run
        if run.config.checkpoint.copies_every:
            group.interrupt(run.generation)
            run.saver.abandon()
            run.generation += 1  # the rescue needs a folder and a rendezvous of its own
            yield from run.saver.rescue(group, run.config, run.step, run.generation)

    def _replanned(self, change: Change) -> Iterator[Event]:
        """Plan the run for another layout; raise `NoRoomError` if planning refuses it, so that another one is
        chosen."""
        assert self._replan is not None
        run, config = self._run, change.degrees.of(self._run.config)
        before, after = run.config.layout(), config.layout()
        ranks = {"ranks": [before.ranks, after.ranks]}
        changed = Interruption(kind="resized", text=change.reason, step=run.step, facts=ranks)
        run.interruptions.change(changed)
        yield run.tell("resized", f"{change.reason}; from {before.describe()} to {after.describe()}")
        try:
            with run.interruptions.timed("plan"):
                run.plan = self._replan(config, self._launcher)
        except NoRoomError:
            raise
        except ValueError as error:
            run.resizing.refuse(change.degrees)
            raise NoRoomError(f"{after.describe()} cannot be planned: {error}") from None

    def _survived(self, error: WorkerError) -> Interruption:
        """Describe a failure that the run tolerates; raise the error again if it does not."""
        run, text = self._run, str(error).splitlines()[0]
        failure = failure_of(error.rank, text, run.step, error.unwell_seconds)
        if isinstance(error, GuardError) or (error.user_error and not run.trained):
            raise error
        if self._stop.is_set() or not run.interruptions.goes_on_after(error):
            run.tell("failed", text)
            raise error
        run.interruptions.failure = failure
        return failure

    def _restarts(self, failure: Interruption) -> Iterator[Event]:
        """Report a failure that the next generation recovers from, and wait before another try."""
        gone = failure.facts["replaced"]
        what = f"{rank_names(gone)} replaced" if gone else "no rank is lost"
        text = f"{failure.text}; {what}, all ranks go on as a new generation"
        yield self._run.tell("restarted", text + self._run.interruptions.counted)
        self._stop.wait(self._run.interruptions.wait_s)

    def _finish(self) -> Iterator[Event]:
        run = self._run
        complete = run.step == run.config.train.steps
        predicted = json.loads(run.plan.files.get("predicted.json", "{}")).get("step_seconds")
        records, serial = run.directory.records(), run.plan.serial
        report = build_report(
            records, run.config, complete=complete, serial=serial, predicted_seconds=predicted
        )
        if trouble := run.directory.write_report(report):
            yield Incident(kind="failed", text=trouble, step=run.step)
        run.tell("finished", "complete" if complete else "stopped early")
        yield Finished(complete=complete, report=report)
