"""A lock file: a process holds it, and lets go of it when the process ends, however it ends.

`flock` does that where the file system has it. Where it has not (Lustre without ``-o flock``), `filelock`
goes over to a file that names its holder's process and host: that of a dead process of this host counts for
nothing, so that a killed run goes on at once; that of another host stays until somebody removes it, since
nobody here can know what lives there.
"""

import os
import socket
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

from braid.actors.config import ConfigError

_MOMENT_S = 0.3
"""For who has just ended."""


class HeldError(ConfigError):
    """Somebody else holds the file: the message says who."""


class FileHold:
    """A lock file that this process takes and releases; from any of its threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path, thread_local=False)

    def take(self, patience_s: float = _MOMENT_S) -> None:
        """`HeldError` if another process holds it after so long, for ever if that is negative. `ConfigError`
        where nothing can be locked."""
        try:
            self._lock.acquire(timeout=patience_s)
            if not isinstance(self._lock, SoftFileLock):  # which has written the same itself
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
        """Process and host that hold it, or held it last."""
        try:
            return " on ".join(self.path.read_text(encoding="utf-8").split()[:2]) or "unknown"
        except (OSError, UnicodeDecodeError):
            return "unknown"

    def release(self) -> None:
        self._lock.release()
