"""Runs the controllers of one run on Ray: a new one takes over when one has died."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from braid.actors.controller.actor import end_controller, start_controller
from braid.actors.controller.controller import Replan, RunOptions
from braid.actors.controller.records.run_records import CheckpointSaved, Event, Started, read_identity
from braid.actors.stage.rank.messages import RunPlan

_STOP_SECONDS = 30.0
"""Seconds after which a controller that has not accepted a stop is killed: its actor hangs, or was never
started."""


class Controllers:
    """Starts controllers, yields their events, and tells the present one that the run should stop."""

    def __init__(self, plan: RunPlan, options: RunOptions, replan: Replan) -> None:
        self._plan, self._replan = plan, replan
        self._options = options
        self._before = read_identity(plan.config.run_directory)
        """Identity in the run's directory before this run has written its own there."""
        self._saved = False
        """Whether there is a checkpoint to resume from."""
        self._actor: Any = None

    def start(self) -> None:
        """Start the first controller, or another one in place of a dead one."""
        options = self._options
        here = read_identity(self._plan.config.run_directory)
        # Until this run's identity is written, another run's may be in the directory: begin as the user
        # asked.
        begun = here is not None and (self._before is None or here.mark != self._before.mark)
        if self._actor is not None and (begun or options.resume):
            again = (options.again or begun) and not self._saved
            options = replace(options, resume=True, overwrite=False, again=again, takes_over=True)
        self._actor = start_controller(self._plan, options, self._replan)

    def events(self) -> Iterator[Event]:
        """Yield the present controller's events. Raise its errors, and `RayActorError` if it dies."""
        for reference in self._actor.run.options(num_returns="streaming").remote():
            event = ray.get(reference)
            if isinstance(event, BaseException):
                raise event
            self._saved |= isinstance(event, CheckpointSaved) or (
                isinstance(event, Started) and event.first_step > 1
            )
            yield event

    def end(self) -> None:
        """End the present controller, also one that is at work, and whatever it has started."""
        end_controller(self._actor, self._plan)

    def stop(self) -> None:
        """Ask the present controller to end the run. If it is dead, the next one is asked."""
        actor = self._actor
        try:
            ray.get(actor.stop.remote(), timeout=_STOP_SECONDS)
        except GetTimeoutError:
            ray.kill(actor)
        except RayError:
            pass
