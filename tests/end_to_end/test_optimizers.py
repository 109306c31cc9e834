"""Optimizers, schedules and averages in every layout, against torch's own classes in one process.

The reference knows nothing of shards, owners or states: `torch.optim.AdamW`, `torch.optim.Muon` for every
matrix, the schedulers of `torch.optim.lr_scheduler`, and `AveragedModel`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from braid.actors.config import TrainConfig
from braid.actors.stage.state.checkpoint import read_tensors
from braid.jobs.bench.plain_torch import PlainModel, PlainTrainer
from tests.end_to_end.runs import Run, prepare_text, run_layout, run_plain

STEPS = 8
MOE: Mapping[str, Any] = {"family": "moe", "experts": 4, "top_k": 2, "expert_ffn": 48}
LAYOUTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "tp 2": {"parallel": {"tp": 2}},
    "pp 2": {"parallel": {"pp": 2}, "model": {"tied_head": True}},
    "dp 2, ZeRO 3": {"parallel": {"dp": 2, "zero": 3}},
    "ep 2": {"parallel": {"dp": 2, "ep": 2}, "model": MOE},
    "tp 2 x dp 2, ZeRO 1": {"parallel": {"tp": 2, "dp": 2, "zero": 1}},
    "ep 2 of dp 4, ZeRO 2": {"parallel": {"dp": 4, "ep": 2, "zero": 2}, "model": MOE},
}
"""Matrices whole on every rank, cut by rows and columns, cut at any element, whole on some ranks, both."""
SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "cosine": {"optimizer": "adamw", "average": 0.7},
    "linear": {"optimizer": "muon", "momentum": 0.9, "average": 0.9},
    "constant": {"optimizer": "muon"},
    "stable_decay": {"optimizer": "adamw", "decay_steps": 3},
}


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Of a hidden layer; those of all experts are one tensor."""
    ends = ("embedding.weight", "head.weight", "router.weight")
    return parameter.dim() > 1 and not name.endswith(ends)


class TorchTrainer(PlainTrainer):
    """Training with torch's own optimizers, schedulers and average."""

    def __init__(self, model: PlainModel, train: TrainConfig) -> None:
        super().__init__(model, train)
        named = dict(model.named_parameters())
        muon = {n: p for n, p in named.items() if train.optimizer == "muon" and is_matrix(n, p)}
        others = {n: p for n, p in named.items() if n not in muon}
        self._pieces: list[tuple[nn.Parameter, Tensor, Any]] = []
        for p in muon.values():  # torch.optim.Muon takes matrices only: one for each expert
            indices: Sequence[Any] = range(len(p)) if p.dim() == 3 else [...]
            self._pieces += [(p, nn.Parameter(p.detach()[index]), index) for index in indices]
        plain = [p for p in others.values() if p.dim() == 1]
        decayed = [p for p in others.values() if p.dim() > 1]
        groups = [{"params": decayed, "weight_decay": train.weight_decay}, {"params": plain}]
        settings: dict[str, Any] = {"lr": train.lr, "betas": train.betas, "eps": train.eps}
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(groups, weight_decay=0.0, **settings)
        ]
        if self._pieces:
            self.optimizers.append(
                torch.optim.Muon(
                    [piece for _, piece, _ in self._pieces],
                    lr=train.lr,
                    weight_decay=train.weight_decay,
                    momentum=train.momentum,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        self.schedulers = [scheduler(train, optimizer) for optimizer in self.optimizers]
        decay = get_ema_multi_avg_fn(train.average)
        self.average = AveragedModel(model, multi_avg_fn=decay) if train.average else None

    def step(self, step: int, windows: Sequence[Tensor]) -> tuple[float, float]:
        tokens = sum(window[:, 1:].numel() for window in windows)
        total = 0.0
        for window in windows:
            loss = self.model.loss_sum(window[:, :-1], window[:, 1:])
            (loss / tokens).backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
        for whole, piece, index in self._pieces:
            assert whole.grad is not None
            piece.grad = whole.grad[index]
        for optimizer, schedule in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            schedule.step()
        self.model.zero_grad()
        if self.average is not None:
            self.average.update_parameters(self.model)
        return total / tokens, norm.item()


def scheduler(train: TrainConfig, optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """What `train.schedule` says, in torch's words."""
    warmup, low = train.warmup_steps, train.min_lr_fraction
    rise = lr_scheduler.LinearLR(optimizer, 1 / warmup, 1.0, warmup - 1)
    span = train.steps - warmup
    match train.schedule:
        case "cosine":
            then: lr_scheduler.LRScheduler = lr_scheduler.CosineAnnealingLR(optimizer, span, low * train.lr)
        case "linear":
            then = lr_scheduler.LinearLR(optimizer, 1.0, low, span)
        case "constant":
            then = lr_scheduler.ConstantLR(optimizer, 1.0)
        case "stable_decay":
            stay = lr_scheduler.ConstantLR(optimizer, 1.0)
            fall = lr_scheduler.LinearLR(optimizer, 1.0, low, train.decay_steps)
            ends = [warmup, train.steps - train.decay_steps]
            return lr_scheduler.SequentialLR(optimizer, [rise, stay, fall], ends)
    return lr_scheduler.SequentialLR(optimizer, [rise, then], [warmup])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text, drawn anew in every session."""
    return prepare_text(tmp_path_factory.mktemp("text"), torch.seed() % 1000)


def sections(layout: str, **train: Any) -> dict[str, Mapping[str, Any]]:
    """A run's sections: small, in double precision, with a decay and a learning rate that show."""
    given = LAYOUTS[layout]
    model = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "sequence": 32, **given.get("model", {})}
    small = {"steps": STEPS, "warmup_steps": 2, "dtype": "fp64", "lr": 3e-3, "global_batch": 8}
    return {"model": model, "parallel": given["parallel"], "train": {**small, "micro_batch": 1, **train}}


def states(run: Run, step: int) -> dict[str, Tensor]:
    return read_tensors(run.directory / "checkpoints" / f"step-{step}")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_as_torch_does(tmp_path: Path, data: Path, layout: str, schedule: str) -> None:
    """Losses, weights and averages; Muon's matrices, too, as its momentum is rounded to bf16 alike."""
    given = sections(layout, schedule=schedule, **SCHEDULES[schedule])
    run = run_layout(tmp_path, data, **given)
    trainers: list[TorchTrainer] = []

    def reference(model: PlainModel, train: TrainConfig) -> TorchTrainer:
        trainers.append(TorchTrainer(model, train))
        return trainers[0]

    plain = run_plain(run.config, data, reference)
    assert run.losses == pytest.approx(plain.losses, rel=1e-9, abs=0)
    found = states(run, STEPS)
    for name, expected in plain.model.named_parameters():
        torch.testing.assert_close(found[f"parameter.{name}"], expected.detach(), rtol=1e-7, atol=1e-9)
    average = trainers[0].average
    assert (average is not None) == any(name.startswith("average.") for name in found)
    for name, expected in average.module.named_parameters() if average is not None else ():
        torch.testing.assert_close(found[f"average.{name}"], expected.detach(), rtol=1e-7, atol=1e-9)
