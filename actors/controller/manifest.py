"""Checkpoints as directories: made aside, checksummed, published by one rename, verified before use.

``checkpoints/step-N/`` holds what the ranks wrote and ``manifest.json``: size and SHA-256 of every file, the
step, the layout that wrote it, the data it was trained on. ``latest`` names the newest. Nothing is ever
overwritten, and nothing is loaded that does not match its manifest (design section 10, rule 5).
"""

import errno
import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
VERSION = 1
STEP_NAME = re.compile(r"step-(\d+)")


class CheckpointError(ValueError):
    """A checkpoint that is missing or damaged."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint is; ``files`` maps a name to (bytes, SHA-256)."""

    version: int
    step: int
    layout: dict[str, Any]
    data: dict[str, Any]
    shape: dict[str, Any]
    files: dict[str, tuple[int, str]]
    run: str = ""
    """Mark of the run that wrote it (`RunDirectory.mark`); empty if that has none."""


class CheckpointStore:
    """The ``checkpoints`` directory of a run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def begin(self, step: int, generation: int) -> Path:
        """A fresh directory for the ranks to write into."""
        path = self.directory / f"step-{step}.tmp-{generation}"
        if path.exists():
            shutil.rmtree(path)
        path.mkdir(parents=True)
        return path

    def publish(
        self,
        written: Path,
        *,
        step: int,
        layout: dict[str, Any],
        data: dict[str, Any],
        shape: dict[str, Any],
        run: str = "",
    ) -> Path:
        """Checksum what was written, make it durable, and give it its name."""
        files = {
            str(path.relative_to(written)): (path.stat().st_size, _sha256(path))
            for path in sorted(written.rglob("*"))
            if path.is_file()
        }
        manifest = Manifest(
            version=VERSION, step=step, layout=layout, data=data, shape=shape, files=files, run=run
        )
        for name in files:
            _sync(written / name)
        write_durably(written / MANIFEST, json.dumps(asdict(manifest), indent=1))
        _sync(written)
        return self._give_name(written, step)

    def adopt(self, folder: Path) -> Manifest:
        """Give a checkpoint that came from elsewhere its name; `CheckpointError` if it is damaged."""
        manifest = verify_named(folder)
        for name in (*manifest.files, MANIFEST):
            _sync(folder / name)
        _sync(folder)
        self._give_name(folder, manifest.step)
        return manifest

    def _give_name(self, written: Path, step: int) -> Path:
        final = self.directory / f"step-{step}"
        if final.exists():
            # The same step saved again by a run that fell back to an older checkpoint: set the old one aside.
            for leftover in self.directory.glob(f"step-{step}.replaced-*"):
                shutil.rmtree(leftover)  # or a crash would leave two, and nobody knew which one is whole
            aside = self.directory / f"step-{step}.replaced-{os.getpid()}"
            os.rename(final, aside)
            os.rename(written, final)
            _sync(self.directory)
            shutil.rmtree(aside)
        else:
            os.rename(written, final)
        _sync(self.directory)
        write_durably(self.directory / "latest", final.name)
        return final

    def collect(self, keep: int, keep_every: int = 0, newest: int | None = None) -> None:
        """Remove all but the newest ``keep`` checkpoints and those of every so many steps, and leftovers of
        saves that never finished.

        newest: the step that was saved last. Those beyond it belong to a run that fell back because they are
        damaged; they do not count, or the good ones would go for their sake.
        """
        for path in (*self.directory.glob("step-*.tmp-*"), *self.directory.glob("step-*.replaced-*")):
            shutil.rmtree(path)
        steps = [step for step in self.steps() if newest is None or step <= newest]
        for step in to_be_removed(steps, keep, keep_every):
            # By a name that is none first: what is removed half-way must not look like a checkpoint.
            gone = self.directory / f"step-{step}.tmp-old"
            os.rename(self.directory / f"step-{step}", gone)
            shutil.rmtree(gone)

    def steps(self) -> list[int]:
        """Steps of the published checkpoints, oldest first."""
        if not self.directory.is_dir():
            return []
        matches = [STEP_NAME.fullmatch(path.name) for path in self.directory.iterdir()]
        return sorted(int(match.group(1)) for match in matches if match)

    def run_of(self, step: int) -> str | None:
        """The mark of the run that wrote a checkpoint; None if that cannot be read."""
        try:
            return _read_manifest(self.directory / f"step-{step}").run
        except CheckpointError:
            return None

    def undo_replacements(self) -> None:
        """A crash between the two renames of `publish` leaves an older save of the step without its name."""
        for aside in self.directory.glob("step-*.replaced-*"):
            final = self.directory / aside.name.split(".")[0]
            if not final.exists():
                os.rename(aside, final)


def to_be_removed(steps: list[int], keep: int, keep_every: int) -> list[int]:
    """Of checkpoints' steps, oldest first, those that need not be kept."""
    return [step for step in steps[:-keep] if not keep_every or step % keep_every]


def disk_is_full(path: Path, error: Exception) -> bool:
    """Whether a write failed for want of space.

    A rank's error does not always say so (``torch.save`` complains of an unexpected position), so the disk is
    asked too; ask before anything is removed.
    """
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return os.strerror(errno.ENOSPC) in str(error) or shutil.disk_usage(path).free < _NO_SPACE


_NO_SPACE = 1 << 20


def verify(path: Path) -> Manifest:
    """Read a checkpoint's manifest and check every file against it; `CheckpointError` names the file."""
    manifest = _read_manifest(path)
    try:
        there = list(path.rglob("*"))
        if links := [str(p.relative_to(path)) for p in there if p.is_symlink()]:
            raise CheckpointError(f"checkpoint {path}: {min(links)} is a link, which no save writes")
        present = {str(p.relative_to(path)) for p in there if p.is_file()} - {MANIFEST}
        if odd := present ^ set(manifest.files):
            raise CheckpointError(
                f"checkpoint {path}: file {min(odd)} is missing or was not written by the save"
            )
        for name, (size, digest) in manifest.files.items():
            found = (path / name).stat().st_size
            if found != size:
                raise CheckpointError(f"checkpoint {path}: file {name} has {found} bytes instead of {size}")
            if _sha256(path / name) != digest:
                raise CheckpointError(f"checkpoint {path}: the checksum of file {name} is wrong")
    except OSError as error:
        what = f"checkpoint {path}: file {error.filename} cannot be read: {error.strerror}"
        raise CheckpointError(what) from None
    return manifest


def verify_named(path: Path) -> Manifest:
    """`verify`, for a checkpoint whose folder, published or not, has the name of its step."""
    manifest = verify(path)
    if path.name.split(".")[0] != f"step-{manifest.step}":
        raise CheckpointError(f"checkpoint {path}: {MANIFEST} says step {manifest.step}; it was renamed")
    return manifest


def _read_manifest(path: Path) -> Manifest:
    try:
        content = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = {name: (int(size), str(digest)) for name, (size, digest) in content["files"].items()}
        manifest = Manifest(**{**content, "files": files})
        if not all(isinstance(part, dict) for part in (manifest.layout, manifest.data, manifest.shape)):
            raise ValueError("layout, data and shape must be mappings")
        if type(manifest.step) is not int:
            raise ValueError(f"step {manifest.step!r} is no number")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {path} has no readable manifest ({error})") from None
    if manifest.version != VERSION:
        raise CheckpointError(f"checkpoint {path} has version {manifest.version}, this Braid reads {VERSION}")
    return manifest


def write_durably(path: Path, text: str) -> None:
    """Replace a small file atomically, so that a crash leaves the old or the new content."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
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


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
