"""Two hosts on one machine: network namespaces joined by a veth pair, a Ray cluster of one node in each."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.end_to_end.command import environment

PORT = 6379
_START_SECONDS = 60.0


@dataclass(frozen=True)
class Host:
    """A namespace with an address."""

    namespace: str
    address: str

    def run(
        self, *command: str, timeout: float, cwd: Path | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on the host."""
        return subprocess.run(
            ["ip", "netns", "exec", self.namespace, *command],
            cwd=cwd,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def processes(self) -> list[int]:
        """Ids of all processes on the host."""
        listing = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True)
        return [int(word) for word in listing.stdout.split()]


def require_namespaces() -> None:
    """Skip, and say why, where network namespaces cannot be made."""
    if os.geteuid() != 0:
        pytest.skip("two hosts on one machine need root, for network namespaces")
    if shutil.which("ip") is None:
        pytest.skip("two hosts on one machine need iproute2")
    probe = f"braid-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode:
        pytest.skip("this machine does not allow network namespaces")
    subprocess.run(["ip", "netns", "delete", probe], check=True)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two namespaces that see only each other; whatever runs there is ended at the end, by id."""
    require_namespaces()
    mark = f"{os.getpid():x}"
    hosts = (Host(f"braid-{mark}-0", "10.77.0.1"), Host(f"braid-{mark}-1", "10.77.0.2"))
    devices = (f"br{mark}a", f"br{mark}b")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for host in hosts:
            ip("netns", "add", host.namespace)
        first, second = hosts
        pair = ("type", "veth", "peer", "name", devices[1], "netns", second.namespace)
        ip("link", "add", devices[0], "netns", first.namespace, *pair)
        for host, device in zip(hosts, devices, strict=True):
            ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", device)
            ip("-n", host.namespace, "link", "set", device, "up")
            ip("-n", host.namespace, "link", "set", "lo", "up")
        yield hosts
    finally:
        for host in hosts:
            for process in host.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True)


@contextlib.contextmanager
def ray_cluster(hosts: tuple[Host, Host]) -> Iterator[str]:
    """A two-node Ray cluster with one CPU on each host; yields its address."""
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=1", "--disable-usage-stats"]
    head, other = hosts
    address = f"{head.address}:{PORT}"
    with tempfile.TemporaryDirectory(prefix="brd", dir="/tmp") as folder:
        starts = (
            (head, ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={folder}/a"]),
            (other, [f"--address={address}", f"--temp-dir={folder}/b"]),
        )
        for host, options in starts:
            result = host.run(*ray, f"--node-ip-address={host.address}", *options, timeout=_START_SECONDS)
            assert result.returncode == 0, result.stdout + result.stderr
        yield address
