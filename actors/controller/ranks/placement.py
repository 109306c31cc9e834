"""Starts ranks as Ray actors: reserves room for all at once, or raises an error that says what is missing."""

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray._private.state
from ray.exceptions import RayError, RayTaskError
from ray.util import get_placement_group, placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from braid.actors.config import Config
from braid.actors.config.variables import inherited
from braid.actors.controller.ranks.group import (
    NoRoomError,
    StoppedError,
    WorkerError,
    WorkerGroup,
    never,
    raised,
)
from braid.actors.controller.ranks.numbering import host_names, machine_name, numbered
from braid.actors.controller.ranks.rank_environment import rank_environment
from braid.actors.controller.records.span_files import SpanCounts, SpanFiles
from braid.actors.controller.state.recovery import rank_names
from braid.actors.stage.rank.actor import BESIDE, StageActor, start_stage

_EXIT_SECONDS = 5.0
_LOOK_SECONDS = 1.0
"""Seconds between two checks of whether the ranks being started have their places."""
_START_SECONDS = 300.0
"""Seconds that an actor that has a place may take to start: it fetches the package and imports PyTorch."""


@dataclass(frozen=True)
class Reserved:
    """Room for ranks in a placement group that belongs to the caller of the run, such as a trial of Ray Tune;
    the run leaves the group as it is."""

    group: PlacementGroup
    left: tuple[Mapping[str, float], ...]
    """Resources of each bundle without those that the caller itself holds."""

    @staticmethod
    def here() -> "Reserved | None":
        """Return the group of the task or actor that calls this, if its children are to be placed in it."""
        context = ray.get_runtime_context()
        group = ray.util.get_current_placement_group()
        if group is None or not context.should_capture_child_tasks_in_placement_group:
            return None
        first, *others = group.bundle_specs  # Ray Tune places the trial itself in the first bundle
        held = context.get_assigned_resources()
        left = {name: value - held.get(name, 0.0) for name, value in first.items()}
        return Reserved(group, (left, *others))


class RayLauncher:
    """Starts one actor per rank in one placement group."""

    def __init__(self, config: Config, places: str = "", reserved: Reserved | None = None) -> None:
        """``places``: name of the placement group, of which only one exists at a time: a group of this name
        that a dead controller left, and that outlives its actors, is removed. ``reserved``: room that is
        used instead, if it is enough for any rank."""
        self._config, self._cluster, self._places = config, config.cluster, places
        device = config.cluster.device
        gpus = device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
        self._bundle = {"CPU": config.cluster.cpus_per_rank, **({"GPU": 1.0} if gpus else {})}
        self._reserved = reserved
        bundles = enumerate(reserved.left if reserved is not None else ())
        self._slots = [number for number, left in bundles for _ in range(self._room(left))]
        """For each rank that the reserved group has room for, the number of its bundle."""

    def check(self, ranks: int) -> None:
        """Raise `NoRoomError` if the reserved group, or the whole cluster, is too small and does not grow."""
        if len(self._slots) >= ranks:
            return
        if self._slots:
            raise NoRoomError(
                f"the layout asks for {ranks} ranks, and the placement group of this task has room for "
                f"{len(self._slots)} beside the task; reserve a bundle for every rank, or lower parallel.dp, "
                f"parallel.tp or parallel.pp"
            )
        total = ray.cluster_resources()
        fits = all(total.get(name, 0.0) >= need * ranks for name, need in self._bundle.items())
        grows = any(name in os.environ for name in ("RAY_ENABLE_AUTOSCALER_V2", "KUBERAY_GEN_RAY_START_CMD"))
        if not fits and not grows:
            raise NoRoomError(self._too_small(ranks))

    @contextlib.contextmanager
    def collector(self, files: Path, bytes_per_rank: int) -> Iterator["ActorCollector"]:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        remote: Any = ray.remote(SpanFiles)
        actor: Any = remote.options(num_cpus=0, scheduling_strategy=here).remote(files, bytes_per_rank)
        try:
            yield ActorCollector(actor)
        finally:
            with contextlib.suppress(RayError):
                ray.get(actor.close.remote(), timeout=_EXIT_SECONDS)
            ray.kill(actor)

    def start(
        self, ranks: int, avoid: Sequence[str] = (), stopped: Callable[[], bool] = never
    ) -> WorkerGroup:
        """Place and start the actors; raise `NoRoomError` after ``cluster.placement_timeout_s`` without
        room."""
        self.check(ranks)
        if self._reserved is not None and self._slots:
            places = self._slots[:ranks]
            return ActorGroup(self._reserved.group, places, self._bundle, self._config, stopped, owned=False)
        self.release()
        strategy = "SPREAD" if self._cluster.spread else "PACK"
        bundles = self._bundles(ranks, avoid, stopped)
        group = placement_group(bundles, strategy=strategy, name=self._places)
        try:
            if not _placed(group, self._cluster.placement_timeout_s, stopped):
                raise NoRoomError(self._too_small(ranks))
        except (NoRoomError, StoppedError):
            remove_placement_group(group)
            raise
        return ActorGroup(group, range(ranks), self._bundle, self._config, stopped)

    def release(self) -> None:
        """Remove the placement group that a controller which has ended has left."""
        with contextlib.suppress(ValueError):  # there is none of that name
            remove_placement_group(get_placement_group(self._places))

    def _bundles(
        self, ranks: int, avoid: Sequence[str], stopped: Callable[[], bool]
    ) -> list[dict[str, float]]:
        """Return the resources that each rank reserves; Ray assigns them to nodes in an order of its own.

        Raise `NoRoomError` if the nodes outside ``avoid`` stay too small. Places that were given back a
        moment ago may not be free yet, so wait for them.
        """
        if not avoid:
            return [dict(self._bundle) for _ in range(ranks)]
        deadline = time.monotonic() + self._cluster.placement_timeout_s
        while True:
            free = [address for address, slots in self._free(avoid, ()).items() for _ in range(slots)]
            if len(free) >= ranks:  # every node has 1 of the resource "node:ADDRESS"
                return [{**self._bundle, f"node:{address}": 0.001} for address in free[:ranks]]
            if time.monotonic() > deadline:
                raise NoRoomError(f"{self._too_small(ranks)}; {', '.join(avoid)} are left out as slow")
            if stopped():
                raise StoppedError
            time.sleep(_LOOK_SECONDS / 4)

    def machines(self) -> list[str]:
        """Return the kinds of the cluster's nodes by their resources, since addresses change."""
        return sorted({machine_name(node["Resources"]) for node in ray.nodes() if node["Alive"]})

    def hosts(self, ranks: int) -> list[str]:
        """Predict each rank's host as if every node were free: the fewest nodes that hold all ranks, or with
        ``cluster.spread`` one rank on each node in turn. Autoscaled nodes that do not exist yet are assumed
        to be as large as the largest present one.
        """
        rooms = sorted((self._room(node["Resources"]) for node in ray.nodes() if node["Alive"]), reverse=True)
        rooms = [room for room in rooms if room] or [ranks]
        while sum(rooms) < ranks:
            rooms.append(rooms[0])
        if self._cluster.spread:
            turns = sorted((turn, node) for node, room in enumerate(rooms) for turn in range(room))
            return [f"node {node}" for node in sorted(node for _, node in turns[:ranks])]
        return [f"node {node}" for node, room in enumerate(rooms) for _ in range(room)][:ranks]

    def _room(self, free: Mapping[str, float]) -> int:
        return min(int(free.get(name, 0.0) / need + 1e-6) for name, need in self._bundle.items())

    def capacity(self, group: WorkerGroup | None, avoid: Sequence[str] = ()) -> tuple[int, bool]:
        """Return how many ranks there is room for on nodes that stay and are not in ``avoid``, and whether a
        node of the group is leaving."""
        if self._slots:
            return len(self._slots), False
        leaving = ray._private.state.state.get_draining_nodes()  # by id, with deadlines
        held = [*zip(group.node_ids, group.addresses, strict=True)] if isinstance(group, ActorGroup) else []
        stay = sum(node not in leaving and address not in avoid for node, address in held)
        leaves = any(node in leaving for node, _ in held)
        return stay + sum(self._free(avoid, leaving).values()), leaves

    def _free(self, addresses: Collection[str], ids: Collection[str]) -> dict[str, int]:
        """Return how many more ranks could be placed, by node address, leaving out nodes with these addresses
        or ids."""
        left = ray._private.state.available_resources_per_node()
        rooms: dict[str, int] = defaultdict(int)
        for node in ray.nodes():
            address, free = node["NodeManagerAddress"], left.get(node["NodeID"], {})
            if node["Alive"] and address not in addresses and node["NodeID"] not in ids:
                rooms[address] += self._room(free)
        return rooms

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
    """Handle of the actor that collects spans, for ranks and the controller."""

    def __init__(self, actor: Any) -> None:
        self.target = actor
        self._answer: Future[SpanCounts] | None = None
        self._known = SpanCounts()

    def counts(self) -> SpanCounts:
        """Return the actor's answer to an earlier call, without waiting for a new one; a trouble once the
        actor is gone."""
        try:
            if self._answer is not None and self._answer.done():
                answer, self._answer = self._answer, None
                self._known = answer.result()
            if self._answer is None:
                self._answer = self.target.counts.remote().future()
        except RayError as error:
            return SpanCounts(trouble=f"the collector of spans is gone: {str(error).splitlines()[0]}")
        return self._known


class ActorGroup(WorkerGroup):
    """One actor per rank; ranks are numbered by node and GPU once they run, since Ray's bundles keep no
    order."""

    def __init__(
        self,
        group: PlacementGroup,
        places: Sequence[int],
        bundle: dict[str, float],
        config: Config,
        stopped: Callable[[], bool],
        *,
        owned: bool = True,
    ) -> None:
        """``places``: number of each rank's bundle in the placement group. ``owned``: whether the group ends
        with the ranks."""
        ranks = len(places)
        super().__init__(ranks, config.failure, config.cluster, on_gpus="GPU" in bundle)
        self._group, self._bundle, self._config, self._owned = group, bundle, config, owned
        self._timeout_s = config.cluster.placement_timeout_s
        self._bundle_of = list(places)
        """Each rank's bundle index in the placement group."""
        self._actors = [self._start(rank) for rank in range(ranks)]
        self._nodes: list[dict[str, Any]] = [{} for _ in range(ranks)]
        try:
            with self.heeding(stopped):
                self._number(range(ranks))
        except (NoRoomError, StoppedError, WorkerError):
            self.shutdown()
            raise

    def _start(self, rank: int) -> Any:
        bundle = PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=self._bundle_of[rank]
        )
        options = {
            "num_cpus": self._bundle["CPU"],
            "num_gpus": self._bundle.get("GPU", 0.0),
            "scheduling_strategy": bundle,
            "runtime_env": {"env_vars": rank_environment(self._config, {})},
        }
        return start_stage(rank, options, inherited(self._config.cluster.env, os.environ))

    def _number(self, ranks: Sequence[int]) -> None:
        """Number ranks that have just been started."""
        self._find_nodes()
        order = numbered(self._nodes, ranks)
        for by_rank in (self._actors, self._bundle_of, self._nodes):
            values: list[Any] = [by_rank[rank] for rank in order]
            for rank, value in zip(ranks, values, strict=True):
                by_rank[rank] = value
        for rank in ranks:  # its other calls come after this one
            self._actors[rank].number_as.remote(rank)
        self.addresses = [str(node["address"]) for node in self._nodes]
        self.hosts = host_names(self.addresses, self.node_ids)

    def _find_nodes(self) -> None:
        """Find the node of every rank once all ranks run.

        Raise `NoRoomError` if a place is lost before its rank has started, `WorkerError` for a rank that has
        a place and does not start. A node may be gone, with its ranks, before Ray notices: a rank that is
        started there meanwhile waits for another place, which may never come.
        """
        ranks = {actor.node.remote(): rank for rank, actor in enumerate(self._actors)}
        waiting = list(ranks)
        deadline = time.monotonic() + max(_START_SECONDS, self._timeout_s)
        while waiting:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_LOOK_SECONDS)
            if waiting and time.monotonic() > deadline:
                late = ranks[waiting[0]]
                self._gone.update(ranks[call] for call in waiting)
                raise WorkerError(late, "its actor has a place and has not started", died=True)
            if self._stopped():
                raise StoppedError
            if waiting and not _placed(self._group, self._timeout_s, self._stopped):
                homeless = [ranks[call] for call in waiting]
                self._gone.update(homeless)  # these ranks will never answer
                raise NoRoomError(_no_place(homeless))
        self._nodes = self.call_all(StageActor.node)

    @property
    def node_ids(self) -> list[str]:
        return [str(node["node"]) for node in self._nodes]

    def _send(
        self, rank: int, method: str, arguments: tuple[Any, ...], *, beside: bool = False
    ) -> "Future[Any]":
        call = getattr(self._actors[rank], method)
        call = call.options(concurrency_group=BESIDE) if beside else call
        answer: Future[Any] = call.remote(*arguments).future()
        return answer

    def _failure(self, rank: int, error: BaseException) -> WorkerError:
        if isinstance(error, RayTaskError):
            return raised(rank, error.cause, trace=str(error))
        return WorkerError(rank, f"its actor died: {str(error).splitlines()[0]}", died=True)

    def describe(self) -> dict[str, Any]:
        return {"launcher": "ray", "ray": ray.__version__, "ranks": self._nodes}

    def _kill(self, rank: int) -> None:
        ray.kill(self._actors[rank])

    def _restart(self, ranks: Sequence[int]) -> None:
        # Ray finds another node for the places of a lost one; until then the group is not ready.
        if not _placed(self._group, self._timeout_s, self._stopped):
            raise NoRoomError(_no_place(ranks))
        for rank in ranks:
            self._actors[rank] = self._start(rank)
        self._number(sorted(ranks))

    def shutdown(self) -> None:
        """Ask every actor to leave its groups, then end it and release its place."""
        reachable = [
            actor for rank, actor in enumerate(self._actors) if rank not in self._calls.keys() | self._gone
        ]
        leaving = [actor.close.remote() for actor in reachable]
        if leaving:
            with contextlib.suppress(RayError):
                ray.wait(leaving, num_returns=len(leaving), timeout=_EXIT_SECONDS)
        for actor in self._actors:
            ray.kill(actor)
        if self._owned:
            remove_placement_group(self._group)


def _placed(group: PlacementGroup, timeout_s: float, stopped: Callable[[], bool]) -> bool:
    """Wait for a placement group; return False after ``timeout_s`` without room. Raise `StoppedError` once
    ``stopped()``."""
    deadline = time.monotonic() + timeout_s
    while not group.wait(min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic()))):
        if stopped():
            raise StoppedError
        if time.monotonic() >= deadline:
            return False
    return True


def _no_place(ranks: Sequence[int]) -> str:
    names = rank_names(ranks)
    return f"there is no room to start {names}: its node is gone and no other one is free; add a node"
