"""Runs ranks as plain processes of this machine, without Ray; also the baseline for the overhead of Ray."""

import contextlib
import multiprocessing
import os
import queue
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from braid.actors.config import Config, ConfigError
from braid.actors.config.variables import inherited
from braid.actors.controller.ranks.cpus import usable_cpus
from braid.actors.controller.ranks.failures import GuardError
from braid.actors.controller.ranks.group import WorkerError, WorkerGroup, never, raised
from braid.actors.controller.ranks.parent import HELD, die_with, enter_namespace, signals_held
from braid.actors.controller.ranks.private_folders import shorten_multiprocessing
from braid.actors.controller.ranks.rank_environment import gpus_here, rank_environment
from braid.actors.controller.records.span_files import SpanFiles
from braid.actors.stage.measure.span_stream import ConnectionSink

LOOPBACK = "127.0.0.1"
PRELOADED = ["braid.actors.stage.rank.worker", "torch._dynamo"]
"""Modules that the fork server imports before ranks are forked; making an optimizer imports torch's compiler.
"""
_CONNECT_SECONDS = 5.0
_EXIT_SECONDS = 5.0
_GUEST_EXIT_SECONDS = 60.0
"""Long, as torchrun takes a killed rank for a failure of the run."""
_GUEST_ENDED = (
    "its process has ended, and with it the run; `torchrun --max-restarts` starts all processes again, and "
    "`braid train --resume-if-begun` goes on from the newest checkpoint"
)
_EXIT_CODE_SECONDS = 0.3
"""Seconds to wait for the exit code of a process whose pipe has closed; the code is only for a message."""


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
        self._spans: SpanFiles | None = None

    def check(self, ranks: int) -> None:
        """Raise `ConfigError` if the ranks need more CPUs or GPUs than this machine has, or have no
        network."""
        if self._places is None:
            check_loopback()
        check_room(self._config, ranks)

    @contextlib.contextmanager
    def collector(self, files: Path, bytes_per_rank: int) -> Iterator[SpanFiles]:
        with contextlib.closing(SpanFiles(files, bytes_per_rank)) as spans:
            self._spans = spans
            yield spans
        self._spans = None

    def capacity(self, group: WorkerGroup | None, avoid: Sequence[str] = ()) -> tuple[int, bool]:
        return int(usable_cpus() / self._config.cluster.cpus_per_rank), False

    def start(
        self, ranks: int, avoid: Sequence[str] = (), stopped: Callable[[], bool] = never
    ) -> WorkerGroup:
        """Start the processes without waiting for them; ``avoid`` is ignored, as there is one machine."""
        self.check(ranks)
        return ProcessGroup(self._placed(ranks), self._config, self._serve, self._spans)

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
    """One process per rank, connected by three private pipes: for calls, for its pulse, for spans.

    A fork server that has imported what a rank needs starts them, so that a lost rank is replaced at once.
    Guests are ranks in processes that torchrun has started, and only torchrun can replace.
    """

    def __init__(
        self,
        places: Sequence[ProcessPlace],
        config: Config,
        serve: "Serve",
        spans: SpanFiles | None = None,
        guests: "Mapping[int, Guest] | None" = None,
    ) -> None:
        """``serve``: what a new process runs. ``spans``: files for the ranks' spans; None if ranks stream
        none. ``guests``: processes of torchrun by rank, if there are any."""
        gpus = gpus_here(os.environ) > 0 and config.cluster.device != "cpu"
        super().__init__(len(places), config.failure, config.cluster, on_gpus=gpus)
        self.addresses = [place.address for place in places]
        self.hosts = [place.host for place in places]
        self._places, self._serve, self._spans, self._guests = places, serve, spans, guests or {}
        secret = inherited(config.cluster.env, os.environ)
        self._environment = {**os.environ, **rank_environment(config, os.environ), **secret}
        self._children = [self._start(rank) for rank in range(len(places))]

    def _start(self, rank: int) -> "Child":
        if (guest := self._guests.get(rank)) is not None:
            return self._child(guest, guest.calls, guest.pulse, guest.spans)
        shorten_multiprocessing()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        ours, theirs = zip(context.Pipe(), context.Pipe(), context.Pipe(duplex=False), strict=True)
        process = context.Process(
            target=_run,
            args=(self._serve, rank, self._places[rank], *theirs, self._environment),
            name=f"braid rank {rank}",
            daemon=True,
        )
        with signals_held():
            resource_tracker.ensure_running()  # unblocks signals in this thread at its end
        with signals_held():
            process.start()
        for connection in theirs:
            connection.close()
        return self._child(process, *ours)

    def _child(
        self, process: "BaseProcess | Guest", calls: Connection, pulse: Connection, spans: Connection
    ) -> "Child":
        if self._spans is not None:
            self._spans.receive(spans)
        else:
            spans.close()
        return Child(process, Line(calls), Line(pulse))

    def _send(
        self, rank: int, method: str, arguments: tuple[Any, ...], *, beside: bool = False
    ) -> "Future[Any]":
        child = self._children[rank]
        return (child.pulse if beside else child.calls).ask(method, arguments)

    def _failure(self, rank: int, error: BaseException) -> WorkerError:
        return error if isinstance(error, WorkerError) else self._ended(rank)

    def _ended(self, rank: int) -> WorkerError:
        if rank in self._guests:
            return GuardError(rank, _GUEST_ENDED, died=True)
        process = self._children[rank].process
        process.join(_EXIT_CODE_SECONDS)
        code = process.exitcode
        text = "its process is ending" if code is None else f"its process ended with exit code {code}"
        return WorkerError(rank, text, died=True)

    def _kill(self, rank: int) -> None:
        self._children[rank].kill()

    def _restart(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if rank in self._guests:
                raise self._ended(rank)
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
        for rank in self._calls:
            self._children[rank].process.kill()
        leave_s = _GUEST_EXIT_SECONDS if self._guests else _EXIT_SECONDS
        wait([child.calls.ask("close", ()) for child in self._children], leave_s)
        for child in self._children:
            child.process.join(_EXIT_SECONDS)
            child.kill()


class Line:
    """A connection to a rank, over which one call after the other is answered. A thread sends and receives,
    because a send to a stopped process whose pipe is full would block for ever."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._unsent: queue.SimpleQueue[tuple[Any, Future[Any]] | None] = queue.SimpleQueue()
        self._open = True
        threading.Thread(target=self._run, name="line", daemon=True).start()

    def ask(self, method: str, arguments: tuple[Any, ...]) -> "Future[Any]":
        """Return the future answer. Its exception is the rank's `WorkerError`, or an `OSError` or `EOFError`
        if the rank's process has ended."""
        answer: Future[Any] = Future()
        if self._open:
            self._unsent.put((ForkingPickler.dumps((method, arguments)), answer))
        else:
            answer.set_exception(EOFError())
        return answer

    def _run(self) -> None:
        with self._connection:
            while (call := self._unsent.get()) is not None:
                content, answer = call
                try:
                    self._connection.send_bytes(content)
                    outcome = self._connection.recv()
                except Exception as error:
                    answer.set_exception(error)
                    continue
                if isinstance(outcome, WorkerError):
                    answer.set_exception(outcome)
                else:
                    answer.set_result(outcome[0])

    def close(self) -> None:
        """Close the connection once the last call is answered, or the rank's process has ended."""
        self._open = False
        self._unsent.put(None)


@dataclass(frozen=True)
class Guest:
    """The process of a rank that somebody else has started, and the controller's ends of its connections."""

    address: str
    pid: int
    calls: Connection
    pulse: Connection
    spans: Connection
    exitcode: int | None = None

    def join(self, timeout: float | None = None) -> None:
        """Wait until a rank that has answered its last call closes its connections."""
        with contextlib.suppress(OSError):
            self.calls.poll(timeout)

    def kill(self) -> None:
        """Let the process end: a rank whose connections close in the middle of its work exits."""
        for connection in (self.calls, self.pulse, self.spans):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True)
class Child:
    """A rank's process and the controller's ends of its pipes."""

    process: BaseProcess | Guest
    calls: Line
    pulse: Line

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
    spans: Connection,
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
    served[0].spans = ConnectionSink(spans)
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
            pulse.send((answer,))
