"""Ranks as Ray actors: room for all of them at once, or an error that says what is missing."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from braid.actors.config import Config, ConfigError
from braid.actors.controller.group import WorkerError, WorkerGroup
from braid.actors.controller.span_files import SpanCounts, SpanFiles
from braid.actors.stage.actor import StageActor

_EXIT_SECONDS = 5.0
_CAUSE_SECONDS = 0.3
"""For so long a rank's error is not believed to be the first one: another rank may have died."""


class RayLauncher:
    """Starts one actor per rank in one placement group."""

    def __init__(self, config: Config) -> None:
        self._cluster = config.cluster
        device = config.cluster.device
        self._gpus = device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)

        self._bundle = {"CPU": config.cluster.cpus_per_rank, **({"GPU": 1.0} if self._gpus else {})}

    def check(self, ranks: int) -> None:
        """`ConfigError` if the whole cluster is too small, and none of its kind can grow."""
        total = ray.cluster_resources()
        fits = all(total.get(name, 0.0) >= need * ranks for name, need in self._bundle.items())
        grows = any(name in os.environ for name in ("RAY_ENABLE_AUTOSCALER_V2", "KUBERAY_GEN_RAY_START_CMD"))
        if not fits and not grows:
            raise ConfigError(self._too_small(ranks))

    @contextlib.contextmanager
    def collector(self, files: Path, bytes_per_rank: int) -> Iterator["ActorCollector"]:
        """An actor on this node, whose files it writes."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        remote: Any = ray.remote(SpanFiles)
        actor: Any = remote.options(num_cpus=0, scheduling_strategy=here).remote(files, bytes_per_rank)
        try:
            yield ActorCollector(actor)
        finally:
            with contextlib.suppress(RayError):
                ray.get(actor.close.remote(), timeout=_EXIT_SECONDS)
            ray.kill(actor)

    def start(self, ranks: int) -> WorkerGroup:
        """Place and start the actors; `ConfigError` after ``cluster.placement_timeout_s`` without room."""
        self.check(ranks)
        group = placement_group([self._bundle] * ranks, strategy="SPREAD" if self._cluster.spread else "PACK")
        if not group.wait(self._cluster.placement_timeout_s):
            remove_placement_group(group)
            raise ConfigError(self._too_small(ranks))
        return ActorGroup(group, ranks, self._bundle, self._cluster.threads_per_rank)

    def _too_small(self, ranks: int) -> str:
        bundle = self._bundle
        total, free = ray.cluster_resources(), ray.available_resources()
        asked = ", ".join(f"{need * ranks:g} {name}" for name, need in bundle.items())
        there = ", ".join(
            f"{total.get(name, 0.0):g} {name} ({free.get(name, 0.0):g} free)" for name in bundle
        )
        return (
            f"the layout asks for {ranks} ranks ({asked}), the Ray cluster has {there} on "
            f"{sum(node['Alive'] for node in ray.nodes())} node(s); "
            f"lower parallel.dp, parallel.tp or parallel.pp, add nodes, or free what other jobs hold"
        )


class ActorCollector:
    """An actor that takes spans, as ranks and the controller know it."""

    def __init__(self, actor: Any) -> None:
        self.target = actor

    def counts(self) -> SpanCounts:
        """What became of the spans so far; unknown once the actor is gone."""
        try:
            counts: SpanCounts = ray.get(self.target.counts.remote(), timeout=_EXIT_SECONDS)
        except RayError as error:
            return SpanCounts(trouble=f"the collector of spans is gone: {str(error).splitlines()[0]}")
        return counts


class ActorGroup:
    """One actor per rank."""

    def __init__(self, group: PlacementGroup, ranks: int, bundle: dict[str, float], threads: int) -> None:
        self._group = group
        self._aborted = False
        self._actors = [
            StageActor.options(  # type: ignore[attr-defined]
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0.0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=rank
                ),
                runtime_env={"env_vars": {"OMP_NUM_THREADS": str(threads)}},
            ).remote(rank)
            for rank in range(ranks)
        ]
        self._nodes: list[dict[str, Any]] = self.call_all("node")
        self.addresses = [str(node["address"]) for node in self._nodes]

    def call(self, rank: int, method: str, *arguments: Any) -> Any:
        """Call one rank and wait."""
        return self._get(rank, getattr(self._actors[rank], method).remote(*arguments))

    def call_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call all ranks and wait; the first failure ends the waiting."""
        references = [getattr(actor, method).remote(*arguments) for actor in self._actors]
        rank_of = {reference: rank for rank, reference in enumerate(references)}
        results: dict[int, Any] = {}
        waiting = references
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1)
            for reference in ready:
                try:
                    results[rank_of[reference]] = self._get(rank_of[reference], reference)
                except WorkerError as error:
                    raise self._cause(error, {rank_of[other]: other for other in waiting}) from None
        return [results[rank] for rank in range(len(references))]

    def _cause(self, error: WorkerError, waiting: dict[int, Any]) -> WorkerError:
        """The death of another rank, if that is what a rank complains of; else its own error."""
        if error.died or error.user_error:
            return error
        for rank, reference in waiting.items():
            try:
                ray.get(reference, timeout=_CAUSE_SECONDS)
            except RayActorError:
                return WorkerError(rank, "its actor died", died=True)
            except RayError:
                pass
        return error

    @staticmethod
    def _get(rank: int, reference: Any) -> Any:
        try:
            return ray.get(reference)
        except RayTaskError as error:
            cause = error.cause
            raise WorkerError(
                rank,
                str(cause) if isinstance(cause, ValueError) else f"{type(cause).__name__}: {cause}",
                user_error=isinstance(cause, ValueError),
                trace=str(error),
            ) from None
        except RayActorError as error:
            text = f"its actor died: {str(error).splitlines()[0]}"
            raise WorkerError(rank, text, died=True) from None

    def describe(self) -> dict[str, Any]:
        """The actors, their nodes and processes."""
        return {"launcher": "ray", "ray": ray.__version__, "ranks": self._nodes}

    def abort(self) -> None:
        """Kill the actors; `shutdown` has nobody to ask then."""
        self._aborted = True
        for actor in self._actors:
            ray.kill(actor)

    def shutdown(self) -> None:
        """Ask every actor to leave its groups, then end it and give its place back."""
        leaving = [] if self._aborted else [actor.close.remote() for actor in self._actors]
        with contextlib.suppress(RayError):
            ray.wait(leaving, num_returns=max(1, len(leaving)), timeout=_EXIT_SECONDS if leaving else 0)
        for actor in self._actors:
            ray.kill(actor)
        remove_placement_group(self._group)
