"""Runs the controllers of one run on Ray: a new one takes over when one has died."""

from collections.abc import Generator, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from braid.actors.controller.actor import end_controller, start_controller
from braid.actors.controller.controller import Replan, RunOptions
from braid.actors.controller.ranks.failures import RestartBudget
from braid.actors.controller.ranks.group import WorkerError
from braid.actors.controller.records.run_records import (
    CheckpointSaved,
    Event,
    Incident,
    Started,
    StepDone,
    read_identity,
)
from braid.actors.stage.rank.messages import RunPlan
from braid.jobs.training.stopping import StopSignals

_STOP_SECONDS = 30.0
"""Seconds after which a controller that has not accepted a stop is killed: its actor hangs, or was never
started."""


def run_on_ray(
    plan: RunPlan, asked: RunOptions, replan: Replan, signals: StopSignals
) -> Generator[Event, None, None]:
    """Yield the events of one controller after the other. Raise `WorkerError` if too many die."""
    run, budget = plan.config.run_directory, RestartBudget(plan.config.failure.max_restarts)
    before, options, saved = read_identity(run), asked, False
    actor: Any = None
    try:
        while True:
            actor = start_controller(plan, options, replan)
            try:
                with signals.calling(partial(_stop, actor)):
                    for event in _events(actor):
                        if isinstance(event, StepDone):
                            budget.step_done(event.record.step)
                        saved |= isinstance(event, CheckpointSaved)
                        saved |= isinstance(event, Started) and event.first_step > 1
                        yield event
                return
            except RayActorError as error:
                if not budget.spend():
                    text = f"the controller died: {str(error).splitlines()[0]}; go on with resume=True"
                    raise WorkerError(0, text, user_error=True) from None
            # Its ranks have ended with it.
            yield Incident(kind="restarted", text="the controller died; a new one goes on", step=0)
            # From the run's directory the next controller knows where to resume. Until this run's identity
            # is written there, another run's may be: begin as the user asked.
            here = read_identity(run)
            begun = here is not None and (before is None or here.mark != before.mark)
            if begun or asked.resume:
                again = (asked.again or begun) and not saved
                options = replace(asked, resume=True, overwrite=False, again=again, takes_over=True)
    finally:
        end_controller(actor, plan)  # also one that is at work: the cluster may go on


def _events(actor: Any) -> Iterator[Event]:
    """Yield a controller's events. Raise its errors, and `RayActorError` if it dies."""
    for reference in actor.run.options(num_returns="streaming").remote():
        event = ray.get(reference)
        if isinstance(event, BaseException):
            raise event
        yield event


def _stop(actor: Any) -> None:
    """Ask a controller to end the run. If it is dead, the next one is asked."""
    try:
        ray.get(actor.stop.remote(), timeout=_STOP_SECONDS)
    except GetTimeoutError:
        ray.kill(actor)
    except RayError:
        pass
