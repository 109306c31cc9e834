"""Emulates two hosts on one machine: network namespaces joined by a veth pair with limited rate.

The reason is in docs/design.md, Numbers of overlap. It works on Linux only, as root, with Debian's iproute2.
Everything is removed again, whatever happens inside.
"""

import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from braid.actors.controller.ranks.group import StoppedError
from braid.actors.controller.ranks.parent import enter_namespace
from braid.actors.controller.ranks.processes import ProcessPlace, separate_places
from braid.jobs.cluster.guardian import MARK
from braid.jobs.cluster.session import WORKERS, session_folder
from braid.jobs.training.stopping import StopSignals

RAY_PORT, JOB_PORT = 6379, 8265
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
_START_SECONDS, _END_SECONDS = 120.0, 10.0
_NETLINK_ROUTE, _RTM_NEWLINK, _NLM_F_REQUEST, _NLM_F_ACK = 0, 16, 1, 4
_IFLA_GSO_IPV4_MAX_SIZE, _IFLA_GRO_IPV4_MAX_SIZE = 63, 64
"""Constants of Linux's `rtnetlink.h` and `if_link.h`."""


class HostsError(RuntimeError):
    """This machine does not allow emulated hosts; the message says what is missing."""


@dataclass(frozen=True)
class Host:
    """A network namespace with an address, and its share of this machine's CPUs (None: all CPUs, shared with
    other hosts)."""

    namespace: str
    address: str
    cpus: tuple[int, ...] | None = None

    def run(
        self, *command: str, timeout: float, cwd: Path | None = None, env: dict[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on the host."""
        return subprocess.run(
            ["ip", "netns", "exec", self.namespace, *command],
            cwd=cwd,
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def processes(self) -> list[int]:
        """Return the ids of all processes on the host."""
        listing = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True)
        return [int(word) for word in listing.stdout.split()]

    def ip(self, *words: str) -> None:
        """Run an ``ip`` command on the host, to set up its network."""
        _run("ip", "-n", self.namespace, *words)

    def remove(self) -> None:
        """Kill all processes on the host by id, then remove the host."""
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        subprocess.run(["ip", "netns", "delete", self.namespace], capture_output=True)


def check_hosts() -> None:
    """Raise `HostsError` if network namespaces cannot be created."""
    if os.geteuid() != 0:
        raise HostsError("two hosts on one machine need root, for network namespaces: run as root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise HostsError(f"two hosts on one machine need {tool}: apt-get install iproute2")
    probe = f"braid-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode:
        raise HostsError("this machine does not allow network namespaces (a container without CAP_SYS_ADMIN)")
    subprocess.run(["ip", "netns", "delete", probe], check=True)


class Hosts:
    """Two namespaces and the link between them."""

    cluster: Mapping[str, float] = MappingProxyType({})
    """Settings that configurations of ranks there need: none, as the link itself is shaped."""

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
    with _terminates():
        try:
            for host in hosts:
                _run("ip", "netns", "add", host.namespace)
            first.ip("link", "add", devices[0], "type", "veth", "peer", devices[1], "netns", second.namespace)
            for host, device in zip(hosts, devices, strict=True):
                host.ip("addr", "add", f"{host.address}/24", "dev", device)
                host.ip("link", "set", device, "up")
                host.ip("link", "set", "lo", "up")
                _set_packets(host.namespace, device, PACKET_BYTES)
                for name, value in _TRANSPORT.items():
                    # A kernel may lack a setting.
                    host.run("sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{name}", timeout=_END_SECONDS)
            yield Hosts(hosts, devices)
        finally:
            for host in hosts:
                host.remove()


PACED = (
    "ranks run on this host's loopback instead, each connection paced to the rate: transfers that meet on "
    "one link do not slow each other down, and both ends' copies are this host's"
)
"""Description of measurements without root, and how they differ from two hosts."""


class Paced:
    """Ranks on this host's loopback, on CPUs of their own, with paced connections."""

    hosts: tuple[Host, ...] = ()

    def __init__(self) -> None:
        self.cluster: dict[str, float] = {}

    def shape(self, mbit: float, message_bytes: float, inside_mbit: float | None = None) -> None:
        """Make later connections at this rate; connections inside hosts have the same rate."""
        self.cluster = {"emulated_link_mbit": mbit}

    def places(self, ranks: int, *, filled: bool = False) -> list[ProcessPlace]:
        """Return places as on two hosts, each with half of the CPUs."""
        return [separate_places(2)[2 * rank // ranks if filled else rank % 2] for rank in range(ranks)]


def two_hosts_or_paced() -> tuple[contextlib.AbstractContextManager[Hosts | Paced], str]:
    """Return two emulated hosts; without root the paced loopback instead, with the reason in words."""
    try:
        check_hosts()
    except HostsError as error:
        return contextlib.nullcontext(Paced()), str(error)
    return two_hosts(), ""


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


@contextlib.contextmanager
def ray_cluster(
    hosts: Sequence[Host], env: dict[str, str], cpus: int = 1, *, job_server: bool = False
) -> Iterator[str]:
    """Start a Ray cluster with one node on each host; yield its address.

    ``job_server``: with Ray's dashboard on the first host, port `JOB_PORT`.
    """
    start = (sys.executable, "-m", "ray.scripts.scripts", "start")
    head, other = hosts
    address = f"{head.address}:{RAY_PORT}"
    page = [f"--include-dashboard={str(job_server).lower()}"]
    if job_server:
        page += [f"--dashboard-host={head.address}", f"--dashboard-port={JOB_PORT}"]
    with session_folder() as folder:  # ends Ray's processes, which carry its mark
        starts = (
            (head, ["--head", f"--port={RAY_PORT}", *page, f"--temp-dir={folder}/a"]),
            (other, [f"--address={address}", f"--temp-dir={folder}/b"]),
        )
        for host, options in starts:
            options += [f"--num-cpus={cpus}", f"--node-ip-address={host.address}", "--disable-usage-stats"]
            result = host.run(
                *start, *options, timeout=_START_SECONDS, env={**WORKERS, MARK: str(folder), **env}
            )
            if result.returncode:
                raise HostsError(f"Ray did not start on {host.address}: {result.stdout}{result.stderr}")
        yield address


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise HostsError(f"{' '.join(command)}: {result.stderr.strip() or result.returncode}")


@contextlib.contextmanager
def _terminates() -> Iterator[None]:
    """Turn the first signal that asks this process to end into `KeyboardInterrupt`, so that hosts are
    removed."""
    with StopSignals().heard():
        try:
            yield
        except StoppedError:
            raise KeyboardInterrupt from None
