"""Joins processes that torchrun has started, or another launcher that sets the same variables: the process of
rank 0 is the command, with the controller, and every other process becomes a rank.

The processes meet at torchrun's store. There rank 0 tells the others where its `Door` is and which token
opens it, or, if it refuses the run, how to end. Calls, questions and spans then travel over TCP connections
to the door, as they travel over pipes between processes of one machine. Rank 0 itself is a child of the
command.
"""

import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from braid.actors.config import Config, ConfigError
from braid.actors.config.joined import JoinedProcess
from braid.actors.config.variables import inherited
from braid.actors.controller.ranks.failures import GuardError
from braid.actors.controller.ranks.group import StoppedError, WorkerGroup, never
from braid.actors.controller.ranks.parent import HELD, die_with
from braid.actors.controller.ranks.processes import (
    Guest,
    ProcessGroup,
    ProcessLauncher,
    ProcessPlace,
    answer,
    check_room,
    obey,
)
from braid.actors.controller.ranks.rank_environment import rank_environment
from braid.actors.stage.measure.span_stream import ConnectionSink

if TYPE_CHECKING:
    from torch.distributed import Store

_WAIT: Final = timedelta(days=30)
"""Longest time for which a process waits for rank 0, which may have data to prepare."""
_END_SECONDS: Final = 10.0
"""Seconds for all processes to end together: then each has exit code of rank 0."""
_DOOR, _END, _LEFT = "door", "end", "left"
"""Keys in the store: address and token of the door (empty: the run was refused), the exit code, and the
number of processes that have read it."""


def store() -> "Store":
    """Connect to torchrun's store, or host it, if this is rank 0 and the launcher has none."""
    from torch.distributed import PrefixStore, rendezvous

    common, *_ = next(rendezvous("env://", timeout=_WAIT))
    attempt = [os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT")]
    return PrefixStore("/".join(["braid", *attempt]), common)


def own_address(process: JoinedProcess) -> str:
    """Return the IPv4 address of this host from which it reaches the store."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((process.address, process.port))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR={process.address!r} is not reached from here ({error.strerror or error}); give "
            f"torchrun an IPv4 address or a name of the first node"
        ) from None


@contextlib.contextmanager
def joined(process: JoinedProcess) -> Iterator[None]:
    """Run the command of rank 0 in the block, and tell other processes its exit code. In these, be a rank,
    and exit."""
    if process.rank:
        sys.exit(serve(process))
    meeting = store()  # held, as this process may host it
    try:
        yield
    except SystemExit as ended:
        _ignore_signals()  # torchrun ends all processes as soon as one has failed
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if not meeting.check([_DOOR]):
            meeting.set(_DOOR, "")
        meeting.set(_END, str(code))
        deadline = time.monotonic() + _END_SECONDS
        while meeting.add(_LEFT, 0) < process.ranks - 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        raise


def launcher_here(config: Config, places: Sequence[ProcessPlace] | None = None) -> ProcessLauncher:
    """Return the launcher of plain processes: it joins torchrun's, or, without torchrun, starts its own."""
    process = JoinedProcess.of(os.environ) if places is None else None
    return ProcessLauncher(config, places) if process is None else JoinedLauncher(config, process)


KINDS: Final = ("calls", "pulse", "spans")
"""The connections that a rank makes."""


class Plate(NamedTuple):
    """Where a door is, and the token that opens it."""

    address: str
    port: int
    token: str

    def knock(self, kind: str, rank: int, own_address: str) -> Connection:
        """Connect, show the token, see that the other side has it too, and tell who comes for what."""
        connection = Client((self.address, self.port), authkey=self.token.encode())
        connection.send((kind, rank, own_address, os.getpid()))
        return connection


class Door:
    """Lets in processes that show the token, and nobody else; what others send is never unpickled."""

    def __init__(self, address: str) -> None:
        self._listener = Listener((address, 0), backlog=1024)
        self.plate = Plate(*cast("tuple[str, int]", self._listener.address), secrets.token_hex(32))
        self._arrived: dict[tuple[str, int], tuple[Connection, str, int]] = {}
        self._changed = threading.Condition()
        self._open = True
        threading.Thread(target=self._listen, name="door", daemon=True).start()

    def __enter__(self) -> "Door":
        return self

    def __exit__(self, *error: object) -> None:
        self._open = False
        with contextlib.suppress(OSError):
            Client(self.plate[:2]).close()  # wakes the thread that listens
        for connection, *_ in self._arrived.values():
            connection.close()

    def _listen(self) -> None:
        with self._listener:
            while True:
                try:
                    connection = self._listener.accept()
                except OSError:  # whoever came has left already, or too many files are open
                    time.sleep(0.1)
                    continue
                if not self._open:
                    connection.close()
                    return
                threading.Thread(target=self._greet, args=(connection,), name="guest", daemon=True).start()

    def _greet(self, connection: Connection) -> None:
        """Exchange proofs of the token, in both directions; then take what the process has come for."""
        token = self.plate.token.encode()
        try:
            deliver_challenge(connection, token)
            answer_challenge(connection, token)
        except (OSError, EOFError, AuthenticationError):
            connection.close()
            return
        with contextlib.suppress(OSError, EOFError, ValueError):
            kind, rank, address, pid = connection.recv()
            with self._changed:
                self._arrived[kind, rank] = connection, address, pid
                self._changed.notify_all()

    def take(self, rank: int, limit_s: float, stopped: Callable[[], bool] = never) -> Guest:
        """Wait for a rank's process. Raise `StoppedError`, or an error that ends the run if it does not come
        within ``limit_s`` seconds."""
        keys, deadline = [(kind, rank) for kind in KINDS], time.monotonic() + limit_s
        with self._changed:
            while not all(key in self._arrived for key in keys):
                if stopped():
                    raise StoppedError
                if time.monotonic() > deadline:
                    text = f"its process has not come within {limit_s:g} s (cluster.group_timeout_s)"
                    raise GuardError(rank, text)
                self._changed.wait(0.1)
            (calls, address, pid), (pulse, *_), (spans, *_) = (self._arrived.pop(key) for key in keys)
        return Guest(address, pid, calls, pulse, spans)


# -- the process of rank 0 -----------------------------------------------------------------------------------


class JoinedLauncher(ProcessLauncher):
    """Takes as ranks the processes that torchrun has started, within the block of `gathered`."""

    def __init__(self, config: Config, process: JoinedProcess) -> None:
        super().__init__(config)
        self._process = process
        self._door: Door | None = None

    def check(self, ranks: int) -> None:
        """Raise `ConfigError` if there are more or fewer processes than ranks, or this host has no room."""
        process, parallel = self._process, self._config.parallel
        if self._config.elastic.max_ranks is not None:
            raise ConfigError(
                f"elastic.max_ranks={self._config.elastic.max_ranks}: torchrun's processes do not come and "
                f"go; set elastic.max_ranks to null, or train on Ray"
            )
        if ranks != process.ranks:
            degrees = ", ".join(
                f"parallel.{axis}={getattr(parallel, axis)}" for axis in ("dp", "tp", "pp", "cp")
            )
            raise ConfigError(
                f"the layout has {ranks} ranks ({degrees}), and torchrun has started {process.ranks} "
                f"processes; start {ranks} (`--nproc-per-node` times `--nnodes`), or change the degrees"
            )
        check_room(self._config, process.on_this_host)

    def capacity(self, group: WorkerGroup | None, avoid: Sequence[str] = ()) -> tuple[int, bool]:
        return self._process.ranks, False

    def hosts(self, ranks: int) -> list[str]:
        alone = self._config.cluster.emulated_link_mbit is not None
        each = 1 if alone else self._process.on_this_host
        return [f"node {rank // each}" for rank in range(ranks)]

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        with Door(own_address(self._process)) as door:
            store().set(_DOOR, json.dumps(door.plate))
            self._door = door
            yield

    def start(
        self, ranks: int, avoid: Sequence[str] = (), stopped: Callable[[], bool] = never
    ) -> WorkerGroup:
        """Take the processes of the first ranks as they arrive."""
        assert self._door is not None, "ranks start within the block of `gathered`"
        limit_s = self._config.cluster.group_timeout_s
        guests = {rank: self._door.take(rank, limit_s, stopped) for rank in range(1, ranks)}
        addresses = [own_address(self._process), *(guest.address for guest in guests.values())]
        alone = self._config.cluster.emulated_link_mbit is not None
        places = [
            ProcessPlace(address, machine=f"emulated host {rank}" if alone else None)
            for rank, address in enumerate(addresses)
        ]
        for guest in guests.values():
            with contextlib.suppress(OSError):  # its first call tells that it has ended
                guest.calls.send(self._config)
        return ProcessGroup(places, self._config, self._serve, self._spans, guests)


# -- the processes of the other ranks ------------------------------------------------------------------------


def serve(process: JoinedProcess) -> int:
    """Be a rank of the run of rank 0's process, until that ends; return its exit code."""
    die_with(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is a run, whose controller decides when to end
    meeting = store()
    plate = meeting.get(_DOOR)
    _ignore_signals()
    groups = 0
    while plate and _served(process, Plate(*json.loads(plate))):
        groups += 1
    meeting.set_timeout(timedelta(seconds=_END_SECONDS))
    try:
        code = int(meeting.get(_END))
        meeting.add(_LEFT, 1)
    except RuntimeError:  # the process of rank 0 was killed, or cannot be reached
        if plate and not groups:
            where = ":".join(map(str, json.loads(plate)[:2]))
            print(
                f"braid: rank {process.rank} does not reach rank 0 at {where}; see MASTER_ADDR",
                file=sys.stderr,
            )
        return 1
    return code


def _ignore_signals() -> None:
    for number in HELD:
        signal.signal(number, signal.SIG_IGN)


def _served(process: JoinedProcess, plate: Plate) -> bool:
    """Be a rank of the next group of ranks (of a profile, of the run); return False if no other will come."""
    from braid.actors.stage.rank.worker import Worker

    address = own_address(process)
    try:
        calls, pulse, spans = (plate.knock(kind, process.rank, address) for kind in KINDS)
        config = calls.recv()
    except (OSError, EOFError):  # the door is closed
        return False
    os.environ.update({**rank_environment(config, os.environ), **inherited(config.cluster.env, os.environ)})
    served: list[Any] = []
    over = threading.Event()

    def watch() -> None:
        answer(pulse, served)
        if not over.is_set():  # the controller is gone, or has given this rank up
            os._exit(1)

    threading.Thread(target=watch, name="pulse", daemon=True).start()
    served.append(Worker(process.rank, address))
    served[0].spans = ConnectionSink(spans)
    obey(served[0], process.rank, calls)
    over.set()
    for connection in (calls, pulse, spans):
        connection.close()
    return True
