"""Files of checkpoints and models: what ranks tell of them, for tests without ranks, and pickles that run."""

import errno
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from braid.actors.controller.state import manifest
from braid.actors.controller.state.manifest import CheckpointStore


def digests(folder: Path) -> dict[str, tuple[int, str]]:
    """Bytes and SHA-256 of all files of a folder, made durable as ranks do."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
        content = path.read_bytes()
        found[str(path.relative_to(folder))] = (len(content), hashlib.sha256(content).hexdigest())
    return found


def written(store: CheckpointStore, step: int, content: bytes | None = None) -> Path:
    """What ranks leave in a fresh folder: the same in every file, or bytes that are drawn."""
    folder = store.begin(step, generation=3)
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        (folder / name).write_bytes(os.urandom(1000) if content is None else content)
    return folder


def publish(store: CheckpointStore, step: int, content: bytes | None = None, **facts: Any) -> Path:
    """A whole checkpoint; ``facts``: what its manifest says, of nothing in particular by default."""
    folder = written(store, step, content)
    told = {"layout": {}, "data": {}, "shape": {}, **facts}
    return store.publish(folder, digests(folder), step=step, **told)


def flip(file: Path, at: int | None = None) -> None:
    """Change one bit, in the middle unless another place is given."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 4
    file.write_bytes(content)


def keeps(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Folders of these names are not removed whole, as where NFS keeps a file that somebody has open."""
    remove = manifest.shutil.rmtree

    def rmtree(path: Any, *arguments: Any, **named: Any) -> None:
        if Path(path).name in names and not named.get("ignore_errors"):
            (Path(path) / ".metadata").unlink(missing_ok=True)
            raise OSError(errno.EBUSY, "Device or resource busy", str(Path(path) / ".nfs01"))
        remove(path, *arguments, **named)

    monkeypatch.setattr(manifest.shutil, "rmtree", rmtree)


class Marker:
    """A pickle of this makes a directory when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)
