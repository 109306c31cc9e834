"""The Ray shell around the controller."""

from collections.abc import Iterator

import ray

from braid.actors.controller.controller import Controller, RunOptions
from braid.actors.controller.group import WorkerFailed
from braid.actors.controller.placement import RayLauncher
from braid.actors.controller.records import Event
from braid.actors.stage.worker import RunPlan


@ray.remote(num_cpus=0, max_concurrency=2, max_restarts=0)
class ControllerActor:
    """Runs one `Controller`; `run` streams its events, `stop` may be called meanwhile."""

    def __init__(self, plan: RunPlan, options: RunOptions) -> None:
        self._controller = Controller(plan, RayLauncher(plan.config), options)

    def run(self) -> Iterator[Event | ValueError | WorkerFailed]:
        """Events as they happen; an error that is for the user comes as the last of them."""
        try:
            yield from self._controller.run()
        except (ValueError, WorkerFailed) as error:
            yield error

    def stop(self) -> None:
        """End after the step under way."""
        self._controller.stop()
