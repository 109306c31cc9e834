"""The command line. Errors that the user can correct become one message on standard error and exit code 2."""

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from braid import __version__
from braid.actors.config import Config, ConfigError
from braid.actors.config.joined import JoinedProcess, on_torchrun
from braid.jobs.bench.cli import bench
from braid.jobs.cluster.kubernetes import kubernetes
from braid.jobs.cluster.slurm import slurm
from braid.jobs.cluster.submission import JobError, jobs, submit
from braid.jobs.commands.checkpoint import checkpoint
from braid.jobs.commands.models import evaluate, generate
from braid.jobs.commands.viewing import dashboard, grafana, logs, report, trace
from braid.jobs.data.cli import data
from braid.jobs.drill.cli import drill
from braid.jobs.output import ExitCode, background, check_outputs, complain, say, write_output
from braid.jobs.planning.cli import compare, explain, plan, presets, profile, schedule, simulate
from braid.jobs.usage import (
    ConfigFile,
    Launcher,
    Overrides,
    Overwrite,
    Resume,
    as_options,
    example,
    group,
    read_config,
    told,
)
from braid.scheduling.text.json_text import json_text

app = group(
    "Train transformer language models and hide communication behind computation.",
    "train first.yaml --launcher processes. Each command has a --help of its own.",
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def train(
    config: ConfigFile,
    overrides: Overrides = None,
    launcher: Launcher = None,
    address: Annotated[str | None, typer.Option(help="Join this Ray cluster, HOST:PORT or auto.")] = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    resume_if_begun: Annotated[
        bool, typer.Option("--resume-if-begun", help="Go on if there is a checkpoint, else begin anew.")
    ] = False,
    until: Annotated[int | None, typer.Option(help="Stop with a checkpoint after this step.", min=1)] = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="Run this plan (braid plan --output): it gives what CONFIG leaves open."),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Also write the report to this file.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan and start nothing; a model.layer is loaded.")
    ] = False,
) -> None:
    """Train a model."""
    from braid.jobs.planning.work import with_plan

    resolved = on_torchrun(with_plan(read_config(config, overrides, launcher, address), plan))
    if dry_run:
        _dry_run(resolved, resume=resume or resume_if_begun)
        return
    if resume + overwrite + resume_if_begun > 1:
        raise ConfigError("--resume, --overwrite and --resume-if-begun exclude each other")
    check_outputs(report=report)
    from braid.jobs.training.display import Display
    from braid.jobs.training.stopping import SecondSignalError
    from braid.jobs.training.train import IF_BEGUN
    from braid.jobs.training.train import train as run

    with (
        background(sys.stdout) as output,
        Display(Console(file=output), live=resolved.telemetry.progress).running() as display,
    ):
        try:
            result = run(
                resolved,
                callbacks=[display],
                resume=IF_BEGUN if resume_if_begun else resume,
                overwrite=overwrite,
                until=until,
            )
        except SecondSignalError as error:  # typer would print nothing about it
            complain(as_options(str(error)))
            raise typer.Exit(ExitCode.INTERRUPTED) from None
    write_output("report", report, json_text(result.report, indent=1))
    if not result.complete and result.steps != until:
        raise typer.Exit(ExitCode.INTERRUPTED)


def _dry_run(config: Config, *, resume: bool) -> None:
    from braid.jobs.planning.view import show_dry_run
    from braid.jobs.training.refusals import check_inputs
    from braid.jobs.training.remarks import on_learning_rate

    console = Console()
    show_dry_run(console, config, check_inputs(config))
    for text in on_learning_rate(config, resume=resume):
        say(console, f"warning {text}")


def demo(overrides: Overrides = None) -> None:
    """See what hiding communication is worth: two ranks over an emulated slow link, without and with it."""
    from braid.jobs.commands.demo import run, show_demo

    console = Console()
    found = run(console, overrides or [])
    show_demo(console, found)
    if found.alike != found.compared:
        raise typer.Exit(ExitCode.FAILURE)


def prepare(config: ConfigFile, overrides: Overrides = None) -> None:
    """Tokenise a run's corpus now instead of on first use; renew data.directory if its files changed."""
    from braid.jobs.cluster.session import launcher_of
    from braid.jobs.data.data_sets import check_data, prepare_data
    from braid.jobs.planning.work import with_plan
    from braid.jobs.training.display import Display

    resolved = with_plan(read_config(config, overrides))
    check_data(resolved, sources=True)  # missing inputs are reported before a cluster starts
    with (
        Display(Console(), live=resolved.telemetry.progress).running() as display,
        launcher_of(resolved) as (_, executor),
    ):
        prepare_data(resolved, executor, display.show, renew=True)


for command, call in (
    (train, "train first.yaml --set train.steps=30 --launcher processes"),
    (demo, "demo --set train.steps=40"),
    (prepare, "prepare first.yaml"),
    (schedule, "schedule first.yaml --set overlap.schedule=ddp --show"),
    (plan, "plan llama-3.1-8b --cluster h100 --nodes 8 --output plan.yaml"),
    (simulate, "simulate plan.yaml --schedule megatron"),
    (explain, "explain plan.yaml"),
    (compare, "compare plan.yaml other.yaml"),
    (presets, "presets"),
    (profile, "profile first.yaml --launcher processes --svg heat.svg"),
    (generate, "generate runs/first --prompt 'def main' --temperature 0.8"),
    (evaluate, "evaluate runs/first --tasks lambada_openai,arc_easy --limit 100"),
    (trace, "trace runs/first --steps 5-8"),
    (report, "report runs/first --output first.html"),
    (logs, "logs runs/first --rank 0"),
    (dashboard, "dashboard runs/first --port 8080"),
    (drill, "drill first.yaml --faults kill-forward,nan --launcher processes"),
    (submit, "submit first.yaml --address http://10.0.0.1:8265 --follow"),
    (slurm, "slurm first.yaml --nodes 8 --gpus-per-node 8 --time 12:00:00 --output first.sh"),
    (kubernetes, "kubernetes first.yaml --image braid:1 --claim runs --output run.yaml"),
):
    app.command(epilog=example(call))(command)
groups = {"bench": bench, "data": data, "grafana": grafana, "checkpoint": checkpoint, "jobs": jobs}
for name, commands in groups.items():
    app.add_typer(commands, name=name)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"braid {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _in_utf8() -> None:
    """Restart this command in UTF-8 mode if file names would be read in another encoding, as with
    ``LC_ALL=C``: Ray, YAML and JSON know only UTF-8. All processes of the run inherit the mode."""
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def main(arguments: list[str] | None = None) -> None:
    """Entry point: run a command, turn errors into messages and exit codes. Under torchrun, all processes but
    that of rank 0 become ranks of its run."""
    if arguments is None:
        _in_utf8()
    trains = (sys.argv[1:] if arguments is None else arguments)[:1] == ["train"]
    try:
        process = JoinedProcess.of(os.environ) if trains else None
    except ConfigError as error:
        sys.exit(_report(error))
    if process is None:
        _run(arguments)
    from braid.actors.controller.ranks.rendezvous import joined

    with joined(process):
        _run(arguments)


def _run(arguments: list[str] | None) -> NoReturn:
    # Ray's import errors are noisy and of little use; its logs stay in its session directory.
    os.environ.setdefault("RAY_DEDUP_LOGS", "1")
    try:
        sys.exit(app(args=arguments, prog_name="braid", standalone_mode=False))
    except (KeyboardInterrupt, typer.Abort):
        complain("interrupted")
        sys.exit(ExitCode.INTERRUPTED)
    except BrokenPipeError:  # the reader of this command's output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.FAILURE)
    except Exception as error:
        sys.exit(_report(error))


def _report(error: Exception) -> int:
    """Print one message and return the exit code; only internal errors show a traceback."""
    if hasattr(error, "show") and hasattr(error, "exit_code"):  # typer's own: wrong options, unknown commands
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
        else:
            complain(told(error))
        return ExitCode.MISTAKE
    if isinstance(error, ValueError):
        complain(as_options(str(error)))
        return ExitCode.MISTAKE
    from braid.actors.controller.ranks.group import StoppedError, WorkerError

    match error:
        case StoppedError():
            complain(str(error) or "stopped; nothing is lost")
            return ExitCode.INTERRUPTED
        case JobError() | OSError():
            complain(str(error))
            return ExitCode.FAILURE
        case WorkerError(user_error=True):
            complain(as_options(error.user_message))
            return ExitCode.MISTAKE
        case WorkerError():
            if error.trace:
                with contextlib.suppress(OSError, ValueError):
                    print(error.trace, file=sys.stderr)
            complain(as_options("\n".join([str(error), *getattr(error, "__notes__", ())])))
            return ExitCode.FAILURE
    raise error


if __name__ == "__main__":
    main()
