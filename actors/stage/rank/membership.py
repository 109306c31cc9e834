"""A rank's membership in a generation's process groups: join, break off at any moment, leave; its network
address, and the connections of the groups."""

import contextlib
import fcntl
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from braid.actors.stage.rank.devices import device_of, local_rank
from braid.actors.stage.rank.groups import make_world
from braid.actors.stage.rank.messages import Rendezvous

if TYPE_CHECKING:  # tests of GPUs run where pydantic is not installed
    from braid.actors.config import ClusterConfig
    from braid.actors.stage.run.step_graph import StepGraph

_SIOCGIFADDR = 0x8915
_SO_MAX_PACING_RATE = 47
"""Socket option for a limit in bytes per second, which TCP keeps; from Linux's `asm-generic/socket.h`."""


def interface_of(address: str) -> str | None:
    """Return the network interface that has an IPv4 address; None if unknown.

    The loopback interface answers to all of 127.0.0.0/8, but reports only one of these addresses.
    """
    first = address.partition(".")[0]
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", name.encode()[:15])
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            interface_address = socket.inet_ntoa(answer[20:24])
            if interface_address == address or (first == "127" and interface_address.startswith("127.")):
                return name
    return None


def bind_gloo(address: str) -> None:
    """Make gloo use the interface of ``address``, unless the user chose an interface."""
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface_of(address)):
        os.environ["GLOO_SOCKET_IFNAME"] = name


def store_on(address: str, timeout: timedelta) -> dist.TCPStore:
    """Host a store on a free port of one address only; torch itself would listen on all addresses."""
    listening = socket.create_server((address, 0))
    port = listening.getsockname()[1]
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listening.detach(),
    )


class Connections:
    """The sockets opened while process groups were made: their rate can be limited, and they can be shut down
    to end waiting calls.

    gloo has no other way to end a collective whose peer is silent: a waiting thread returns when its sockets
    are shut down, and not before (measured; docs/design.md, Failure). Sockets that other threads happen to
    open in this time are shut down too; Ray renews its connections by itself.
    """

    def __init__(self) -> None:
        self._before = _sockets()
        self._of_groups: dict[int, int] = {}

    def made(self) -> None:
        """Record that the groups have been made: sockets opened later do not belong to them."""
        self._of_groups = dict(_sockets().items() - self._before.items())

    def shut(self) -> None:
        """Shut the connections down in both directions, except connections that were closed in the meantime.

        Listening sockets are left alone: gloo ends the process when one of its listening sockets is shut
        down.
        """
        self._each(lambda connection: connection.shutdown(socket.SHUT_RDWR))

    def pace(self, mbit: float) -> None:
        """Limit each connection's sending rate, in Mbit/s, as if hosts were joined by a slow link."""
        rate = round(mbit * 1e6 / 8)
        self._each(lambda connection: connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate))

    def _each(self, do: Callable[[socket.socket], None]) -> None:
        for handle, inode in (self._of_groups or dict(_sockets().items() - self._before.items())).items():
            with contextlib.suppress(OSError):
                if os.fstat(handle).st_ino == inode:
                    with socket.socket(fileno=os.dup(handle)) as connection:
                        connection.getpeername()  # raises if it is not connected
                        do(connection)


def _sockets() -> dict[int, int]:
    """Return the inode of each socket of this process, by file descriptor."""
    sockets = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            status = os.stat(entry)
            if stat.S_ISSOCK(status.st_mode):
                sockets[int(entry.name)] = status.st_ino
    return sockets


class Membership:
    """Holds the store where ranks meet, the connections between them, and the rank's device."""

    graph: "StepGraph | None" = None
    """The CUDA graph of a step. It is dropped before the groups are destroyed: NCCL destroys no communicator
    that a graph still refers to."""

    def __init__(self, address: str) -> None:
        self.device = torch.device("cpu")
        self._address = address
        self._store: dist.TCPStore | None = None
        self._connections: Connections | None = None
        self._generation, self._broken_off = 0, -1
        """The present generation, and the newest generation that was broken off."""
        self._lock = threading.Lock()

    def host_store(self, timeout_s: float) -> int:
        self._store = store_on(self._address, timedelta(seconds=timeout_s))
        return int(self._store.port)

    def begin(self, cluster: "ClusterConfig", rank: int, rendezvous: Rendezvous) -> None:
        """Begin a generation: choose the device, and watch which connections are opened from now on."""
        with self._lock:  # an abort of the previous generation has ended
            if self._generation == rendezvous.generation:  # the same generation again
                self._broken_off = -1
            self._generation = rendezvous.generation
        self.intact()
        self.device = device_of(cluster.device, local_rank(rank, rendezvous.hosts))
        self.use_device()
        self._connections = Connections()

    def join(self, cluster: "ClusterConfig", rendezvous: Rendezvous, rank: int, ranks: int) -> None:
        timeout = timedelta(seconds=cluster.group_timeout_s)
        bind_gloo(self._address)
        if self._store is None:
            self._store = dist.TCPStore(rendezvous.address, rendezvous.port, is_master=False, timeout=timeout)
        backend: str = cluster.backend
        if backend == "auto":
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        store = dist.PrefixStore(f"generation-{rendezvous.generation}", self._store)
        make_world(backend, store, rank, ranks, timeout)

    def connected(self, mbit: float | None) -> None:
        """Record that all groups have been made; ``mbit``: limit of each connection's rate, in Mbit/s."""
        assert self._connections is not None
        self._connections.made()
        if mbit is not None:
            self._connections.pace(mbit)

    def break_off(self, generation: int | None = None) -> None:
        """Make calls that wait for other ranks raise, or return garbage; callable from any thread.

        ``generation``: the generation to break off; None for the present one. A generation that is over is
        left alone. If the generation has not begun yet, its `begin` will raise.
        """
        with self._lock:
            meant = self._generation if generation is None else generation
            if meant < self._generation:
                return
            self._broken_off = meant  # before any waiting call returns
            if meant == self._generation:
                self.use_device()
                self._drop_graph()
                if self._connections is not None:
                    self._connections.shut()
                self._abort()

    def _drop_graph(self) -> None:
        if self.graph is not None:
            self.graph.drop()

    def _abort(self) -> None:
        if dist.is_initialized() and self.device.type == "cuda":
            dist.distributed_c10d._abort_process_group()

    @property
    def broken(self) -> bool:
        """Whether communication of the present generation was broken off."""
        return self._broken_off == self._generation

    def intact(self) -> None:
        """Raise `RuntimeError` if communication was broken off: collectives may have returned garbage."""
        if self.broken:
            raise RuntimeError("communication was broken off")

    def use_device(self) -> None:
        """Let this thread work with the rank's GPU; a new thread begins with the machine's first GPU."""
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device)

    def leave(self) -> None:
        self._drop_graph()
        self._destroy()
        self._store = self._connections = self.graph = None

    def _destroy(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
