"""What is told of a run before it begins, though nothing is wrong."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from braid.actors.config import Config, parse_config
from braid.jobs.data.prepare import Prepared
from braid.jobs.remarks import on_data, on_learning_rate
from tests.jobs.corpora import prepared


def configured(folder: Path, **sections: Any) -> Config:
    return parse_config({"name": "run", "runs": str(folder), **sections})


def written(folder: Path, content: bytes, **options: Any) -> Prepared:
    (folder / "a.jsonl").write_bytes(content)
    return prepared(folder / "data", folder / "a.jsonl", **options)


def line(text: str) -> bytes:
    return json.dumps({"text": text}).encode() + b"\n"


def test_what_was_left_out_is_told(tmp_path: Path) -> None:
    content = line("some text") * 40 + line(" ") * 2 + line("") + b'{"text": "\xff"}\n'
    done = written(tmp_path, content, encoding_errors="skip")
    config = configured(tmp_path, model={"sequence": 1}, train={"validation_samples": 1})
    assert list(on_data(config, done)) == [
        "data.files: 1 document not in UTF-8 left out; convert the files, or keep what can be read with "
        "data.encoding_errors=replace",
        "data.files: 3 documents without any text left out",
    ]


def test_splits_that_are_too_small_are_told(tmp_path: Path) -> None:
    done = written(tmp_path, b"".join(line(f"{number:09}") for number in range(20)), validation_fraction=0.2)
    held_out = done.validation_tokens // 10
    assert 2 <= held_out <= 8, "documents of ten tokens"
    train = {"global_batch": 40, "micro_batch": 4, "validation_samples": 30}
    windows = (done.train_tokens - 1) // 10
    told = list(on_data(configured(tmp_path, model={"sequence": 10}, train=train), done))
    assert told == [
        f"the training split has {done.train_tokens} tokens, {windows} samples of "
        f"model.sequence=10, and every step takes train.global_batch=40, the same text several times; "
        f"add text to data.files",
        f"validation takes all {held_out - 1} samples that are held out, where train.validation_samples=30 "
        f"asks for more; raise data.validation_fraction, or add text to data.files",
    ]
    enough = {"global_batch": 4, "validation_samples": 1}
    assert list(on_data(configured(tmp_path, model={"sequence": 10}, train=enough), done)) == []


@pytest.mark.parametrize(("warmup", "told"), [(100, 0), (101, 1), (500, 1)])
def test_a_warm_up_that_does_not_end_is_told(tmp_path: Path, warmup: int, told: int) -> None:
    found = list(
        on_learning_rate(configured(tmp_path, train={"steps": 100, "warmup_steps": warmup}), resume=False)
    )
    assert len(found) == told
    assert all(f"train.warmup_steps={warmup} is more than train.steps=100" in text for text in found)


def cosine(step: int, steps: int) -> float:
    """Of step ``step``, from 1, with 10 steps of warm-up, from 1e-3 down to a tenth."""
    share = (step - 1 - 10) / (steps - 10)
    return 1e-4 + 9e-4 * (1 + math.cos(math.pi * share)) / 2


@pytest.mark.parametrize(("steps", "told"), [(100, False), (300, True)])
def test_a_rate_that_leaps_on_resuming_is_told(tmp_path: Path, steps: int, told: bool) -> None:
    """The decay of a run of 100 steps is nearly over in step 90; in one of 300 it has hardly begun."""
    config = configured(tmp_path, train={"steps": steps})
    config.run_directory.mkdir(parents=True)
    last = {"step": 90, "lr": cosine(90, 100)}
    (config.run_directory / "metrics.jsonl").write_text(json.dumps(last) + "\n")
    found = list(on_learning_rate(config, resume=True))
    assert len(found) == told
    if told:
        assert f"from {cosine(90, 100):.3g} in step 90 to {cosine(91, 300):.3g} in the next one" in found[0]
    assert list(on_learning_rate(config, resume=False)) == []
