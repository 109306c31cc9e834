"""Drives a run: start ranks, rendezvous, step, validate, save, write down. Never touches a tensor.

A plain class: it runs in a Ray actor (`braid.actors.controller.actor`) or in the process of the command line.
A run is a sequence of generations: the first one, and one after every failure or change of membership, each
with process groups of its own. Who its ranks are and where their state comes from is decided at its begin.
"""

import json
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from braid.actors.config import Config
from braid.actors.controller.elastic import Change
from braid.actors.controller.generation import Generation, Places, RunState
from braid.actors.controller.group import (
    Launcher,
    NoRoomError,
    StoppedError,
    WorkerError,
    WorkerGroup,
)
from braid.actors.controller.homes import Homes, begun_mark
from braid.actors.controller.interruptions import Interruptions
from braid.actors.controller.records import (
    Event,
    Finished,
    Incident,
    RunDirectory,
    check_run_directory,
    identity_of,
)
from braid.actors.controller.recovery import Changed, Failure, in_words
from braid.actors.controller.reporting import build_report
from braid.actors.controller.rescue import rescue
from braid.actors.controller.resizing import Resizing
from braid.actors.controller.saving import Saver
from braid.actors.controller.steps import GuardError
from braid.actors.stage.messages import RunPlan
from braid.scheduling.spec import ModelShape


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run starts and ends, beside its configuration."""

    resume: bool = False
    overwrite: bool = False
    until: int | None = None
    """Stop, with a checkpoint, after this step instead of ``train.steps``."""
    again: bool = False
    """Where no home has a checkpoint, ``resume`` begins anew: for whoever starts a run again by itself."""
    takes_over: bool = False
    """Another controller of the same command has died; this one goes on with its run."""


Replan = Callable[[Config, Launcher], RunPlan]
"""Plans a run anew, for the layout of a configuration."""


def check_begin(config: Config, options: RunOptions, shape: ModelShape) -> None:
    """Refuse what a run cannot begin with, or go on from, before anything starts.

    `ConfigError` for its directory; `CheckpointError` for checkpoints that are missing, damaged (by their
    manifests), or of another model or order of samples; `MirrorError` for a mirror that does not answer.
    """
    resume, mark = _resumes(config, options)
    check_run_directory(config, resume=resume, overwrite=options.overwrite, mark=mark)
    if not resume:
        return
    homes = Homes.of(config, identity_of(config.run_directory, config.name, mark), resume=True)
    if not options.again or homes.begun():
        train = config.train
        found = homes.newest_of(shape)
        found.check_data({"seed": train.seed, "global_batch": train.global_batch})


def _resumes(config: Config, options: RunOptions) -> tuple[bool, str]:
    """Whether a run goes on, and the mark of the one that it goes on with."""
    mark = begun_mark(config) if options.resume else ""
    begins_anew = options.again and not mark and not config.run_directory.is_dir()
    return options.resume and not begins_anew, mark


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
        self._replan, self._launcher, self._options = replan, launcher, options
        self._stop = threading.Event()
        self._run = RunState(
            plan=plan,
            interruptions=Interruptions(plan.config.failure),
            resizing=Resizing(plan.config, launcher, plan.shape.vocabulary),
            stop=self._stop,
            until=options.until,
        )

    def stop(self) -> None:
        """Ask the run to end after the step under way, with a checkpoint; callable from any thread."""
        self._stop.set()

    def run(self) -> Iterator[Event]:
        """Train. Raises `ConfigError`, `CheckpointError` or `WorkerError`, and `StoppedError` if the run was
        asked to stop before it began; leaves nothing running."""
        run, options, config = self._run, self._options, self._run.config
        resume, mark = _resumes(config, options)
        directory = RunDirectory(config, resume=resume, overwrite=options.overwrite, mark=mark)
        try:
            run.generation = directory.last_generation
            run.interruptions.failure = directory.unfinished() if resume else None
            run.trained = options.takes_over and run.interruptions.failure is not None
            homes = Homes.of(config, directory.identity, resume=resume)
            saver = Saver(homes, directory, config.checkpoint)
            try:
                run.resumed = resume and (not options.again or homes.begun())
                if run.trained:  # its home may be away for a while
                    run.step = run.interruptions.failure.step if run.interruptions.failure else 0
                elif run.resumed:  # errors show before anything starts; ranks verify all files later
                    run.step = homes.newest_of(run.plan.shape).manifest.step
                budget = config.telemetry.trace_mb_per_rank << 20
                with self._launcher.collector(directory.path / "trace", budget) as collector:
                    try:
                        yield from self._generations(Places(directory, homes, saver, collector))
                    except StoppedError:
                        if not run.step:
                            raise
                        yield from self._stopped_short(directory, saver)
                yield from self._finish(directory)
            finally:
                saver.close()
        finally:
            directory.close()

    def _generations(self, places: Places) -> Iterator[Event]:
        """One set of ranks after the other, until the run is over."""
        change: Change | None = None
        avoid: tuple[str, ...] = ()
        while True:
            try:
                if change is not None:
                    yield from self._replanned(change, places)
                    avoid, change = change.avoid, None
                group = self._launcher.start(self._run.config.layout().ranks, avoid, self._stop.is_set)
            except NoRoomError as error:  # nodes left while nothing ran
                change = yield from self._on_what_is_left(error, "not all nodes are there")
                continue
            except WorkerError as error:  # a rank that measures, or one that does not start
                yield from self._restarts(self._survived(error, places), places)
                if change is not None:  # there may be fewer nodes by now
                    lost = NoRoomError(str(error).splitlines()[0])
                    change = yield from self._on_what_is_left(lost, "measuring for the new layout failed")
                continue
            self._run.resizing.started()
            try:
                change = yield from self._with_ranks(group, places)
            finally:
                group.shutdown()
            if change is None:
                return

    def _with_ranks(self, group: WorkerGroup, places: Places) -> Generator[Event, None, Change | None]:
        """Generations on as many ranks, until the run is over or should go on with other ranks."""
        while True:
            try:
                return (yield from Generation(self._run, places, group).train())
            except NoRoomError as error:
                left = len(group.left())
                yield from self._rescue(group, places)
                group.shutdown()
                return (yield from self._on_what_is_left(error, "a node is lost", left))
            except WorkerError as error:
                try:
                    failure = self._survived(error, places)
                except WorkerError:
                    yield from self._rescue(group, places)
                    raise
                with self._run.interruptions.timed("interrupt"):
                    failure.gone = tuple(group.interrupt(self._run.generation))
                places.saver.abandon()
                yield from self._restarts(failure, places)
            except (StoppedError, ValueError, OSError):
                yield from self._rescue(group, places)
                raise

    def _rescue(self, group: WorkerGroup, places: Places) -> Iterator[Event]:
        """The run, or its layout, is about to end: what ranks hold in memory becomes a checkpoint."""
        run = self._run
        if run.config.checkpoint.copies_every:
            group.interrupt(run.generation)
            places.saver.abandon()
            run.generation += 1  # a folder and a meeting of its own
            yield from rescue(
                group, run.config, places.saver, places.directory, run.generation, run.step, run.described
            )

    def _on_what_is_left(self, error: NoRoomError, why: str, left: int = 0) -> Generator[Event, None, Change]:
        run = self._run
        return (
            yield from run.resizing.what_is_left(run.config, error, why, left, run.step, self._stop.is_set)
        )

    def _replanned(self, change: Change, places: Places) -> Iterator[Event]:
        """Plan the run for another layout; `NoRoomError` if that is refused, so that another one is taken."""
        assert self._replan is not None
        run, config = self._run, change.degrees.of(self._run.config)
        before, after = run.config.layout(), config.layout()
        run.interruptions.change(Changed(change.reason, run.step, time.time(), before.ranks, after.ranks))
        text = f"{change.reason}; from {before.describe()} to {after.describe()}"
        places.directory.note("resized", run.step, run.generation, text)
        yield Incident(kind="resized", text=text, step=run.step)
        try:
            with run.interruptions.timed("plan"):
                run.plan = self._replan(config, self._launcher)
        except NoRoomError:
            raise
        except ValueError as error:
            run.resizing.refuse(change.degrees)
            raise NoRoomError(f"{after.describe()} cannot be planned: {error}") from None

    def _survived(self, error: WorkerError, places: Places) -> Failure:
        """What failed, if the run tolerates it; else raises it again."""
        run = self._run
        failure = Failure(
            rank=error.rank,
            text=str(error).splitlines()[0],
            step=run.step,
            time=time.time(),
            unwell_seconds=error.unwell_seconds,
        )
        if isinstance(error, GuardError) or (error.user_error and not run.trained):
            raise error
        if self._stop.is_set() or not run.interruptions.goes_on_after(error):
            places.directory.note("failed", run.step, run.generation, failure.text)
            raise error
        run.interruptions.failure = failure
        return failure

    def _restarts(self, failure: Failure, places: Places) -> Iterator[Event]:
        """Tell of a failure that the next generation makes up for, and wait before another try."""
        text = f"{failure.text}; {in_words(failure.gone)}, all ranks go on as a new generation"
        text += self._run.interruptions.counted
        places.directory.note("restarted", failure.step, self._run.generation, text)
        yield Incident(kind="restarted", text=text, step=failure.step)
        self._stop.wait(self._run.interruptions.wait_s)

    def _stopped_short(self, directory: RunDirectory, saver: Saver) -> Iterator[Event]:
        """The run was asked to stop while it had no ranks that could save its newest steps."""
        run, saved = self._run, saver.last_step or 0
        if run.trained and saved < run.step:
            text = f"stopped in a recovery; the newest checkpoint is of step {saved}, {run.step} were done"
            directory.note("telemetry", run.step, run.generation, text)
            yield Incident(kind="failed", text=text, step=run.step)
            run.step = saved

    def _finish(self, directory: RunDirectory) -> Iterator[Event]:
        """Nothing runs any more."""
        run, step = self._run, self._run.step
        complete = step == run.config.train.steps
        predicted = json.loads(run.plan.files.get("predicted.json", "{}")).get("step_seconds")
        report = build_report(
            directory.records(),
            run.config,
            complete=complete,
            serial=run.plan.serial,
            predicted_seconds=predicted,
        )
        if trouble := directory.write_report(report):
            yield Incident(kind="failed", text=trouble, step=step)
        directory.note("finished", step, run.generation, "complete" if complete else "stopped early")
        yield Finished(complete=complete, report=report)
