"""``braid checkpoint``: list, verify and export what runs have saved."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from braid.actors.config import ConfigError
from braid.jobs.output import ExitCode, complain
from braid.jobs.usage import AsJson, Commands, RunFolder, example
from braid.scheduling.text.json_text import json_text

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


@checkpoint.command("list", epilog=example("checkpoint list runs/first"))
def list_checkpoints(run: RunFolder, as_json: AsJson = False) -> None:
    """Show a run's checkpoints: step, size, layout, and whether every file is what was saved."""
    from braid.jobs.commands.checkpoints import checkpoints_at, examine

    rows = []
    table = Table(box=None, pad_edge=False)
    for name in ("step", "size"):
        table.add_column(name, justify="right")
    table.add_column("layout")
    table.add_column("state", overflow="fold")
    for path in checkpoints_at(run):
        saved = examine(path)
        rows.append(
            {
                "step": saved.step,
                "path": str(path),
                "size_bytes": saved.size_bytes,
                "layout": saved.layout,
                "verified": not saved.problem,
                "problem": saved.problem or None,
            }
        )
        state = Text(saved.problem or "verified")  # names of files are not rich's markup
        table.add_row(str(saved.step), decimal(saved.size_bytes), saved.layout or "-", state)
    if as_json:
        typer.echo(json_text(rows))
    else:
        Console().print(table, highlight=False)


@checkpoint.command("verify", epilog=example("checkpoint verify runs/first"))
def verify_checkpoints(source: RunOrCheckpoint) -> None:
    """Compare every file with its checksum; exit code 2, and the file's name, if one differs."""
    from braid.jobs.commands.checkpoints import checkpoints_at, examine

    code = 0
    for path in checkpoints_at(source):
        saved = examine(path)
        if saved.problem:
            complain(saved.problem)
            code = ExitCode.MISTAKE
        else:
            typer.echo(f"{path}: verified, {decimal(saved.size_bytes)}")
    raise typer.Exit(code)


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
    from braid.jobs.commands.checkpoints import best_checkpoint, check_built_in, new_directory
    from braid.jobs.training.beside_weights import copy_kept

    if not max_file_gb > 0:
        raise ConfigError(f"--max-file-gb {max_file_gb} must be greater than 0")
    found, problems = best_checkpoint(source)
    assert found.shape is not None
    check_built_in(found.path)
    for problem in problems:
        complain(f"{problem}; falling back to step {found.step}")
    if found.shape.capacity_factor:
        complain(
            f"experts were trained to drop tokens beyond model.capacity_factor="
            f"{found.shape.capacity_factor}; the exported model drops none"
        )
    with new_directory(directory) as partial:
        from braid.actors.stage.state.exchange import export_model

        tokens = copy_kept(found.path, partial)
        if tokens is None:
            complain(f"{source} has kept no tokenizer; the export has weights and config.json only")
        files = export_model(found.path, partial, found.shape, dtype, int(max_file_gb * 1e9), tokens or {})
        size = sum(file.stat().st_size for file in files)
    count = "1 file" if len(files) == 1 else f"{len(files)} files"
    typer.echo(f"step {found.step} of {source}: {directory}, {decimal(size)} of {dtype} in {count}")
