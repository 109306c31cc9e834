"""What ranks hand the controller of the files that they wrote, for tests without ranks."""

import hashlib
import os
from pathlib import Path


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
