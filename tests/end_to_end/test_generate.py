"""Text and scores of a run's own model: what it says, where it stops, that it is the model that trained."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from braid.actors.controller.records.json_lines import read_lines
from braid.jobs.bench.plain_torch import PlainModel, load_named
from braid.jobs.commands.checkpoint import chosen
from braid.jobs.commands.models import opened, weights_of
from tests.actors.saved import flip
from tests.end_to_end.command import write_config
from tests.end_to_end.runs import Run as Finished
from tests.end_to_end.test_text import goes_on
from tests.in_process import Capture, Outcome, called, refused
from tests.jobs.corpora import train_tokenizer

SEED = int(os.environ["BRAID_TEST_SEED"])
DOCUMENTS = [
    "one sheep, two sheep, three sheep sleep",
    "Q: how many sheep? A: three, and all of them sleep",
]
TEMPLATE = (
    "{% for message in messages %}Q: {{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %} A:{% endif %}"
)
Command = Callable[..., Outcome]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With ``runs/run``, which has learned `DOCUMENTS` by heart, and ``exported``, made of it."""
    from braid.actors.config import load_config
    from braid.jobs.training.train import train

    folder = tmp_path_factory.mktemp("generate")
    (folder / "mine.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS * 20))
    train_tokenizer(folder / "tokenizer.json", ["</s>", "<stop>"], DOCUMENTS, 261)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<stop>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = write_config(
        folder,
        runs=str(folder / "runs"),
        data={"files": [str(folder / "mine.jsonl")], "tokenizer": str(folder), "validation_fraction": 0},
        model={"hidden": 64, "layers": 2, "sequence": 64},
        train={"steps": 80, "lr": 6e-3, "global_batch": 8, "micro_batch": 8},
        checkpoint={"every": 40},
        telemetry={"page": False, "spans": False},
    )
    train(load_config(config))
    return folder


@pytest.fixture
def command(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Command:
    """``braid ARGUMENTS`` in this process and the folder."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "300")
    return lambda *arguments: called(capsys, *arguments)


def said(outcome: Outcome) -> str:
    """The text that was generated; its line ends."""
    assert outcome.code == 0, outcome.errors
    assert outcome.output.endswith("\n")
    return outcome.output[:-1]


def plain_model(run: Path, step: int = 80) -> PlainModel:
    """The model of a checkpoint, in plain PyTorch, from its parameters by name."""
    shape = chosen(run).shape
    assert shape is not None
    finished = Finished(config=None, shape=shape, directory=run, events=())  # type: ignore[arg-type]
    model = PlainModel(shape, torch.float32)
    load_named(model, finished.parameters(step))
    return model


@torch.no_grad()
def plain_logits(model: PlainModel, ids: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([ids]))[0]
    return logits


def test_the_model_is_the_one_that_trained(folder: Path) -> None:
    """Logits of what generation reads, on tokens drawn anew."""
    for step in (40, 80):
        with weights_of(folder / "runs" / "run", str(step)) as weights:
            model, _ = opened(weights, weights)
            ids = torch.randint(model.config.vocab_size, (64,), generator=torch.Generator().manual_seed(SEED))
            with torch.no_grad():
                found = model(ids[None]).logits[0]
        assert not weights.exists(), "the export is removed"
        expected = plain_logits(plain_model(folder / "runs" / "run", step), ids.tolist())
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert expected.std() > 0.1, "nothing to tell apart"


def test_it_goes_on_to_the_end_of_the_text(folder: Path, command: Command) -> None:
    """As a loop over the plain model does, which takes the likeliest token until that ends the document."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    begin = "one sheep,"
    text = said(command("generate", "runs/run", "--prompt", begin))
    assert begin + text == DOCUMENTS[0]
    ids, model = tokenizer(begin, add_special_tokens=False).input_ids, plain_model(folder / "runs" / "run")
    while ids[-1] != tokenizer.eos_token_id:
        ids.append(int(plain_logits(model, ids)[-1].argmax()))
    assert tokenizer.decode(ids[:-1]) == DOCUMENTS[0]
    short = said(command("generate", "runs/run", "--prompt", begin, "--max-tokens", 2))
    assert text.startswith(short)
    assert len(short) < len(text)


def test_a_question_in_the_chat_template(folder: Path, command: Command) -> None:
    question = ("--prompt", "how many sheep?")
    answer = DOCUMENTS[1].partition(" A:")[2]
    assert said(command("generate", "runs/run", *question, "--chat")) == answer
    assert said(command("generate", "runs/run", *question)) != answer
    assert command("checkpoint", "export", "runs/run", "exported").code == 0
    assert said(command("generate", "exported", *question, "--chat")) == answer
    tokenizer = AutoTokenizer.from_pretrained(folder / "exported")
    messages = [{"role": "user", "content": "how many sheep?"}]
    made = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert made == "Q: how many sheep? A:"
    assert goes_on(folder / "exported", "one sheep,") == DOCUMENTS[0], "in transformers"


def test_draws_follow_their_seed_and_stop_where_the_sequence_is_full(command: Command) -> None:
    call = ("generate", "runs/run", "--prompt", "sheep", "--temperature", "3", "--max-tokens", "40")
    first, again, other = (said(command(*call, "--seed", seed)) for seed in (1, 1, 2))
    assert first == again != other
    narrow = said(command("generate", "runs/run", "--prompt", "one sheep,", "--top-p", "1e-9"))
    assert narrow == said(command("generate", "runs/run", "--prompt", "one sheep,", "--temperature", "0"))
    call = ("generate", "runs/run", "--prompt", "sheep " * 20, "--temperature", "9", "--max-tokens", "500")
    outcome = command(*call, "--seed", SEED)
    said(outcome)
    if outcome.errors:  # else the token that ends the text was drawn
        assert outcome.errors == (
            "braid: stopped at 64 tokens, the length of the sequences that runs/run was trained on\n"
        )


def write_tasks(folder: Path) -> None:
    """A task ``going_on``: which text goes on as the documents do, and which does not."""
    folder.mkdir(exist_ok=True)
    task = {
        "task": "going_on",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{begin}}",
        "doc_to_choice": "{{ends}}",
        "doc_to_target": "{{right}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "going_on.yaml").write_text(json.dumps(task))
    (folder / "broken.yaml").write_text(json.dumps({**task, "task": "broken", "test_split": "absent"}))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


ROWS: list[dict[str, Any]] = [
    {"begin": "one sheep,", "ends": [" two sheep", " three, and"], "right": 0},
    {"begin": "Q: how many", "ends": [" sleep", " sheep?"], "right": 1},
    {"begin": "one sheep, two sheep,", "ends": [" one", " three sheep"], "right": 0},
    {"begin": "Q: how many sheep? A:", "ends": [" three", " one"], "right": 0},
]
"""The third is wrong about the documents."""


def test_scores_on_a_task_of_ones_own(
    folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The model knows the documents by heart."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    write_tasks(folder / "tasks")
    (tmp_path / "git").write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    call = ("evaluate", "runs/run", "--tasks", "going_on", "--include-path", "tasks")
    outcome = command(*call, "--json", "--output", "scores.json")
    assert outcome.code == 0, outcome.errors
    content = json.loads(outcome.output)
    assert json.loads((folder / "scores.json").read_text()) == content
    assert content["results"]["going_on"]["acc,none"] == 0.75
    assert content["n-samples"]["going_on"]["effective"] == 4
    shown = command(*call, "--limit", "2")
    assert shown.code == 0, shown.errors
    head, line = [line.split() for line in shown.output.splitlines() if line.strip()]
    assert head == ["task", "metric", "value", "±", "examples"]
    assert line == ["going_on", "acc", "1.0000", "0.0000", "2"]
    assert not (tmp_path / "asked").exists(), "git complains where no checkout is"
    refused(command(*call[:3], "broken", *call[4:]), "--tasks broken", "cannot be loaded")
    refused(command(*call[:3], "going_off", *call[4:]), "'going_off'", "did you mean 'going_on'?")


def test_wrong_calls_are_one_line(folder: Path, command: Command, tmp_path: Path) -> None:
    prompt = ("--prompt", "sheep")
    for arguments, says in {
        ("runs/run", *prompt, "--checkpoint", "7"): ("--checkpoint 7: runs/run", "steps 40, 80", "best"),
        ("runs/run", *prompt, "--checkpoint", "best"): (
            "no checkpoint of runs/run was validated",
            "keep_best",
        ),
        ("runs/run/checkpoints/step-40", *prompt, "--checkpoint", "40"): ("is one checkpoint", "leave"),
        ("runs/run", "--prompt", "sheep " * 100): ("--prompt has ", "sequences of runs/run (64); shorten it"),
    }.items():
        assert refused(command("generate", *arguments), *says).count("\n") == 1
    weights = tmp_path / "weights"
    assert command("checkpoint", "export", "runs/run", weights, "--checkpoint", "40").code == 0
    refused(command("generate", weights, *prompt, "--checkpoint", "40"), "holds weights and no checkpoints")
    content = json.loads((weights / "tokenizer_config.json").read_text())
    strict = content | {"chat_template": "{{ raise_exception('no user here') }}"}
    (weights / "tokenizer_config.json").write_text(json.dumps(strict))
    refused(command("generate", weights, *prompt, "--chat"), "chat template", "no user here")
    del content["chat_template"]
    (weights / "tokenizer_config.json").write_text(json.dumps(content))
    refused(command("generate", weights, *prompt, "--chat"), "has no chat template; leave --chat out")
    config = json.loads((weights / "config.json").read_text())
    (weights / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    refused(command("generate", weights, *prompt), "lacks the tensor model.layers.2.")
    (weights / "config.json").write_text(json.dumps({**config, "model_type": "no model"}))
    refused(command("generate", weights, *prompt), f"transformers cannot read {weights}")
    (weights / "model.safetensors").rename(weights / "pytorch_model.bin")
    refused(command("generate", weights, *prompt), "no safetensors")


def test_the_best_checkpoint_is_exported_after_a_resume(
    command: Command, folder: Path, tmp_path: Path
) -> None:
    """Trained so fast that it gets worse; the best checkpoint is that of the lowest validation of all."""
    (folder / "long.txt").write_text(" ".join(f"{n} sheep sleep" for n in range(2000)))
    write_config(
        folder,
        name="best",
        data={"files": ["long.txt"], "validation_fraction": 0.3},
        model={"layers": 2},
        train={"steps": 30, "lr": 0.01, "validate_every": 3, "global_batch": 4, "micro_batch": 4},
        checkpoint={"every": 10, "keep": 1, "keep_best": True},
        telemetry={"page": False, "spans": False},
    )
    for more in (["--until", "12"], ["--resume", "--set", "train.lr=3.0"]):
        done = command("train", "run.yaml", *more)
        assert done.code == 0, done.errors
    lines = read_lines(Path("runs/best/metrics.jsonl"))
    losses = {line["step"]: line["validation_loss"] for line in lines if line.get("validation_loss")}
    best = min(losses, key=losses.__getitem__)
    assert best < 30, "the last one is the best: too easy a test"
    rows = json.loads(command("checkpoint", "list", "runs/best", "--json").output)
    assert [(row["step"], row["best"]) for row in rows] == [(best, True), (30, False)]
    assert [row["validation_loss"] for row in rows] == [losses[best], losses[30]]
    shown = command("checkpoint", "list", "runs/best").output
    assert f"{losses[best]:.4f} best" in shown
    told = command("checkpoint", "export", "runs/best", tmp_path / "one", "--checkpoint", "best")
    assert told.output.startswith(f"step {best} of runs/best")
    assert command("checkpoint", "export", "runs/best", tmp_path / "two", "--checkpoint", str(best)).code == 0
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
    flip(folder / "runs" / "best" / "checkpoints" / f"step-{best}" / "__0_0.distcp")
    refused(
        command("generate", "runs/best", "--prompt", "1", "--checkpoint", "best"), f"step-{best}", "checksum"
    )
