"""Writes the shards of one split of one work item."""

import hashlib
import os
import secrets
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from braid.actors.stage.data.token_files import TokenShard

_SHARD_TOKENS = 1 << 27  # tokens after which a shard is full


class ShardWriter:
    """Writes one split of one work item, in shards of bounded size with unique names."""

    def __init__(self, folder: Path, split: str, number: int, dtype: np.dtype) -> None:
        self._folder, self._dtype = folder, dtype
        self._stem = f"{split}-item{number:06d}-{secrets.token_hex(8)}"
        self._files: list[Any] = []
        """The files of the current shard; none if there is no shard."""
        self.shards: list[TokenShard] = []

    def write(
        self, ids: np.ndarray, bytes_of_text: int = 0, documents: int = 0, **beside: np.ndarray
    ) -> None:
        """Append token ids (1-d) that stand for ``bytes_of_text`` bytes and end ``documents`` documents.

        ``beside``: content of the files beside the shard, by ending (`TokenShard.beside`), in every call.
        """
        if not len(ids):
            return
        if not self._files:
            self._name = f"{self._stem}-{len(self.shards):04d}"
            names = self._name, *(f"{self._name}.{ending}" for ending in beside)
            self._files = [open(self._folder / name, "wb") for name in names]  # noqa: SIM115 - `close`
            self._hash, self._counts = hashlib.sha256(), Counter[str]()
        for file, array in zip(self._files, (ids.astype(self._dtype), *beside.values()), strict=False):
            content = array.tobytes()
            file.write(content)
            self._hash.update(content)
        self._counts["tokens"] += len(ids)  # quicker than `update`
        self._counts["bytes_of_text"] += bytes_of_text
        self._counts["documents"] += documents
        if self._counts["tokens"] >= _SHARD_TOKENS:
            self.close()

    def close(self) -> None:
        """Finish the current shard and flush it to disk."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
            file.close()
        if self._files:
            self._files = []
            self.shards.append(TokenShard(file=self._name, sha256=self._hash.hexdigest(), **self._counts))
