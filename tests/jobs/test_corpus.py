"""Formats, files and documents: what goes in comes out, and what is wrong is told in one line."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from braid.actors.stage.data.token_files import TokenShards, read_index
from braid.jobs.data import corpus as corpus_module
from braid.jobs.data import shards as shards_module
from braid.jobs.data import tokenise as tokenise_module
from braid.jobs.data.corpus import cut
from braid.jobs.data.prepare import Preparation, prepare
from tests.jobs.corpora import (
    DOCUMENTS,
    hidden,
    prepared,
    request_of,
    stored,
    stored_ids,
    train_tokenizer,
    write_lines,
    write_rows,
)

# Round trips.


COLUMNS = (pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string()))


@pytest.fixture(params=["text", "jsonl", "jsonl-utf8", *COLUMNS], ids=str)
def documents_file(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """`DOCUMENTS` in one of the formats, as an entry of data.files."""
    if request.param == "text":
        for number, text in enumerate(DOCUMENTS):
            (tmp_path / f"{number:03}.txt").write_bytes(text.encode())
        return str(tmp_path / "*.txt")
    if isinstance(request.param, pa.DataType):
        return str(write_rows(tmp_path / "a.parquet", DOCUMENTS, request.param))
    return str(write_lines(tmp_path / "a.jsonl", DOCUMENTS, ascii_only=request.param == "jsonl"))


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
@pytest.mark.usefixtures("small_items")
def test_documents_come_back(documents_file: str, tokenizer: str, tmp_path: Path) -> None:
    if tokenizer == "bpe":
        tokenizer = str(train_tokenizer(tmp_path / "tokenizer.json", ["<|endoftext|>"]))
    request = request_of(documents_file, tokenizer=tokenizer)
    assert len(cut(request.sources, "text")) > 3
    updates: list[Preparation] = []
    done = prepare(request, tmp_path / "out", map, updates.append)
    train, validation = stored(done.output, "train"), stored(done.output, "validation")
    assert [text for text in DOCUMENTS if text in train] == train
    assert [text for text in DOCUMENTS if text in validation] == validation
    assert sorted(train + validation) == sorted(DOCUMENTS)
    assert done.documents == len(DOCUMENTS)
    index = read_index(done.output)
    assert index == done.index
    assert updates[-1] == Preparation(len(updates), len(updates), sum(map(index.tokens, index.splits)))
    shards = [shard for split in index.splits.values() for shard in split]
    assert sum(shard.bytes_of_text for shard in shards) == sum(len(text.encode()) for text in DOCUMENTS)
    for split in ("train", "validation"):
        opened = TokenShards.open(done.output, split, 16)
        assert opened.starts[-1] == index.tokens(split)
        windows = opened.tokens_at(np.arange(opened.samples))
        assert np.array_equal(windows[:, :-1].ravel(), stored_ids(done.output, split)[: windows[:, :-1].size])


@pytest.mark.parametrize("item_bytes", [1, 2, 50, 333, 10**6])
def test_ranges_of_lines_lose_and_repeat_nothing(
    item_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "_SMALLEST_ITEM_BYTES", item_bytes)
    monkeypatch.setattr(corpus_module, "_LARGEST_ITEM_BYTES", item_bytes)
    documents = ["a", "b" * 200, "", "c", "d" * 51, "e"]
    path = write_lines(tmp_path / "a.jsonl", documents)
    path.write_bytes(b"\xef\xbb\xbf\n" + path.read_bytes().replace(b"\n", b"\r\n\n").rstrip())
    done = prepared(tmp_path / "out", path, validation_fraction=0)
    assert stored(done.output, "train") == [text for text in documents if text]
    assert done.index.documents_empty == 1


def test_formats_mix_in_the_order_of_their_paths(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("\ufefftwo")
    write_lines(tmp_path / "c.NDJSON", ["three", "four"])
    write_rows(tmp_path / "a.pq", ["one", None], pa.string())
    entries = [tmp_path / "c.*", tmp_path / "[ab].*", tmp_path / "b.md"]
    done = prepared(tmp_path / "out", *entries, validation_fraction=0)
    assert stored(done.output, "train") == ["one", "two", "three", "four"]
    assert [Path(path).name for path, _, _ in done.index.sources] == ["a.pq", "b.md", "c.NDJSON"]
    assert done.index.documents_empty == 1


def test_a_text_whose_lines_end_in_carriage_returns(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\rtwo\r")
    (tmp_path / "b.txt").write_bytes(b"one\r\ntwo\r")
    done = prepared(tmp_path / "out", tmp_path / "*.txt", validation_fraction=0)
    assert stored(done.output, "train") == ["one\ntwo\n", "one\r\ntwo\r"]


def test_exclude_goes_by_name_or_by_path(tmp_path: Path) -> None:
    for name in ("a/one.txt", "a/two.txt", "b/c/three.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found = request_of(tmp_path / "**/*.txt", exclude=["two.*", "*/b/*"])
    assert [Path(source.path).name for source in found.sources] == ["one.txt"]
    found = request_of("python-stdlib", exclude=["*/encodings/*"])
    assert any(source.path.endswith("json/__init__.py") for source in found.sources)


def test_large_documents_and_shards_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenise_module, "_PIECE_CHARACTERS", 10)
    monkeypatch.setattr(shards_module, "_SHARD_TOKENS", 64)
    path = write_lines(tmp_path / "a.jsonl", DOCUMENTS)
    done = prepared(tmp_path / "out", path, validation_fraction=0)
    assert stored(done.output, "train") == DOCUMENTS
    shards = done.index.splits["train"]
    assert len(shards) > 20
    assert all(64 <= shard.tokens < 64 + 40 for shard in shards[:-1])
    assert sum(shard.documents for shard in shards) == len(DOCUMENTS)


# Text that is not UTF-8.


@pytest.fixture
def broken_text(tmp_path: Path) -> list[Path]:
    (tmp_path / "a.txt").write_bytes(b"good text")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9 \xff")
    (tmp_path / "c.jsonl").write_bytes(
        b'{"text": "fine"}\n{"text": "caf\xe9"}\n{"text": "half \\ud83d pair"}\n'
    )
    column = pa.array([b"row", b"caf\xe9"]).view(pa.string())  # Parquet's writer does not check it either
    pq.write_table(pa.table({"text": column}), tmp_path / "d.parquet")
    return [tmp_path / name for name in ("*.txt", "c.jsonl", "d.parquet")]


def test_text_that_is_not_utf8_is_refused(broken_text: list[Path], tmp_path: Path) -> None:
    remedy = "data.encoding_errors to replace or skip"
    places = {
        "b.txt": r"b.txt is not UTF-8 at byte 3 \(0xe9\)",
        "c.jsonl": r"c.jsonl is not UTF-8 at byte 30 \(0xe9\)",
        "d.parquet": r"row 1 of .*d.parquet' is not UTF-8 at byte 3 \(0xe9\)",
    }
    for name, place in places.items():
        with pytest.raises(ValueError, match=f"^data.files: .*{place}.*{remedy}"):
            prepared(tmp_path / "out", tmp_path / name)
    path = tmp_path / "e.jsonl"
    path.write_text('\n{"text": "half \\ud83d pair"}')
    with pytest.raises(ValueError, match=f"e.jsonl:2 has half a surrogate pair.*{remedy}"):
        prepared(tmp_path / "out", path)


def test_text_that_is_not_utf8_is_repaired_or_skipped(broken_text: list[Path], tmp_path: Path) -> None:
    options = {"validation_fraction": 0, "encoding_errors": "replace"}
    done = prepared(tmp_path / "replaced", *broken_text, **options)
    assert stored(done.output, "train") == [
        *("good text", "caf\ufffd \ufffd", "fine", "caf\ufffd", "half \ufffd pair", "row", "caf\ufffd")
    ]
    options["encoding_errors"] = "skip"
    done = prepared(tmp_path / "skipped", *broken_text, **options)
    assert stored(done.output, "train") == ["good text", "fine", "row"]
    assert done.index.documents_skipped == 4


# Refusals.

ROWS = "good.parquet"
ARRAY = r"files: '.*' is one JSON array, not JSON lines; make lines of it with: jq -c '\.\[\]'$"
FILES: dict[str, Any] = {
    "good.txt": "text",
    "blank.txt": " \n\t",
    "odd.json": "{}",
    "packed.jsonl.gz": "x",
    "packed.tar.gz": "x",
    "packed.parquet.xz": "x",
    "broken.jsonl": '{"text": "a"}\n\n{"text": \n{"text": "b"}',
    "array.json": '[{"text": "a"},\n {"text": "b"}]',
    "an array.jsonl": '[\n {"text": "a"},\n {"text": "b"}\n]',
    "returns.jsonl": '{"text": "a"}\r{"text": "b"}\r',
    "list.jsonl": '{"text": "a"}\n["b"]',
    "other.jsonl": '{"content": "a", "id": 1}',
    "fieldless.jsonl": "{}",
    "number.jsonl": '{"text": 1}',
    "broken.parquet": "PAR1 nonsense",
    "broken-tokenizer.json": '{"model": 1}',
}


MESSAGES: list[tuple[str, str, dict[str, Any]]] = [
    ("missing.txt", r"files: 'missing.txt' finds no file \(in /.*\); correct", {}),
    (".", r"files: '.' is a folder; write './\*\*/\*.txt'", {}),
    ("odd.json", r"files: '.*odd.json' ends in '.json'; set data.format to jsonl", {}),
    ("packed.tar.gz", r"files: '.*gz' ends in '.tar.gz'; unpack it", {}),
    ("packed.parquet.xz", r"files: '.*xz' ends in '.xz', no Parquet; unpack it", {}),
    ("packed.jsonl.gz", r"files: cannot read '.*gz' \(Not a gzipped file.*repair", {}),
    ("sftpp://h/a", r"files='sftpp://h/a': no file system is called 'sftpp'; did you mean", {}),
    ("s3://b/a", r"files='s3://b/a': .*s3fs.*pip install 'braid\[object-stores\]'", {}),
    ("memory://none/*.txt", r"files: 'memory://none/\*.txt' finds no file; correct the URL", {}),
    ("blank.txt", r"files: 1 file\(s\) hold no text \(1 documents are empty.*give files", {}),
    ("broken.jsonl", r"files: .*broken.jsonl:3 is not JSON \(Expecting value, column.*repair", {}),
    ("array.json", ARRAY, {}),
    ("an array.jsonl", ARRAY, {}),
    ("returns.jsonl", r"files: '.*' has lines that end in a carriage return.* tr '.r' '.n'$", {}),
    ("list.jsonl", r"files: .*list.jsonl:2 holds a list, not an object; write", {}),
    ("other.jsonl", r"text_field: 'text' is not in .*other.jsonl:1, which has 'content', 'id'; set", {}),
    ("fieldless.jsonl", r"text_field: 'text' is not in .*which has no field at all; exclude", {}),
    ("number.jsonl", r"text_field: 'text' is a number in .*number.jsonl:1; name", {}),
    (ROWS, rf"text_field: 'body' is not in '.*{ROWS}', which has 'id', 'text'; set", {"text_field": "body"}),
    (ROWS, rf"text_field: 'id' has type int64 in '.*{ROWS}'; name", {"text_field": "id"}),
    ("broken.parquet", r"files: '.*broken.parquet' is not readable Parquet \(.*\); repair", {}),
    ("torn.parquet", r"files: '.*torn.parquet' is not readable Parquet \(.*\); repair", {}),
    ("good.txt", r"exclude: \['\*.txt'\] leaves no file", {"exclude": ["*.txt"]}),
    ("good.txt", r"tokenizer: cannot read '.*none.json' \(No such file.*give", {"tokenizer": "none.json"}),
    ("good.txt", r"tokenizer: '.*' is not a Hugging Face.* \(.*save", {"tokenizer": "broken-tokenizer.json"}),
]


@pytest.mark.parametrize(("file", "message", "options"), MESSAGES, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_told_in_one_line(
    file: str, message: str, options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    rows = write_rows(tmp_path / ROWS, DOCUMENTS, pa.string()).read_bytes()
    (tmp_path / "torn.parquet").write_bytes(rows[:4] + bytes(200) + rows[204:])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ValueError, match=f"^data.{message}") as fault:
        prepared(tmp_path / "out", file, **options)
    assert "\n" not in str(fault.value)
    assert not (tmp_path / "out").exists()
    assert not hidden(tmp_path)


def test_no_files_are_refused() -> None:
    with pytest.raises(ValueError, match=r"data.files: \[\] names no file"):
        request_of()
