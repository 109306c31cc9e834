"""The controllers of one run on Ray: each takes over from the one that died."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from braid.actors.controller.actor import start_controller
from braid.actors.controller.controller import Replan, RunOptions
from braid.actors.controller.records.run_records import CheckpointSaved, Event, Started, read_identity
from braid.actors.stage.rank.messages import RunPlan

_STOP_SECONDS = 30.0
"""A controller that has not heard of a stop by then is ended: its actor hangs, or was never started."""


class Controllers:
    """Starts controllers, passes on their events, and tells each of them that the run should stop."""

    def __init__(self, plan: RunPlan, options: RunOptions, replan: Replan) -> None:
        self._plan, self._replan = plan, replan
        self._options = options
        self._before = read_identity(plan.config.run_directory)
        """What the run's directory holds before this run is written down there."""
        self._saved = False
        """Whether there is a checkpoint to go on from."""
        self._actor: Any = None

    def start(self) -> None:
        """Start the first controller, or another one in place of a dead one."""
        options = self._options
        here = read_identity(self._plan.config.run_directory)
        # Until the run is written down, another run may lie in its directory: begin as the user asked.
        begun = here is not None and (self._before is None or here.mark != self._before.mark)
        if self._actor is not None and (begun or options.resume):
            again = (options.again or begun) and not self._saved
            options = replace(options, resume=True, overwrite=False, again=again, takes_over=True)
        self._actor = start_controller(self._plan, options, self._replan)

    def events(self) -> Iterator[Event]:
        """What the present controller tells. Raises its errors, and `RayActorError` if it dies."""
        for reference in self._actor.run.options(num_returns="streaming").remote():
            event = ray.get(reference)
            if isinstance(event, BaseException):
                raise event
            self._saved |= isinstance(event, CheckpointSaved) or (
                isinstance(event, Started) and event.first_step > 1
            )
            yield event

    def stop(self) -> None:
        """Ask the present controller to end the run. If it is dead, the next one is asked."""
        actor = self._actor
        try:
            ray.get(actor.stop.remote(), timeout=_STOP_SECONDS)
        except GetTimeoutError:
            ray.kill(actor)
        except RayError:
            pass
