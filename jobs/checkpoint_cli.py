"""``braid checkpoint``: list, verify and export what runs have saved."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from braid.actors.config import ConfigError
from braid.jobs.usage import AsJson, Commands, RunFolder, example
from braid.scheduling.json_text import json_text

checkpoint = typer.Typer(
    cls=Commands,
    epilog=example("checkpoint list runs/first"),
    help="List, verify and export the checkpoints of a run.",
    no_args_is_help=True,
    add_completion=False,
)

RunOrCheckpoint = Annotated[
    Path,
    typer.Argument(
        help="A run, or one checkpoint such as runs/first/checkpoints/step-20.", metavar="RUN|CHECKPOINT"
    ),
]
_ERROR_EXIT = 2


@checkpoint.command("list", epilog=example("checkpoint list runs/first"))
def list_checkpoints(run: RunFolder, as_json: AsJson = False) -> None:
    """Show a run's checkpoints: step, size, layout, and whether every file is what was saved."""
    from braid.jobs.checkpoints import checkpoints_at, examine

    found = [examine(path) for path in checkpoints_at(run)]
    if as_json:
        rows = [
            {
                "step": one.step,
                "path": str(one.path),
                "size_bytes": one.size_bytes,
                "layout": one.layout,
                "verified": one.manifest is not None,
                "problem": one.problem or None,
            }
            for one in found
        ]
        typer.echo(json_text(rows))
        return
    table = Table(box=None, pad_edge=False)
    for name in ("step", "size"):
        table.add_column(name, justify="right")
    table.add_column("layout")
    table.add_column("state", overflow="fold")
    for one in found:
        state = Text(one.problem or "verified")  # names of files are not rich's markup
        table.add_row(str(one.step), _size(one.size_bytes), one.layout or "-", state)
    Console().print(table, highlight=False)


@checkpoint.command("verify", epilog=example("checkpoint verify runs/first"))
def verify_checkpoints(source: RunOrCheckpoint) -> None:
    """Compare every file with its checksum; exit code 2, and the file's name, if one differs."""
    from braid.jobs.checkpoints import checkpoints_at, examine

    problems = 0
    for path in checkpoints_at(source):
        one = examine(path)
        if one.problem:
            typer.echo(f"braid: {one.problem}", err=True)
            problems += 1
        else:
            typer.echo(f"{path}: verified, {_size(one.size_bytes)}")
    if problems:
        raise typer.Exit(_ERROR_EXIT)


@checkpoint.command("export", epilog=example("checkpoint export runs/first exported --dtype bf16"))
def export_checkpoint(
    source: RunOrCheckpoint,
    directory: Annotated[Path, typer.Argument(help="A new directory.", metavar="DIR")],
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="Of the weights.")] = "fp32",
    max_file_gb: Annotated[
        float, typer.Option(help="Cut the weights into files of at most this size.")
    ] = 5.0,
) -> None:
    """Write a model for Hugging Face's transformers: weights, config.json, tokenizer, generation settings.

    Llama, Qwen2, Qwen3, GPT-2, Mixtral, Qwen3-MoE, Phi-3.5-MoE. A run's newest verified checkpoint is taken.
    """
    from braid.jobs.beside_weights import copy_beside, kept_by, token_ids
    from braid.jobs.checkpoints import best_checkpoint, check_built_in, new_directory

    if not max_file_gb > 0:
        raise ConfigError(f"--max-file-gb {max_file_gb} must be greater than 0")
    found, complaints = best_checkpoint(source)
    check_built_in(found.path)
    for complaint in complaints:
        typer.echo(f"braid: {complaint}; falling back to step {found.step}", err=True)
    if found.shape.capacity_factor:
        typer.echo(
            f"braid: experts were trained to drop tokens beyond model.capacity_factor="
            f"{found.shape.capacity_factor}; the exported model drops none",
            err=True,
        )
    beside = kept_by(found.path)
    if beside is None:
        typer.echo(
            f"braid: {source} has kept no tokenizer; the export has weights and config.json only", err=True
        )
    with new_directory(directory) as partial:
        from braid.actors.stage.exchange import export_model

        tokens = {} if beside is None else token_ids(beside)
        files = export_model(found.path, partial, found.shape, dtype, int(max_file_gb * 1e9), tokens)
        if beside is not None:
            copy_beside(beside, partial)
        size = sum(file.stat().st_size for file in files)
    count = "1 file" if len(files) == 1 else f"{len(files)} files"
    typer.echo(f"step {found.step} of {source}: {directory}, {_size(size)} of {dtype} in {count}")


def _size(count: int) -> str:
    """Bytes for people."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
