"""Preparation: splits, executors, re-use, interruption and concurrency."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import braid
from braid.jobs.data.executors import Executor, local_map
from braid.jobs.data.prepare import prepare
from braid.jobs.data.tokenise import document_hash
from tests.jobs.corpora import (
    DOCUMENTS,
    contents,
    hidden,
    prepared,
    request_of,
    stored,
    stored_ids,
    train_tokenizer,
    write_lines,
)
from tests.waiting import alive, within

ROOT = Path(braid.__file__).parents[1]


# Splits.


def test_a_document_is_in_the_same_split_whatever_is_beside_it(tmp_path: Path) -> None:
    a = write_lines(tmp_path / "a.jsonl", DOCUMENTS[:40])
    z = write_lines(tmp_path / "z.jsonl", DOCUMENTS[20:][::-1])
    splits = []
    for number, files in enumerate([[a], [z], [a, z]]):
        folder = prepared(tmp_path / f"out{number}", *files).output
        splits.append({split: set(stored(folder, split)) for split in ("train", "validation")})
    together = splits[2]
    assert not together["train"] & together["validation"]
    for alone in splits[:2]:
        assert alone["train"] <= together["train"]
        assert alone["validation"] <= together["validation"]


@pytest.mark.usefixtures("small_items")
@pytest.mark.parametrize(("fraction", "held_out"), [(1e-15, 1), (1 - 1e-15, len(DOCUMENTS) - 1)])
def test_neither_split_is_empty(fraction: float, held_out: int, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", DOCUMENTS)
    folder = prepared(tmp_path / "out", path, validation_fraction=fraction).output
    train, validation = stored(folder, "train"), stored(folder, "validation")
    assert len(validation) == held_out
    assert sorted(train + validation) == sorted(DOCUMENTS)
    assert max(map(document_hash, validation)) < min(map(document_hash, train))


@pytest.mark.parametrize(
    ("kind", "text", "fraction", "train"),
    [
        ("jsonl", "0123456789", 0.2, "01234567"),
        ("txt", "0123456789", 1e-9, "012345678"),
        ("jsonl", "0123456789", 0.99, "0"),
        ("txt", "Ωμέγω", 0.2, "Ωμέγ"),
        ("jsonl", "0", 0.2, "0"),
        ("txt", "0123456789", 0, "0123456789"),
    ],
)
def test_of_one_document_the_tail_is_held_out(
    kind: str, text: str, fraction: float, train: str, tmp_path: Path
) -> None:
    path = tmp_path / f"a.{kind}"
    path.write_text(text if kind == "txt" else json.dumps({"text": text}))
    done = prepared(tmp_path / "out", path, validation_fraction=fraction)
    assert "".join(stored(done.output, "train")) == train
    assert "".join(stored(done.output, "validation")) == text.removeprefix(train)
    ends = np.concatenate([stored_ids(done.output, split) == 256 for split in ("train", "validation")])
    assert (done.documents, ends.sum(), ends[-1]) == (1, 1, True)


def test_of_equal_documents_the_tails_are_held_out(tmp_path: Path) -> None:
    done = prepared(tmp_path / "out", write_lines(tmp_path / "a.jsonl", ["0123456789"] * 3))
    assert stored(done.output, "train") == ["01234567" * 3]
    assert stored(done.output, "validation") == ["89"] * 3


# Executors.


def backwards(function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
    """An executor that does some items twice and answers in another order."""
    for item in random.Random(0).sample(items, len(items)):
        function(item)
        yield function(item)


@pytest.mark.usefixtures("small_items")
def test_the_output_does_not_depend_on_the_executor(tmp_path: Path) -> None:
    request = request_of(write_lines(tmp_path / "a.jsonl", DOCUMENTS))
    executors: list[Executor] = [map, backwards, local_map]
    first, *others = (
        contents(prepare(request, tmp_path / f"out{number}", executor).output)
        for number, executor in enumerate(executors)
    )
    assert len(first) > 10
    assert others == [first, first]


# The output folder.


def test_what_is_not_ours_is_not_replaced(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("text")
    for name in ("home", "a.txt"):
        if name == "home":
            (tmp_path / name).mkdir()
            (tmp_path / name / "thesis.doc").write_text("years of work")
        says = rf"data.directory: '.*{name}' is there and is no prepared data set"
        with pytest.raises(ValueError, match=says):
            prepared(tmp_path / name, source)
    assert (tmp_path / "home/thesis.doc").read_text() == "years of work"
    assert source.read_text() == "text"
    with pytest.raises(ValueError, match=r"data.directory: cannot write beside '.*' \(Not a directory\)"):
        prepared(source / "more" / "out", source)


# Once or again.


def test_what_was_made_is_kept_until_something_changes(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text('{"text": "the one file"}')
    tokenizer = train_tokenizer(tmp_path / "t.json", ["<eos>"])

    def again(**options: Any) -> tuple[bool, str]:
        done = prepare(request_of(source, **options), tmp_path / "deep/out")
        assert not hidden(done.output.parent)
        return done.reused, done.index.fingerprint

    reused, first = again()
    assert not reused
    assert again() == (True, first)
    os.utime(source, ns=(0, 1))  # may have changed
    assert again() == (False, first)
    source.write_text('{"text": "the ONE file"}')
    own = {"tokenizer": str(tokenizer)}
    other = {"validation_fraction": 0.3}, {"encoding_errors": "skip"}, {"format": "jsonl"}, own
    for options in ({}, *other):
        assert not again(**options)[0]
    assert again(**own)[0]
    train_tokenizer(tokenizer, ["</s>", "<pad>"])
    assert not again(**own)[0]
    (tmp_path / "deep/out/train-00000.bin").write_bytes(b"torn")
    assert not again(**own)[0]
    assert again(**own)[0]
    (tmp_path / "deep/out/index.json").unlink()
    os.mkfifo(tmp_path / "deep/out/index.json")  # nobody will ever write to it
    assert not again(**own)[0]
    assert again(**own)[0]


SCRIPT = """
import multiprocessing, sys, time
from pathlib import Path
from braid.actors.config import parse_config
from braid.jobs.data import corpus
from braid.jobs.data.identity import DataRequest
from braid.jobs.data.prepare import prepare

def stop(progress):
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    time.sleep(float(sys.argv[3]))

if __name__ == "__main__":
    corpus._SMALLEST_ITEM_BYTES = 2000
    request = DataRequest.of(parse_config({"data": {"files": [sys.argv[1]], "validation_fraction": 0.2}}))
    print(prepare(request, Path(sys.argv[2]), progress=stop).reused)
"""


def start(folder: Path, pause_s: float) -> subprocess.Popen[str]:
    """Another process that prepares a.jsonl with two workers and pauses after every item."""
    if not (folder / "script.py").exists():  # another process may be reading it
        (folder / "script.py").write_text(SCRIPT)
    paths = [str(folder / name) for name in ("script.py", "a.jsonl", "out")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *paths, str(pause_s)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}  # an error is the last line
    return subprocess.Popen(command, text=True, env=environment, **streams)


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes in /proc")
def test_a_killed_run_leaves_nothing_visible_and_no_process(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", DOCUMENTS)
    with start(tmp_path, pause_s=600) as process:
        assert process.stdout
        workers = [int(pid) for pid in process.stdout.readline().split()]
        process.send_signal(signal.SIGKILL)
    assert workers
    assert not (tmp_path / "out").exists()
    assert len(hidden(tmp_path)) == 1
    assert within(20, lambda: not any(map(alive, workers)))
    assert not prepare(request_of(tmp_path / "a.jsonl"), tmp_path / "out").reused
    assert not hidden(tmp_path)


def test_processes_wait_for_each_other(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", DOCUMENTS)
    processes = [start(tmp_path, pause_s=0.1) for _ in range(3)]
    answers = [process.communicate(timeout=60)[0].splitlines()[-1] for process in processes]
    assert sorted(answers) == ["False", "True", "True"]


def test_a_crash_between_two_renames_loses_no_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former data set takes its name again, also where the next run cannot make another."""
    output = tmp_path / "out"
    first = prepared(output, write_lines(tmp_path / "a.jsonl", DOCUMENTS))
    before, request = contents(output), request_of(tmp_path / "a.jsonl")
    real = Path.rename

    def crashes(self: Path, target: Path) -> Path:
        if target == output:
            raise KeyboardInterrupt  # and nothing is undone, as after SIGKILL
        return real(self, target)

    other = request_of(write_lines(tmp_path / "b.jsonl", DOCUMENTS[:9]))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", crashes)
        with pytest.raises(KeyboardInterrupt):
            prepare(other, output)
    assert not output.exists()
    again = prepare(request, output)
    assert again.reused
    assert again.index == first.index
    assert contents(output) == before
    assert not hidden(tmp_path)
