"""Runs as Ray jobs: shipped to a cluster's job server, found again by the run's name, followed, stopped.

A job carries the package and a folder with the resolved configuration. Data and run directories are not
shipped: relative paths are made absolute here, and must mean the same on all nodes.
"""

import contextlib
import logging
import os
import re
import shlex
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from braid.actors.config import NAME_PATTERN, Config, ConfigError
from braid.actors.config.paths import BYTES, anchored, expanded
from braid.actors.config.variables import looks_secret
from braid.jobs.cluster.doors import check_job_server, is_loopback
from braid.jobs.cluster.session import environment, package
from braid.jobs.data.tokenizer import tokenizer_of

STOP_SECONDS = 120
"""Time for a job to save a checkpoint after it was told to stop; Ray's own default is 3."""

_ENDED = {"SUCCEEDED", "FAILED", "STOPPED"}
_POLL_SECONDS, _STATUS_SECONDS = 0.3, 10.0
_CONNECT_SECONDS, _READ_SECONDS = 20.0, 60.0


class JobError(RuntimeError):
    """The job server refuses or fails, for a reason that is not in the configuration."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A submitted job; times are seconds since 1970."""

    id: str
    run: str | None
    """The run's name; None of a job that `braid submit` did not make."""
    status: str
    """PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED."""
    message: str
    started: float | None
    ended: float | None
    entrypoint: str
    metadata: Mapping[str, str]
    """Of a run: ``braid_run``, ``braid_layout`` (the mesh in words, as it was submitted), ``braid_directory``
    (as nodes see it), ``braid_submitted_by`` (``user@host``) and ``braid_stop_seconds``."""

    @property
    def active(self) -> bool:
        """Whether it waits or runs."""
        return self.status not in _ENDED

    @property
    def stop_seconds(self) -> float:
        given = self.metadata.get("braid_stop_seconds", "")
        return float(given) if given.isdecimal() else STOP_SECONDS


class JobServer:
    """A cluster's job server, ``http://HOST:8265``, which also serves Ray's dashboard."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--address {address!r} must be a job server such as http://10.0.0.1:8265")
        self._address, self._host = address.rstrip("/"), parts.hostname
        self._client = _client(self._address, is_loopback(self._host))

    def submit(
        self,
        config: Config,
        options: list[str],
        environment: Mapping[str, str],
        python: str,
        stop_seconds: int,
    ) -> Job:
        """Start a run as a job. `ConfigError` if the run has an active job, or, without ``options``, any job.

        options       of ``braid train``: ``--resume`` or ``--overwrite``
        environment   variables of the driver and all ranks; kept by Ray for everybody to read
        python        the interpreter's name on the nodes
        stop_seconds  between SIGTERM and SIGKILL, for the last checkpoint
        """
        config = _prepared(config)
        name = config.name
        check_job_server(self._address, self._host, config.cluster.allow_unauthenticated)
        jobs = self.jobs()
        _check_new(name, jobs, bool(options))
        taken = {job.id for job in jobs}  # Ray never takes an id twice
        ids = (name if number == 1 else f"{name}-{number}" for number in count(1))
        new = next(id for id in ids if id not in taken)
        facts = {
            "run": name,
            "layout": "auto" if config.parallel.auto else config.layout().describe(),
            "directory": str(config.run_directory),
            "submitted_by": f"{os.environ.get('USER') or os.getuid()}@{socket.gethostname()}",
            "stop_seconds": str(stop_seconds),
        }
        with tempfile.TemporaryDirectory(prefix="braid-job-") as folder:
            (Path(folder) / "run.yaml").write_text(config.to_yaml(), encoding="utf-8")
            with _answers():
                self._client.submit_job(
                    entrypoint=shlex.join([python, "-m", "braid", "train", "run.yaml", *options]),
                    submission_id=new,
                    runtime_env={
                        "working_dir": folder,
                        "py_modules": [package()],
                        "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(stop_seconds), **environment},
                    },
                    metadata={f"braid_{key}": value for key, value in facts.items()},
                )
        return self.find(new, by_run=False)

    def jobs(self) -> list[Job]:
        """All submitted jobs, the newest first."""
        with _answers():
            found = [_job(job) for job in self._client.list_jobs() if job.type.value == "SUBMISSION"]
        return sorted(found, key=lambda job: job.started or 0.0, reverse=True)

    def find(self, name: str, *, by_run: bool = True) -> Job:
        """The job of a run (the active one, else the newest), or the job with this id."""
        jobs = self.jobs()
        found = _of_run(name, jobs) if by_run else []
        if found := found or [job for job in jobs if job.id == name]:
            return found[0]
        known = ", ".join(dict.fromkeys(job.run or job.id for job in jobs)) or "none"
        raise ConfigError(f"there is no run or job named {name!r} at {self._address}; there are: {known}")

    def logs(self, job: Job) -> str:
        """All that the job has printed so far."""
        with _answers():
            return str(self._client.get_job_logs(job.id))

    async def follow(self, job: Job) -> AsyncIterator[str]:
        """What the job prints, as it comes, to its end."""
        with _answers():
            async for text in self._client.tail_job_logs(job.id):
                yield text

    def stop(self, job: Job, seconds: float) -> Job:
        """Tell a job to stop, and wait until it has; `JobError` after ``seconds``."""
        with _answers():
            self._client.stop_job(job.id)
        stopped = self.ended(job, seconds)
        if stopped.active:
            raise JobError(
                f"job {job.id} is still {stopped.status} {seconds:g} s after it was told to stop; "
                f"it is killed {job.stop_seconds:g} s after it was told"
            )
        return stopped

    def ended(self, job: Job, seconds: float = _STATUS_SECONDS) -> Job:
        """The job when it has ended, or as it is after ``seconds``; its log may end a little earlier."""
        deadline = time.monotonic() + seconds
        while (now := self.find(job.id, by_run=False)).active and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return now


def _prepared(config: Config) -> Config:
    """A configuration for a job: checked as far as that can be done here, with absolute paths.

    The job joins the cluster that it is submitted to, so no address is left in it.
    """
    if config.cluster.launcher != "ray":
        raise ConfigError(f"cluster.launcher={config.cluster.launcher!r} cannot be submitted; set it to ray")
    config = anchored(expanded(config), Path.cwd())
    if not config.parallel.auto:
        config.layout()
    if config.tokenizer == BYTES or Path(config.tokenizer).exists():
        config.check(tokenizer_of(config).vocabulary)
    return config.changed(cluster={"address": None})


def environment_of(settings: list[str]) -> dict[str, str]:
    """``NAME=VALUE`` words as a mapping; `ConfigError` for secrets, which Ray would show to everybody."""
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


def _check_new(name: str, jobs: list[Job], goes_on: bool) -> None:
    """Refuse a run that is active, or that ended and is neither to go on nor to be replaced."""
    for job in _of_run(name, jobs)[:1]:
        if job.active:
            raise ConfigError(
                f"run {name!r} is active: job {job.id} is {job.status}; wait for it, stop it with "
                f"'braid jobs stop {name}', or choose another with --set name=..."
            )
        if not goes_on:
            raise ConfigError(
                f"run {name!r} was here before: job {job.id} is {job.status}; continue it with "
                f"--resume, replace it with --overwrite, or choose another with --set name=..."
            )


def _of_run(name: str, jobs: list[Job]) -> list[Job]:
    """The jobs of a run, active ones first, then the newest."""
    return sorted((job for job in jobs if job.run == name), key=lambda job: not job.active)


def _job(details: Any) -> Job:
    metadata = {str(key): str(value) for key, value in (details.metadata or {}).items()}
    run = metadata.get("braid_run", "")
    return Job(
        id=details.submission_id,
        run=run if re.fullmatch(NAME_PATTERN, run) else None,
        status=details.status.value,
        message=details.message or "",
        started=details.start_time / 1000 if details.start_time else None,
        ended=details.end_time / 1000 if details.end_time else None,
        entrypoint=details.entrypoint,
        metadata=metadata,
    )


def _client(address: str, local: bool) -> Any:
    """Ray's client for exactly this address, whatever the environment says. ``local``: on this machine."""
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError:
        raise ConfigError("jobs need Ray, which is not installed: pip install 'ray[default]'") from None

    direct: dict[str, Any] = {"proxies": {"no_proxy": urlsplit(address).hostname}} if local else {}

    class Client(JobSubmissionClient):
        """Has time limits, and asks this machine without a proxy."""

        def _do_request(self, method: str, endpoint: str, **named: Any) -> Any:
            read = _CONNECT_SECONDS if endpoint == "/api/version" else _READ_SECONDS
            return super()._do_request(method, endpoint, timeout=(_CONNECT_SECONDS, read), **direct, **named)

    for name in ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk"):
        logging.getLogger(name).setLevel(logging.ERROR)  # they tell of every upload
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
    """Turn Ray's complaints about a server into ours."""
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
