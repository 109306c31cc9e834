"""Text there and back: a corpus and a tokenizer of one's own or of imported weights; what exports have."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from tokenizers import Tokenizer as Backend
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from tests.end_to_end.command import ROOT, write_config
from tests.foreign_models import random_model
from tests.in_process import Capture, called
from tests.jobs.corpora import train_tokenizer

DOCUMENTS = ["one sheep, two sheep, three sheep sleep", "we count: naïve 語 <stop> and no end"]
Command = Callable[..., str]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Command:
    """``braid ARGUMENTS`` in this process and a folder of its own; what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")

    def call(*arguments: str) -> str:
        done = called(capsys, *arguments)
        assert done.code == 0, done.errors
        return done.output + done.errors

    return call


def write_corpus(path: Path) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS * 20)
    with pa.CompressedOutputStream(str(path), "zstd") as file:
        file.write(lines.encode())


def goes_on(folder: Path, text: str) -> str:
    """What the exported model makes of the beginning of a text, to the token that ends it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    begin = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        (ids,) = model.generate(**begin, max_new_tokens=60, do_sample=False, pad_token_id=0)
    assert int(ids[-1]) == tokenizer.eos_token_id == model.config.eos_token_id
    return str(tokenizer.decode(ids[:-1]))


def test_a_model_of_my_own_text_ends_where_texts_end(command: Command, tmp_path: Path) -> None:
    """A tokenizer of one's own: `test_generate`."""
    write_corpus(tmp_path / "mine.jsonl.zst")
    end, number = "<|endoftext|>", 256
    write_config(
        tmp_path,
        data={"files": ["mine.jsonl.zst"], "validation_fraction": 0},
        model={"hidden": 64, "layers": 2, "sequence": 64},
        train={"steps": 70, "lr": 6e-3, "global_batch": 8, "micro_batch": 8},
        telemetry={"page": False, "spans": False},
    )
    said = command("train", "run.yaml")
    assert f"documents end with token {number}, {end!r}" in said
    (index,) = (tmp_path / "runs" / "data").glob("*/index.json")
    content = json.loads(index.read_text())
    assert (content["end_token"], content["end_of_document"]) == (end, number)
    command("checkpoint", "export", "runs/run", "exported")
    assert goes_on(tmp_path / "exported", "one sheep,") == DOCUMENTS[0]
    assert GenerationConfig.from_pretrained(tmp_path / "exported").eos_token_id == number
    mask = os.umask(0)
    os.umask(mask)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "exported").iterdir()}
    assert modes == {0o666 & ~mask}
    found = AutoTokenizer.from_pretrained(tmp_path / "exported")
    text = "".join(map(chr, range(0x20, 0x250))) + "語 🙂\n\t  end"
    assert found.encode(text, add_special_tokens=False) == list(text.encode())
    assert found.decode(list(text.encode())) == text


def test_tokenizer_and_settings_of_imported_weights_come_back(command: Command, tmp_path: Path) -> None:
    file = train_tokenizer(tmp_path / "t.json", ["<s>", "</s>", "<stop>"], DOCUMENTS, 261)
    write_corpus(tmp_path / "mine.jsonl.zst")
    theirs = tmp_path / "theirs"
    model = random_model("llama", 0)
    model.config.bos_token_id, model.config.eos_token_id = 0, 2
    ends: dict[str, Any] = {"eos_token_id": [2], "bos_token_id": 0}
    model.generation_config = GenerationConfig(temperature=0.7, do_sample=True, **ends)
    model.save_pretrained(theirs)
    backend = Backend.from_file(str(file))
    backend.no_truncation()
    backend.no_padding()  # else it has one token more than the model
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<stop>")
    fast.save_pretrained(theirs)
    content = {"model": {"initial": "theirs"}, "data": {"files": ["mine.jsonl.zst"], "end_token": "</s>"}}
    content["train"] = {"steps": 1, "global_batch": 2, "micro_batch": 2}
    (tmp_path / "run.yaml").write_text(json.dumps({**content, "cluster": {"launcher": "processes"}}))
    command("train", "run.yaml")
    command("checkpoint", "export", "runs/run", "ours")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (theirs / name).read_bytes()
    settings, found = (
        json.loads((folder / "generation_config.json").read_text()) for folder in (theirs, tmp_path / "ours")
    )
    assert found == {**settings, "eos_token_id": [2, 1]}
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, found["eos_token_id"])
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (theirs, tmp_path / "ours"))
    assert before(DOCUMENTS)["input_ids"] == after(DOCUMENTS)["input_ids"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    others = ("name=other", "data.tokenizer=bytes", "data.end_token=null")
    command("train", "run.yaml", *(word for one in others for word in ("--set", one)))
    command("checkpoint", "export", "runs/other", "other")
    kept = json.loads((tmp_path / "other" / "generation_config.json").read_text())
    assert (kept["temperature"], kept["eos_token_id"], kept.get("bos_token_id")) == (0.7, 256, None)


def test_names_that_are_not_ascii_under_a_locale_of_ascii(tmp_path: Path) -> None:
    """Folder, configuration, corpus: Python reads such names in a way of its own there."""
    folder = tmp_path / "Läufe 語"
    folder.mkdir()
    (folder / "tëxt.txt").write_text("text " * 400, encoding="utf-8")
    config = write_config(folder, data={"files": ["tëxt.txt"]}, telemetry={"page": False})
    config = config.rename(config.with_name("lauf-ä.yaml"))
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "braid", "train", config.name, "--set", "runs=läufe"]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **locale}, capture_output=True, encoding="utf-8", timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "Läufe 語/läufe" in done.stdout
    assert (folder / "läufe" / "run" / "report.json").is_file()
