"""Files of checkpoints and models: what ranks tell of them, for tests without ranks, and pickles that run."""

import hashlib
import os
from pathlib import Path
from typing import Any


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


class Marker:
    """A pickle of this makes a directory when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)
