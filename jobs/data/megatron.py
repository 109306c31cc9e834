"""Copies tokens from Megatron's pairs of files: ``X.bin`` has tokens, ``X.idx`` where documents begin.

The index is little-endian: the magic, a version (uint64), a code for the tokens' dtype (uint8), the numbers
of sequences and of document bounds (uint64 each); then, of every sequence, its number of tokens (int32) and
the byte in ``X.bin`` where it begins (int64); then the document bounds, as numbers of sequences (int64):
document d is the sequences from bound d to bound d + 1. Modes of sequences may follow, and are not read.
"""

import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from braid.jobs.data.corpus import KEY, FileRange, Source, WorkItem, item_bytes, pair_of, unreadable
from braid.jobs.data.tokenizer import Tokenizer

_MAGIC: Final = b"MMIDIDX\x00\x00"
_VERSION: Final = 1
_CODES: Final = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Dtypes of tokens by their code; 6 and 7 are floating-point numbers."""
_HEADER: Final = struct.Struct("<9sQBQQ")


@dataclass(frozen=True, eq=False)
class TokenPair:
    """A pair of files, mapped into memory."""

    path: str
    """Of the file with tokens."""
    tokens: np.ndarray
    sizes: np.ndarray
    begins: np.ndarray
    """Each sequence's first token in ``tokens``."""
    bounds: np.ndarray
    """[D + 1]: document d is the sequences from bound d to bound d + 1."""

    @classmethod
    def open(cls, path: str) -> "TokenPair":
        """Open the pair to which the file at ``path`` belongs; raise `ValueError` if it is damaged."""
        tokens_path, index_path = pair_of(path)
        try:
            content = np.memmap(index_path, mode="r") if os.path.getsize(index_path) else np.zeros(0, "u1")
            tokens = np.memmap(tokens_path, mode="r") if os.path.getsize(tokens_path) else np.zeros(0, "u1")
        except OSError as fault:
            raise unreadable(index_path, fault) from None
        if content[: len(_MAGIC)].tobytes() != _MAGIC or len(content) < _HEADER.size:
            raise _broken(index_path, "it does not begin as Megatron's index")
        _, version, code, sequences, documents = _HEADER.unpack(content[: _HEADER.size].tobytes())
        if version != _VERSION:
            raise _broken(index_path, f"it has version {version}, this Braid reads {_VERSION}")
        if code not in _CODES:
            raise _broken(index_path, f"its tokens have the dtype code {code}, known are {[*_CODES]}")
        parts, at = [], _HEADER.size
        for dtype, count in (("<i4", sequences), ("<i8", sequences), ("<i8", documents)):
            size = np.dtype(dtype).itemsize * count
            if at + size > len(content):
                raise _broken(
                    index_path, f"it is cut short: {sequences} sequences, {documents} document bounds"
                )
            parts.append(content[at : at + size].view(dtype))
            at += size
        (sizes, offsets, bounds), width = parts, np.dtype(_CODES[code]).itemsize
        ends = offsets + sizes * np.int64(width)
        if (sizes < 0).any() or (offsets % width).any() or (offsets < 0).any():
            raise _broken(index_path, "a sequence has an impossible size or place")
        if len(tokens) % width or (np.maximum(offsets, ends) > len(tokens)).any():
            raise _broken(tokens_path, f"it has {len(tokens)} bytes, and {index_path!r} needs {ends.max()}")
        if not len(bounds) or bounds[0] or bounds[-1] != sequences or (np.diff(bounds) < 0).any():
            raise _broken(index_path, f"its documents are not all of its {sequences} sequences in order")
        return cls(tokens_path, tokens.view(_CODES[code]), sizes, offsets // width, bounds)

    def document(self, number: int) -> np.ndarray:
        """Return the token ids of one document: [tokens]."""
        of_it = slice(self.bounds[number], self.bounds[number + 1])
        parts = zip(self.begins[of_it].tolist(), self.sizes[of_it].tolist(), strict=True)
        return np.concatenate(
            [self.tokens[:0], *(self.tokens[begin : begin + size] for begin, size in parts)]
        )


def _broken(path: str, why: str) -> ValueError:
    return ValueError(
        f"{KEY}: {path!r} is not readable ({why}); write it again, or exclude it and its partner"
    )


def megatron_items(sources: Sequence[Source]) -> tuple[WorkItem, ...]:
    """Cut pairs of files between documents into items of roughly equal size."""
    target, paths = item_bytes(sources), {source.path for source in sources}
    ranges = []
    for path in sorted(paths):
        if missing := next((other for other in pair_of(path) if other not in paths), None):
            raise ValueError(f"{KEY}: {path!r} has no partner {missing!r}; add or exclude both")
        if not path.endswith(".idx"):
            continue
        pair = TokenPair.open(path)
        before = np.concatenate([[0], np.cumsum(pair.sizes, dtype=np.int64)])[pair.bounds]
        before *= pair.tokens.itemsize  # bytes before each bound
        start, documents = 0, len(before) - 1
        while start < documents:
            stop = max(start + 1, int(np.searchsorted(before, before[start] + target, side="right")) - 1)
            ranges.append(FileRange(path, "megatron", start, stop, int(before[stop] - before[start])))
            start = stop
    return tuple(WorkItem(number, (part,)) for number, part in enumerate(ranges))


def read_tokens(part: FileRange, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yield the token ids of the documents of one range in order; a document that does not end with the
    tokenizer's end token gets one, an empty document stays empty."""
    pair, end = _opened(part.path, os.stat(part.path).st_mtime_ns), tokenizer.end_of_document
    for number in range(part.start, part.stop):
        ids = pair.document(number)
        if len(ids) and not 0 <= ids.min() <= ids.max() < tokenizer.vocabulary:
            wrong = ids[(ids < 0) | (ids >= tokenizer.vocabulary)][0]
            raise ValueError(
                f"data.tokenizer: {tokenizer.name!r} has {tokenizer.vocabulary} tokens, and document "
                f"{number} of {pair.path!r} has token {wrong}; set data.tokenizer to the tokenizer that made "
                "the file"
            )
        ids = ids.astype(np.uint32)
        yield ids if not len(ids) or ids[-1] == end else np.append(ids, np.uint32(end))


def token_hash(ids: np.ndarray) -> int:
    """Return a uniformly distributed number in [0, 2**64) that depends on the ids (uint32) alone."""
    return int.from_bytes(hashlib.blake2b(ids.astype("<u4").tobytes(), digest_size=8).digest(), "big")


@lru_cache(maxsize=1)
def _opened(path: str, modified_ns: int) -> TokenPair:
    """Open a pair once per process, as a long index takes longer to check than an item takes."""
    return TokenPair.open(path)
