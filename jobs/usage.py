"""Conventions that all commands share: an example in every help, one line for a wrong call."""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from braid.actors.config import Config, load_config
from braid.scheduling.text.suggestions import must_be_one_of, nearest

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
    from braid.jobs.data.hub_names import with_hub_files  # loads numpy, which help texts do not need

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
    return typer.Typer(cls=Commands, **more)


class Commands(TyperGroup):
    """A group of commands that suggests a command for an unknown name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve a command as typer does, but also suggest commands for words of other systems."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            known = self.list_commands(ctx)
            near = nearest(name, known)
            remedy = f"did you mean {near!r}?" if near else f"there are {', '.join(known)}"
            ctx.fail(f"there is no command {f'{ctx.command_path} {name}'!r}; {remedy}")
        return super().resolve_command(ctx, args)


def told(error: Any) -> str:
    """Describe in one line a call that typer refuses: the fault, and the remedy."""
    context: Any = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "braid"
    text = (
        str(error.format_message()).rstrip(".").replace("Value error, ", "").replace("Input should", "must")
    )
    if wrong := re.search(r"'([^']*)' is not one of (.*)", text):
        choices = [choice.strip(" '") for choice in wrong[2].split(",")]
        return f"{text[: wrong.start()]}{wrong[1]!r} {must_be_one_of(wrong[1], choices)}"
    return text if ";" in text else f"{text}; see {path} --help"
