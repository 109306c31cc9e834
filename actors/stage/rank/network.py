"""Where a rank is reached, and the connections of its process groups."""

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
"""Linux's `asm-generic/socket.h`; in bytes per second. TCP keeps the rate by itself."""


def interface_of(address: str) -> str | None:
    """The name of the network interface that holds an IPv4 address; None where it cannot be told.

    The loopback interface answers to all of 127.0.0.0/8, and names one of them.
    """
    first = address.partition(".")[0]
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", name.encode()[:15])
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            held = socket.inet_ntoa(answer[20:24])
            if held == address or (first == "127" and held.startswith("127.")):
                return name
    return None


def bind_gloo(address: str) -> None:
    """Make gloo use the interface of ``address``, unless the user chose one."""
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface_of(address)):
        os.environ["GLOO_SOCKET_IFNAME"] = name


def store_on(address: str, timeout: timedelta) -> dist.TCPStore:
    """Host a store on a free port of one address; by itself torch would listen on all of this machine's."""
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
    """The sockets that were opened while process groups were made: paced, and shut when groups are given up.

    gloo has no other way to end a collective whose peer is silent: a thread that waits in one comes back when
    its sockets are shut, and not before (measured; docs/design.md, Failure). What other threads happen to
    open meanwhile is shut too; Ray's connections are made anew by themselves.
    """

    def __init__(self) -> None:
        self._before = _sockets()
        self._own: dict[int, int] = {}

    def made(self) -> None:
        """The groups have been made."""
        self._own = dict(_sockets().items() - self._before.items())

    def shut(self) -> None:
        """Shut the connections in both directions; those that were closed in the meantime are left alone.

        Listening sockets are left alone too: gloo ends the process when one of its own is shut.
        """
        self._each(lambda connection: connection.shutdown(socket.SHUT_RDWR))

    def pace(self, mbit: float) -> None:
        """Let each connection send at a rate at most, as if hosts were joined by a slow link."""
        rate = round(mbit * 1e6 / 8)
        self._each(lambda connection: connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate))

    def _each(self, do: Callable[[socket.socket], None]) -> None:
        for handle, inode in (self._own or dict(_sockets().items() - self._before.items())).items():
            with contextlib.suppress(OSError):
                if os.fstat(handle).st_ino == inode:
                    with socket.socket(fileno=os.dup(handle)) as connection:
                        connection.getpeername()  # raises if it is not connected
                        do(connection)


def _sockets() -> dict[int, int]:
    """This process's sockets: file descriptors and inodes."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            status = os.stat(entry)
            if stat.S_ISSOCK(status.st_mode):
                found[int(entry.name)] = status.st_ino
    return found
