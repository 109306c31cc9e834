"""Writes the shards of one split of one work item."""

import hashlib
import os
import secrets
from collections import Counter
from pathlib import Path

import numpy as np

from braid.actors.stage.data.token_files import TokenShard

_SHARD_TOKENS = 1 << 27  # tokens after which a shard is full


class _HashedFile:
    """A new file, and the SHA-256 of its content."""

    def __init__(self, path: Path) -> None:
        self._file, self._hash = open(path, "wb"), hashlib.sha256()  # noqa: SIM115 - `close`

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self._hash.update(content)

    def close(self) -> str:
        """Flush the file to disk; return the hash."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._hash.hexdigest()


class ShardWriter:
    """Writes one split of one work item, in shards of bounded size with unique names."""

    def __init__(self, folder: Path, split: str, number: int, dtype: np.dtype) -> None:
        self._folder, self._dtype = folder, dtype
        self._stem = f"{split}-item{number:06d}-{secrets.token_hex(8)}"
        self._files: dict[str, _HashedFile] = {}
        """The files of the current shard; none if there is no shard."""
        self.shards: list[TokenShard] = []

    def write(self, ids: np.ndarray, bytes_of_text: int = 0, documents: int = 0, **beside: bytes) -> None:
        """Append token ids (1-d) that stand for ``bytes_of_text`` bytes and end ``documents`` documents.

        ``beside``: content of the files beside the shard, by ending (``marks``, ``counts``), in every call.
        """
        if not len(ids):
            return
        if not self._files:
            self._name = f"{self._stem}-{len(self.shards):04d}"
            endings = "", *(f".{ending}" for ending in beside)
            self._files = {end: _HashedFile(self._folder / f"{self._name}{end}") for end in endings}
            self._counts = Counter[str]()
        contents = ids.astype(self._dtype).tobytes(), *beside.values()
        for file, content in zip(self._files.values(), contents, strict=True):
            file.write(content)
        self._counts.update(tokens=len(ids), bytes_of_text=bytes_of_text, documents=documents)
        if self._counts["tokens"] >= _SHARD_TOKENS:
            self.close()

    def close(self) -> None:
        """Finish the current shard and flush it to disk."""
        if self._files:
            hashes = {ending: file.close() for ending, file in self._files.items()}
            self._files = {}
            marks = hashes.get(".marks", "")
            shard = TokenShard(file=self._name, sha256=hashes[""], marks_sha256=marks, **self._counts)
            self.shards.append(shard)
