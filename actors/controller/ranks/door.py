"""A TCP server of the controller for ranks in processes that somebody else has started (`rendezvous.py`)."""

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Final, NamedTuple, cast

from braid.actors.controller.ranks.failures import GuardError
from braid.actors.controller.ranks.group import StoppedError, never

KINDS: Final = ("calls", "pulse", "spans")
"""The connections that a rank makes."""


@dataclass(frozen=True)
class Guest:
    """A process of another rank, and the controller's ends of its connections."""

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
