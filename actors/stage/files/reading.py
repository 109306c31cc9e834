"""Opens the files that a run depends on, such that no file can block it for ever. Does not import torch."""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


class UnreadableError(OSError):
    """Raised if a file cannot be read. The message is for the user: it names the file and the remedy."""


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file; raise `OSError` for others, such as a FIFO that nobody ever writes."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return open(handle, "rb")


def read_text(path: Path) -> str:
    """Return a file's text; raise `OSError`, or `UnicodeDecodeError` if it is not UTF-8."""
    with open_regular(path) as file:
        return file.read().decode("utf-8")
