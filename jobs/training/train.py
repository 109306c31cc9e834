"""Starts a run: prepares the data, plans, drives the controller, passes its events to a display."""

import contextlib
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from braid.actors.config import Config, ConfigError, load_config, parse_config
from braid.actors.config.paths import anchored, expanded
from braid.actors.controller.controller import Controller, RunOptions
from braid.actors.controller.decisions import SimulatedSchedule, find_or_decide
from braid.actors.controller.planning import build_schedule
from braid.actors.controller.profiling import Profiled, find_or_measure, known_profile
from braid.actors.controller.ranks.group import Launcher, StoppedError, WorkerError
from braid.actors.controller.ranks.processes import ProcessPlace
from braid.actors.controller.ranks.rank_environment import allow_open_files
from braid.actors.controller.records.run_records import (
    Event,
    Finished,
    Incident,
    Started,
    read_identity,
)
from braid.actors.controller.state.locks import FileHold
from braid.actors.controller.state.manifest import CheckpointStore
from braid.actors.stage.rank.log import log_file
from braid.actors.stage.rank.messages import Fault, RunPlan
from braid.dashboards.sinks import Sinks
from braid.jobs.cluster.session import launcher_of
from braid.jobs.data.data_sets import RECORD, data_record, prepare_data
from braid.jobs.data.hub import with_hub_files
from braid.jobs.data.prepare import Preparation, Prepared
from braid.jobs.data.tokenizer import tokenizer_of
from braid.jobs.planning.work import with_plan
from braid.jobs.training.beside_weights import check_base, keep, keep_base
from braid.jobs.training.callbacks import Callbacks
from braid.jobs.training.layouts import MeasuredLayout, left_open, with_layers, with_layout
from braid.jobs.training.page import LivePage
from braid.jobs.training.refusals import check_run
from braid.jobs.training.remarks import WITHOUT_BASE, on_learning_rate
from braid.jobs.training.stopping import SecondSignalError, StopSignals
from braid.jobs.training.tracking import network_tools, tell_event
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.schedule.text import write

IF_BEGUN: Final = "if-begun"
"""Value of ``resume`` that begins a run anew if there is no checkpoint."""
_TIDY_SECONDS = 10.0
"""Seconds to wait for the processes of a run that was stopped at once to end."""


@dataclass(frozen=True)
class Compared:
    """The alternatives that an ``auto`` of the configuration compared, first the fastest, which the run
    takes: schedules (``overlap.schedule``), or layouts (``parallel``, and choices for every layer)."""

    rows: Sequence[SimulatedSchedule] | Sequence[MeasuredLayout]


@dataclass(frozen=True)
class PageOpened:
    """The live page of the run is served on this machine."""

    address: str


Show = Callable[[Event | Prepared | Preparation | Profiled | Compared | PageOpened | str], None]
"""Receives what there is to report of a run; a string is a line for people."""


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What became of a run that ended without an error."""

    directory: Path
    """The run's directory, an absolute path; `braid.load_run` reads it."""
    report: Mapping[str, Any]
    """The content of ``report.json``."""
    stopped: str | None
    """Why the run ended before ``train.steps``: a callback's reason, or the signal or ``until``; None if it
    is complete."""

    @property
    def complete(self) -> bool:
        """Whether all steps are done."""
        return bool(self.report["complete"])

    @property
    def steps(self) -> int:
        """Number of steps that are done, also before this call."""
        return len(self.report["steps"])

    @property
    def loss(self) -> float | None:
        """Loss of the last step, in nats per token; None if no step is done."""
        return self.report["steps"][-1]["loss"] if self.steps else None

    @property
    def validation_loss(self) -> float | None:
        """Loss of the last validation, in nats per token; None if there was none."""
        return self.report["validation"]["loss"]


def train(
    config: Config | Mapping[str, Any] | Path | str,
    *,
    callbacks: Iterable[object] = (),
    resume: bool | Literal["if-begun"] = False,
    overwrite: bool = False,
    until: int | None = None,
) -> TrainingResult:
    """Train to the end, or until a callback, SIGINT, SIGTERM or SIGHUP stops the run with a checkpoint.

    ``config``: a configuration, its content as a mapping, or the path of its file. ``callbacks``: objects
    with methods of `Callback`. ``resume``: go on from the run's newest good checkpoint; with "if-begun",
    begin anew if there is none. ``overwrite``: replace a run of the same name. ``until``: stop after this
    step.

    Raise `ConfigError` (or another `ValueError`) for faults that the user can correct, `WorkerError` if a
    rank fails, the first exception of a callback, and `StoppedError` if the run is stopped before its first
    step. A second signal raises `SecondSignalError`, a `KeyboardInterrupt`: then the checkpoint under way is
    given up. Nothing that the run has started outlives the call.
    """
    signals = StopSignals()
    told = Callbacks(callbacks, signals.ask)
    try:
        config = anchored(expanded(_config(config)), Path.cwd())
        options = _options(resume, overwrite, until)
        report = report_of(training(config, options, told.hear, signals=signals))
        if told.error is not None:
            raise told.error
    except BaseException as error:
        raised = error
        if told.error is not None and isinstance(error, Exception):
            raised = told.error
        elif isinstance(error, StoppedError):
            raised = StoppedError("the run was stopped before its first step; nothing is lost")
        told.failed(raised)
        if raised is error:
            raise
        raise raised from (None if isinstance(error, StoppedError) else error)
    stopped = None
    if not report["complete"]:
        stopped = told.reason or ("a signal" if signals.asked_at is not None else f"until={until}")
    return TrainingResult(directory=config.run_directory, report=report, stopped=stopped)


def _config(given: Any) -> Config:
    """Return the configuration that a caller gives in any form."""
    match given:
        case Config():
            return given
        case Mapping():
            return parse_config(given)
        case str() | Path():
            return load_config(given)
    raise ConfigError(
        f"config={given!r} is a {type(given).__name__}; give a braid.Config, a mapping, or the path of a "
        f"YAML file"
    )


def _options(resume: Any, overwrite: Any, until: Any) -> RunOptions:
    """Check the arguments of `train`."""
    if resume not in (True, False, IF_BEGUN):
        raise ConfigError(f"resume={resume!r} must be True, False or {IF_BEGUN!r}")
    if overwrite not in (True, False):
        raise ConfigError(f"overwrite={overwrite!r} must be True or False")
    if resume and overwrite:
        raise ConfigError(
            f"resume={resume!r} and overwrite=True exclude each other: a run is continued or replaced"
        )
    if until is not None and (type(until) is not int or until < 1):
        raise ConfigError(f"until={until!r} must be the number of a step, 1 or more, or None")
    return RunOptions(resume=bool(resume), overwrite=overwrite, again=resume == IF_BEGUN, until=until)


def report_of(events: Iterable[Event]) -> dict[str, Any]:
    """Consume a run's events to its end; return its report, or an empty dict if it has none."""
    reports = [event.report for event in events if isinstance(event, Finished)]
    return reports[-1] if reports else {}


def training(
    config: Config,
    options: RunOptions | None = None,
    show: Show = lambda event: None,
    *,
    faults: tuple[Fault, ...] = (),
    places: Sequence[ProcessPlace] | None = None,
    signals: StopSignals | None = None,
) -> Generator[Event, None, None]:
    """Train like `train`, but yield events: ranks wait until the next one is requested. `Finished` has the
    report. ``faults``: faults of a drill. ``places``: places of ranks as plain processes, if not all on this
    host. ``signals``: handles signals, and lets the caller stop the run.

    Close the generator if it is not consumed to its end, to end what it has started. Several runs may
    alternate in a thread, if the run that began last ends first.
    """
    # ranks do not share the command's working directory
    config, options = with_hub_files(anchored(expanded(config), Path.cwd())), options or RunOptions()
    run, telemetry = config.run_directory, config.telemetry
    allow_open_files()
    config = with_plan(config)
    shape = check_run(config, options, places)
    tokenizer = tokenizer_of(config)
    for text in on_learning_rate(config, resume=options.resume):
        show(_warning("learning-rate", text))
    if config.model.lora is not None:
        if (base := config.model.initial) is None:
            show(_warning("adapters", WITHOUT_BASE))
        elif options.resume:
            check_base(run, base)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_explained(run))
        signals = stack.enter_context((signals or StopSignals()).heard())
        tools: dict[str, dict[str, Any]] = {"tensorboard": {}} if telemetry.tensorboard else {}
        if telemetry.wandb.mode != "off":
            tools["wandb"] = telemetry.wandb.model_dump()
        tools |= network_tools(telemetry)
        sinks = stack.enter_context(Sinks(tools, lambda text: show(_warning("telemetry", text))))
        page = LivePage(telemetry.page_port)
        stack.callback(page.close)
        launcher, executor = stack.enter_context(launcher_of(config, places))
        on_ray = config.cluster.launcher == "ray"
        # otherwise checked before, or the run uses what room there is
        if on_ray and config.elastic.max_ranks is None and not config.parallel.auto:
            launcher.check(config.layout().ranks)
        prepared = prepare_data(config, executor, show, resume=options.resume)
        data = str(prepared.output)
        made = plan_run(_laid_out(config, shape, launcher, data, show), shape, data, launcher, show)
        made = replace(made, faults=faults, files={**made.files, RECORD: data_record(prepared)})
        run_on = _on_ray if on_ray else _in_processes
        events = stack.enter_context(contextlib.closing(run_on(made, launcher, options, signals)))
        begun = False
        for event in events:
            show(event)
            if isinstance(event, Started) and not begun:  # otherwise it is started again, after a failure
                begun = True
                with _told("data", "exports will have no tokenizer: ", show):
                    keep(config, tokenizer, run)
                    keep_base(config, run)
                if telemetry.page:
                    with _told("telemetry", "", show):
                        show(PageOpened(page.open(run)))
                identity = read_identity(run)
                mark = identity.mark if identity is not None else ""
                sinks.begin(run, mark, config.name, config.model_dump(mode="json"))
            tell_event(sinks, event)
            yield event


def _warning(kind: str, text: str) -> Incident:
    return Incident(kind=kind, text=text, step=0)


@contextlib.contextmanager
def _told(kind: str, what: str, show: Show) -> Iterator[None]:
    """Report an error of the block, and go on with the run."""
    try:
        yield
    except (OSError, ValueError) as error:
        show(_warning(kind, f"{what}{error}"))


@contextlib.contextmanager
def _explained(run: Path) -> Iterator[None]:
    """Explain how to resume after a second signal, which leaves no partial checkpoint, and after a
    failure."""
    try:
        yield
    except WorkerError as error:
        if not error.user_error and log_file(run, error.rank).exists():
            error.add_note(f"what the rank wrote: braid logs {os.path.relpath(run)} --rank {error.rank}")
        raise
    except SecondSignalError:
        store, lock = CheckpointStore(run / "checkpoints"), FileHold(run / ".lock")
        newest = "there is no checkpoint"
        with contextlib.suppress(ConfigError, OSError):
            lock.take(_TIDY_SECONDS)
            store.remove_unfinished()
            lock.release()
        if steps := store.steps():
            newest = f"the newest checkpoint is of step {steps[-1]}; go on with resume=True"
        raise SecondSignalError(f"stopped at once, without a checkpoint; {newest}") from None


def plan_run(config: Config, shape: ModelShape, data: str, launcher: Launcher, show: Show) -> RunPlan:
    """Make the plan that ranks get; if decisions need measured costs, profile the run first."""
    known = known_profile(config, shape, launcher)
    if config.overlap.needs_profile:
        if known is None:
            show("profile measuring operators alone and beside communication (once, under a minute)")
        known = find_or_measure(config, shape, launcher, data=data)
        show(known)
        if known.trouble:
            show(_warning("telemetry", known.trouble))
    if known is None:
        return RunPlan(config=config, shape=shape, schedule=write(build_schedule(config, shape)), data=data)
    decided = find_or_decide(config, shape, known.profile)
    if decided.candidates:
        show(Compared(decided.candidates))
    return RunPlan(
        config=config.with_schedule(decided.name),
        shape=shape,
        schedule=decided.schedule,
        data=data,
        solo_ns=decided.solo_ns,
        profile=known.profile.source,
        serial=decided.serial,
        files={"profile.json": known.profile.to_json(), **decided.files},
    )


def replan(before: RunPlan, config: Config, launcher: Launcher) -> RunPlan:
    """Plan a run that continues in another layout; profile it again if that is needed."""
    made = plan_run(config, before.shape, before.data, launcher, lambda event: None)
    return replace(made, faults=before.faults)


def _laid_out(config: Config, shape: ModelShape, launcher: Launcher, data: str, show: Show) -> Config:
    """Search for the layout and for the best choice for every layer, if the configuration leaves them
    open."""

    def tell(what: str) -> None:
        show(f"profile measuring {what} (once, under a minute)")

    if config.parallel.auto:
        config, layouts = with_layout(config, shape, launcher, tell, data)
        show(Compared(layouts))
        config = left_open(config, shape)
    if config.chooses_layers and config.overlap.plan is None:
        config, layouts = with_layers(config, shape, launcher, tell, data)
        show(Compared(layouts))
    return config


def _in_processes(
    plan: RunPlan, launcher: Launcher, options: RunOptions, signals: StopSignals
) -> Generator[Event, None, None]:
    controller = Controller(plan, launcher, options)
    with signals.calling(controller.stop):
        yield from controller.run()


def _on_ray(
    plan: RunPlan, launcher: Launcher, options: RunOptions, signals: StopSignals
) -> Generator[Event, None, None]:
    """Run on Ray; ``launcher`` is the command's, each controller has its own."""
    import ray.util.metrics

    from braid.dashboards.metrics_feed import told_to_ray  # loads a web server
    from braid.jobs.training.controllers import run_on_ray

    with told_to_ray(plan.config.run_directory, ray.util.metrics):
        yield from run_on_ray(plan, options, partial(replan, plan), signals)
