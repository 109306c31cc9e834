"""Runs on conversations, in any layout, against `transformers` with labels of -100 and plain PyTorch."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from braid.actors.config import Config
from braid.actors.stage.data.sample_order import sample_ids
from braid.actors.stage.data.token_files import read_index
from braid.jobs.bench.plain_torch import adamw, learning_rate
from braid.jobs.data.identity import DataRequest
from braid.jobs.data.prepare import prepare
from tests.end_to_end.runs import Run, planned, run_plan, small_config, trained
from tests.foreign_models import SEQUENCE, in_float64, random_model

Sections = Mapping[str, Mapping[str, Any]]

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
TRAIN = {"dtype": "fp64", "steps": 3, "global_batch": 8, "micro_batch": 2, "warmup_steps": 1, "lr": 1e-3}
LAYOUTS: Mapping[str, Sections] = {
    "tp": {"parallel": {"tp": 2}, "overlap": {"schedule": "megatron"}},
    "pp": {"parallel": {"pp": 2}, "overlap": {"schedule": "megatron"}},
    "zero": {"parallel": {"dp": 2, "zero": 3}, "overlap": {"schedule": "ddp"}},
    "cp": {"parallel": {"cp": 2}, "overlap": {"schedule": "megatron"}},
    "strands": {"parallel": {"tp": 2}, "overlap": {"schedule": "dhelix"}},
    "pieces": {"parallel": {"tp": 2}, "overlap": {"schedule": "intra_batch"}},
}


def sections_of(path: Path, *, document_mask: bool, seed: int) -> Sections:
    """Random conversations of one to three exchanges, and a random model of `transformers`."""
    drawn, lines = random.Random(seed), []
    for _ in range(200):
        told = []
        for _ in range(drawn.randint(1, 3)):
            a, b = drawn.randrange(9), drawn.randrange(9)
            told += [{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": f"{a + b}"}]
        lines.append(json.dumps({"messages": told}) + "\n")
    path.mkdir(parents=True, exist_ok=True)
    (path / "chat.jsonl").write_text("".join(lines))
    (path / "chat.jinja").write_text(TEMPLATE)
    files: dict[str, Any] = {"files": [str(path / "chat.jsonl")], "chat_template": str(path / "chat.jinja")}
    files["tokenizer"] = "bytes"
    random_model("llama", seed).double().save_pretrained(path / "weights")
    return {
        "data": {"format": "chat", "validation_fraction": 0.2, "document_mask": document_mask, **files},
        "model": {"initial": str(path / "weights"), "sequence": SEQUENCE},
        "train": {**TRAIN, "validation_samples": 7},
    }


def prepared(path: Path, config: Config) -> Path:
    return prepare(DataRequest.of(config), path / "data", map).output


def rows_of(data: Path, split: str) -> tuple[Tensor, Tensor]:
    """Tokens and marks of all rows, read without our reader."""
    index = read_index(data)
    shape = -1, index.row_tokens
    tokens = [np.fromfile(file, index.dtype) for file in sorted(data.glob(f"{split}-*.bin"))]
    marks = [np.fromfile(file, np.uint8) for file in sorted(data.glob(f"{split}-*.marks"))]
    both = (np.concatenate(tokens).astype(np.int64), np.concatenate(marks))
    return torch.from_numpy(both[0]).reshape(shape), torch.from_numpy(both[1]).reshape(shape)


class Reference:
    """`transformers` in float64, with labels of -100 and a mask of attention for documents."""

    def __init__(self, config: Config, data: Path, seed: int) -> None:
        self.config, self.data = config, data
        self.model = random_model("llama", seed).double()
        self.model.set_attn_implementation("eager")

    def loss(self, tokens: Tensor, marks: Tensor) -> tuple[Tensor, int]:
        """Sum of the losses of targets that count, and their number."""
        inputs, length = tokens[:, :-1], tokens.shape[1] - 1
        seen = torch.ones(len(tokens), length, length, dtype=torch.bool).tril()
        if self.config.data.document_mask:
            document = (marks[:, :-1] & 2).bool().cumsum(1)
            seen &= document[:, :, None] == document[:, None, :]
        bias = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
        logits = self.model(inputs, attention_mask=bias[:, None]).logits
        labels = tokens[:, 1:].masked_fill((marks[:, 1:] & 1) == 0, -100)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), int(
            (labels != -100).sum()
        )

    def train(self) -> tuple[list[float], list[float], float]:
        """Losses and gradient norms of all steps, and the loss of a validation."""
        train = self.config.train
        tokens, marks = rows_of(self.data, "train")
        losses, norms = [], []
        with in_float64(self.model):
            optimizer = adamw(self.model.parameters(), train)
            for step in range(train.steps):
                begin = step * train.global_batch
                ids = sample_ids(train.seed, len(tokens), begin, train.global_batch)
                total, count = self.loss(tokens[ids], marks[ids])
                (total / count).backward()
                norms.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), train.clip_norm).item())
                optimizer.param_groups[0]["lr"] = optimizer.param_groups[-1]["lr"] = learning_rate(
                    train, step
                )
                optimizer.step()
                optimizer.zero_grad()
                losses.append((total / count).item())
            held_out = rows_of(self.data, "validation")
            most = min(len(held_out[0]), train.validation_samples)
            ids = np.arange(most) * len(held_out[0]) // most
            with torch.no_grad():
                total, count = self.loss(held_out[0][ids], held_out[1][ids])
        return losses, norms, total.item() / count


@pytest.mark.parametrize("document_mask", [True, False], ids=["documents", "rows"])
def test_every_layout_learns_as_transformers_does(tmp_path: Path, document_mask: bool) -> None:
    seed = random.randrange(10**6)
    common = sections_of(tmp_path, document_mask=document_mask, seed=seed)
    config = small_config(tmp_path / "runs", **common)
    data = prepared(tmp_path, config)
    losses, norms, validation = Reference(config, data, seed).train()
    for name, layout in LAYOUTS.items() if document_mask else [("tp", LAYOUTS["tp"])]:
        sections = {**common, **layout}
        sections["overlap"] = planned(tmp_path / "plans", sections)
        run = trained(run_plan(small_config(tmp_path / "runs", **sections), data))
        assert run.losses == pytest.approx(losses, rel=1e-9, abs=0), (name, seed)
        assert run.gradient_norms == pytest.approx(norms, rel=1e-9, abs=0), (name, seed)
        assert run.report["validation"]["loss"] == pytest.approx(validation, rel=1e-9, abs=0), (name, seed)


def silent(data: Path) -> None:
    """Make of a data set one in which no token counts."""
    for file in [*data.glob("train-*.marks"), *data.glob("train-*.counts")]:
        file.write_bytes(bytes(file.stat().st_size))


def test_a_step_in_which_nothing_counts(tmp_path: Path) -> None:
    """Its loss is 0 and it has no gradient."""
    common = sections_of(tmp_path, document_mask=False, seed=7)
    train = {**TRAIN, "steps": 2, "weight_decay": 0.0}
    config = small_config(tmp_path / "runs", **{**common, "train": train}, checkpoint={"every": 1})
    data = prepared(tmp_path, config)
    silent(data)
    run: Run = trained(run_plan(config, data))
    assert run.losses == [0.0, 0.0]
    assert run.gradient_norms == [0.0, 0.0]
    first, last = run.parameters(1), run.parameters(2)
    assert all(torch.equal(first[name], tensor) for name, tensor in last.items())
    assert all(tensor.isfinite().all() for tensor in last.values())
