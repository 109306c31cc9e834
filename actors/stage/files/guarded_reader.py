"""Reads a distributed checkpoint without trusting it.

PyTorch stores a checkpoint's table of contents, ``.metadata``, as a pickle and reads it with `pickle.load`,
which runs any code that the file requests. Checksums do not help against somebody who can also write the
manifest, as in a checkpoint from elsewhere. Here unpickling finds only the classes that such a table consists
of, and only files in the checkpoint's own directory are read.
"""

import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from braid.actors.stage.files.reading import UnreadableError, open_regular

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
