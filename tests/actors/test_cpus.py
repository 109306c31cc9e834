"""CPUs that a process may use: quotas of control groups, of both versions, from files."""

import os
from pathlib import Path

import pytest

from braid.actors.controller.ranks.cpus import throttled, usable_cpus, whole_cpus


@pytest.fixture(autouse=True)
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of eight CPUs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))


def made(root: Path, files: dict[str, str]) -> Path:
    """A machine's root with these files."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


GROUPS = "sys/fs/cgroup"
V1 = {"proc/self/cgroup": "3:cpuset:/x\n2:cpu,cpuacct:/pod/me\n1:name=systemd:/y\n"}
V2 = {"proc/self/cgroup": "0::/pod/me\n"}


def second(**quotas: str) -> dict[str, str]:
    """Control groups of version 2: of the process, of the pod and of the machine."""
    places = {"me": "/pod/me", "pod": "/pod", "root": ""}
    return {**V2, **{f"{GROUPS}{places[name]}/cpu.max": quota for name, quota in quotas.items()}}


def first(**quotas: int) -> dict[str, str]:
    """Of version 1; a container sees its own group as the root."""
    places = {"me": "cpu,cpuacct/pod/me", "pod": "cpu,cpuacct/pod", "root": "cpu"}
    content = {f"{GROUPS}/{places[name]}/cpu.cfs_quota_us": str(quota) for name, quota in quotas.items()}
    return {**V1, **content, **{f"{GROUPS}/{places[name]}/cpu.cfs_period_us": "100000" for name in quotas}}


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, 8.0),
        (second(me="150000 100000\n"), 1.5),
        (second(me="max 100000\n"), 8.0),
        (second(me="300000 100000", pod="200000 100000"), 2.0),
        (second(root="100000 100000"), 1.0),
        (second(me="1600000 100000"), 8.0),
        (second(me="nonsense"), 8.0),
        (first(me=-1, pod=50_000), 0.5),
        (first(root=100_000), 1.0),
    ],
)
def test_quotas(tmp_path: Path, files: dict[str, str], cpus: float) -> None:
    assert usable_cpus(made(tmp_path, files)) == cpus


def test_a_process_has_one_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("braid.actors.controller.ranks.cpus.usable_cpus", lambda: 0.5)
    assert whole_cpus() == 1


def test_stops_by_a_quota_are_counted(tmp_path: Path) -> None:
    assert throttled(made(tmp_path, V2)) == 0
    text = "usage_usec 5\nnr_periods 9\nnr_throttled 7\nthrottled_usec 3\n"
    assert throttled(made(tmp_path, {"sys/fs/cgroup/pod/me/cpu.stat": text})) == 7
