"""Ranks as plain processes of this machine, for use without Ray and as the yardstick of Ray's price."""

import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from braid.actors.config import Config, ConfigError
from braid.actors.controller.group import Collector, WorkerError, WorkerGroup
from braid.actors.controller.span_files import SpanFiles, socket_collector

LOOPBACK = "127.0.0.1"
_EXIT_SECONDS = 5.0
_CAUSE_SECONDS = 0.3
"""For so long a rank's error is not believed to be the first one: another rank may have died."""
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Place:
    """Where a rank runs: an address, and the network namespace that has it (None: this process's own)."""

    address: str = LOOPBACK
    namespace: str | None = None


class ProcessLauncher:
    """Starts one process per rank, by default all on this machine's loopback."""

    def __init__(
        self, config: Config, places: Sequence[Place] | None = None, serve: "Serve | None" = None
    ) -> None:
        """``serve``: makes what each process serves, by default a `Worker`."""
        self._serve = serve or _worker
        self._threads = config.cluster.threads_per_rank
        self._cpus_per_rank = config.cluster.cpus_per_rank
        self._places = places

    def check(self, ranks: int) -> None:
        """`ConfigError` if the ranks need more CPUs than this machine has."""
        cpus = len(os.sched_getaffinity(0))
        if ranks * self._cpus_per_rank > cpus:
            raise ConfigError(
                f"the layout asks for {ranks} ranks of cluster.cpus_per_rank={self._cpus_per_rank:g}, this "
                f"machine has {cpus} CPUs; lower parallel.dp, parallel.tp or parallel.pp, or let ranks share "
                f"CPUs with cluster.cpus_per_rank={cpus / ranks:g}"
            )

    def collector(self, files: Path, bytes_per_rank: int) -> AbstractContextManager[Collector]:
        """A thread of this process at the end of a Unix socket."""
        return socket_collector(SpanFiles(files, bytes_per_rank))

    def start(self, ranks: int) -> WorkerGroup:
        """Start the processes."""
        self.check(ranks)
        return ProcessGroup(self._places or [Place()] * ranks, self._threads, self._serve)


class ProcessGroup:
    """One child process per rank, each at the end of a private pipe."""

    def __init__(self, places: Sequence[Place], threads: int, serve: "Serve") -> None:
        self.addresses = [place.address for place in places]
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for rank, place in enumerate(places):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, place, theirs, os.getpid(), threads, serve),
                name=f"braid rank {rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._connections.append(mine)
            self._processes.append(process)

    def call(self, rank: int, method: str, *arguments: Any) -> Any:
        """Call one rank and wait."""
        self._send(rank, method, arguments)
        return self._collect([rank])[rank]

    def call_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call all ranks and wait; the first failure ends the waiting."""
        ranks = range(len(self._processes))
        for rank in ranks:
            self._send(rank, method, arguments)
        results = self._collect(list(ranks))
        return [results[rank] for rank in ranks]

    def _send(self, rank: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            self._connections[rank].send((method, arguments))
        except OSError:
            raise self._died(rank) from None

    def _collect(self, ranks: list[int]) -> dict[int, Any]:
        waiting = {self._connections[rank]: rank for rank in ranks}
        results: dict[int, Any] = {}
        while waiting:
            multiprocessing.connection.wait(list(waiting))
            for connection in [c for c in waiting if c.poll()]:
                rank = waiting.pop(connection)
                try:
                    outcome = connection.recv()
                except (EOFError, OSError):
                    raise self._died(rank) from None
                if isinstance(outcome, WorkerError):
                    raise self._cause(outcome, waiting)
                results[rank] = outcome[0]
        return results

    def _cause(self, error: WorkerError, waiting: dict[Connection, int]) -> WorkerError:
        """The death of another rank, if that is what a rank complains of; else its own error."""
        if not error.user_error and waiting:
            for connection in multiprocessing.connection.wait(list(waiting), _CAUSE_SECONDS):
                process = self._processes[waiting[connection]]  # type: ignore[index]
                process.join(_CAUSE_SECONDS)
                if not process.is_alive():
                    return self._died(waiting[connection])  # type: ignore[index]
        return error

    def _died(self, rank: int) -> WorkerError:
        self._processes[rank].join(1.0)
        text = f"its process ended with exit code {self._processes[rank].exitcode}"
        return WorkerError(rank, text, died=True)

    def describe(self) -> dict[str, Any]:
        """The processes and this machine."""
        return {
            "launcher": "processes",
            "addresses": list(self.addresses),
            "processes": [process.pid for process in self._processes],
        }

    def abort(self) -> None:
        """Kill the processes; `shutdown` has nothing to wait for then."""
        for process in self._processes:
            process.kill()

    def shutdown(self) -> None:
        """Ask every rank to end, then end those that do not."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(("close", ()))
            connection.close()
        for process in self._processes:
            process.join(_EXIT_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()


Serve = Callable[[int, str], Any]
"""Makes, in a rank's process, the object whose methods are called: from the rank and its address."""


def _worker(rank: int, address: str) -> Any:
    from braid.actors.stage.worker import Worker

    return Worker(rank, address)


def _serve(rank: int, place: Place, connection: Connection, parent: int, threads: int, serve: Serve) -> None:
    """A rank's main loop: a method's name and arguments in, its result or its failure out."""
    _die_with_parent(parent)
    if place.namespace is not None:
        enter_namespace(place.namespace)
    for number in (signal.SIGINT, signal.SIGTERM):  # the controller decides when to end, and closes the pipe
        signal.signal(number, signal.SIG_IGN)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    worker = serve(rank, place.address)
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            break
        try:
            outcome: Any = (getattr(worker, method)(*arguments),)
        except ValueError as error:
            outcome = WorkerError(rank, str(error), user_error=True, trace=traceback.format_exc())
        except Exception as error:
            outcome = WorkerError(rank, f"{type(error).__name__}: {error}", trace=traceback.format_exc())
        try:
            connection.send(outcome)
        except OSError:
            break
        if method == "close":
            break


def enter_namespace(namespace: str | int) -> None:
    """Move this thread, and what it starts, into a network namespace by name or open file (Linux, root)."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = namespace if isinstance(namespace, int) else os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    failed = libc.setns(handle, _CLONE_NEWNET)
    os.close(handle)
    if failed:
        raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")


def _die_with_parent(parent: int) -> None:
    """Ask Linux to end this process when its parent dies, however that happens."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
