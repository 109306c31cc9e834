"""Conventions that all commands share: an example in every help, one line for a wrong call."""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from braid.actors.config import Config, load_config

ConfigFile = Annotated[Path, typer.Argument(help="The run's YAML file.", metavar="CONFIG")]
RunFolder = Annotated[Path, typer.Argument(help="A run's directory, such as runs/first.", metavar="RUN")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Override a key, as in --set train.lr=3e-4; may be repeated.", metavar="KEY=VALUE"
    ),
]
Launcher = Annotated[
    Literal["ray", "processes"] | None,
    typer.Option(help="Short for --set cluster.launcher=...: Ray actors, or plain processes."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the run's newest good checkpoint.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a run of the same name.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def read_config(
    path: Path, overrides: list[str] | None, launcher: str | None = None, address: str | None = None
) -> Config:
    """Load a configuration and apply a command's options to it; fetch what it names on the Hub."""
    from braid.jobs.data.hub import with_hub_files  # loads numpy, which help texts do not need

    extra = {"cluster.launcher": launcher, "cluster.address": address and json.dumps(address)}
    words = [*(overrides or []), *(f"{key}={word}" for key, word in extra.items() if word)]
    return with_hub_files(load_config(path, words))


def as_options(text: str) -> str:
    """Write what a message tells a Python caller to give as options of commands: ``resume=True``,
    ``name=...``, ``override 'KEY=VALUE'``. All other messages name keys, which commands and Python share."""
    text = re.sub(r"\b(resume|overwrite)=True\b", r"--\1", text)
    return re.sub(r"\boverride (?=['\"])|(?<![\w.-])(?=[a-z_]+=\.\.\.)", "--set ", text)


def example(command: str) -> str:
    """Return the last line of a command's help."""
    return f"Example: braid {command}"


def group(text: str, call: str, **more: Any) -> typer.Typer:
    """Make a group of commands, with a help text and an example."""
    more = {"epilog": example(call), "help": text, "no_args_is_help": True, "add_completion": False, **more}
    return typer.Typer(**more)


def told(error: Any) -> str:
    """Describe in one line a call that typer refuses: the fault, and the remedy."""
    context: Any = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "braid"
    text = (
        str(error.format_message()).rstrip(".").replace("Value error, ", "").replace("Input should", "must")
    )
    return f"{text.rstrip('?')}; see {path} --help"
