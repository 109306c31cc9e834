"""Files of a distributed checkpoint: hashed while PyTorch writes them and read back; read without trust.

PyTorch stores a checkpoint's table of contents, ``.metadata``, as a pickle and reads it with `pickle.load`,
which runs any code that the file requests. Checksums do not help against somebody who can also write the
manifest, as in a checkpoint from elsewhere. Here unpickling finds only the classes that such a table consists
of, and only files in the checkpoint's own directory are read.
"""

import contextlib
import errno
import hashlib
import io
import os
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from braid.actors.stage.files.digests import PIECE_BYTES, Digests, damage
from braid.actors.stage.files.reading import UnreadableError, open_regular


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


_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "pathlib": {"Path", "PosixPath"},
    "pathlib._local": {"Path", "PosixPath"},  # their module in Python 3.13
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


class RefusedError(ValueError):
    """Raised for a checkpoint that contains something which no checkpoint needs."""


class FailedTogetherError(RuntimeError):
    """Raised for a save or load that failed on some rank; all ranks gave it up, and can continue."""


class GuardedReader(FileSystemReader):
    """`FileSystemReader` that runs no code of a checkpoint and reads no files outside its directory."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._directory = directory
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the table of contents, which is read once; raise `ValueError` if the file holds anything
        else, `UnreadableError` if the file cannot be read."""
        if self._metadata is None:
            self._metadata = self._read()
        assert self._metadata.storage_meta is not None
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the tensors of a plan; raise `RefusedError` if files contain anything but tensors."""
        try:
            return super().read_data(plan, planner)
        except pickle.UnpicklingError as error:
            asked = re.search(r"GLOBAL (\S+)", str(error))
            reason = f"it asks for {asked[1]}" if asked else str(error).splitlines()[0]
            entries = self.read_metadata().storage_data
            files = sorted({entries[item.storage_index].relative_path for item in plan.items})
            place = f"{self._directory}: {', '.join(files)}"
            raise RefusedError(f"{place} is refused: {reason}, which no tensor needs") from None

    def _read(self) -> Metadata:
        path = self._directory / ".metadata"
        try:
            with open_regular(path) as file:
                metadata = _Unpickler(file).load()
        except OSError as error:
            raise UnreadableError(f"{path} cannot be read: {error.strerror}") from None
        except Exception as error:  # a damaged pickle raises whatever it happens to run into
            raise ValueError(f"{path} is refused: {error}") from None
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise ValueError(f"{path} is refused: it holds no table of contents")
        for entry in metadata.storage_data.values():
            file_name = entry.relative_path
            if Path(file_name).name != file_name:
                raise ValueError(f"{path} is refused: it leads to {file_name!r}, out of the checkpoint")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        return metadata

    @staticmethod
    def plain(error: CheckpointException) -> Exception:
        """Return a `RefusedError` or `FailedTogetherError` for PyTorch's error, itself no `Exception`."""
        causes = {rank: cause for rank, (cause, _) in error.failures.items()}
        refused = next((cause for cause in causes.values() if isinstance(cause, RefusedError)), None)
        told = "; ".join(f"rank {rank}: {cause}" for rank, cause in causes.items())
        return refused or FailedTogetherError(told)
