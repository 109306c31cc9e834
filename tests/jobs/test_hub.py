"""Data sets through the library `datasets`: folders here, and a Hub that a test serves on loopback."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from braid.actors.config import Config, ConfigError, parse_config
from braid.jobs.data import hub
from braid.jobs.data.corpus import MissingSourcesError
from braid.jobs.data.identity import DataRequest
from braid.jobs.data.prepare import Prepared, prepare
from tests.end_to_end.command import braid
from tests.jobs.corpora import DOCUMENTS, prepared, stored, stored_ids, write_rows
from tests.jobs.hub_stub import serving


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The library's cache, in the test's folder; nothing that an earlier test has loaded."""
    folder = tmp_path / "hf"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder))
    monkeypatch.chdir(tmp_path)
    hub._rows.cache_clear()
    datasets.disable_progress_bars()
    yield folder
    datasets.enable_progress_bars()
    hub._rows.cache_clear()


def of_hub(id: str | Path, **more: Any) -> Config:
    own = {key: more.pop(key) for key in ("subset", "split", "column", "streaming") if key in more}
    return parse_config({"data": {"validation_fraction": 0.2, **more, "hub": {"id": str(id), **own}}})


def made(folder: Path, id: str | Path, **more: Any) -> Prepared:
    hub._rows.cache_clear()
    return prepare(DataRequest.of(of_hub(id, **more)), folder, map)


def texts(folder: Path) -> list[str]:
    return stored(folder, "train") + stored(folder, "validation")


def write_sets(folder: Path) -> Path:
    (folder / "data").mkdir(parents=True)
    import pyarrow as pa

    write_rows(folder / "data" / "train-00000-of-00002.parquet", DOCUMENTS[:40], pa.string())
    write_rows(folder / "data" / "train-00001-of-00002.parquet", [*DOCUMENTS[40:50], None, ""], pa.string())
    write_rows(folder / "data" / "test-00000-of-00001.parquet", DOCUMENTS[50:], pa.string())
    return folder


def test_tokens_are_those_of_our_own_reader(tmp_path: Path) -> None:
    folder = write_sets(tmp_path / "set")
    ours = prepared(tmp_path / "ours", folder / "data" / "train-*.parquet")
    for name, more in (("whole", {}), ("streamed", {"streaming": True})):
        done = made(tmp_path / name, folder, **more)
        assert done.index.documents_empty == ours.index.documents_empty == 2
        for split in ("train", "validation"):
            assert stored_ids(done.output, split).tolist() == stored_ids(ours.output, split).tolist()
    again = prepare(DataRequest.of(of_hub(folder, streaming=True)), tmp_path / "whole", map)
    assert again.reused, "streamed or not, the tokens are the same"


def test_splits_and_their_parts(tmp_path: Path) -> None:
    folder = write_sets(tmp_path / "set")
    for name, split, expected in (
        ("test", "test", DOCUMENTS[50:]),
        ("part", "train[:25%]", DOCUMENTS[:13]),
        ("sum", "train+test", [*DOCUMENTS[:50], *DOCUMENTS[50:]]),
    ):
        made(tmp_path / name, folder, split=split)
        assert sorted(texts(tmp_path / name)) == sorted(expected)


def test_work_is_cut_by_the_data_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_sets(tmp_path / "set")
    request = DataRequest.of(of_hub(folder))
    assert len(request.items()) == 1
    monkeypatch.setattr(hub, "_ROWS", (7, 7))
    assert [part.ranges[0].start for part in request.items()] == [*range(0, 52, 7)]
    many = prepare(request, tmp_path / "many", map)
    one = prepared(tmp_path / "ours", folder / "data" / "train-*.parquet")
    assert stored_ids(many.output, "train").tolist() == stored_ids(one.output, "train").tolist()
    assert len(DataRequest.of(of_hub(folder, streaming=True)).items()) == 2, "one for each file"


def test_another_column_split_or_version_is_another_data_set(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    lines = [json.dumps({"a": f"first {n}", "b": f"second {n}"}) for n in range(30)]
    (folder / "train.jsonl").write_text("\n".join(lines))
    first = DataRequest.of(of_hub(folder, column="a"))
    assert DataRequest.of(of_hub(folder, column="a")).digest == first.digest
    assert DataRequest.of(of_hub(folder, column="b")).digest != first.digest
    done = prepare(first, tmp_path / "out", map)
    assert first.digest == done.index.request
    (folder / "train.jsonl").write_text("\n".join(lines[:-1]))
    assert DataRequest.of(of_hub(folder, column="a")).digest != first.digest


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"id": "./nothing"}, "data.hub.id='./nothing' is no folder; correct the path"),
        ({"id": "set"}, "data.hub.id='set' is also a folder here; write ./set for the folder"),
        ({"id": "./empty"}, "data.hub: './empty' cannot be looked up .*; correct data.hub.id"),
        ({"subset": "en"}, "data.hub: './set' cannot be looked up .BuilderConfig 'en' not found.*'default'"),
        ({"split": "trian"}, "data.hub.split='trian' is not in './set', which has train, test"),
        ({"split": "train[:x%]"}, "data.hub: './set' cannot be loaded .*train.:x%"),
        ({"column": "body"}, "data.hub.column='body' is not in './set', which has id, text"),
        ({"column": "id"}, "data.hub.column='id' of './set' holds int, not text; name a column of text"),
        ({"streaming": True, "column": "id"}, "data.hub.column='id' of './set' holds int, not text"),
        ({"id": "parquet"}, "data.hub.id='parquet' is a format, not a data set; .* give files to data.files"),
    ],
)
def test_what_is_not_there_is_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    write_sets(tmp_path / "set")
    (tmp_path / "empty").mkdir()
    kind = MissingSourcesError if "is no folder" in says or "looked up" in says else ConfigError
    with pytest.raises(kind, match=says) as fault:  # a run may have the tokens of what is missing
        made(tmp_path / "out", **{"id": "./set", **change})
    assert "\n" not in str(fault.value)
    assert not (tmp_path / "out").exists()


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    folder = write_sets(tmp_path / "set")
    (folder / "data" / "train-00001-of-00002.parquet").write_bytes(b"PAR1")
    for streaming in (False, True):
        with pytest.raises(ValueError, match=r"data.hub: '.*set' cannot be (loaded|read) "):
            made(tmp_path / "out", folder, streaming=streaming)


def test_a_missing_library_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"data.hub needs the package datasets .*pip install 'braid\[hub\]'"):
        made(tmp_path / "out", write_sets(tmp_path / "set"))


def test_a_commit_of_the_hub_is_what_was_found_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command itself, as the library reads the Hub's address once; the real Hub is not asked."""
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in DOCUMENTS)
    commits = ["a" * 40, "b" * 40]
    for name, value in (("HF_HOME", str(tmp_path / "home")), ("HF_HUB_DISABLE_XET", "1")):
        monkeypatch.setenv(name, value)

    def command(id: str = "me/texts", streaming: bool = False) -> tuple[int, str]:
        content = {"data": {"hub": {"id": id, "streaming": streaming}}, "cluster": {"launcher": "processes"}}
        (tmp_path / "run.yaml").write_text(json.dumps(content))
        done = braid(tmp_path, "prepare", "run.yaml")
        return done.code, done.output + done.errors

    with serving({"me/texts": {"train.jsonl": lines}}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.commit = commits[0]
        code, said = command(streaming=True)
        assert (code, f"of {len(DOCUMENTS)} documents" in said, "prepared before" in said) == (0, True, False)
        code, said = command()
        assert (code, "prepared before" in said) == (0, True), "streamed or not"
        hub.commit = commits[1]
        hub.repositories["me/texts"]["train.jsonl"] += b'{"text": "one more"}\n'
        code, said = command()
        told = f"of {len(DOCUMENTS) + 1} documents" in said, "prepared before" in said
        assert (code, *told) == (0, True, False)
        read = {path.partition("/")[0] for path in hub.read if path.endswith("train.jsonl")}
        assert read == {*commits}, "commits, no branch"
        code, said = command("me/other")
        assert (code, "data.hub: 'me/other' cannot be looked up" in said) == (2, True)
    code, said = command("me/other")
    assert (code, said.count("\n"), "see to the network" in said) == (2, 1, True), "without many tries"
