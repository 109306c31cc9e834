"""``braid submit`` and ``braid jobs`` against a stand-in for a job server; a real one is in end_to_end/."""

import io
import json
import socket
import sys
import zipfile
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from unittest.mock import Mock

import grpc
import pytest
import ray

from braid.actors.config import ConfigError, load_config, parse_config
from braid.jobs.cluster import doors, session, submission
from braid.jobs.cluster.session import check_lasting, ray_session
from tests.in_process import Capture, Outcome, called, refused
from tests.jobs.job_server_stub import State, job_server

CANARY = "canary-4c1e77aa03"
BEYOND = "0.0.0.0"
"""Reaches a server on loopback, and is no address of loopback."""


Braid = Callable[..., Outcome]


@pytest.fixture
def server() -> Iterator[State]:
    with job_server() as state:
        yield state


@pytest.fixture
def braid(server: State, here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> Braid:
    """``braid ARGUMENTS --address http://HOST:PORT`` in this process, in a folder with ``run.yaml``."""
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("RAY_ADDRESS", "10.255.255.1:6379")  # Ray's client would go there instead
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    (here / "run.yaml").write_text("name: first\nparallel: {dp: 2}\ndata: {files: [corpus.txt]}\n")

    def call(*arguments: str, host: str = "127.0.0.1") -> Outcome:
        return called(capsys, *arguments, "--address", f"http://{host}:{server.port}")

    return call


def test_what_is_shipped(server: State, braid: Braid, tmp_path: Path) -> None:
    """That the package works there: `tests.end_to_end.test_jobs`."""
    options = ("--set", "train.steps=7", "--set", "checkpoint.mirror=mirror")
    done = braid("submit", "run.yaml", *options, "--env", "NCCL_DEBUG=WARN")
    assert done.code == 0, done
    assert "run first is job first" in done.output
    (request,) = server.submitted
    assert request["submission_id"] == "first"
    assert request["entrypoint"] == "python -m braid train run.yaml"
    environment = request["runtime_env"]
    assert environment["env_vars"] == {"RAY_JOB_STOP_WAIT_TIME_S": "120", "NCCL_DEBUG": "WARN"}
    facts = {"run": "first", "layout": "dp 2", "directory": str(tmp_path / "runs" / "first")}
    assert request["metadata"].items() >= {f"braid_{name}": value for name, value in facts.items()}.items()
    folder = tmp_path / "folder"
    with zipfile.ZipFile(io.BytesIO(server.packages[environment["working_dir"].rpartition("/")[2]])) as file:
        file.extractall(folder)
    assert [path.name for path in folder.iterdir()] == ["run.yaml"]
    config = load_config(folder / "run.yaml")
    assert config.train.steps == 7
    assert config.runs == tmp_path / "runs"
    assert config.checkpoint.mirror == str(tmp_path / "mirror")
    assert config.data.files == (str(tmp_path / "corpus.txt"),)
    assert config.cluster.address is None
    assert len(environment["py_modules"]) == 1
    assert CANARY not in json.dumps(server.submitted)
    assert not [name for name, content in server.packages.items() if CANARY.encode() in content]


def test_a_name_is_run_once_at_a_time(server: State, braid: Braid) -> None:
    assert braid("submit", "run.yaml").code == 0
    for options in ((), ("--resume",), ("--overwrite",)):
        says = ("run 'first' is active", "job first is RUNNING", "braid jobs stop first", "--set name=")
        refused(braid("submit", "run.yaml", *options), *says)
    assert len(server.submitted) == 1
    assert braid("submit", "run.yaml", "--set", "name=second").code == 0
    server.jobs[0]["status"] = "STOPPED"
    refused(braid("submit", "run.yaml"), "was here before: job first is STOPPED", "--resume", "--overwrite")
    for option, job in (("--resume", "first-2"), ("--overwrite", "first-3")):
        done = braid("submit", "run.yaml", option)
        assert f"run first is job {job}" in done.output
        assert server.submitted[-1]["entrypoint"] == f"python -m braid train run.yaml {option}"
        server.jobs[-1]["status"] = "FAILED"


def failed(outcome: Outcome, says: str) -> None:
    """One message, no trace, and nobody's mistake."""
    assert outcome.code == 1, outcome
    assert says in outcome.errors
    assert "Traceback" not in outcome.errors


def test_a_submission_that_fails(server: State, braid: Braid) -> None:
    server.on_submit = lambda request: (500, "no space left")
    failed(braid("submit", "run.yaml"), "no space left")


NOT_SUBMITTED = {
    ("--set", "cluster.launcher=processes"): ("cluster.launcher='processes'", "ray"),
    ("--resume", "--overwrite"): ("exclude each other",),
    ("--env", "GRAFANA_TOKEN=x"): ("GRAFANA_TOKEN", "secret"),
    ("--env", "A B=x"): ("NAME=VALUE",),
}


def test_what_is_not_submitted(server: State, braid: Braid) -> None:
    for options, says in NOT_SUBMITTED.items():
        refused(braid("submit", "run.yaml", *options), *says)
    assert server.writes == []


def test_an_open_job_server_is_refused(server: State, braid: Braid) -> None:
    """Unless one says that this is meant, which is noted; nothing is sent before."""
    says = (f"http://{BEYOND}:{server.port}", "without a token", "RAY_AUTH_MODE=token")
    refused(braid("submit", "run.yaml", host=BEYOND), *says, "cluster.allow_unauthenticated")
    assert server.writes == []
    allowed = braid("submit", "run.yaml", "--set", "cluster.allow_unauthenticated=true", host=BEYOND)
    assert allowed.code == 0
    assert "braid: warning: the Ray job server" in allowed.errors
    assert len(server.submitted) == 1


def test_a_job_server_with_a_token(server: State, braid: Braid) -> None:
    """With one: `tests.end_to_end.test_jobs`."""
    server.wants_token = True
    refused(braid("submit", "run.yaml", host=BEYOND), "wants a token", "RAY_AUTH_MODE=token")
    refused(braid("jobs", "list"), "wants a token")
    assert server.writes == []


class _Gcs(grpc.GenericRpcHandler):
    """The head of a cluster, as far as strangers see it."""

    def __init__(self, closed: bool) -> None:
        self._closed = closed

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            if self._closed:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


def test_an_open_cluster_is_refused(capsys: Capture) -> None:
    for closed in (True, False):
        head = grpc.server(futures.ThreadPoolExecutor(1), handlers=[_Gcs(closed)])
        port = head.add_insecure_port("127.0.0.1:0")
        head.start()
        try:
            doors.check_cluster(f"127.0.0.1:{port}", allowed=False)
            if closed:
                doors.check_cluster(f"{BEYOND}:{port}", allowed=False)
                continue
            says = rf"{BEYOND}:{port} listens beyond loopback.*RAY_AUTH_MODE=token"
            with pytest.raises(ConfigError, match=says):
                doors.check_cluster(f"{BEYOND}:{port}", allowed=False)
            assert capsys.readouterr().err == ""
            doors.check_cluster(f"{BEYOND}:{port}", allowed=True)
            assert f"warning: the Ray cluster at {BEYOND}:{port}" in capsys.readouterr().err
        finally:
            head.stop(None).wait()


def test_loopback() -> None:
    here = ["localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]"]
    elsewhere = ("10.0.0.1", BEYOND, "::", "localhost.example.org", "127.0.0.1.example.org", "")
    assert [host for host in (*here, *elsewhere) if doors.is_loopback(host)] == here


def test_list_status_and_logs(server: State, braid: Braid) -> None:
    server.add("first", "STOPPED", {"braid_run": "first", "braid_layout": "dp 2"})
    server.add("[red]x", "RUNNING", {"braid_run": "../../etc", "braid_submitted_by": "[bold]me"})
    server.add("first-2", "RUNNING", {"braid_run": "first"})
    server.add("first-3", "FAILED", {"braid_run": "first"})
    head, *rows = braid("jobs", "list").output.splitlines()
    assert head.split()[:3] == ["run", "job", "status"]
    assert [row.split()[:3] for row in rows] == [
        ["first", "first-3", "FAILED"],
        ["first", "first-2", "RUNNING"],
        ["-", "[red]x", "RUNNING"],
        ["first", "first", "STOPPED"],
    ]
    assert "[bold]me" in rows[2]
    listed = json.loads(braid("jobs", "list", "--json").output)
    assert [job["id"] for job in listed] == ["first-3", "first-2", "[red]x", "first"]
    shown = json.loads(braid("jobs", "status", "first", "--json").output)
    assert (shown["id"], shown["status"]) == ("first-2", "RUNNING"), "the active one before newer ones"
    assert "it is FAILED" in braid("jobs", "status", "first-3").output
    assert braid("jobs", "logs", "first").output == "log of first-2\n"
    for name in ("nobody", "../first", ""):
        refused(braid("jobs", "status", name), repr(name), "there are: first")


def test_stop(server: State, braid: Braid, monkeypatch: pytest.MonkeyPatch) -> None:
    server.add("first", "RUNNING", {"braid_run": "first"})
    monkeypatch.setattr(submission, "STOP_SECONDS", -submission._STATUS_SECONDS)
    failed(braid("jobs", "stop", "first"), "braid: job first is still RUNNING 0 s after it was told to stop")
    assert server.writes == [("POST", "/api/jobs/first/stop")]
    server.jobs[0]["status"] = "STOPPED"
    assert braid("jobs", "stop", "first").output == "job first is STOPPED already\n"
    assert len(server.writes) == 1


def test_an_address_that_is_none(capsys: Capture) -> None:
    for address in ("10.0.0.1:6379", "ftp://h:1", "http://", "nowhere"):
        refused(called(capsys, "jobs", "list", "--address", address), address)


@pytest.fixture
def silent() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_nobody_answers(silent: int, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(submission, "_CONNECT_SECONDS", 0.2)
    with job_server() as gone:
        closed = gone.port
    for port in (closed, silent):
        refused(called(capsys, "jobs", "list", "--address", f"http://127.0.0.1:{port}"), "does not answer")


def test_a_server_that_goes_away(server: State, braid: Braid) -> None:
    server.add("first", "RUNNING", {"braid_run": "first"})
    server.silent_after = 2  # the version, asked twice
    failed(braid("jobs", "status", "first"), "braid: the job server answers no more: ")


def test_runs_in_a_copy_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a job that was submitted with a working directory, and only of such a one."""
    copy = "/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_1/runs"
    check_lasting(parse_config({"runs": copy}))
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": {"working_dir": "gcs://x"}}))
    check_lasting(parse_config({"runs": "/shared/runs", "checkpoint": {"mirror": "s3://bucket/run"}}))
    with pytest.raises(ConfigError, match=r"runs='/tmp/ray.*absolute path"):
        check_lasting(parse_config({"runs": copy}))
    for mirror in (copy, f"file://{copy}"):
        with pytest.raises(ConfigError, match=r"checkpoint.mirror='.*/tmp/ray.*absolute path"):
            check_lasting(parse_config({"runs": "/shared/runs", "checkpoint": {"mirror": mirror}}))


def test_a_ray_head_that_never_answers(silent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told by the name of where the address came from."""
    monkeypatch.setattr(doors, "_SECONDS", 0.5)
    here = f"127.0.0.1:{silent}"
    monkeypatch.setenv("RAY_ADDRESS", here)
    for cluster, given in (({}, r"^\$RAY_ADDRESS \(127"), ({"address": here}, r"^cluster\.address='127")):
        says = rf"{given}.*does not answer \(it takes connections and says nothing"
        with pytest.raises(ConfigError, match=says), ray_session(parse_config({"cluster": cluster})):
            pass


def test_an_address_of_ipv6() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConfigError, match=r"does not answer \(Connection refused\)"):
        session._check_reachable(f"[::1]:{port}", "cluster.address")


def test_this_machine_is_not_asked_through_a_proxy(
    server: State, braid: Braid, silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://user:{CANARY}@127.0.0.1:{silent}")
    done = braid("submit", "run.yaml")
    assert done.code == 0, done


# Where Ray cannot be loaded, started or joined: one line with the remedy.


def refused_session(says: str) -> None:
    with pytest.raises(ConfigError) as refused, ray_session(parse_config({})):
        pass
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_ray_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    for name in ("_check_reachable", "check_cluster"):
        monkeypatch.setattr(session, name, lambda *words: None)
    monkeypatch.setattr(ray, "init", Mock(side_effect=Exception("no node came up\nwith all its details")))
    joined = "$RAY_ADDRESS (10.0.0.1:6379): cannot join this Ray cluster (no node came up);"
    started = "Ray does not start on this machine (no node came up); see that /dev/shm"
    for address, says in (("", started), ("10.0.0.1:6379", joined)):
        monkeypatch.setenv("RAY_ADDRESS", address)
        refused_session(says)


def test_ray_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise OSError('a library of it is gone')")
    monkeypatch.delitem(sys.modules, "ray")
    monkeypatch.syspath_prepend(tmp_path)
    refused_session("needs Ray, which cannot be loaded (a library of it is gone); install it")
