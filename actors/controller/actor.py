"""Wraps the controller as a Ray actor."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from braid.actors.config.variables import inherited
from braid.actors.controller.controller import Controller, Replan, RunOptions
from braid.actors.controller.ranks.group import StoppedError, WorkerError
from braid.actors.controller.ranks.placement import RayLauncher, Reserved
from braid.actors.controller.records.run_records import Event
from braid.actors.stage.rank.messages import RunPlan


class ControllerActor:
    """Runs one `Controller`; `run` streams its events, `stop` may be called meanwhile (two threads)."""

    def __init__(
        self,
        plan: RunPlan,
        options: RunOptions,
        replan: Replan | None,
        inherited: Mapping[str, str],
        reserved: Reserved | None,
    ) -> None:
        """``inherited``: environment variables of the run's command, which ranks inherit from this actor.
        ``reserved``: room for ranks that the caller of the run has."""
        os.environ.update(inherited)
        self._controller = Controller(plan, _launcher(plan, reserved), options, replan)

    def run(self) -> Iterator[Event | ValueError | OSError | WorkerError | StoppedError]:
        """Yield events as they happen; an error meant for the user is yielded as the last item."""
        try:
            yield from self._controller.run()
        except (ValueError, OSError, WorkerError, StoppedError) as error:
            yield error

    def stop(self) -> None:
        self._controller.stop()


def start_controller(plan: RunPlan, options: RunOptions, replan: Replan | None) -> Any:
    """Start the controller's actor on this node, where it writes its files; return its handle."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    settings = {"num_cpus": 0, "max_concurrency": 2, "max_restarts": 0, "scheduling_strategy": here}
    secret = inherited(plan.config.cluster.env, os.environ)
    actor = ray.remote(ControllerActor).options(**settings)
    return actor.remote(plan, options, replan, secret, Reserved.here())


def end_controller(actor: Any, plan: RunPlan) -> None:
    """End a controller, with its ranks, and give back their places, on a cluster that goes on."""
    with contextlib.suppress(RayError):
        ray.kill(actor)
        _launcher(plan).release()


def _launcher(plan: RunPlan, reserved: Reserved | None = None) -> RayLauncher:
    return RayLauncher(plan.config, f"braid {plan.config.run_directory}", reserved)
