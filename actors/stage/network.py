"""Where a rank is reached: the node's address and the interface that holds it."""

import contextlib
import fcntl
import os
import socket
import struct

_SIOCGIFADDR = 0x8915


def interface_of(address: str) -> str | None:
    """The name of the network interface that holds an IPv4 address; None where it cannot be told."""
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", name.encode()[:15])
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def bind_gloo(address: str) -> None:
    """Make gloo use the interface of ``address``, unless the user chose one."""
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface_of(address)):
        os.environ["GLOO_SOCKET_IFNAME"] = name
