"""Files of a checkpoint that are hashed while PyTorch writes them, and read back."""

import contextlib
import errno
import hashlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem

from braid.actors.stage.digests import Digests, damage


class CheckedWriter(dcp.FileSystemWriter):
    """Writes a rank's share of a checkpoint, durably, and knows the digests of what it wrote."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, sync_files=True)
        self._directory = directory
        self._files = self.fs = _HashingFiles()

    def read_back(self) -> Digests:
        """Digests of this rank's files; `OSError` (EIO) names the first that is not what was written."""
        if (what := damage(self._directory, self._files.written)) is not None:
            raise OSError(errno.EIO, f"what is read back is not what was written: {what}")
        return self._files.written


class _HashingFiles(FileSystem):
    """PyTorch's way to files."""

    def __init__(self) -> None:
        self.written: dict[str, tuple[int, str]] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file; one that is written is hashed meanwhile."""
        with super().create_stream(path, mode) as stream:
            if "w" not in mode:
                yield stream
                return
            hashed = _HashedStream(stream)
            yield hashed
            stream.flush()
            os.fsync(stream.fileno())
        self.written[Path(path).name] = (hashed.tell(), hashed.digest.hexdigest())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Give a file another name."""
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class _HashedStream(io.BufferedIOBase):
    """A file that is written from its begin to its end; whoever opened the file closes it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._count = 0
        self.digest = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._stream.write(view)
        self.digest.update(view)
        self._count += len(view)
        return len(view)

    def tell(self) -> int:
        return self._count

    def flush(self) -> None:
        if not self._stream.closed:
            self._stream.flush()

    def fileno(self) -> int:
        return int(self._stream.fileno())
