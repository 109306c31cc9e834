"""Checksums of a checkpoint's files.

A checkpoint of a large model is hashed by all its ranks, each of which hashes its share, and never by one
process alone: while ranks write it (`checkpoint_files.py`), when they read back the written data, and before
they load it.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from io import BufferedReader
from pathlib import Path

from braid.actors.stage.files.reading import open_regular, read_text

MANIFEST = "manifest.json"
"""The file of a checkpoint that lists all other files (`braid.actors.controller.state.manifest`)."""

Digests = Mapping[str, tuple[int, str]]
"""Bytes and SHA-256 of files, by their names in a checkpoint's folder."""


PIECE_BYTES = 16 << 20
"""Number of bytes read or written between two signs of progress: at 2 MB/s there is one every 8 seconds."""


def damage(
    directory: Path, files: Digests, progress: Callable[[int], object] = lambda count: None
) -> str | None:
    """Return a description of the first file that differs from its digest; None if all files are intact.

    ``progress`` is called with the number of bytes read since its previous call.
    """
    for name, (size, digest) in files.items():
        try:
            with open_regular(directory / name) as file:
                found = os.fstat(file.fileno()).st_size
                if found != size:
                    return f"file {name} has {found} bytes instead of {size}"
                if _sha256(file, progress) != digest:
                    return f"the checksum of file {name} is wrong"
        except OSError as error:
            return f"file {name} cannot be read: {error.strerror}"
    return None


def damage_in_share(directory: Path, rank: int, ranks: int) -> str | None:
    """Check one rank's share of the files in a checkpoint's manifest (as `damage`)."""
    try:
        files = dict(json.loads(read_text(directory / MANIFEST))["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:  # the controller has just read it
        return f"{MANIFEST} cannot be read ({error})"
    largest_first = sorted(files, key=lambda name: (-files[name][0], name))
    return damage(directory, {name: (files[name][0], files[name][1]) for name in largest_first[rank::ranks]})


def _sha256(file: BufferedReader, progress: Callable[[int], object]) -> str:
    """Return the SHA-256 of a file as it is on the disk, not in the kernel's page cache."""
    with contextlib.suppress(OSError, AttributeError):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    digest = hashlib.sha256()
    while piece := file.read(PIECE_BYTES):
        digest.update(piece)
        progress(len(piece))
    return digest.hexdigest()
