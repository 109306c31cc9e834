"""``braid submit``, ``braid jobs``: submit runs as Ray jobs to a cluster's job server, and find them by name.

A job carries the package and a folder with the resolved configuration. Data and run directories are not
shipped: relative paths are made absolute here, and must mean the same on all nodes.
"""

import contextlib
import logging
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from braid.actors.config import NAME_PATTERN, Config, ConfigError, load_config
from braid.actors.config.paths import BYTES, anchored, expanded
from braid.actors.config.variables import looks_secret
from braid.jobs.cluster.doors import check_job_server, is_loopback
from braid.jobs.output import ExitCode, answer, complain, duration, facts_of
from braid.jobs.usage import AsJson, ConfigFile, Overrides, Overwrite, Resume, example, group

STOP_SECONDS = 120
"""Seconds for a job to save a checkpoint after it was told to stop; Ray's own default is 3."""

_POLL_SECONDS, _STATUS_SECONDS = 0.3, 10.0
_CONNECT_SECONDS, _READ_SECONDS = 20.0, 60.0
_HERE = "http://127.0.0.1:8265"
_SUBMITTED = ("layout", "directory", "submitted by")
"""Facts that `braid submit` stores with a job."""
_LISTED = ("run", "job", "status", "layout", "started", "took", "submitted by")

jobs = group("List, show, follow and stop the jobs of a Ray cluster.", "jobs list")

Address = Annotated[
    str, typer.Option(help="The cluster's job server, http://HOST:8265.", envvar="RAY_API_SERVER_ADDRESS")
]
Name = Annotated[str, typer.Argument(help="A run's name (its newest job), or a job's id.", metavar="NAME")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Show what the job prints, to its end.")]


class JobError(RuntimeError):
    """The job server refuses a request or fails, for a reason outside the configuration."""


def _facts(job: Any) -> dict[str, Any]:
    """Return what ``--json`` prints of one of Ray's jobs; times are seconds since 1970."""
    started, ended = (ms / 1000 if ms else None for ms in (job.start_time, job.end_time))
    facts = {"id": job.submission_id, "run": _run_of(job), "status": job.status.value}
    facts |= {"message": job.message or "", "started": started, "ended": ended}
    return {**facts, "entrypoint": job.entrypoint, "metadata": job.metadata or {}}


def _run_of(job: Any) -> str | None:
    """Return the name of a job's run; None for a job that `braid submit` did not make."""
    name = str((job.metadata or {}).get("braid_run", ""))
    return name if re.fullmatch(NAME_PATTERN, name) else None


def _cells(job: Any) -> dict[str, Text]:
    """Return a job's facts for tables, by column; as `Text`, since names may contain rich's markup."""
    facts = _facts(job)
    words = {"run": facts["run"], "job": facts["id"], "status": facts["status"], "message": facts["message"]}
    words |= {name: facts["metadata"].get(f"braid_{name.replace(' ', '_')}") for name in _SUBMITTED}
    if (started := facts["started"]) is not None:
        words["started"] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started))
        words["took"] = duration((facts["ended"] or time.time()) - started)
    words["command"] = job.entrypoint
    return {name: Text(words.get(name) or "-") for name in dict.fromkeys((*_LISTED, *words))}


# -- commands ------------------------------------------------------------------------------------------------


def submit(
    config: ConfigFile,
    address: Address = _HERE,
    overrides: Overrides = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    follow: Follow = False,
    env: Annotated[
        list[str] | None,
        typer.Option(help="A variable for the job; no secrets; may be repeated.", metavar="NAME=VALUE"),
    ] = None,
) -> None:
    """Train on a Ray cluster: send configuration and package to its job server.

    Relative paths are taken from here (of model.layer, model.initial and checkpoint.mirror from CONFIG's
    folder) and must mean the same on all nodes.
    """
    from braid.jobs.cluster.session import package  # imported here, because help texts do not need it

    if resume and overwrite:
        raise ConfigError("--resume and --overwrite exclude each other")
    resolved = load_config(config, overrides or ())
    server, variables = JobServer(address), _variables(env or [])
    resolved = _checked(resolved)
    check_job_server(server.address, server.host, resolved.cluster.allow_unauthenticated)
    known = server.jobs()
    _check_new(resolved.name, known, resume or overwrite)
    taken = {job.submission_id for job in known}  # Ray never accepts an id twice
    ids = (resolved.name if number == 1 else f"{resolved.name}-{number}" for number in count(1))
    new = next(id for id in ids if id not in taken)
    facts = {
        "run": resolved.name,
        "layout": "auto" if resolved.parallel.auto else resolved.layout().describe(),
        "directory": str(resolved.run_directory),
        "submitted_by": f"{os.environ.get('USER') or os.getuid()}@{socket.gethostname()}",
    }
    words = ["--resume"] * resume + ["--overwrite"] * overwrite
    with tempfile.TemporaryDirectory(prefix="braid-job-") as folder:
        (Path(folder) / "run.yaml").write_text(resolved.to_yaml(), encoding="utf-8")
        with _answers():
            server.client.submit_job(
                entrypoint=" ".join(["python -m braid train run.yaml", *words]),
                submission_id=new,
                runtime_env={
                    "working_dir": folder,
                    "py_modules": [package()],
                    "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS), **variables},
                },
                metadata={f"braid_{key}": value for key, value in facts.items()},
            )
    typer.echo(f"run {resolved.name} is job {new} at {address}; records in {resolved.run_directory}")
    if follow:
        _follow(server, new)
    else:
        typer.echo(f"follow it with: braid jobs logs {resolved.name} -f --address {address}")


@jobs.command("list", epilog=example("jobs list --address http://10.0.0.1:8265"))
def list_jobs(address: Address = _HERE, as_json: AsJson = False) -> None:
    """Show all submitted jobs, the newest first."""
    known = JobServer(address).jobs()
    table = Table(*(Column(name, overflow="fold") for name in _LISTED), box=None, pad_edge=False)
    for job in known:
        table.add_row(*map(_cells(job).__getitem__, _LISTED))
    answer(as_json, lambda: [*map(_facts, known)], lambda: Console().print(table, highlight=False))


@jobs.command(epilog=example("jobs status first"))
def status(name: Name, address: Address = _HERE, as_json: AsJson = False) -> None:
    """Show a job: what became of it, where its records are."""
    job = JobServer(address).find(name)
    table = facts_of(_cells(job), box=None, pad_edge=False)
    answer(as_json, lambda: _facts(job), lambda: Console().print(table, highlight=False))


@jobs.command(epilog=example("jobs logs first --follow"))
def logs(name: Name, address: Address = _HERE, follow: Follow = False) -> None:
    """Show what a job has printed."""
    server = JobServer(address)
    job = server.find(name)
    if follow:
        _follow(server, job.submission_id)
        return
    with _answers():
        typer.echo(str(server.client.get_job_logs(job.submission_id)), nl=False)


@jobs.command(epilog=example("jobs stop first"))
def stop(name: Name, address: Address = _HERE) -> None:
    """Stop a job and wait for it: the run saves a checkpoint first, and --resume goes on from there."""
    server = JobServer(address)
    job = server.find(name)
    id = job.submission_id
    if job.status.is_terminal():
        typer.echo(f"job {id} is {job.status} already")
        return
    with _answers():
        server.client.stop_job(id)
    status = server.ended(id, seconds := STOP_SECONDS + _STATUS_SECONDS)
    if not status.is_terminal():
        raise JobError(
            f"job {id} is still {status} {seconds:g} s after it was told to stop; see it with: "
            f"braid jobs status {id}"
        )
    typer.echo(f"job {id} is {status}")


def _follow(server: "JobServer", job: str) -> None:
    """Print a job's log to its end; exit with the job's code: 0, 1 if it failed, 130 if it was stopped."""
    import asyncio  # loads slowly

    async def show() -> None:
        with _answers():
            async for text in server.client.tail_job_logs(job):
                sys.stdout.write(text)
                sys.stdout.flush()

    try:
        asyncio.run(show())
    except KeyboardInterrupt:
        complain(f"job {job} goes on; stop it with: braid jobs stop {job}")
        raise
    status = server.ended(job)
    typer.echo(f"job {job} is {status}")
    if status != "SUCCEEDED":
        raise typer.Exit(ExitCode.INTERRUPTED if status == "STOPPED" else ExitCode.FAILURE)


# -- the job server ------------------------------------------------------------------------------------------


class JobServer:
    """A cluster's job server, ``http://HOST:8265``, which also serves Ray's dashboard."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--address {address!r} must be a job server such as http://10.0.0.1:8265")
        self.address, self.host = address.rstrip("/"), parts.hostname
        self.client = _client(self.address, is_loopback(self.host))

    def jobs(self) -> list[Any]:
        """Return all submitted jobs, as Ray's `JobDetails`, the newest first."""
        with _answers():
            found = [job for job in self.client.list_jobs() if job.type.value == "SUBMISSION"]
        return sorted(found, key=lambda job: job.start_time or 0, reverse=True)

    def find(self, name: str) -> Any:
        """Return the job of a run (the active one, else the newest), or the job with this id."""
        known = self.jobs()
        found = _of_run(name, known) or [job for job in known if job.submission_id == name]
        if found:
            return found[0]
        names = ", ".join(dict.fromkeys(_run_of(job) or job.submission_id for job in known)) or "none"
        raise ConfigError(f"there is no run or job named {name!r} at {self.address}; there are: {names}")

    def ended(self, id: str, seconds: float = _STATUS_SECONDS) -> Any:
        """Return the status of a job once it has ended, or after ``seconds``; its log may end a little
        earlier."""
        deadline = time.monotonic() + seconds
        while True:
            job = next((job for job in self.jobs() if job.submission_id == id), None)
            if job is None:
                raise JobError(f"job {id} is gone from {self.address}")
            if job.status.is_terminal() or time.monotonic() >= deadline:
                return job.status
            time.sleep(_POLL_SECONDS)


def _checked(config: Config) -> Config:
    """Return the configuration for a job: checked as far as possible here, with absolute paths.

    It contains no cluster address, since the job joins the cluster that it is submitted to.
    """
    from braid.jobs.data.tokenizer import tokenizer_of

    if config.cluster.launcher != "ray":
        raise ConfigError(f"cluster.launcher={config.cluster.launcher!r} cannot be submitted; set it to ray")
    config = anchored(expanded(config), Path.cwd())
    if not config.parallel.auto:
        config.layout()
    if config.tokenizer == BYTES or Path(config.tokenizer).exists():
        config.check(tokenizer_of(config).vocabulary)
    return config.changed(cluster={"address": None})


def _variables(settings: list[str]) -> dict[str, str]:
    """Parse ``NAME=VALUE`` words; raise `ConfigError` for secrets, which Ray would show to everybody."""
    variables = {}
    for setting in settings:
        name, separator, value = setting.partition("=")
        if not separator or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(f"--env {name!r} must be written NAME=VALUE, such as --env NCCL_DEBUG=WARN")
        if looks_secret(name, value):
            raise ConfigError(
                f"--env {name} looks like a secret, and Ray shows a job's environment to whoever may list "
                f"jobs; set it on the nodes instead, or let the program read it from a file"
            )
        variables[name] = value
    return variables


def _check_new(name: str, known: list[Any], goes_on: bool) -> None:
    """Refuse a run that is active, or that has ended and is neither resumed nor overwritten."""
    for job in _of_run(name, known)[:1]:
        now, what = f"job {job.submission_id} is {job.status}", ""
        if not job.status.is_terminal():
            what = f"is active: {now}; wait for it, stop it with 'braid jobs stop {name}'"
        elif not goes_on:
            what = f"was here before: {now}; continue it with --resume, replace it with --overwrite"
        if what:
            raise ConfigError(f"run {name!r} {what}, or choose another with --set name=...")


def _of_run(name: str, known: list[Any]) -> list[Any]:
    """Return the jobs of a run, active ones first, then the newest."""
    return sorted((job for job in known if _run_of(job) == name), key=lambda job: job.status.is_terminal())


def _client(address: str, local: bool) -> Any:
    """Make Ray's client for exactly this address, whatever the environment says. ``local``: it is this
    machine."""
    from braid.jobs.cluster.session import environment

    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError:
        raise ConfigError("jobs need Ray, which is not installed: pip install 'ray[default]'") from None

    direct: dict[str, Any] = {"proxies": {"no_proxy": urlsplit(address).hostname}} if local else {}

    class Client(JobSubmissionClient):
        """Client with time limits, and without a proxy for this machine."""

        def _do_request(self, method: str, endpoint: str, **named: Any) -> Any:
            read = _CONNECT_SECONDS if endpoint == "/api/version" else _READ_SECONDS
            return super()._do_request(method, endpoint, timeout=(_CONNECT_SECONDS, read), **direct, **named)

    for name in ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk"):
        logging.getLogger(name).setLevel(logging.ERROR)  # they log every upload
    with _answers(), environment({}):
        for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
            os.environ.pop(name, None)
        try:
            return Client(address)
        except OSError:
            raise ConfigError(
                f"--address {address!r} does not answer; check that a Ray head with its dashboard "
                f"(ray start --head --dashboard-host=...) runs there, and that no proxy stands between"
            ) from None


@contextlib.contextmanager
def _answers() -> Iterator[None]:
    """Convert Ray's errors about a server into `ConfigError` or `JobError`."""
    from aiohttp import ClientError
    from ray.exceptions import AuthenticationError

    try:
        yield
    except AuthenticationError:
        raise ConfigError(
            "the job server wants a token, and the one here is missing or wrong: set RAY_AUTH_MODE=token and "
            "RAY_AUTH_TOKEN_PATH to a file with the token, or put it into ~/.ray/auth_token"
        ) from None
    except (ClientError, OSError) as error:
        text = str(error) or type(error).__name__
        raise JobError(f"the job server answers no more: {text}; look with: braid jobs list") from None
    except RuntimeError as error:
        raise JobError(str(error)) from None
