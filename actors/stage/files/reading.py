"""Opens files that a run depends on, so that none of them can make it wait for ever. Imports no torch."""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


class UnreadableError(OSError):
    """A file that cannot be read. The message is for the user: it names the file and the remedy."""


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading; `OSError` for anything else, such as a FIFO, whose writer may never come."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return open(handle, "rb")


def read_text(path: Path) -> str:
    """The content of a UTF-8 file; `OSError` if it cannot be read, `UnicodeDecodeError` for other bytes."""
    with open_regular(path) as file:
        return file.read().decode("utf-8")
