"""Small corpora in every format, and what is stored of them: shared by the tests of preparation."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from braid.actors.config import parse_config
from braid.actors.stage.data.token_files import read_index
from braid.jobs.data.identity import DataRequest
from braid.jobs.data.prepare import Prepared, prepare
from braid.jobs.data.tokenizer import BytesTokenizer, Tokenizer, load_tokenizer

DOCUMENTS = [f"document {n}: naïve Ωμέγα 語 🙂\nsecond line\u2028{'x' * (n * 7 % 50)}" for n in range(60)]


def request_of(*files: Path | str, **options: Any) -> DataRequest:
    data = {"files": [str(file) for file in files], "validation_fraction": 0.2, **options}
    return DataRequest.of(parse_config({"data": data}))


def prepared(folder: Path, *files: Path | str, **options: Any) -> Prepared:
    """What is made of a corpus in a folder, in this process."""
    return prepare(request_of(*files, **options), folder, map)


def write_lines(path: Path, documents: Sequence[str], field: str = "text", ascii_only: bool = True) -> Path:
    lines = [json.dumps({"id": n, field: text}, ensure_ascii=ascii_only) for n, text in enumerate(documents)]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_rows(
    path: Path, documents: Sequence[str | None], kind: pa.DataType, row_group_size: int = 7
) -> Path:
    column = pa.array(documents, pa.string()).cast(kind)
    table = pa.table({"id": range(len(documents)), "text": column})
    pq.write_table(table, path, row_group_size=row_group_size)
    return path


def stored_ids(folder: Path, split: str) -> np.ndarray:
    index = read_index(folder)
    parts = [np.fromfile(folder / shard.file, dtype=index.dtype) for shard in index.splits[split]]
    return np.concatenate([np.empty(0, dtype=index.dtype), *parts])


def stored(folder: Path, split: str) -> list[str]:
    index = read_index(folder)
    bytes_alone = index.tokenizer == BytesTokenizer.name
    tokenizer = load_tokenizer(index.tokenizer, None if bytes_alone else index.end_token)
    ids = stored_ids(folder, split)
    parts = np.split(ids, np.flatnonzero(ids == index.end_of_document) + 1)
    return [text_of(tokenizer, part) for part in parts if len(part)]


def text_of(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    """The text of ids; ends of documents become nothing."""
    ids = ids[ids != tokenizer.end_of_document]
    if isinstance(tokenizer, BytesTokenizer):
        return ids.astype(np.uint8).tobytes().decode(errors="replace")
    return Backend.from_file(tokenizer.name).decode(ids.tolist(), skip_special_tokens=False)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if ".tmp-" in path.name]


def train_tokenizer(
    path: Path, special: list[str], documents: Sequence[str] = DOCUMENTS, size: int = 400
) -> Path:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator(documents, trainer)
    backend.enable_truncation(5)
    backend.enable_padding(length=9)
    backend.save(str(path))
    return path
