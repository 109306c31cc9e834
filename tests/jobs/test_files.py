"""Compressed files, and files at URLs, give the same tokens as plain ones here."""

import bz2
import gzip
import lzma
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest

from braid.jobs.data.corpus import cut
from braid.jobs.data.executors import Executor, local_map
from braid.jobs.data.prepare import prepare
from tests.jobs.corpora import DOCUMENTS, request_of, stored, write_lines, write_rows
from tests.servers import Asked, served


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return bytes(sink.getvalue())


pytestmark = pytest.mark.usefixtures("small_items")
PACKED = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd}


def tokens(folder: Path, *files: Path | str, executor: Executor = map) -> dict[str, list[str]]:
    done = prepare(request_of(*files), folder, executor)
    return {split: stored(done.output, split) for split in ("train", "validation")}


@pytest.mark.parametrize("ending", PACKED)
def test_compressed_files(tmp_path: Path, ending: str) -> None:
    """Two streams one after the other, as parallel compressors write them; lines are counted as in a plain
    file."""
    path = write_lines(tmp_path / "a.jsonl", DOCUMENTS)
    (tmp_path / "a.txt").write_text("one document")
    lines = path.read_bytes()
    pack = PACKED[ending]
    (tmp_path / f"b.jsonl.{ending}").write_bytes(pack(lines[:500]) + pack(lines[500:]))
    (tmp_path / f"b.txt.{ending}").write_bytes(pack(b"one document"))
    packed = sorted(tmp_path.glob(f"b.*.{ending}"))
    plain = tokens(tmp_path / "plain", tmp_path / "a.*")
    assert tokens(tmp_path / "packed", *packed) == plain
    assert len(cut(request_of(packed[0]).sources, "text")) == 1
    torn = tmp_path / f"torn.jsonl.{ending}"
    torn.write_bytes(pack(lines)[:-9])
    with pytest.raises(ValueError, match=r"^data.files: cannot read '.*torn.*' \(.+\); repair"):
        tokens(tmp_path / "torn", torn)
    bad = tmp_path / f"bad.jsonl.{ending}"
    bad.write_bytes(pack(b'{"text": "a"}\n\n{'))
    with pytest.raises(ValueError, match=rf"^data.files: .*bad.jsonl.{ending}:3 is not JSON"):
        tokens(tmp_path / "bad", bad)


@pytest.fixture
def memory() -> Iterator[str]:
    yield "memory://corpus"
    fsspec.filesystem("memory").rm("/corpus", recursive=True)


def test_files_at_urls(memory: str, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_lines(folder / "a.jsonl", DOCUMENTS)
    (folder / "b.txt.gz").write_bytes(gzip.compress(b"one document"))
    write_rows(folder / "c.parquet", DOCUMENTS, pa.string())
    files = fsspec.filesystem("memory")
    for path in folder.iterdir():
        files.pipe(f"/corpus/sub/{path.name}", path.read_bytes())
    here = tokens(tmp_path / "here", folder / "*")
    assert tokens(tmp_path / "there", f"{memory}/**/*.*") == here
    files_there = f"{memory}/sub/a.jsonl", f"{memory}/*/b.txt.gz"
    request = request_of(*files_there)
    paths = [source.path for source in request.sources]
    assert paths == ["memory:///corpus/sub/b.txt.gz", "memory://corpus/sub/a.jsonl"]
    assert len(cut(request.sources, "text")) > 2, "cut where it can be"
    with pytest.raises(ValueError, match=r"^data.files: 'memory://corpus/sub' is a folder; write"):
        request_of(f"{memory}/sub")
    files.pipe("/corpus/sub/b.txt.gz", gzip.compress(b"two document"))
    assert request_of(*files_there).digest != request.digest


def test_urls_of_files_here_are_paths(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    for url in ((tmp_path / "a.txt").as_uri(), f"local://{tmp_path}/*.txt"):
        (source,) = request_of(url).sources
        assert source.path == str(tmp_path / "a.txt")


def test_files_of_the_web(tmp_path: Path) -> None:
    """Read by processes of their own, from a server that sends no parts."""

    def answer(asked: Asked) -> tuple[int, bytes]:
        file = tmp_path / asked.path.lstrip("/")
        return (200, file.read_bytes()) if file.exists() else (404, b"")

    write_lines(tmp_path / "a.jsonl", DOCUMENTS)
    (tmp_path / "b.jsonl.zst").write_bytes(zstd((tmp_path / "a.jsonl").read_bytes()))
    with served(answer, "application/octet-stream") as port:
        web = f"http://127.0.0.1:{port}"
        there = tokens(tmp_path / "there", f"{web}/a.jsonl", f"{web}/b.jsonl.zst", executor=local_map)
        with pytest.raises(ValueError, match=r"^data.files: 'http://.*none.txt' finds no file"):
            request_of(f"{web}/none.txt")
    assert there == tokens(tmp_path / "here", tmp_path / "a.jsonl", tmp_path / "b.jsonl.zst")
