"""Emulates two hosts on one machine: network namespaces joined by a veth pair with limited rate.

The reason is in docs/design.md, Numbers of overlap. It works on Linux only, as root, with Debian's iproute2.
Everything is removed again, whatever happens inside.
"""

import contextlib
import os
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from braid.actors.config import ConfigError
from braid.actors.controller.ranks.parent import enter_namespace
from braid.actors.controller.ranks.processes import ProcessPlace, separate_places
from braid.jobs.drill.command import kill
from braid.jobs.training.stopping import StopSignals

PACKET_BYTES, _LEAST_PACKET_BYTES, _PACKET_SECONDS = 250_000, 16_000, 0.004
"""Largest packets on the link: the bytes that pass in `_PACKET_SECONDS`, within these bounds. A network card
splits large packets itself; on a virtual link every packet costs CPU time that training needs, so they should
be few. But the link's bucket must hold one packet, and all its content passes at once: at 40 Mbit/s, 256 KB
were half a message that took no time. So a packet is at most a quarter of a message."""
_SLACK_BYTES = 12_000
"""Bytes that the bucket holds beside a packet: with 2 KB, `tbf` split packets in software (docs/log.md)."""
_TRANSPORT = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0"}
"""The same TCP settings on every machine: Reno, which every kernel allows, at full speed after a pause.

Some hosts use BBR, which on a link without delay keeps so few bytes in flight that ranks wake up 8000 times
in a step of 200 MB, and sends almost nothing for 0.2 s in every 10.
"""
_NETLINK_ROUTE, _RTM_NEWLINK, _NLM_F_REQUEST, _NLM_F_ACK = 0, 16, 1, 4
_IFLA_GSO_IPV4_MAX_SIZE, _IFLA_GRO_IPV4_MAX_SIZE = 63, 64
"""Constants of Linux's `rtnetlink.h` and `if_link.h`."""


@dataclass(frozen=True)
class Host:
    """A network namespace with an address, and its share of this machine's CPUs (None: all CPUs, shared with
    other hosts)."""

    namespace: str
    address: str
    cpus: tuple[int, ...] | None = None

    def processes(self) -> list[int]:
        """Return the ids of all processes on the host."""
        listing = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True)
        return [int(word) for word in listing.stdout.split()]

    def ip(self, *words: str) -> None:
        """Run an ``ip`` command on the host, to set up its network."""
        _run("ip", "-n", self.namespace, *words)

    def remove(self) -> None:
        """Kill all processes on the host by id, then remove the host."""
        kill(*self.processes())
        subprocess.run(["ip", "netns", "delete", self.namespace], capture_output=True)


def check_hosts() -> None:
    """Raise `ConfigError` if network namespaces cannot be created."""
    if os.geteuid() != 0:
        raise ConfigError(
            "two hosts on one machine need root, for network namespaces: run as root (without root, "
            "cluster.emulated_link_mbit paces the connections of a run)"
        )
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise ConfigError(f"two hosts on one machine need {tool}: apt-get install iproute2")
    probe = f"braid-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode:
        raise ConfigError("this machine allows no network namespaces (a container without CAP_SYS_ADMIN)")
    subprocess.run(["ip", "netns", "delete", probe], check=True)


class Hosts:
    """Two namespaces and the link between them."""

    def __init__(self, hosts: tuple[Host, Host], devices: tuple[str, str]) -> None:
        self.hosts = hosts
        self._devices = devices

    def shape(
        self, mbit: float, message_bytes: float = 4 * PACKET_BYTES, inside_mbit: float | None = None
    ) -> None:
        """Limit the link to a rate in each direction; this may be called again while the link is in use.

        ``message_bytes``: usual size of a message. ``inside_mbit``: also limit traffic between two processes
        of one host, in each direction.
        """
        for host, device in zip(self.hosts, self._devices, strict=True):
            _limit(host.namespace, device, mbit, message_bytes)
            if inside_mbit is not None:
                host.ip("link", "set", "lo", "mtu", "1500")  # the bucket has no room for packets of 64 KB
                _limit(host.namespace, "lo", 2 * inside_mbit, message_bytes)  # lo carries both directions

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Take the link down for the length of the block, as if a cable had been pulled."""
        end = ("link", "set", self._devices[0])
        self.hosts[0].ip(*end, "down")
        try:
            yield
        finally:
            self.hosts[0].ip(*end, "up")

    def places(self, ranks: int, *, filled: bool = False) -> list[ProcessPlace]:
        """Return the place of every rank; neighbours are on different hosts, unless hosts are ``filled`` one
        after the other."""
        hosts = (self.hosts[2 * rank // ranks if filled else rank % 2] for rank in range(ranks))
        return [ProcessPlace(host.address, host.namespace, host.cpus) for host in hosts]


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Create two namespaces that see only each other; at the end, kill everything that runs there, by id."""
    check_hosts()
    _remove_orphans()
    mark = f"{os.getpid():x}"
    halves = separate_places(2)  # halves of the CPUs: hosts do not share them
    first = Host(f"braid-{mark}-0", "10.77.0.1", halves[0].cpus)
    second = Host(f"braid-{mark}-1", "10.77.0.2", halves[1].cpus)
    hosts, devices = (first, second), (f"br{mark}a", f"br{mark}b")
    with StopSignals().heard():  # the first signal raises an error, so that hosts are removed
        try:
            for host in hosts:
                _run("ip", "netns", "add", host.namespace)
            first.ip("link", "add", devices[0], "type", "veth", "peer", devices[1], "netns", second.namespace)
            for host, device in zip(hosts, devices, strict=True):
                host.ip("addr", "add", f"{host.address}/24", "dev", device)
                host.ip("link", "set", device, "up")
                host.ip("link", "set", "lo", "up")
                _set_packets(host.namespace, device, PACKET_BYTES)
                for name, value in _TRANSPORT.items():  # a kernel may lack a setting
                    write = f"echo {value} > /proc/sys/net/ipv4/{name}"
                    subprocess.run(
                        ["ip", "netns", "exec", host.namespace, "sh", "-c", write], capture_output=True
                    )
            yield Hosts(hosts, devices)
        finally:
            for host in hosts:
                host.remove()


def _limit(namespace: str, device: str, mbit: float, message_bytes: float) -> None:
    most = min(mbit * 1e6 / 8 * _PACKET_SECONDS, message_bytes / 4, PACKET_BYTES)
    packet = int(max(_LEAST_PACKET_BYTES, most))
    _set_packets(namespace, device, packet)
    rate = ["rate", f"{mbit:g}mbit", "burst", f"{packet + _SLACK_BYTES}b", "latency", "400ms"]
    _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *rate)


def _set_packets(namespace: str, device: str, most_bytes: int) -> None:
    """Set a device's largest packets (IPv4's "BIG TCP", Linux 6.3); older kernels keep 64 KB.

    It sends an rtnetlink message, as the `ip` of Debian 12 has no option for this.
    """

    def ask() -> None:
        enter_namespace(namespace)  # only this thread enters it, and ends here
        attributes = b"".join(
            struct.pack("=HHI", 8, kind, most_bytes)
            for kind in (_IFLA_GSO_IPV4_MAX_SIZE, _IFLA_GRO_IPV4_MAX_SIZE)
        )
        body = struct.pack("=BxHiII", socket.AF_UNSPEC, 0, socket.if_nametoindex(device), 0, 0) + attributes
        header = struct.pack("=IHHII", 16 + len(body), _RTM_NEWLINK, _NLM_F_REQUEST | _NLM_F_ACK, 1, 0)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_ROUTE) as asking:
            asking.send(header + body)
            asking.recv(4096)  # a refusal does no harm: it is only a speed-up

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()


def _remove_orphans() -> None:
    """Remove hosts whose creator was killed before it could remove them; their names contain its process
    id."""
    for path in Path("/run/netns").glob("braid-*-[01]"):
        maker = int(path.name.split("-")[1], 16)
        if not Path(f"/proc/{maker}").exists():
            Host(path.name, "").remove()


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise ConfigError(f"{' '.join(command)}: {result.stderr.strip() or result.returncode}")
