"""Writes files of a checkpoint, hashes them while PyTorch writes, and reads them back."""

import contextlib
import errno
import hashlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem

from braid.actors.stage.files.digests import PIECE_BYTES, Digests, damage


class CheckedWriter(dcp.FileSystemWriter):
    """Writes a rank's share of a checkpoint durably, and records the digests of the written data."""

    def __init__(self, directory: Path, progress: Callable[[int], object] = lambda count: None) -> None:
        """``progress`` is called with the number of bytes written or read back since its previous call."""
        super().__init__(directory, sync_files=True)
        self._directory, self._progress = directory, progress
        self._files = self.fs = _HashingFiles(progress)

    def read_back(self) -> Digests:
        """Read this rank's files and return their digests; raise `OSError` (EIO) that names the first file
        which differs from the written data."""
        if (what := damage(self._directory, self._files.written, self._progress)) is not None:
            raise OSError(errno.EIO, f"what is read back is not what was written: {what}")
        return self._files.written


class _HashingFiles(FileSystem):
    """File access of PyTorch's checkpointing that hashes written files."""

    def __init__(self, progress: Callable[[int], object]) -> None:
        self._progress = progress
        self.written: dict[str, tuple[int, str]] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file; if it is opened for writing, hash the data as they are written."""
        with super().create_stream(path, mode) as stream:
            if "w" not in mode:
                yield stream
                return
            hashed = _HashedStream(stream, self._progress)
            yield hashed
            stream.flush()
            os.fsync(stream.fileno())
        self.written[Path(path).name] = (hashed.tell(), hashed.digest.hexdigest())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class _HashedStream(io.BufferedIOBase):
    """A file that is written from beginning to end and hashed; whoever opened the file closes it."""

    def __init__(self, stream: Any, progress: Callable[[int], object]) -> None:
        self._stream, self._progress = stream, progress
        self._count = self._synced = 0
        self.digest = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), PIECE_BYTES):
            piece = view[begin : begin + PIECE_BYTES]
            self._stream.write(piece)
            self.digest.update(piece)
            self._count += len(piece)
            self._sync_some()
            self._progress(len(piece))
        return len(view)

    def _sync_some(self) -> None:
        """Write the kernel's buffers to the disk; a single sync at the end would look like a standstill."""
        if self._count - self._synced >= PIECE_BYTES:
            self._stream.flush()
            os.fdatasync(self._stream.fileno())
            self._synced = self._count

    def tell(self) -> int:
        return self._count

    def flush(self) -> None:
        if not self._stream.closed:
            self._stream.flush()

    def fileno(self) -> int:
        return int(self._stream.fileno())
