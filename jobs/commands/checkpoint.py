"""``braid checkpoint``: lists, verifies and exports checkpoints of runs."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Column, Table
from rich.text import Text

from braid.actors.config import ConfigError, read_content
from braid.actors.controller.state.manifest import MANIFEST, CheckpointError, CheckpointStore, verify
from braid.jobs.output import ExitCode, answer, complain, counted, listed, on_disk
from braid.jobs.usage import AsJson, RunFolder, example, group
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.schedule.states import AVERAGE, PARAMETER
from braid.scheduling.text.records import from_mapping

checkpoint = group("List, verify and export the checkpoints of a run.", "checkpoint list runs/first")

RunOrCheckpoint = Annotated[
    Path,
    typer.Argument(
        help="A run, or one checkpoint such as runs/first/checkpoints/step-20.", metavar="RUN|CHECKPOINT"
    ),
]
BEST: Final = "best"
"""Word for the checkpoint with the lowest validation loss."""
Which = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        help=f"A step of the run, or {BEST}: of lowest validation loss; by default the newest.",
        metavar=f"STEP|{BEST}",
    ),
]
_STEP = re.compile(r"step-(\d+)")


@checkpoint.command("list", epilog=example("checkpoint list runs/first"))
def list_checkpoints(run: RunFolder, as_json: AsJson = False) -> None:
    """Show a run's checkpoints: step, size, layout, validation loss, and whether every file is what was
    saved."""
    best = _best(run)
    columns = [Column(name, justify="right") for name in ("step", "size")]
    columns += [Column(name, overflow="fold") for name in ("layout", "validation", "state")]
    table, rows = Table(*columns, box=None, pad_edge=False), []
    for saved in map(_examined, checkpoints_at(run)):
        loss = "-" if saved.validation_loss is None else f"{saved.validation_loss:.4f}"
        loss += f" {BEST}" if saved.step == best else ""
        state = Text(saved.problem or "verified")  # file names must not be read as rich's markup
        table.add_row(str(saved.step), decimal(saved.size_bytes), saved.layout or "-", loss, state)
        row = {name: value for name, value in vars(saved).items() if name != "shape"}
        verified = {"verified": not saved.problem, "problem": saved.problem or None}
        rows.append({**row, "path": str(saved.path), "best": saved.step == best, **verified})
    answer(as_json, lambda: rows, lambda: Console().print(table, highlight=False))


@checkpoint.command("verify", epilog=example("checkpoint verify runs/first"))
def verify_checkpoints(source: RunOrCheckpoint) -> None:
    """Compare every file with its checksum; exit code 2, and the file's name, if one differs."""
    found = [_examined(path) for path in checkpoints_at(source)]
    for saved in found:
        if saved.problem:
            complain(saved.problem)
        else:
            typer.echo(f"{saved.path}: verified, {decimal(saved.size_bytes)}")
    raise typer.Exit(ExitCode.MISTAKE if any(saved.problem for saved in found) else 0)


@checkpoint.command("export", epilog=example("checkpoint export runs/first exported --dtype bf16"))
def export_checkpoint(
    source: RunOrCheckpoint,
    directory: Annotated[Path, typer.Argument(help="A new directory.", metavar="DIR")],
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="Of the weights.")] = "fp32",
    max_file_gb: Annotated[
        float, typer.Option(help="Cut the weights into files of at most this size.")
    ] = 5.0,
    which: Which = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Of a run with model.lora: the whole model, not its adapters.")
    ] = False,
    average: Annotated[
        bool, typer.Option("--average", help="Write the average of the weights (train.average).")
    ] = False,
) -> None:
    """Write a model for Hugging Face's transformers: weights, config.json, tokenizer, generation settings.

    Llama, Mistral, Qwen2, Qwen3, GPT-2, Mixtral, Qwen3-MoE, Phi-3.5-MoE. A run's newest verified checkpoint
    is taken. Of a run with model.lora, write its adapters for peft.
    """
    if not max_file_gb > 0:
        raise ConfigError(f"--max-file-gb {max_file_gb} must be greater than 0")
    found = chosen(source, which)
    if merge and found.shape is not None and found.shape.lora is None:
        raise ConfigError(f"--merge: checkpoint {found.path} holds a whole model, no adapters; leave it out")
    state = AVERAGE if average else PARAMETER
    with new_directory(directory) as partial:
        files = write_weights(found, partial, dtype, int(max_file_gb * 1e9), state, adapters=not merge)
        size = sum(file.stat().st_size for file in files)
    count = counted(len(files), "file")
    typer.echo(f"step {found.step} of {source}: {directory}, {decimal(size)} of {dtype} in {count}")


@dataclass(frozen=True, kw_only=True)
class Examined:
    """Result of reading a checkpoint completely."""

    path: Path
    step: int | None
    """Step according to the directory's name, else according to the manifest."""
    size_bytes: int = 0
    problem: str = ""
    """Description of a fault, with the name of the file; the fields below are None then."""
    layout: str | None = None
    shape: ModelShape | None = None
    validation_loss: float | None = None
    """In nats per token; None if the saved state was not validated."""


def chosen(source: Path, which: str | None = None) -> Examined:
    """Return the checkpoint of a run that ``which`` names (`Which`), or the one at ``source``; its shape is
    known.

    By default the newest verified checkpoint is taken, and damaged newer ones are told of. Raise
    `ConfigError` if there is no such checkpoint, or it has no Hugging Face form, `CheckpointError` if none
    is good.
    """
    paths = checkpoints_at(source)
    if which is not None:
        paths = [_named(source, paths, which)]
    problems: list[str] = []
    for candidate in reversed(paths):
        found = _examined(candidate)
        if found.shape is not None:
            break
        problems.append(found.problem)
    else:
        raise CheckpointError("; ".join(problems))
    _check_built_in(found.path)
    for problem in problems:
        complain(f"{problem}; falling back to step {found.step}")
    return found


def write_weights(
    found: Examined,
    directory: Path,
    dtype: str = "fp32",
    max_file_bytes: int = 5_000_000_000,
    state: str = PARAMETER,
    *,
    adapters: bool = False,
) -> list[Path]:
    """Write a verified checkpoint in Hugging Face's form into an empty directory; return the files of
    weights.

    ``state``: the kind of state that is written, the weights or their average; ``adapters``: write the
    adapters of a run with ``model.lora`` alone, in the form of `peft`; otherwise they are merged into the
    base model. Raise `ConfigError` if that is not there.
    """
    from braid.actors.stage.state.exchange import export_adapters, export_model
    from braid.jobs.training.beside_weights import copy_kept

    assert found.shape is not None
    adapted = found.shape.lora is not None
    base = _base_of(found.path, merge=not adapters) if adapted else None
    if found.shape.capacity_factor:
        complain(
            f"experts were trained to drop tokens beyond model.capacity_factor="
            f"{found.shape.capacity_factor}; the exported model drops none"
        )
    tokens = copy_kept(found.path, directory)
    if tokens is None:
        complain(
            f"the run of {found.path} has kept no tokenizer; the export has weights and config.json only"
        )
    if adapted and adapters:
        return [export_adapters(found.path, directory, found.shape, dtype, base, state)]
    return export_model(found.path, directory, found.shape, dtype, max_file_bytes, tokens or {}, base, state)


def _named(source: Path, paths: list[Path], which: str) -> Path:
    """Return the checkpoint among a run's that ``which`` names; raise `ConfigError` if there is none."""
    steps = {path.name.removeprefix("step-"): path for path in paths}
    if paths == [source]:
        raise ConfigError(f"--checkpoint {which}: {source} is one checkpoint; leave the option out")
    if which == BEST and (best := _best(source)) is not None:
        return steps[str(best)]
    if which == BEST:
        raise ConfigError(
            f"--checkpoint {BEST}: no checkpoint of {source} was validated; train with train.validate_every "
            f"and checkpoint.keep_best=true"
        )
    if which not in steps:
        raise ConfigError(
            f"--checkpoint {which}: {source} has checkpoints of steps {', '.join(steps)}; give one of them, "
            f"or {BEST}"
        )
    return steps[which]


def _best(run: Path) -> int | None:
    """Return the step of a run's checkpoint with the lowest validation loss; None if there is none."""
    from braid.actors.controller.records.run_records import read_identity  # loads numpy

    identity = read_identity(run)
    best = CheckpointStore(run / "checkpoints").best(identity.mark if identity is not None else "")
    return best.step if best is not None else None


def _examined(path: Path) -> Examined:
    """Read a checkpoint and check every file against its manifest."""
    named = _STEP.fullmatch(path.name)
    found = Examined(path=path, step=int(named[1]) if named else None)
    try:
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        found = replace(found, size_bytes=size)
        manifest = verify(path)
        known = {field.name for field in fields(ParallelLayout)}  # earlier versions wrote more fields
        layout = {key: value for key, value in manifest.layout.items() if key in known}
        return replace(
            found,
            step=manifest.step if found.step is None else found.step,
            layout=from_mapping(ParallelLayout, layout, f"{path / MANIFEST}: layout").describe(),
            shape=from_mapping(ModelShape, manifest.shape, f"{path / MANIFEST}: shape"),
            validation_loss=manifest.validation_loss,
        )
    except OSError as error:  # its run may remove it while it is read
        problem = f"checkpoint {path}: file {error.filename} cannot be read: {error.strerror}"
        return replace(found, problem=problem)
    except ValueError as error:
        return replace(found, problem=str(error))


def checkpoints_at(path: Path) -> list[Path]:
    """Return all checkpoints of a run, oldest first, or the one checkpoint at ``path``."""
    if not path.exists():
        runs = sorted(str(file.parent) for file in path.parent.glob("*/config.yaml"))
        there = f"there are {listed(runs)}" if runs else f"{path.parent} holds no runs"
        raise ConfigError(f"there is no run {path}; {there}")
    if (path / MANIFEST).is_file() or (path.is_dir() and _STEP.fullmatch(path.name)):
        return [path]
    store = CheckpointStore(path / "checkpoints")
    if not store.directory.is_dir():
        raise ConfigError(
            f"{path} is neither a run nor a checkpoint; give runs/NAME or a step-N in its checkpoints"
        )
    found = [store.directory / f"step-{step}" for step in store.steps()]
    if not found:
        raise ConfigError(f"there is no checkpoint in {store.directory} yet")
    return found


def _model_of(checkpoint: Path) -> dict[str, Any]:
    """Return the section ``model`` of the run that wrote a checkpoint; empty if the run is not there."""
    written = checkpoint.resolve().parent.parent / "config.yaml"
    model = read_content(written).get("model") if written.is_file() else None
    return model if isinstance(model, dict) else {}


def _base_of(checkpoint: Path, *, merge: bool) -> Path | None:
    """Return the directory of the model that a checkpoint's adapters belong to; None if the run began with
    random weights. Raise `ConfigError` if adapters are to be merged into the model, and it is not there."""
    initial = _model_of(checkpoint).get("initial")
    if not merge:
        return None if initial is None else Path(initial)
    if initial is None:
        raise ConfigError(
            f"the run of checkpoint {checkpoint} has no model.initial, into which its adapters could be "
            f"merged; `braid checkpoint export` writes the adapters alone"
        )
    if not (base := Path(initial)).is_dir():
        raise ConfigError(
            f"model.initial={initial!r} of the run of checkpoint {checkpoint} is not a directory any more, "
            f"and its adapters cannot be merged; bring the base model back"
        )
    from braid.jobs.training.beside_weights import check_base

    check_base(checkpoint.resolve().parent.parent, base)
    return base


def _check_built_in(checkpoint: Path) -> None:
    """Raise `ConfigError` if the run that wrote a checkpoint has user-defined layers."""
    layer = _model_of(checkpoint).get("layer")
    if layer is not None:
        raise ConfigError(
            f"checkpoint {checkpoint} has layers of model.layer={layer!r}; only built-in ones have a "
            f"Hugging Face form"
        )


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Make a directory to fill, which is renamed to ``target`` once all is written; on an error nothing is
    left."""
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists already; give the name of a new directory")
    if not target.parent.is_dir():
        raise ConfigError(f"{target}: the folder {target.parent} does not exist")
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    try:
        partial.mkdir()
        yield partial
        for path in (*partial.iterdir(), partial):
            on_disk(path)
        os.rename(partial, target)
        on_disk(target.parent)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
