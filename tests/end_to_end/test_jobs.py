"""Jobs on a Ray cluster of two nodes (two network namespaces), with its job server and a token."""

import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from braid.actors.controller.records.json_lines import read_lines
from braid.jobs.drill.hosts import Host, two_hosts
from tests.end_to_end.clusters import JOB_PORT, ray_on_hosts, require_hosts, run_on
from tests.end_to_end.command import ROOT, environment, processes_mentioning, write_config, write_corpus

BIN = Path(sys.executable).parent
_PATIENCE = 400.0
"""Seconds for a command, on a machine that is busy with other things."""


@dataclass(frozen=True)
class Cluster:
    folder: Path
    host: Host
    env: dict[str, str]

    @property
    def url(self) -> str:
        return f"http://{self.host.address}:{JOB_PORT}"

    def braid(self, *arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
        """``braid ARGUMENTS --address ...`` on the first host."""
        command = [sys.executable, "-m", "braid", *arguments, "--address", self.url]
        return run_on(self.host, *command, timeout=_PATIENCE, cwd=self.folder, env=self.env | env)

    def good(self, *arguments: str) -> str:
        """The same, which must succeed; its output."""
        result = self.braid(*arguments)
        assert result.returncode == 0, result.stdout + result.stderr
        assert result.stderr == ""
        return result.stdout

    def refused(self, *arguments: str, **env: str) -> str:
        """The same, which must be refused; the message."""
        result = self.braid(*arguments, **env)
        assert result.returncode == 2, result.stdout + result.stderr
        assert "Traceback" not in result.stderr
        return result.stderr

    def follow(self, name: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "braid", "jobs", "logs", name, "-f", "--address", self.url]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.host.namespace, *command],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster that wants a token; on its nodes lies another ``braid``, one that cannot be imported."""
    require_hosts()
    write_corpus(tmp_path)
    placed = {"launcher": "ray", "spread": True, "cpus_per_rank": 0.5}
    write_config(tmp_path, parallel={"dp": 2}, train={"steps": 100000}, cluster=placed)
    other = tmp_path / "nodes" / "braid"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise ImportError('this is not the package that was shipped')\n")
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    here = environment() | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    nodes = here | {"PYTHONPATH": str(other.parent), "PATH": os.pathsep.join((str(BIN), here["PATH"]))}
    with two_hosts() as link, ray_on_hosts(link.hosts, nodes, cpus=2):
        (session,) = sessions(link.hosts[0])
        yield Cluster(tmp_path, link.hosts[0], here)
    assert not Path(session).exists()
    assert processes_mentioning(session) == []
    names = {host.namespace for host in link.hosts}
    assert not names & {path.name for path in Path("/run/netns").glob("*")}, "a namespace is left"
    assert processes_mentioning(str(tmp_path)) == []
    jobs = Path("/tmp").glob("braid-job-*")
    assert not [path for path in jobs if path.stat().st_mtime > other.stat().st_mtime]


def sessions(host: Host) -> set[str]:
    """The folders of the clusters that run on a host."""
    found: set[str] = set()
    for process in host.processes():
        with contextlib.suppress(OSError):  # it may have ended meanwhile
            command = Path(f"/proc/{process}/cmdline").read_bytes().decode()
            found |= set(re.findall(r"/tmp/braid-[0-9]+-[a-z0-9_]+", command))
    return found


def steps(run: Path) -> list[int]:
    return [line["step"] for line in read_lines(run / "metrics.jsonl")]


def until(process: "subprocess.Popen[str]", text: str) -> list[str]:
    """The lines of a process up to the first one that holds a text."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError("".join(lines))


@pytest.mark.slow
@pytest.mark.timeout(900)  # about a minute on two free cores
def test_two_jobs_at_once(cluster: Cluster) -> None:
    """One is followed, stopped and resumed; the other, from plain `ray job submit`, meanwhile ends."""
    runs = cluster.folder / "runs"
    assert "wants a token" in cluster.refused("submit", "run.yaml", RAY_AUTH_MODE="disabled")
    assert "run run is job run" in cluster.good("submit", "run.yaml")
    again = cluster.refused("submit", "run.yaml", "--resume")
    for text in ("run 'run' is active", "job run is", "braid jobs stop run", "--set name="):
        assert text in again
    settings = {"name": "plain", "runs": runs, "parallel.dp": 1, "train.steps": 2}
    plain = ["braid", "train", "run.yaml"]
    plain += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    variables = json.dumps({"env_vars": {"PYTHONPATH": str(ROOT)}})
    options = ["--no-wait", "--submission-id=plain", "--working-dir=.", f"--runtime-env-json={variables}"]
    command = [str(BIN / "ray"), "job", "submit", f"--address={cluster.url}", *options, "--", *plain]
    started = run_on(cluster.host, *command, timeout=_PATIENCE, cwd=cluster.folder, env=cluster.env)
    assert started.returncode == 0, started.stdout + started.stderr

    follower = cluster.follow("run")
    until(follower, "step ")
    assert "is STOPPED" in cluster.good("jobs", "stop", "run")
    rest, _ = follower.communicate(timeout=_PATIENCE)
    assert follower.returncode == 130, rest
    assert "stopped early; go on with --resume" in rest
    done = len(steps(runs / "run"))
    assert f"step-{done}" in {path.name for path in (runs / "run" / "checkpoints").iterdir()}
    placed = json.loads((runs / "run" / "cluster.json").read_text())["ranks"]
    assert len({rank["address"] for rank in placed}) == 2, "the ranks were on both nodes"

    more = ("submit", "run.yaml", "--resume", "--follow", "--set", f"train.steps={done + 2}")
    resumed = cluster.good(*more)
    assert "run run is job run-2" in resumed
    assert "job run-2 is SUCCEEDED" in resumed
    assert steps(runs / "run") == list(range(1, done + 3))

    deadline = time.monotonic() + _PATIENCE
    while (found := _listed(cluster))["plain"]["status"] != "SUCCEEDED" and time.monotonic() < deadline:
        time.sleep(1)
    ended = {"run": "STOPPED", "run-2": "SUCCEEDED", "plain": "SUCCEEDED"}
    assert {name: job["status"] for name, job in found.items()} == ended
    assert found["plain"]["run"] is None
    assert found["run"]["metadata"]["braid_layout"] == "dp 2"
    assert (cluster.folder / "token").read_text() not in json.dumps(found)
    assert steps(runs / "plain") == [1, 2]
    assert "step 2/2" in cluster.good("jobs", "logs", "plain")


def _listed(cluster: Cluster) -> dict[str, Any]:
    return {job["id"]: job for job in json.loads(cluster.good("jobs", "list", "--json"))}
