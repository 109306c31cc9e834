"""Creates private folders outside the run's own folder, for sockets and Ray's sessions.

A Unix socket's path has 107 bytes at most, and ``$TMPDIR`` may be long, read-only or missing: the first
usable place is taken. The process that makes a folder holds a lock in it to its end; the next start removes
folders whose lock nobody holds.
"""

import contextlib
import functools
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from multiprocessing import util
from pathlib import Path

from braid.actors.config import ConfigError
from braid.actors.controller.state.locks import FileHold

_LONGEST_SOCKET = 107
_NAME = re.compile(r"braid-(\d+)-[a-z0-9_]{8}")
_LOCK = ".lock"
_LONGEST_NAME = len("braid-4194304-abcdefgh")
_MULTIPROCESSING_ROOM = len("/pymp-abcdefgh/listener-abcdefgh")
_OTHERS = ("/tmp", "/var/tmp", "/dev/shm")


@contextlib.contextmanager
def private_folder(room: int) -> Iterator[Path]:
    """Make a folder that only this user can read, for the length of the block.

    ``room``: most bytes that paths of sockets in it add to the folder's own path. Raise `ConfigError` if no
    place suits.
    """
    in_order = (os.environ.get("TMPDIR") or _OTHERS[0], *_OTHERS)
    places = list(dict.fromkeys(Path(place).absolute() for place in in_order))
    for place in places:
        _remove_orphans(place)
    folder, lock = _make(places, room)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def _make(places: Iterable[Path], room: int) -> tuple[Path, FileHold]:
    refused = []
    for place in places:
        if len(os.fsencode(place)) + 1 + _LONGEST_NAME + room > _LONGEST_SOCKET:
            refused.append(f"{place} is too long a path for sockets")
            continue
        try:
            folder = Path(tempfile.mkdtemp(prefix=f"braid-{os.getpid()}-", dir=place))
        except OSError as error:
            refused.append(f"{place}: {error.strerror}")
            continue
        lock = FileHold(folder / _LOCK)
        try:
            lock.take()
        except ConfigError as error:
            shutil.rmtree(folder, ignore_errors=True)
            refused.append(str(error))
            continue
        return folder, lock
    raise ConfigError(
        f"there is no folder for sockets ({'; '.join(refused)}); set TMPDIR to a folder that can be written "
        f"and whose path has at most {_LONGEST_SOCKET - 1 - _LONGEST_NAME - room} characters"
    )


def _remove_orphans(place: Path) -> None:
    """Remove folders of this user whose processes were killed before they could remove them."""
    with contextlib.suppress(OSError):
        for folder in place.iterdir():
            with contextlib.suppress(OSError, ConfigError):  # the folder is gone, or a process holds its lock
                match, status = _NAME.fullmatch(folder.name), folder.lstat()
                if not match or not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                    continue  # others may plant names and links
                if not (folder / _LOCK).exists() and Path(f"/proc/{match[1]}").exists():
                    continue  # the folder is being made
                lock = FileHold(folder / _LOCK)
                lock.take(0)
                shutil.rmtree(folder, ignore_errors=True)
                lock.release()


@functools.cache
def shorten_multiprocessing() -> None:
    """Let multiprocessing create its sockets in a private folder, which lasts as long as this process."""
    stack = contextlib.ExitStack()
    folder = stack.enter_context(private_folder(_MULTIPROCESSING_ROOM))
    util.Finalize(None, stack.close, exitpriority=-101)  # after multiprocessing's own, at -100
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        util.get_temp_dir()  # remembers the folder that it makes in `tempfile`'s
    finally:
        tempfile.tempdir = before
