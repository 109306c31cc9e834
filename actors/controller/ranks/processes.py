"""Runs ranks as plain processes of this machine, without Ray; also the baseline for the overhead of Ray."""

import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import socket
import threading
import traceback
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Protocol

from braid.actors.config import Config, ConfigError
from braid.actors.config.variables import inherited
from braid.actors.controller.ranks.cpus import usable_cpus
from braid.actors.controller.ranks.group import (
    Answer,
    Collector,
    Outcome,
    Polled,
    WorkerError,
    WorkerGroup,
    never,
    raised,
)
from braid.actors.controller.ranks.parent import HELD, die_with, signals_held
from braid.actors.controller.ranks.private_folders import shorten_multiprocessing
from braid.actors.controller.ranks.rank_environment import gpus_here, rank_environment
from braid.actors.controller.records.span_files import SpanFiles, socket_collector

LOOPBACK = "127.0.0.1"
PRELOADED = ["braid.actors.stage.rank.worker", "torch._dynamo"]
"""Modules that the fork server imports before ranks are forked; making an optimizer imports torch's compiler.
"""
_CONNECT_SECONDS = 5.0
_EXIT_SECONDS = 5.0
_EXIT_CODE_SECONDS = 0.3
"""Seconds to wait for the exit code of a process whose pipe has closed; the code is only for a message."""
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class ProcessPlace:
    """Where a rank runs: an address, and the network namespace and CPUs (None: this process's own)."""

    address: str = LOOPBACK
    namespace: str | None = None
    cpus: tuple[int, ...] | None = None
    machine: str | None = None
    """Name of the host that this place emulates, if the address does not identify it."""

    @property
    def host(self) -> str:
        """Name of the host; equal for ranks of one host."""
        return self.machine or self.address


def check_loopback() -> None:
    """Raise `ConfigError` if this machine cannot reach itself: its loopback is down, as in a new
    namespace."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise ConfigError(
            f"ranks meet on {LOOPBACK}, and nothing is reached there ({error.strerror or error}); bring the "
            f"loopback device up (ip link set lo up)"
        ) from None


def check_room(config: Config, ranks: int) -> None:
    """Raise `ConfigError` if the ranks need more CPUs or GPUs than this machine has."""
    gpus, wanted = gpus_here(os.environ), config.cluster.device
    if ranks > gpus and (wanted == "cuda" or (wanted == "auto" and gpus)):
        raise ConfigError(
            f"the layout asks for {ranks} ranks of cluster.device={wanted!r}, this machine has {gpus} "
            f"GPUs; lower parallel.dp, parallel.tp or parallel.pp, or set cluster.device=cpu"
        )
    cpus, each = usable_cpus(), config.cluster.cpus_per_rank
    if ranks * each > cpus:
        raise ConfigError(
            f"the layout asks for {ranks} ranks of cluster.cpus_per_rank={each:g}, this machine has "
            f"{cpus:g} CPUs; lower parallel.dp, parallel.tp or parallel.pp, or let ranks share CPUs with "
            f"cluster.cpus_per_rank={cpus / ranks:g}"
        )


class ProcessLauncher:
    """Starts one process per rank, by default all on this machine's loopback."""

    def __init__(
        self, config: Config, places: Sequence[ProcessPlace] | None = None, serve: "Serve | None" = None
    ) -> None:
        """``serve``: makes the object that each process serves, by default a `Worker`."""
        self._config, self._places, self._serve = config, places, serve or _worker

    def check(self, ranks: int) -> None:
        """Raise `ConfigError` if the ranks need more CPUs or GPUs than this machine has, or have no
        network."""
        if self._places is None:
            check_loopback()
        check_room(self._config, ranks)

    def collector(self, files: Path, bytes_per_rank: int) -> AbstractContextManager[Collector]:
        return socket_collector(SpanFiles(files, bytes_per_rank))

    def capacity(self, group: WorkerGroup | None, avoid: Sequence[str] = ()) -> tuple[int, bool]:
        return int(usable_cpus() / self._config.cluster.cpus_per_rank), False

    def start(
        self, ranks: int, avoid: Sequence[str] = (), stopped: Callable[[], bool] = never
    ) -> WorkerGroup:
        """Start the processes without waiting for them; ``avoid`` is ignored, as there is one machine."""
        self.check(ranks)
        return ProcessGroup(self._placed(ranks), self._config, self._serve)

    def _placed(self, ranks: int) -> Sequence[ProcessPlace]:
        alone = self._config.cluster.emulated_link_mbit is not None  # each rank is a host of its own
        return self._places or (separate_places(ranks) if alone else [ProcessPlace()] * ranks)

    def machines(self) -> list[str]:
        return []

    def hosts(self, ranks: int) -> list[str]:
        return [place.host for place in self._placed(ranks)]

    def gathered(self) -> AbstractContextManager[object]:
        """Return a block within which ranks may start; here it does nothing."""
        return contextlib.nullcontext()


def separate_places(ranks: int) -> list[ProcessPlace]:
    """Give each rank CPUs of its own, as if on a host of its own, if there are enough."""
    cpus = sorted(os.sched_getaffinity(0))
    share = len(cpus) // ranks
    return [
        ProcessPlace(cpus=tuple(cpus[n * share : (n + 1) * share]) or None, machine=f"emulated host {n}")
        for n in range(ranks)
    ]


class ProcessGroup(WorkerGroup):
    """One child process per rank, connected by two private pipes: for calls, and for its pulse.

    A fork server that has imported what a rank needs starts them, so that a lost rank is replaced at once.
    """

    def __init__(self, places: Sequence[ProcessPlace], config: Config, serve: "Serve") -> None:
        gpus = gpus_here(os.environ) > 0 and config.cluster.device != "cpu"
        super().__init__(len(places), config.failure, config.cluster, on_gpus=gpus)
        self.addresses = [place.address for place in places]
        self.hosts = [place.host for place in places]
        self._places, self._serve = places, serve
        secret = inherited(config.cluster.env, os.environ)
        self._environment = {**os.environ, **rank_environment(config, os.environ), **secret}
        self._asked: dict[int, deque[str]] = {}
        """Questions that each rank has not answered yet, the oldest first."""
        self._owed = [0] * len(places)
        """Unanswered calls of each rank; more than one after a call that another rank's error ended."""
        self._children = [self._start(rank) for rank in range(len(places))]

    def _start(self, rank: int) -> "Child":
        """Start the process of a rank."""
        shorten_multiprocessing()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        (calls, theirs), (pulse, their_pulse) = context.Pipe(), context.Pipe()
        process = context.Process(
            target=_run,
            args=(self._serve, rank, self._places[rank], theirs, their_pulse, self._environment),
            name=f"braid rank {rank}",
            daemon=True,
        )
        with signals_held():
            resource_tracker.ensure_running()  # unblocks signals in this thread at its end
        with signals_held():
            process.start()
        theirs.close()
        their_pulse.close()
        return Child(process, PipeEnd(calls), PipeEnd(pulse))

    def _submit(self, rank: int, method: str, arguments: tuple[Any, ...]) -> None:
        self._owed[rank] += 1
        self._children[rank].calls.send((method, arguments))

    def _ask(self, rank: int, question: str, *arguments: Any) -> None:
        if question != "pulse" or rank not in self._asked:
            self._children[rank].pulse.send((question, arguments))
            self._asked.setdefault(rank, deque()).append(question)

    def _poll(self, waiting: Collection[int], timeout_s: float) -> Polled:
        calls = {self._children[rank].calls.connection: rank for rank in waiting}
        pulses = {self._children[rank].pulse.connection: rank for rank in self._asked}
        ready = set(multiprocessing.connection.wait([*calls, *pulses], timeout_s))
        answers: list[Answer] = []
        for connection, rank in pulses.items():
            if connection in ready:
                try:
                    answers.append((rank, self._asked[rank].popleft(), connection.recv()))
                except (EOFError, OSError):  # its process ends, as its other pipe will tell
                    self._asked[rank].clear()
                if not self._asked[rank]:
                    del self._asked[rank]
        outcomes: list[tuple[int, Outcome]] = []
        for connection, rank in calls.items():
            if connection in ready:
                self._owed[rank] -= 1
                try:
                    outcome: Outcome = connection.recv()
                except (EOFError, OSError):
                    outcomes.append((rank, self._ended(rank)))
                    continue
                if not self._owed[rank]:
                    outcomes.append((rank, outcome))  # else it answers a call that nobody waits for
        return outcomes, answers

    def _ended(self, rank: int) -> WorkerError:
        process = self._children[rank].process
        process.join(_EXIT_CODE_SECONDS)
        code = process.exitcode
        text = "its process is ending" if code is None else f"its process ended with exit code {code}"
        return WorkerError(rank, text, died=True)

    def _kill(self, rank: int) -> None:
        self._asked.pop(rank, None)  # the rank answers no more, and its pipe is closed
        self._children[rank].kill()

    def _restart(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._asked.pop(rank, None)
            self._owed[rank] = 0
            self._children[rank] = self._start(rank)

    def describe(self) -> dict[str, Any]:
        return {
            "launcher": "processes",
            "addresses": list(self.addresses),
            "processes": [child.process.pid for child in self._children],
        }

    def shutdown(self) -> None:
        """Ask every rank to end, then kill ranks that do not end; kill a rank that is at work without
        asking."""
        for rank, child in enumerate(self._children):
            if rank in self._busy:
                child.process.kill()
            child.calls.send(("close", ()))
        for child in self._children:
            child.process.join(_EXIT_SECONDS)
            child.kill()


class PipeEnd:
    """This process's end of a pipe. A separate thread sends, because a send to a stopped process whose pipe
    is full would block for ever."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._unsent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sending", daemon=True)
        self._thread.start()

    def send(self, content: Any) -> None:
        """Send once the other side accepts it; whoever reads from the pipe notices if it is closed."""
        self._unsent.put(ForkingPickler.dumps(content))

    def _run(self) -> None:
        while (content := self._unsent.get()) is not None:
            try:
                self.connection.send_bytes(content)
            except (OSError, ValueError):  # the other side is gone
                return

    def close(self) -> None:
        self._unsent.put(None)
        self._thread.join(_EXIT_SECONDS)
        self.connection.close()


class RankProcess(Protocol):
    """What the controller knows of a rank's process; `BaseProcess` documents it."""

    @property
    def pid(self) -> int | None: ...

    @property
    def exitcode(self) -> int | None: ...

    def join(self, timeout: float | None = None) -> None: ...

    def kill(self) -> None: ...


@dataclass(frozen=True)
class Child:
    """A rank's process and the controller's ends of its pipes."""

    process: RankProcess
    calls: PipeEnd
    pulse: PipeEnd

    def kill(self) -> None:
        """End the process, if it lives, and close the pipes. Do not wait long for a process that the kernel
        cannot kill, for example while it waits for a disk."""
        self.process.kill()
        self.process.join(_EXIT_SECONDS)
        self.calls.close()
        self.pulse.close()


Serve = Callable[[int, str], Any]
"""Makes, from a rank and its address, the object whose methods are called in the rank's process."""


def _worker(rank: int, address: str) -> Any:
    from braid.actors.stage.rank.worker import Worker

    return Worker(rank, address)


def _run(
    serve: Serve,
    rank: int,
    place: ProcessPlace,
    calls: Connection,
    pulse: Connection,
    environment: Mapping[str, str],
) -> None:
    """Run a rank's process: calls in its main loop, questions in a thread."""
    die_with(os.getppid())  # the parent is the fork server, which ends with whoever started it
    os.environ.update(environment)  # the fork server keeps the environment of its own start
    if place.namespace is not None:
        enter_namespace(place.namespace)
    if place.cpus is not None:
        os.sched_setaffinity(0, place.cpus)
    for number in HELD:  # the controller decides when to end, and closes the pipe
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)  # children of a rank inherit ignored signals
    served: list[Any] = []
    threading.Thread(target=answer, args=(pulse, served), name="pulse", daemon=True).start()
    served.append(serve(rank, place.address))
    obey(served[0], rank, calls)


def obey(worker: Any, rank: int, calls: Connection) -> None:
    """Run a rank's main loop until ``close``, or until the connection ends: receive a method's name and
    arguments, send back its result or its failure."""
    method = ""
    with contextlib.suppress(EOFError, OSError):  # the pipe is closed
        while method != "close":
            method, arguments = calls.recv()
            try:
                outcome: Any = (getattr(worker, method)(*arguments),)
            except Exception as error:
                outcome = raised(rank, error, traceback.format_exc())
            calls.send(outcome)


def answer(pulse: Connection, served: list[Any]) -> None:
    """Answer ``pulse`` and ``interrupt`` while the main loop works; the served object need not have these
    methods."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            question, arguments = pulse.recv()
            answer = None
            try:
                if method := getattr(served[0], question, None) if served else None:
                    answer = method(*arguments)
            except Exception:  # an error must not end the thread that shows that a rank lives
                traceback.print_exc()
            pulse.send(answer)


def enter_namespace(namespace: str | int) -> None:
    """Move this thread, and what it starts, into a network namespace by name or open file (Linux, root)."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = namespace if isinstance(namespace, int) else os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    failed = libc.setns(handle, _CLONE_NEWNET)
    os.close(handle)
    if failed:
        raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")
