"""Tokenizers and weights by their names on the Hugging Face Hub, which stands in for itself on loopback.

Nothing here needs a network; that the real Hub answers alike is not tested.
"""

import json
import socket
from collections.abc import Iterator
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
from tests.jobs.hub_stub import GATED, Hub, repository, serving
from tests.jobs.mistakes import make

NEVER = ("pytorch_model.bin", "README.md", "modeling.py", "onnx/config.json")
"""Files that are not fetched."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "corpus.txt").write_text("".join(DOCUMENTS) * 40, encoding="utf-8")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return tmp_path / "work"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """With the repositories ``org/toks`` (a tokenizer) and ``org/model`` (weights too)."""
    made = tmp_path / "made"
    train_tokenizer(tmp_path / "tokenizer.json", ["</s>", "<s>"], DOCUMENTS, 261)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.no_padding()  # else it has one token more than the model
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    fast.chat_template = "{{ messages }}"
    fast.save_pretrained(made)
    tokenizer = {**repository(made), **dict.fromkeys(NEVER, b"not to be fetched")}
    random_model("llama", 0).save_pretrained(made)
    with serving({"org/toks": tokenizer, "org/model": {**tokenizer, **repository(made)}}) as stub:
        monkeypatch.setenv("HF_ENDPOINT", stub.url)
        yield stub


def fetched(hub: Hub) -> list[str]:
    return [path.partition("/")[2] for path in hub.read]


def test_a_tokenizer_is_fetched_once_and_then_lies_here(
    folder: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(folder, data={"tokenizer": "org/toks"}, telemetry={"page": False})
    done = braid(folder, "train", "run.yaml", "--until", "1")
    assert done.code == 0, done.errors
    assert "'</s>'" in done.output
    assert {*fetched(hub)} <= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert len(fetched(hub)) == len({*fetched(hub)})
    run = folder / "runs" / "run"
    written = yaml.safe_load((run / "config.yaml").read_text())["data"]["tokenizer"]
    assert written.endswith(f"models--org--toks/snapshots/{hub.commit}"), (
        "this state of the repository, for good"
    )
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (run / "tokenizer" / name).read_bytes() == hub.repositories["org/toks"][name]
    with socket.create_server(("127.0.0.1", 0)) as closed:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
    again = braid(folder, "train", "run.yaml", "--resume", "--until", "2")
    assert again.code == 0, again.errors


def test_weights_are_fetched_without_pickles_and_code(folder: Path, hub: Hub) -> None:
    write_config(folder, data={})
    config = yaml.safe_load((folder / "run.yaml").read_text())
    config["model"] = {"initial": "org/model"}
    (folder / "run.yaml").write_text(json.dumps(config))
    done = braid(folder, "train", "run.yaml", "--dry-run")
    assert done.code == 0, done.errors
    assert "model.safetensors" in fetched(hub)
    assert not {*fetched(hub)} & {*NEVER}


MISTAKES = {
    "data.tokenizer=org/absent": ("data.tokenizer='org/absent' is no path here", "correct the name"),
    f"data.tokenizer={GATED}": (f"data.tokenizer='{GATED}'", "that you may read", "hf auth login"),
    "model.initial=org/absent": ("model.initial=", "org/absent", "correct the name"),
    "data.tokenizer=org/a--b": ("data.tokenizer='org/a--b'", "Hub: "),
}


def test_repositories_that_cannot_be_had(folder: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(folder)
    calls = [(folder, ["train", "run.yaml", "--set", words]) for words in MISTAKES]
    for made, says in zip(make(calls), MISTAKES.values(), strict=True):
        refused(made, *says)  # type: ignore[arg-type]
        assert made.errors.count("\n") == 1, made.errors
        assert not made.loaded
        assert not made.started
    with socket.create_server(("127.0.0.1", 0)) as closed:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
    (made,) = make([(folder, ["train", "run.yaml", "--set", "data.tokenizer=org/toks"])])
    refused(made, "data.tokenizer='org/toks'", "does not answer", "give a path")  # type: ignore[arg-type]
    assert not (folder / "runs").exists()


def test_which_values_are_names(tmp_path: Path) -> None:
    (tmp_path / "mine" / "folder").mkdir(parents=True)
    for value, named in {
        "org/name": True,
        "mine/folder": False,
        "toks/tokenizer.json": False,
        "name": False,
        "./org/name": False,
        "a/b/c": False,
    }.items():
        assert is_hub_name("data.tokenizer", value, tmp_path) == named, value
    assert not is_hub_name("data.directory", "org/name", tmp_path)
    config = parse_config({"data": {"tokenizer": "org/name"}, "model": {"initial": "mine/folder"}})
    found = anchored(config, tmp_path)
    assert (found.data.tokenizer, found.model.initial) == ("org/name", tmp_path / "mine" / "folder")
