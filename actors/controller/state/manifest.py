"""Stores checkpoints as directories: written aside, checksummed, published by one rename, verified before
use.

``checkpoints/step-N/`` holds the files of the ranks and ``manifest.json``: size and SHA-256 of every file,
the step, and the layout and data of the run. No file is ever overwritten, and a checkpoint that does not
match its manifest is never loaded (docs/design.md, Failure).
"""

import contextlib
import errno
import itertools
import os
import re
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from braid.actors.stage.files.digests import MANIFEST, Digests, damage
from braid.actors.stage.files.reading import read_text


class CheckpointError(ValueError):
    """A checkpoint that is missing or damaged."""


class Manifest(BaseModel):
    """Description of a checkpoint; ``files`` maps a name to (bytes, SHA-256)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    version: Literal[1] = 1
    step: int
    layout: dict[str, Any]
    data: dict[str, Any]
    shape: dict[str, Any]
    files: dict[str, tuple[int, str]]
    states: dict[str, Any] = {}
    """Fields of `OptimizerStates`; empty in older checkpoints, which are AdamW's without an average."""
    run: str = ""
    """Mark of the run that wrote the checkpoint (`RunDirectory.identity`)."""
    validation_loss: float | None = None
    """Validation loss of the saved state, in nats per token; None if that state was not validated."""

    @staticmethod
    def from_json(text: str | bytes) -> "Manifest":
        """Parse the text of a manifest; raise `ValueError` if it is not one."""
        try:
            return Manifest.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"{where} {first['input']!r:.60}: {first['msg']}".strip()) from None


class CheckpointStore:
    """The ``checkpoints`` directory of a run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.trouble: dict[str, None] = {}
        """Messages about old folders that could not be removed; published checkpoints are fine. Removals are
        tried again with the next checkpoint."""

    def begin(self, step: int, generation: int) -> Path:
        """Make a fresh directory for the ranks to write into."""
        path = self.directory / f"step-{step}.tmp-{generation}"
        if path.exists():
            shutil.rmtree(path)
        path.mkdir(parents=True)
        return path

    def publish(self, written: Path, files: Digests, **facts: Any) -> Path:
        """Rename a folder of written files to its final name. ``files``: all of them, already durable.
        ``facts``: the other fields of `Manifest`.

        Raise `CheckpointError` if the folder's files differ from ``files`` in names or sizes.
        """
        manifest = Manifest(files=dict(sorted(files.items())), **facts)
        write_durably(written / MANIFEST, manifest.model_dump_json(indent=1))
        inspect(written)
        _sync(written)
        return self._give_name(written, manifest.step)

    def adopt(self, folder: Path, manifest: Manifest) -> Path:
        for name in (*manifest.files, MANIFEST):
            _sync(folder / name)
        _sync(folder)
        return self._give_name(folder, manifest.step)

    def _give_name(self, written: Path, step: int) -> Path:
        final = self.directory / f"step-{step}"
        aside = self.directory / f"step-{step}.replaced-{os.getpid()}"
        if replaces := final.exists():
            # The same step saved again by a run that fell back to an older checkpoint: set the old one aside.
            for leftover in self.directory.glob(f"step-{step}.replaced-*"):
                self._remove(leftover)  # else a crash would leave two, without a sign of which is whole
            os.rename(final, aside)
        os.rename(written, final)
        _sync(self.directory)
        if replaces:
            self._remove(aside)
        return final

    def _remove(self, path: Path) -> None:
        """Remove a folder, or record in `trouble` why that failed.

        The folder is renamed first: half a checkpoint must not look like a checkpoint.
        """
        names = (self.directory / f"{path.name.split('.')[0]}.tmp-old{n or ''}" for n in itertools.count())
        try:
            if ".tmp-" not in path.name:
                gone = next(name for name in names if not name.exists())
                os.rename(path, gone)
                path = gone
            shutil.rmtree(path)
        except OSError as error:
            what = error.filename or path
            self.trouble[f"{what} cannot be removed: {error.strerror}; it is tried again"] = None

    def collect(
        self,
        keep: int,
        keep_every: int = 0,
        newest: int | None = None,
        *,
        run: str = "",
        generation: int | None = None,
        spared: Collection[int] = (),
    ) -> None:
        """Remove all but the newest ``keep`` checkpoints and every ``keep_every`` steps', and leftovers of
        saves that never finished. `trouble` lists what cannot be removed.

        newest      the step that was saved last. Later steps belong to a run that fell back because they
                    are damaged; they do not count, or the good ones would go for their sake.
        run         mark of the run whose checkpoints these are: checkpoints of other runs stay
        generation  of the ranks that saved last: what later ones are writing stays
        spared      steps that are in use and stay for now
        """
        for path in self.directory.glob("step-*.replaced-*"):
            self._remove(path)
        self.remove_unfinished(generation)
        steps = [step for step in self.steps() if newest is None or step <= newest]
        of_run = [step for step in steps if self.run_of(step) in (None, run)]
        for step in to_be_removed(of_run, keep, keep_every):
            if step not in spared:
                self._remove(self.directory / f"step-{step}")

    def remove_unfinished(self, generation: int | None = None) -> None:
        """Remove files of unfinished saves: of generations up to ``generation``; of all if None, which
        requires that no run is writing."""
        for path in self.directory.glob("step-*.tmp-*"):
            writer = path.name.rpartition("-")[2]
            if generation is None or not writer.isdecimal() or int(writer) <= generation:
                self._remove(path)

    def steps(self) -> list[int]:
        """Return the steps of the published checkpoints, oldest first."""
        return steps_named(path.name for path in self.directory.iterdir()) if self.directory.is_dir() else []

    def run_of(self, step: int) -> str | None:
        """Return the mark of the run that wrote a checkpoint; None if that cannot be read."""
        try:
            return read_manifest(self.directory / f"step-{step}").run
        except CheckpointError:
            return None

    def best(self, run: str, newest: int | None = None) -> Manifest | None:
        """Return the manifest of a run's checkpoint with the lowest validation loss, of steps up to
        ``newest``; None if none of them was validated."""
        of_run: list[Manifest] = []
        for step in (step for step in self.steps() if newest is None or step <= newest):
            with contextlib.suppress(CheckpointError):
                manifest = read_manifest(self.directory / f"step-{step}")
                of_run += [manifest] if manifest.run == run and manifest.step == step else []
        return best_of(of_run)

    def undo_replacements(self) -> None:
        """Restore the name of an older save of a step, if a crash between the two renames of `publish`
        removed it."""
        for aside in self.directory.glob("step-*.replaced-*"):
            final = self.directory / aside.name.split(".")[0]
            if not final.exists():
                os.rename(aside, final)


def steps_named(folders: Iterable[str]) -> list[int]:
    """Return the steps of checkpoints among folders with these names, oldest first."""
    return sorted(int(match[1]) for name in folders if (match := re.fullmatch(r"step-(\d+)", name)))


def to_be_removed(steps: list[int], keep: int, keep_every: int) -> list[int]:
    """Return the steps of checkpoints to remove. ``steps``: the steps of all checkpoints, oldest first."""
    return [step for step in steps[:-keep] if not keep_every or step % keep_every]


def best_of(manifests: Iterable[Manifest]) -> Manifest | None:
    """Return the manifest with the lowest validation loss, of equal ones the first; None if none has a
    loss."""
    losses = [(entry.validation_loss, entry) for entry in manifests if entry.validation_loss is not None]
    return min(losses, key=lambda pair: pair[0])[1] if losses else None


def disk_is_full(path: Path, error: Exception | str) -> bool:
    """Return whether a write failed because the disk is full or a quota is used up.

    A rank's error does not always say so (``torch.save`` complains of an unexpected position), so the disk's
    free space is checked too; call this before anything is removed.
    """
    full = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError) and error.errno in full:
        return True
    if any(os.strerror(number) in str(error) for number in full):
        return True
    try:
        return shutil.disk_usage(path).free < _NO_SPACE
    except OSError:  # the disk cannot be reached at present
        return False


_NO_SPACE = 1 << 20


def inspect(path: Path) -> Manifest:
    """Read a checkpoint's manifest, and compare names and sizes of all files with it, but not their content.
    Raise `CheckpointError` that names the file that differs."""
    manifest = read_manifest(path)
    try:
        there = list(path.rglob("*"))
        if links := [str(p.relative_to(path)) for p in there if p.is_symlink()]:
            raise CheckpointError(f"checkpoint {path}: {min(links)} is a link, which no save writes")
        present = {str(p.relative_to(path)) for p in there if p.is_file()} - {MANIFEST}
        if odd := present ^ set(manifest.files):
            raise CheckpointError(
                f"checkpoint {path}: file {min(odd)} is missing or was not written by the save"
            )
        for name, (size, _) in manifest.files.items():
            size_here = (path / name).stat().st_size
            if size_here != size:
                raise CheckpointError(
                    f"checkpoint {path}: file {name} has {size_here} bytes instead of {size}"
                )
    except OSError as error:
        what = f"checkpoint {path}: file {error.filename} cannot be read: {error.strerror}"
        raise CheckpointError(what) from None
    if path.name.startswith("step-") and path.name.split(".")[0] != f"step-{manifest.step}":
        raise CheckpointError(f"checkpoint {path}: {MANIFEST} says step {manifest.step}; it was renamed")
    return manifest


def verify(path: Path) -> Manifest:
    """Run `inspect`, then read and check every file of a checkpoint in this process."""
    manifest = inspect(path)
    if (what := damage(path, manifest.files)) is not None:
        raise CheckpointError(f"checkpoint {path}: {what}")
    return manifest


def read_manifest(path: Path) -> Manifest:
    """Read a checkpoint's manifest; raise `CheckpointError` if it is missing or invalid."""
    try:
        return Manifest.from_json(read_text(path / MANIFEST))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path} has no readable manifest ({error})") from None


def write_durably(path: Path, content: str | bytes) -> None:
    """Replace a small file atomically, so that a crash leaves either the old or the new content."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    with partial.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
