"""Tokenizers and weights by their names on the Hugging Face Hub, which stands in for itself on loopback.

Nothing here needs a network; that the real Hub answers alike is not tested.
"""

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from braid.actors.config import parse_config
from braid.actors.config.paths import anchored, is_hub_name
from tests.end_to_end.command import braid, write_config
from tests.foreign_models import random_model
from tests.in_process import refused
from tests.jobs.corpora import DOCUMENTS, train_tokenizer
from tests.jobs.hub_stub import COMMIT, GATED, hub
from tests.jobs.mistakes import make


@dataclass
class Place:
    """A folder to work in, the Hub's repositories, and the files that were fetched."""

    folder: Path
    repositories: Path
    fetched: list[str] = field(default_factory=list)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """With the repositories ``org/toks`` (a tokenizer) and ``org/model`` (weights too)."""
    made = Place(tmp_path / "work", tmp_path / "hub")
    made.folder.mkdir()
    for name in ("toks", "model"):
        folder = made.repositories / "org" / name
        folder.mkdir(parents=True)
        backend = Backend.from_file(
            str(train_tokenizer(folder / "tokenizer.json", ["</s>", "<s>"], DOCUMENTS, 261))
        )
        backend.no_padding()  # else it has one token more than the model
        fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
        fast.chat_template = "{{ messages }}"
        fast.save_pretrained(folder)
        for more in ("pytorch_model.bin", "README.md", "modeling.py", "onnx/config.json"):
            (folder / more).parent.mkdir(exist_ok=True)
            (folder / more).write_text("not to be fetched")
    random_model("llama", 0).save_pretrained(folder)
    (made.folder / "corpus.txt").write_text("".join(DOCUMENTS) * 40, encoding="utf-8")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with hub(made.repositories, made.fetched) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield made


def test_a_tokenizer_is_fetched_once_and_then_lies_here(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(place.folder, data={"tokenizer": "org/toks"}, telemetry={"page": False})
    done = braid(place.folder, "train", "run.yaml", "--until", "1")
    assert done.code == 0, done.errors
    assert "'</s>'" in done.output
    assert {*place.fetched} <= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert len(place.fetched) == len({*place.fetched})
    run = place.folder / "runs" / "run"
    written = yaml.safe_load((run / "config.yaml").read_text())["data"]["tokenizer"]
    assert written.endswith(f"models--org--toks/snapshots/{COMMIT}"), "this state of the repository, for good"
    theirs = place.repositories / "org" / "toks"
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (run / "tokenizer" / name).read_bytes() == (theirs / name).read_bytes()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
    again = braid(place.folder, "train", "run.yaml", "--resume", "--until", "2")
    assert again.code == 0, again.errors


def test_weights_are_fetched_without_pickles_and_code(place: Place) -> None:
    write_config(place.folder, data={})
    config = yaml.safe_load((place.folder / "run.yaml").read_text())
    config["model"] = {"initial": "org/model"}
    (place.folder / "run.yaml").write_text(json.dumps(config))
    done = braid(place.folder, "train", "run.yaml", "--dry-run")
    assert done.code == 0, done.errors
    assert "model.safetensors" in place.fetched
    assert not {*place.fetched} & {"pytorch_model.bin", "README.md", "modeling.py", "onnx/config.json"}


MISTAKES = {
    "data.tokenizer=org/absent": ("data.tokenizer='org/absent' is no path here", "correct the name"),
    f"data.tokenizer={GATED}": (f"data.tokenizer='{GATED}'", "registered users", "hf auth login"),
    "model.initial=org/absent": ("model.initial=", "org/absent", "correct the name"),
    "data.tokenizer=org/a--b": ("data.tokenizer='org/a--b'", "Hub: "),
}


def test_repositories_that_cannot_be_had(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(place.folder)
    calls = [(place.folder, ["train", "run.yaml", "--set", words]) for words in MISTAKES]
    for made, says in zip(make(calls), MISTAKES.values(), strict=True):
        refused(made, *says)  # type: ignore[arg-type]
        assert made.errors.count("\n") == 1, made.errors
        assert not made.loaded
        assert not made.started
    with socket.create_server(("127.0.0.1", 0)) as closed:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
    (made,) = make([(place.folder, ["train", "run.yaml", "--set", "data.tokenizer=org/toks"])])
    refused(made, "data.tokenizer='org/toks'", "does not answer", "give a path")  # type: ignore[arg-type]
    assert not (place.folder / "runs").exists()


def test_which_values_are_names(tmp_path: Path) -> None:
    (tmp_path / "mine" / "folder").mkdir(parents=True)
    for value, named in {
        "org/name": True,
        "meta-llama/Llama-3.1-8B": True,
        "mine/folder": False,
        "toks/tokenizer.json": False,
        "name": False,
        "./org/name": False,
        "a/b/c": False,
        "/org/name": False,
    }.items():
        assert is_hub_name("data.tokenizer", value, tmp_path) == named, value
    assert not is_hub_name("data.directory", "org/name", tmp_path)
    config = parse_config({"data": {"tokenizer": "org/name"}, "model": {"initial": "mine/folder"}})
    found = anchored(config, tmp_path)
    assert (found.data.tokenizer, found.model.initial) == ("org/name", tmp_path / "mine" / "folder")
