"""Makes faults of nodes: Ray nodes on this machine, each with one CPU and so one rank, that come, go and slow
down under a run. Waits until Ray knows of the change and the run follows it."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from braid.actors.config import Config, ConfigError
from braid.actors.controller.ranks.elastic import best_degrees, degrees_of
from braid.jobs.cluster.session import WORKERS, environment, own_token, session_folder
from braid.jobs.data.tokenizer import tokenizer_of
from braid.jobs.drill.command import Command, DrillError, family, kill
from braid.jobs.drill.plan import JOINS, KINDS, SLOW, PlannedFault
from braid.jobs.drill.report import FaultOutcome

_DRAIN_S = 60
_STOPPED_S, _RUNS_S = 0.04, 0.02
"""Seconds that a rank on a slow node is stopped and runs, by turns: this gives a third of its speed."""
_SETTINGS = {
    **WORKERS,
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_initial_delay_ms": "1000",
}
"""Settings of Ray with which it notices a lost node within seconds."""


def usable_nodes(config: Config) -> set[int]:
    """Return the numbers of nodes on which an elastic run has a rank on every node, and takes sums in the
    same order: only the data-parallel degree differs from the configured layout."""
    elastic, start = config.elastic, degrees_of(config)
    least, most = elastic.min_ranks or 1, elastic.max_ranks or start.ranks
    if not least <= start.ranks <= most:
        raise ConfigError(
            f"the layout has {start.ranks} ranks, elastic allows {least} to {most}: change "
            f"elastic.min_ranks, elastic.max_ranks or parallel"
        )
    vocabulary = tokenizer_of(config).vocabulary

    def fits(candidate: Config) -> bool:
        with contextlib.suppress(ConfigError):
            candidate.check(vocabulary)
            return True
        return False

    chosen = {nodes: best_degrees(config, nodes, fits, elastic) for nodes in range(least, most + 1)}
    return {
        nodes
        for nodes, degrees in chosen.items()
        if degrees is not None and degrees.ranks == nodes and replace(degrees, dp=start.dp) == start
    }


class Nodes:
    """A Ray cluster whose head has no CPU, and its other nodes as Ray's objects, the oldest first."""

    def __init__(self, cluster: Any, count: int) -> None:
        """Start the head and ``count`` nodes."""
        self._cluster = cluster
        self.nodes: list[Any] = []
        self._joined = 0
        self._add(num_cpus=0, include_dashboard=False)
        self.address = str(cluster.address)
        for _ in range(count):
            self.join()

    def at(self, place: float) -> Any:
        """Return the node selected by a random number in [0, 1)."""
        return self.nodes[int(place * len(self.nodes))]

    def alive(self, node: Any) -> bool:
        """Return whether Ray considers a node alive."""
        table = self._cluster.global_state.node_table()
        return any(row["NodeID"] == node.node_id and row["Alive"] for row in table)

    def join(self) -> Any:
        """Start a node with its own address, and return it. Raise `DrillError` if it does not start."""
        self._joined += 1
        self.nodes.append(self._add(num_cpus=1, node_ip_address=f"127.0.0.{1 + self._joined}"))
        return self.nodes[-1]

    def lose(self, node: Any) -> None:
        """Kill everything that runs on a node, if anything still does, and remove it from the cluster."""
        self.nodes.remove(node)
        kill(*family(*_processes(node)))
        self._cluster.remove_node(node, allow_graceful=False)

    def drain(self, node: Any) -> None:
        """Tell Ray that a node will be taken away; raise `DrillError` if Ray does not accept that."""
        import ray._raylet

        raylet: Any = ray._raylet  # compiled, without types
        preemption, deadline_ms = 2, int((time.time() + _DRAIN_S) * 1000)  # Ray's autoscaler.proto
        client = raylet.GcsClient(address=self.address)
        accepted, _ = client.drain_node(node.node_id, preemption, "a drill", deadline_ms)
        if not accepted:
            raise DrillError("Ray does not drain the node")

    def processes(self) -> list[int]:
        """Return the ids of the processes of all nodes, including the head; workers are their descendants."""
        return [process for node in self._cluster.list_all_nodes() for process in _processes(node)]

    def _add(self, **options: Any) -> Any:
        handler = signal.getsignal(signal.SIGTERM)
        try:
            return self._cluster.add_node(wait=False, **options)
        except Exception as error:  # the type that Ray raises if a node does not start in time
            raise DrillError(f"a Ray node did not start: {error}") from error
        finally:
            signal.signal(signal.SIGTERM, handler)  # Ray's own would drain every node, for half a minute each


@contextlib.contextmanager
def ray_nodes(count: int) -> Iterator[Nodes]:
    """Start a Ray cluster of ``count`` nodes, with its own ports, token and folder, for the length of the
    block.

    The environment has its settings meanwhile, so that commands started in the block can join it.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(session_folder())  # Ray stores the address of its newest cluster there
        stack.enter_context(environment({**_SETTINGS, "RAY_TMPDIR": str(folder)}))
        stack.enter_context(own_token(folder))
        from ray.cluster_utils import Cluster

        cluster = Cluster()
        stack.callback(cluster.shutdown)
        nodes = Nodes(cluster, count)
        # all at once, so that nothing writes any more
        stack.callback(lambda: kill(*family(*nodes.processes())))
        yield nodes


def _processes(node: Any) -> list[int]:
    return [info.process.pid for infos in node.all_processes.values() for info in infos]


def meet(fault: PlannedFault, nodes: Nodes, command: Command, quarantine_s: float) -> FaultOutcome:
    """Cause a fault of nodes; wait until Ray knows of it and the run has as many ranks as nodes."""
    begun = time.time()
    outcome = FaultOutcome(fault, begun)
    if fault.kind == SLOW:
        _slow_down(str(nodes.at(fault.place).node_ip_address), nodes, command, quarantine_s)
    elif fault.kind == JOINS:
        node = nodes.join()
        command.wait(f"Ray to have the node of {fault.name}", lambda: nodes.alive(node))
        outcome.fired = time.time()
    else:
        node = nodes.at(fault.place)
        (nodes.lose if fault.kind == "node-lost" else nodes.drain)(node)
    command.wait(
        f"{fault.nodes_after} ranks after {fault.name}",
        lambda: _ranks(command) == fault.nodes_after and bool(command.incidents(begun, resized=True)),
    )
    if fault.kind == "node-drained":
        nodes.lose(node)  # the announced loss
    if KINDS[fault.kind].nodes < 0:
        command.wait(f"Ray to know of {fault.name}", lambda: not nodes.alive(node))
    outcome.note(command.incidents(begun, resized=True)[0])
    return outcome


def _slow_down(address: str, nodes: Nodes, command: Command, quarantine_s: float) -> None:
    """Stop and continue the ranks at an address many times a second until the run goes on without them; wait
    until it takes the node again, not before its quarantine ends."""
    begun, over = time.time(), threading.Event()

    def by_turns() -> None:
        while not over.is_set():
            processes = command.ranks_at(address)
            for number, seconds in ((signal.SIGSTOP, _STOPPED_S), (signal.SIGCONT, _RUNS_S)):
                kill(*processes, signal_number=number)
                time.sleep(seconds)

    thread = threading.Thread(target=by_turns, name="slow node")
    thread.start()
    try:
        command.wait(f"the run to go on without {address}", lambda: _ranks(command) == len(nodes.nodes) - 1)
    finally:
        over.set()
        thread.join()
    command.wait(f"{address} to be taken again", lambda: bool(command.ranks_at(address)))
    if time.time() < command.incidents(begun, resized=True)[0]["time"] + quarantine_s:
        raise DrillError(f"{address} was taken again before its quarantine of {quarantine_s:g} s ended")


def _ranks(command: Command) -> int:
    """Return the number of ranks in the newest step."""
    return len(command.newest().get("peak_bytes", ()))
