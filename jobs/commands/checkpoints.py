"""What a user does with checkpoints: look at them, verify them, write them down for other tools."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

from braid.actors.config import ConfigError, read_content
from braid.actors.controller.state.manifest import MANIFEST, CheckpointError, CheckpointStore, verify
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.text.records import from_mapping

_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True, kw_only=True)
class Examined:
    """A checkpoint that was read from end to end."""

    path: Path
    step: int | None
    """As the directory's name says, else the manifest."""
    size_bytes: int = 0
    problem: str = ""
    """What is wrong, with the name of the file; empty if every file is what the manifest says."""
    layout: str | None = None
    """The layout that wrote it, such as ``tp 2 x pp 2``; None where there is a problem."""
    shape: ModelShape | None = None
    """The model's; None where there is a problem."""


def examine(path: Path) -> Examined:
    """Check every file of a checkpoint against its manifest."""
    named = _STEP.fullmatch(path.name)
    found = Examined(path=path, step=int(named[1]) if named else None)
    try:
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        found = replace(found, size_bytes=size)
        manifest = verify(path)
        known = {field.name for field in fields(ParallelLayout)}  # earlier versions wrote more
        layout = {key: value for key, value in manifest.layout.items() if key in known}
        return replace(
            found,
            step=manifest.step if found.step is None else found.step,
            layout=from_mapping(ParallelLayout, layout, f"{path / MANIFEST}: layout").describe(),
            shape=from_mapping(ModelShape, manifest.shape, f"{path / MANIFEST}: shape"),
        )
    except OSError as error:  # the run that it belongs to may remove it while it is read
        problem = f"checkpoint {path}: file {error.filename} cannot be read: {error.strerror}"
        return replace(found, problem=problem)
    except ValueError as error:
        return replace(found, problem=str(error))


def checkpoints_at(path: Path) -> list[Path]:
    """All checkpoints of a run, oldest first, or the one checkpoint that ``path`` is.

    `ConfigError` if it is neither, or the run has none.
    """
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


def best_checkpoint(path: Path) -> tuple[Examined, list[str]]:
    """The newest checkpoint at ``path`` without a problem, and the problems of newer ones.

    `CheckpointError` if all have problems.
    """
    problems: list[str] = []
    for candidate in reversed(checkpoints_at(path)):
        found = examine(candidate)
        if not found.problem:
            return found, problems
        problems.append(found.problem)
    raise CheckpointError("; ".join(problems))


def check_built_in(checkpoint: Path) -> None:
    """`ConfigError` if the run that wrote a checkpoint has layers of the user's own."""
    written = checkpoint.resolve().parent.parent / "config.yaml"
    if not written.is_file():
        return
    model = read_content(written).get("model")
    layer = model.get("layer") if isinstance(model, dict) else None
    if layer is not None:
        raise ConfigError(
            f"checkpoint {checkpoint} has layers of model.layer={layer!r}; only built-in ones have a "
            f"Hugging Face form"
        )


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A directory to fill, which gets its name ``target`` once all is written; nothing is left otherwise.

    `ConfigError` if there is something of that name, or no place for it.
    """
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists already; give the name of a new directory")
    if not target.parent.is_dir():
        raise ConfigError(f"{target}: the folder {target.parent} does not exist")
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    try:
        partial.mkdir()
        yield partial
        for path in (*partial.iterdir(), partial):
            _sync(path)
        os.rename(partial, target)
        _sync(target.parent)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
