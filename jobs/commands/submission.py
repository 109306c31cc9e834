"""``braid submit`` and ``braid jobs``: runs as jobs of a Ray cluster."""

import asyncio
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from braid.actors.config import ConfigError, load_config
from braid.jobs.output import ExitCode, complain
from braid.jobs.usage import AsJson, Commands, ConfigFile, Overrides, Overwrite, Resume, example
from braid.scheduling.text.json_text import json_text

if TYPE_CHECKING:
    from braid.jobs.cluster.submission import Job, JobServer

jobs = typer.Typer(
    cls=Commands,
    epilog=example("jobs list"),
    help="List, show, follow and stop the jobs of a Ray cluster.",
    no_args_is_help=True,
    add_completion=False,
)

Address = Annotated[
    str, typer.Option(help="The cluster's job server, http://HOST:8265.", envvar="RAY_API_SERVER_ADDRESS")
]
Name = Annotated[str, typer.Argument(help="A run's name (its newest job), or a job's id.", metavar="NAME")]
_HERE = "http://127.0.0.1:8265"
_SUBMITTED = ("layout", "directory", "submitted by")
"""What `braid submit` notes of a job."""
_LISTED = ("run", "job", "status", "layout", "started", "took", "submitted by")
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Show what the job prints, to its end.")]


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
    python: Annotated[str, typer.Option(help="Python on the cluster's nodes.")] = "python",
    stop_seconds: Annotated[
        int, typer.Option(help="Seconds to save a checkpoint when it is stopped.", min=1)
    ] = 120,  # submission.STOP_SECONDS, which no help needs to load
) -> None:
    """Train on a Ray cluster: send configuration and package to its job server.

    Relative paths are taken from here (of model.layer, model.initial and checkpoint.mirror from CONFIG's
    folder) and must mean the same on all nodes.
    """
    if resume and overwrite:
        raise ConfigError("--resume and --overwrite exclude each other")
    resolved = load_config(config, overrides or ())
    from braid.jobs.cluster.submission import environment_of

    server = _server(address)
    options = ["--resume"] * resume + ["--overwrite"] * overwrite
    job = server.submit(resolved, options, environment_of(env or []), python, stop_seconds)
    typer.echo(f"run {job.run} is job {job.id} at {address}; records in {job.metadata['braid_directory']}")
    if follow:
        _follow(server, job)
    else:
        typer.echo(f"follow it with: braid jobs logs {job.run} -f --address {address}")


@jobs.command("list", epilog=example("jobs list --address http://10.0.0.1:8265"))
def list_jobs(address: Address = _HERE, as_json: AsJson = False) -> None:
    """Show all submitted jobs, the newest first."""
    all_jobs = _server(address).jobs()
    if as_json:
        typer.echo(json_text([asdict(job) for job in all_jobs]))
        return
    table = Table(box=None, pad_edge=False)
    for name in _LISTED:
        table.add_column(name, overflow="fold")
    for job in all_jobs:
        table.add_row(*map(_cells(job).__getitem__, _LISTED))
    Console().print(table, highlight=False)


@jobs.command(epilog=example("jobs status first"))
def status(name: Name, address: Address = _HERE, as_json: AsJson = False) -> None:
    """Show a job: what became of it, where its records are."""
    job = _server(address).find(name)
    if as_json:
        typer.echo(json_text(asdict(job)))
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for row in _cells(job).items():
        table.add_row(*row)
    Console().print(table, highlight=False)


@jobs.command(epilog=example("jobs logs first --follow"))
def logs(
    name: Name,
    address: Address = _HERE,
    follow: Follow = False,
) -> None:
    """Show what a job has printed."""
    server = _server(address)
    job = server.find(name)
    if follow:
        _follow(server, job)
    else:
        typer.echo(server.logs(job), nl=False)


@jobs.command(epilog=example("jobs stop first"))
def stop(
    name: Name,
    address: Address = _HERE,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds to wait; default: what the job was given, and 10.", min=0)
    ] = None,
) -> None:
    """Stop a job and wait for it: the run saves a checkpoint first, and --resume goes on from there."""
    server = _server(address)
    job = server.find(name)
    if not job.active:
        typer.echo(f"job {job.id} is {job.status} already")
        return
    stopped = server.stop(job, job.stop_seconds + 10 if timeout is None else timeout)
    typer.echo(f"job {stopped.id} is {stopped.status}")


def _server(address: str) -> "JobServer":
    from braid.jobs.cluster.submission import JobServer  # here: no help needs it

    return JobServer(address)


def _follow(server: "JobServer", job: "Job") -> None:
    """Print a job's log to its end; the exit code is the job's: 0, 1 if it failed, 130 if it was stopped."""

    async def show() -> None:
        async for text in server.follow(job):
            sys.stdout.write(text)
            sys.stdout.flush()

    try:
        asyncio.run(show())
    except KeyboardInterrupt:
        complain(f"job {job.id} goes on; stop it with: braid jobs stop {job.id}")
        raise
    ended = server.ended(job)
    typer.echo(f"job {ended.id} is {ended.status}")
    if ended.status != "SUCCEEDED":
        raise typer.Exit(ExitCode.INTERRUPTED if ended.status == "STOPPED" else ExitCode.FAILURE)


def _cells(job: "Job") -> dict[str, Text]:
    """What tables tell of a job, by column; as `Text`, since names of others are not rich's markup."""
    started = took = None
    if job.started is not None:
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.started))
        seconds = round((job.ended or time.time()) - job.started)
        took = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    words = {"run": job.run, "job": job.id, "status": job.status, "message": job.message}
    words |= {name: job.metadata.get(f"braid_{name.replace(' ', '_')}") for name in _SUBMITTED}
    words |= {"started": started, "took": took, "command": job.entrypoint}
    return {name: Text(word or "-") for name, word in words.items()}
