"""A lock file that a process holds, and that is released when the process ends, however it ends.

The file system's `flock` does that. Where there is none (Lustre without ``-o flock``), `filelock` falls back
to a file that names its holder's process and host. If that is a dead process of this host, the file is
ignored, so that a killed run can resume at once; if it is of another host, the file stays until somebody
removes it, since its holder may still live.
"""

import os
import socket
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

from braid.actors.config import ConfigError

_MOMENT_S = 0.3
"""Seconds to wait for a holder that is just ending."""


class HeldError(ConfigError):
    """Another process holds the lock file; the message names it."""


class FileHold:
    """A lock file that any thread of this process may take and release."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path, thread_local=False)

    def take(self, patience_s: float = _MOMENT_S) -> None:
        """Take the lock; raise `HeldError` if another process holds it after ``patience_s`` (negative: wait
        for ever), `ConfigError` if the file system cannot lock."""
        try:
            self._lock.acquire(timeout=patience_s)
            if not isinstance(self._lock, SoftFileLock):  # a soft lock has written the same itself
                self.path.write_text(f"{os.getpid()}\n{socket.gethostname()}\n", encoding="utf-8")
        except Timeout:
            # a flock is never left behind, and removing its file would let two processes in
            soft = isinstance(self._lock, SoftFileLock)
            hint = f" (if that is gone, remove {self.path})" if soft else ""
            raise HeldError(f"process {self.holder()}{hint}") from None
        except (OSError, NotImplementedError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"{self.path} cannot be locked ({reason}); mount its file system with locks (NFS: lockd, "
                f"Lustre: -o flock), or name a folder on another one"
            ) from None

    def holder(self) -> str:
        """Return the process and host that hold the file, or held it last."""
        try:
            return " on ".join(self.path.read_text(encoding="utf-8").split()[:2]) or "unknown"
        except (OSError, UnicodeDecodeError):
            return "unknown"

    def release(self) -> None:
        self._lock.release()
