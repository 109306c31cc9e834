"""Runs as Ray jobs: shipped to a cluster's job server, found again by the run's name, followed, stopped.

A job carries the package and one folder with the resolved configuration. What a run reads and writes stays
where it is: relative paths are made absolute here, and must mean the same on all nodes.
"""

import contextlib
import getpass
import logging
import os
import re
import shlex
import socket
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from braid import __version__
from braid.actors.config import NAME_PATTERN, Config, ConfigError, parse_config
from braid.actors.config.paths import BYTES, anchored, expanded
from braid.actors.config.variables import looks_secret
from braid.dashboards.run_files import NotReadableError, read_text
from braid.jobs.data.tokenizer import tokenizer_of
from braid.jobs.doors import check_job_server, is_loopback
from braid.jobs.session import package
from braid.scheduling.yaml_text import parse_yaml

CONFIG_FILE = "run.yaml"
STOP_SECONDS = 120
"""For so long a job that is told to stop may take to save a checkpoint; Ray's own default is 3."""

_RUN, _BY, _AT = "braid_run", "braid_submitted_by", "braid_submitted_at"
_MARK = "braid_submission"
"""Tells one submission from another of the same name."""
_LAYOUT, _VERSION, _DIRECTORY, _STOP = (
    "braid_layout",
    "braid_version",
    "braid_directory",
    "braid_stop_seconds",
)
_ENDED = {"SUCCEEDED", "FAILED", "STOPPED"}
_POLL_SECONDS, _STATUS_SECONDS = 0.3, 10.0
_CONNECT_SECONDS, _READ_SECONDS = 20.0, 60.0
_PASSWORD = re.compile(r"[^/@]*@")


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

    @property
    def active(self) -> bool:
        """Whether it waits or runs."""
        return self.status not in _ENDED

    @property
    def layout(self) -> str | None:
        """The mesh in words: the present one, where an active run's directory is seen from here."""
        given = self.metadata.get(_LAYOUT)
        if not self.active or self.directory is None:
            return given
        try:  # whose directory that is, strangers say: no link is followed, nothing large is read
            text = read_text(Path(self.directory) / "config.yaml")
            return given if text is None else parse_config(parse_yaml(text, "it")).layout().describe()
        except (NotReadableError, ValueError, AttributeError):
            return given

    @property
    def submitted_by(self) -> str | None:
        """``user@host``."""
        return self.metadata.get(_BY)

    @property
    def directory(self) -> str | None:
        """The run's directory, as the nodes see it."""
        return self.metadata.get(_DIRECTORY)

    @property
    def stop_seconds(self) -> float:
        """How long it may take to stop."""
        given = self.metadata.get(_STOP, "")
        return float(given) if given.isdecimal() else STOP_SECONDS


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What is to be submitted, and how.

    environment   variables of the driver and all ranks; kept by Ray for everybody to read
    python        the interpreter's name on the nodes
    stop_seconds  between SIGTERM and SIGKILL, for the last checkpoint
    """

    config: Config
    resume: bool = False
    overwrite: bool = False
    environment: Mapping[str, str]
    python: str = "python"
    stop_seconds: int = STOP_SECONDS


class JobServer:
    """A cluster's job server, ``http://HOST:8265``: the one that also serves Ray's dashboard."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--address {address!r} must be a job server such as http://10.0.0.1:8265")
        self._address, self._host = address.rstrip("/"), parts.hostname
        self._client = _client(self._address)

    def submit(self, submission: Submission) -> Job:
        """Start a run as a job; `ConfigError` if it is active already, or was there and is not to go on."""
        config = prepared_config(submission.config)
        check_job_server(self._address, self._host, config.cluster.allow_unauthenticated)
        jobs = self.jobs()
        _check_new(config, jobs, submission)
        new = _free_id(config.name, {job.id for job in jobs})
        options = ["--resume"] * submission.resume + ["--overwrite"] * submission.overwrite
        command = [submission.python, "-m", "braid", "train", CONFIG_FILE, *options]
        metadata = _metadata(config, submission.stop_seconds)
        with tempfile.TemporaryDirectory(prefix="braid-job-") as folder:
            (Path(folder) / CONFIG_FILE).write_text(config.to_yaml(), encoding="utf-8")
            try:
                with _answers(self._address):
                    self._client.submit_job(
                        entrypoint=shlex.join(command),
                        submission_id=new,
                        runtime_env={
                            "working_dir": folder,
                            "py_modules": [package()],
                            "env_vars": {
                                "RAY_JOB_STOP_WAIT_TIME_S": str(submission.stop_seconds),
                                **submission.environment,
                            },
                        },
                        metadata=metadata,
                    )
            except JobError as error:
                found = {job.id: job for job in self.jobs()}
                if new not in found:
                    raise error
                if found[new].metadata.get(_MARK) != metadata[_MARK]:  # somebody was faster
                    _check_new(config, list(found.values()), submission)
                    raise error
                # It is ours: a busy server took it, and answered too late.
        return self.find(new, by_run=False)

    def jobs(self) -> list[Job]:
        """All submitted jobs, the newest first."""
        with _answers(self._address):
            found = [_job(one) for one in self._client.list_jobs() if one.type.value == "SUBMISSION"]
        return sorted(found, key=lambda job: job.started or 0.0, reverse=True)

    def find(self, name: str, *, by_run: bool = True) -> Job:
        """The job of a run (the active one, else the newest), or the job with this id."""
        jobs = self.jobs()
        of_run = [job for job in jobs if by_run and job.run == name]
        if found := sorted(of_run, key=lambda job: not job.active) or [job for job in jobs if job.id == name]:
            return found[0]
        known = ", ".join(dict.fromkeys(job.run or job.id for job in jobs)) or "none"
        raise ConfigError(f"there is no run or job named {name!r} at {self._address}; there are: {known}")

    def logs(self, job: Job) -> str:
        """All that the job has printed."""
        with _answers(self._address):
            return str(self._client.get_job_logs(job.id))

    async def follow(self, job: Job) -> AsyncIterator[str]:
        """What the job prints, as it comes, to its end."""
        with _answers(self._address):
            async for text in self._client.tail_job_logs(job.id):
                yield text

    def stop(self, job: Job, seconds: float) -> Job:
        """Tell a job to stop, and wait until it has; `JobError` after ``seconds``."""
        with _answers(self._address):
            self._client.stop_job(job.id)
        now = self.ended(job, seconds)
        if now.active:
            raise JobError(
                f"job {job.id} is still {now.status} {seconds:g} s after it was told to stop; "
                f"it is killed {job.stop_seconds:g} s after it was told"
            )
        return now

    def ended(self, job: Job, seconds: float = _STATUS_SECONDS) -> Job:
        """The job when it has ended, or as it is after ``seconds``; its log may end a little earlier."""
        deadline = time.monotonic() + seconds
        while (now := self.find(job.id, by_run=False)).active and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return now


def prepared_config(config: Config) -> Config:
    """A configuration for a job: checked as far as that can be done here, with absolute paths.

    The job joins the cluster that it is submitted to, so no address is left in it.
    """
    if config.cluster.launcher != "ray":
        raise ConfigError(f"cluster.launcher={config.cluster.launcher!r} cannot be submitted; set it to ray")
    config = anchored(expanded(config), Path.cwd())  # what stands beside the file is absolute already
    if not config.parallel.auto:
        config.layout()
    if config.tokenizer == BYTES or Path(config.tokenizer).exists():
        config.check(tokenizer_of(config).vocabulary)
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"address": None})})


def environment_of(settings: list[str]) -> dict[str, str]:
    """``NAME=VALUE`` words as a mapping; `ConfigError` for secrets, which Ray would show to everybody."""
    found = {}
    for setting in settings:
        name, separator, value = setting.partition("=")
        if not separator or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(f"--env {name!r} must be written NAME=VALUE, such as --env NCCL_DEBUG=WARN")
        if looks_secret(name, value):
            raise ConfigError(
                f"--env {name} looks like a secret, and Ray shows a job's environment to whoever may list "
                f"jobs; set it on the nodes instead, or let the program read it from a file"
            )
        found[name] = value
    return found


def _check_new(config: Config, jobs: list[Job], submission: Submission) -> None:
    """Refuse a run that is active, or that ended and is neither to go on nor to be replaced."""
    same = sorted((job for job in jobs if job.run == config.name), key=lambda job: not job.active)
    other = "choose another with --set name=..."
    if same and same[0].active:
        raise ConfigError(
            f"run {config.name!r} is active: job {same[0].id} is {same[0].status}; wait for it, stop it with "
            f"'braid jobs stop {config.name}', or {other}"
        )
    if same and not (submission.resume or submission.overwrite):
        raise ConfigError(
            f"run {config.name!r} was here before: job {same[0].id} is {same[0].status}; continue it with "
            f"--resume, replace it with --overwrite, or {other}"
        )


def _free_id(name: str, taken: set[str]) -> str:
    """NAME, or NAME-2, NAME-3, ...: Ray never takes an id twice."""
    number, new = 1, name
    while new in taken:
        number += 1
        new = f"{name}-{number}"
    return new


def _metadata(config: Config, stop_seconds: int) -> dict[str, str]:
    """What is shown of a run; nothing of the environment."""
    return {
        _RUN: config.name,
        _VERSION: __version__,
        _LAYOUT: "auto" if config.parallel.auto else config.layout().describe(),
        _DIRECTORY: str(config.run_directory),
        _BY: f"{_user()}@{socket.gethostname()}",
        _AT: datetime.now(UTC).isoformat(timespec="seconds"),
        _STOP: str(stop_seconds),
        _MARK: uuid.uuid4().hex,
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container whose user has no name
        return str(os.getuid())


def _job(details: Any) -> Job:
    metadata = {str(key): str(value) for key, value in (details.metadata or {}).items()}
    run = metadata.get(_RUN)
    return Job(
        id=details.submission_id,
        run=run if run is not None and re.fullmatch(NAME_PATTERN, run) else None,
        status=details.status.value,
        message=details.message or "",
        started=details.start_time / 1000 if details.start_time else None,
        ended=details.end_time / 1000 if details.end_time else None,
        entrypoint=details.entrypoint,
        metadata=metadata,
    )


def _client(address: str) -> Any:
    """Ray's client for exactly this address, whatever the environment says."""
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError:
        raise ConfigError("jobs need Ray, which is not installed: pip install 'ray[default]'") from None

    host = urlsplit(address).hostname or ""
    direct: dict[str, Any] = {"proxies": {"no_proxy": host}} if is_loopback(host) else {}

    class Client(JobSubmissionClient):
        """Waits for an answer for so long and no longer; asks this machine itself and no proxy."""

        def _do_request(self, method: str, endpoint: str, **named: Any) -> Any:
            read = _CONNECT_SECONDS if endpoint == "/api/version" else _READ_SECONDS
            return super()._do_request(method, endpoint, timeout=(_CONNECT_SECONDS, read), **direct, **named)

    for name in ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk"):
        logging.getLogger(name).setLevel(logging.ERROR)  # they tell of every upload
    names = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
    saved = {name: os.environ.pop(name) for name in names if name in os.environ}
    with _answers(address):
        try:
            return Client(address)
        except OSError:
            raise ConfigError(
                f"--address {address!r} does not answer; check that a Ray head with its dashboard "
                f"(ray start --head --dashboard-host=...) runs there"
            ) from None
        finally:
            os.environ.update(saved)


@contextlib.contextmanager
def _answers(address: str) -> Iterator[None]:
    """Turn Ray's complaints about the server at ``address`` into ours."""
    from aiohttp import ClientError
    from ray.exceptions import AuthenticationError

    try:
        yield
    except AuthenticationError:
        raise ConfigError(
            f"the job server wants a token, and the one here is missing or wrong: set RAY_AUTH_MODE=token "
            f"and RAY_AUTH_TOKEN_PATH to a file with the token, or put it into ~/.ray/auth_token"
            f"{_or_proxy(address)}"
        ) from None
    except (ClientError, OSError) as error:
        raise JobError(
            f"the job server answers no more: {str(error) or type(error).__name__}{_or_proxy(address)}"
        ) from None
    except RuntimeError as error:
        raise JobError(f"{error}{_or_proxy(address)}") from None


def _or_proxy(address: str) -> str:
    """A hint for messages: a proxy between this machine and the server, if there is any, may be at fault."""
    parts = urlsplit(address)
    proxy, host = getproxies().get(parts.scheme), parts.hostname or ""
    if proxy is None or is_loopback(host) or proxy_bypass(host):
        return ""
    return (
        f" (the proxy {_PASSWORD.sub('', proxy)} stands between; to go without it, put {host} into no_proxy)"
    )
