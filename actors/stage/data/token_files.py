"""Reads training data: a prepared folder of token shards, and the order of its samples.

A prepared data set (`braid.jobs.data.prepare` writes it) is a folder that never changes once it is visible:

    index.json            the contents: tokenizer, dtype, and for every split its shards (`DataIndex`)
    train-00000.bin ...   tokens, little-endian, nothing else; the split is the shards end to end
    validation-00000.bin ...

A data set is a stream or has rows. Sample i of a stream is the window of sequence + 1 tokens that starts at
token i * sequence, so that every token but the first is predicted once per epoch, and windows may cross
document and shard borders. Sample i of rows is row i, of sequence + 1 tokens of its own; beside each of its
shards lie two more files:

    train-00000.marks ... a byte for every token: `COUNTS` if the loss of predicting it counts, `BEGINS` if a
                          document (or the padding at a row's end) begins with it
    train-00000.counts .. for every row the number of tokens that count, as uint32, little-endian

Shape suffixes: N samples, S = sequence + 1 tokens of a window, s = sequence targets of a window.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from braid.actors.stage.files.reading import UnreadableError, read_text

INDEX_FILE = "index.json"
INDEX_FORMAT = "braid-tokens"
INDEX_VERSION = 1
TOKEN_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
TRAIN, VALIDATION = "train", "validation"
COUNTS, BEGINS = 1, 2
ROW_COUNTS: np.dtype[Any] = np.dtype("<u4")

_AGAIN = "prepare it again (`braid prepare`)"


Count = Annotated[int, Field(strict=True, ge=0)]


@dataclass(frozen=True, kw_only=True)
class TokenShard:
    """One file of a split; a document is counted in the shard that contains its end."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    file: str
    tokens: Count
    bytes_of_text: Count
    documents: Count
    sha256: str  # of the tokens; of rows that of the tokens, marks and counts, row by row

    def beside(self, ending: str) -> str:
        """Name of a file beside a shard of rows (``marks``, ``counts``)."""
        return f"{self.file.removesuffix('.bin')}.{ending}"


@dataclass(frozen=True, kw_only=True)
class DataIndex:
    """Contents of `index.json`.

    ``request`` identifies what the data set was made from (the inputs' paths, sizes and times, the tokenizer,
    parameters); ``sources`` and ``parameters`` are the readable part of ``request``.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    tokenizer: str
    tokenizer_fingerprint: str
    vocabulary: Count
    end_of_document: Count
    dtype: Literal["uint16", "uint32"]
    splits: Mapping[str, tuple[TokenShard, ...]]
    documents_skipped: Count  # documents that were left out because they are not UTF-8
    documents_empty: Count  # documents that were left out because they are nothing but white space
    request: str
    parameters: Mapping[str, Any]
    sources: tuple[tuple[str, int, int], ...]  # path, bytes, modification time in ns
    token_bytes: tuple[Count, ...] = ()
    """Number of UTF-8 bytes of each token id's text, 0 for special tokens; empty in older data sets, and for
    tokenizers that do not preserve the text."""
    contents: tuple[str, ...] = ()  # format and SHA-256 of every source, in older data sets alone
    # The following fields are empty or 0 in older data sets.
    end_token: str = ""  # the name of end_of_document
    characters: Count = 0  # number of characters of the documents
    characters_lost: Count = 0  # number of characters without a token
    tokens_unknown: Count = 0  # number of the tokenizer's tokens for unknown text
    row_tokens: Count = 0  # number of tokens of a row; 0: the data set is a stream
    tokens_padded: Count = 0  # number of tokens that fill up rows
    documents_long: Count = 0  # conversations that were left out because they are longer than a row
    documents_silent: Count = 0  # conversations that were left out because none of their tokens counts

    @property
    def fingerprint(self) -> str:
        """Hash of the tokens, which does not depend on where, when and from which path they were prepared."""
        content = [
            INDEX_VERSION,
            self.tokenizer_fingerprint,
            self.vocabulary,
            self.end_of_document,
            self.dtype,
            {split: [[s.tokens, s.sha256] for s in shards] for split, shards in self.splits.items()},
        ]
        if self.row_tokens:
            content.append(self.row_tokens)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def samples(self, split: str, sequence: int) -> int:
        """Return the samples of an epoch; a stream's last tokens, which fill no window, are left out."""
        tokens = self.tokens(split)
        return tokens // self.row_tokens if self.row_tokens else max(0, tokens - 1) // sequence

    def tokens(self, split: str) -> int:
        return sum(shard.tokens for shard in self.splits[split])

    def bytes_of(self, tokens: np.ndarray) -> int | None:
        """Return the UTF-8 bytes of the text that tokens stand for; None if unknown."""
        return int(np.array(self.token_bytes)[tokens].sum()) if self.token_bytes else None

    def to_json(self) -> str:
        """Return the text of `index.json`; `read_index` is the inverse."""
        return json.dumps({"format": INDEX_FORMAT, "version": INDEX_VERSION, **asdict(self)}, indent=1)


def read_description(path: Path, form: str, version: int, kind: Any, again: str) -> Any:
    """Read a JSON file that describes data, of a format and version, as a ``kind`` that pydantic knows.

    ``again``: the remedy, for errors. Raise `UnreadableError` if the file cannot be read, and ValueError if
    it has another format or version, or is damaged.
    """
    where = f"data set {path.parent}: {path.name}"
    try:
        entries = json.loads(read_text(path))
    except OSError as fault:
        raise UnreadableError(
            f"data set {path.parent}: cannot read {path.name} ({fault.strerror}); {again}, and put the "
            "folder where every node sees it"
        ) from None
    except (ValueError, RecursionError):
        raise ValueError(f"{where} is not JSON; {again}") from None
    if not isinstance(entries, dict) or entries.pop("format", None) != form:
        raise ValueError(f"{where} is not of the format {form}; {again}")
    if (stored := entries.pop("version", None)) != version:
        raise ValueError(f"{where} has version {stored!r}, this Braid reads {version}; {again}")
    try:
        return TypeAdapter(kind).validate_python(entries)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        entry = ".".join(map(str, wrong["loc"]))
        raise ValueError(f"{where} is damaged ({entry}: {wrong['msg']}); {again}") from None


def read_index(directory: Path) -> DataIndex:
    """Read a prepared folder's index and check it against the sizes of the shards.

    Raise as `read_description` does, and ValueError if a shard has another size.
    """
    index: DataIndex
    index = read_description(directory / INDEX_FILE, INDEX_FORMAT, INDEX_VERSION, DataIndex, _AGAIN)
    if problem := _damage(index):
        raise ValueError(f"data set {directory}: {INDEX_FILE} is damaged ({problem}); {_AGAIN}")
    for shards in index.splits.values():
        for shard in shards:
            _check_size(directory, shard.file, shard.tokens * TOKEN_DTYPES[index.dtype].itemsize)
            if index.row_tokens:
                rows = shard.tokens // index.row_tokens
                _check_size(directory, shard.beside("marks"), shard.tokens)
                _check_size(directory, shard.beside("counts"), rows * ROW_COUNTS.itemsize)
    return index


def _damage(index: DataIndex) -> str:
    """Return how entries contradict each other; empty if they do not."""
    for shard in (shard for shards in index.splits.values() for shard in shards):
        # Only plain file names are accepted, so that an index cannot point outside its folder.
        if Path(shard.file).name != shard.file or not shard.tokens:
            return f"shard {shard.file!r} has no file name or no tokens"
        if index.row_tokens and shard.tokens % index.row_tokens:
            return f"shard {shard.file!r} has no whole rows of {index.row_tokens} tokens"
    if len(index.token_bytes) not in (0, index.vocabulary):
        return f"token_bytes has {len(index.token_bytes)} entries, the vocabulary {index.vocabulary}"
    if set(index.splits) != {TRAIN, VALIDATION}:
        return f"splits are {sorted(index.splits)}"
    return ""


def _check_size(directory: Path, file: str, wanted: int) -> None:
    try:
        size = (directory / file).stat().st_size
    except OSError as fault:
        raise UnreadableError(f"data set {directory}: {file}: {fault.strerror}; {_AGAIN}") from None
    if size != wanted:
        raise ValueError(f"data set {directory}: {file} has {size} bytes, not {wanted}; {_AGAIN}")


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenShards:
    """One split of a prepared data set, memory-mapped and cut into samples. Make it with `open`."""

    split: str
    sequence: int  # number of tokens that a sample predicts; its window is one token longer
    index: DataIndex
    arrays: tuple[np.ndarray, ...]  # one per shard, read-only
    starts: np.ndarray  # [shards + 1] int64: first token of every shard, then the total
    marks: tuple[np.ndarray, ...] = ()  # one per shard of rows, uint8
    counts: np.ndarray | None = None  # of rows: [samples] number of targets that count

    @classmethod
    def open(
        cls, directory: Path | str, split: str, sequence: int, index: DataIndex | None = None
    ) -> "TokenShards":
        """Open ``split`` of the data set in ``directory`` for windows of ``sequence`` + 1 tokens.

        ``index``: the folder's index if it was read before; None: read it, which checks the size of every
        shard.

        Raise ValueError as `read_index` does, and if the split is too short for one sample, or has rows of
        another length.
        """
        assert sequence >= 1, sequence
        directory = Path(directory)
        index = index or read_index(directory)
        shards = index.splits.get(split, ())
        total = sum(shard.tokens for shard in shards)
        if index.row_tokens not in (0, sequence + 1):
            raise ValueError(
                f"data set {directory}: its rows were packed for model.sequence={index.row_tokens - 1}, not "
                f"for {sequence}; {_AGAIN}"
            )
        if total < sequence + 1:
            raise ValueError(
                f"data set {directory}: split {split!r} has {total} tokens, one sample of sequence "
                f"{sequence} needs {sequence + 1}; add text to data.files, "
                + ("raise data.validation_fraction, " if split == VALIDATION else "")
                + "or shorten the sequence"
            )
        dtype = TOKEN_DTYPES[index.dtype]
        rows = shards if index.row_tokens else ()
        counts = [np.fromfile(directory / shard.beside("counts"), ROW_COUNTS) for shard in rows]
        return cls(
            split=split,
            sequence=sequence,
            index=index,
            arrays=tuple(np.memmap(directory / shard.file, dtype=dtype, mode="r") for shard in shards),
            starts=np.cumsum([0, *(shard.tokens for shard in shards)], dtype=np.int64),
            marks=tuple(np.memmap(directory / s.beside("marks"), np.uint8, mode="r") for s in rows),
            counts=np.concatenate(counts) if rows else None,
        )

    @property
    def samples(self) -> int:
        return self.index.samples(self.split, self.sequence)

    def spread(self, most: int) -> np.ndarray:
        """Return ids of up to ``most`` different samples at equal distances over the split: [count] int64."""
        count = min(most, self.samples)
        return np.arange(count, dtype=np.int64) * self.samples // count

    def tokens_at(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the windows of samples: [N] integers -> [N, sequence + 1] int64."""
        return self._windows(self.arrays, sample_ids, np.int64)

    def masks_at(self, sample_ids: np.ndarray) -> np.ndarray | None:
        """Return which targets' losses count: [N] integers -> [N, sequence] bool; None: all count."""
        if self.counts is None:
            return None
        return (self._windows(self.marks, sample_ids, np.uint8)[:, 1:] & COUNTS).astype(bool)

    def counts_at(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the number of targets of samples that count: [N] integers -> [N] int64."""
        if self.counts is None:
            return np.full(len(sample_ids), self.sequence, np.int64)
        return self.counts[sample_ids].astype(np.int64)

    def begins_at(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return where documents begin in samples, the first token apart: [N] integers -> [N, sequence] bool.

        Documents of rows begin where they were packed, documents of a stream behind the token that ends
        documents.
        """
        if self.counts is None:
            begins_NS = self.tokens_at(sample_ids)[:, :-2] == self.index.end_of_document
        else:
            begins_NS = (self._windows(self.marks, sample_ids, np.uint8)[:, 1:-1] & BEGINS).astype(bool)
        return np.pad(begins_NS, ((0, 0), (1, 0)))

    def _windows(self, arrays: Sequence[np.ndarray], sample_ids: np.ndarray, dtype: Any) -> np.ndarray:
        """Read what ``arrays`` hold for the tokens of samples: [N] integers -> [N, sequence + 1]."""
        windows_NS = np.empty((len(sample_ids), self.sequence + 1), dtype=dtype)
        stride = self.index.row_tokens or self.sequence
        for window_S, sample in zip(windows_NS, sample_ids.tolist(), strict=True):
            self._read(arrays, sample * stride, window_S)
        return windows_NS

    def _read(self, arrays: Sequence[np.ndarray], start: int, out_S: np.ndarray) -> None:
        """Fill ``out_S`` from the split's token ``start`` on, from as many shards as needed."""
        shard = int(np.searchsorted(self.starts, start, side="right")) - 1
        filled = 0
        while filled < len(out_S):
            offset = start + filled - int(self.starts[shard])
            piece = arrays[shard][offset : offset + len(out_S) - filled]
            out_S[filled : filled + len(piece)] = piece
            filled += len(piece)
            shard += 1
