"""A rank's network address, and the connections of its process groups."""

import contextlib
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

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
