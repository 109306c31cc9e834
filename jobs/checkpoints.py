"""What a user does with checkpoints: look at them, verify them, write them down for other tools."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from braid.actors.config import ConfigError, read_content
from braid.actors.controller.manifest import MANIFEST, CheckpointError, CheckpointStore, Manifest, verify
from braid.scheduling.records import from_mapping
from braid.scheduling.spec import ModelShape, ParallelLayout

_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True, kw_only=True)
class Examined:
    """A checkpoint that was read from end to end."""

    path: Path
    size_bytes: int
    manifest: Manifest | None
    """None unless every file has the size and the checksum that the manifest gives it."""
    problem: str = ""
    """What is wrong, with the name of the file; empty if nothing is."""

    @property
    def step(self) -> int | None:
        """As the directory's name says, else the manifest."""
        named = _STEP.fullmatch(self.path.name)
        if named:
            return int(named.group(1))
        return self.manifest.step if self.manifest else None

    @property
    def layout(self) -> str | None:
        """The layout that wrote it, such as ``tp 2 x pp 2``; None if it is not verified."""
        if self.manifest is None:
            return None
        known = {field.name for field in fields(ParallelLayout)}  # earlier versions wrote more
        layout = {key: value for key, value in self.manifest.layout.items() if key in known}
        return from_mapping(ParallelLayout, layout, f"{self.path / MANIFEST}: layout").describe()

    @property
    def shape(self) -> ModelShape:
        """The model's; `CheckpointError` if it is not verified."""
        if self.manifest is None:
            raise CheckpointError(self.problem)
        return from_mapping(ModelShape, self.manifest.shape, f"{self.path / MANIFEST}: shape")


def examine(path: Path) -> Examined:
    """Check every file of a checkpoint against its manifest."""
    size = 0
    try:
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        manifest = verify(path)
        found = Examined(path=path, size_bytes=size, manifest=manifest)
        _ = found.layout, found.shape
    except OSError as error:  # the run that it belongs to may remove it while it is read
        problem = f"checkpoint {path}: file {error.filename} cannot be read: {error.strerror}"
        return Examined(path=path, size_bytes=size, manifest=None, problem=problem)
    except ValueError as error:
        return Examined(path=path, size_bytes=size, manifest=None, problem=str(error))
    return found


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
    """The newest verified checkpoint at ``path``, and what is wrong with those newer than it.

    `CheckpointError` if none is verified.
    """
    complaints: list[str] = []
    for candidate in reversed(checkpoints_at(path)):
        found = examine(candidate)
        if found.manifest is not None:
            return found, complaints
        complaints.append(found.problem)
    raise CheckpointError("; ".join(complaints))


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
