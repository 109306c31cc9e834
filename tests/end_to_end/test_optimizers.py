"""Optimizers, schedules and averages in every layout, against torch's own classes in one process.

The reference knows nothing of shards, owners or states: `torch.optim.AdamW`, `torch.optim.Muon` for every
matrix, the schedulers of `torch.optim.lr_scheduler`, and `AveragedModel`.
"""

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from braid.actors.config import TrainConfig
from braid.actors.controller.controller import RunOptions, check_begin
from braid.actors.controller.state.manifest import CheckpointError
from braid.actors.stage.state.checkpoint import read_tensors
from braid.jobs.bench.plain_torch import PlainModel, PlainTrainer
from tests.end_to_end.runs import Run, prepare_text, run_layout, run_plain, run_plan, small_config, trained
from tests.in_process import Capture, called, refused

SEED = int(os.environ["BRAID_TEST_SEED"])
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


def torchao_optim() -> Any:
    """The library of moments in 8 bits."""
    return importlib.import_module("torchao.optim")


class TorchTrainer(PlainTrainer):
    """Training with torch's own optimizers, schedulers and average."""

    def __init__(self, model: PlainModel, train: TrainConfig) -> None:
        super().__init__(model, train)
        named = dict(model.named_parameters())
        muon = {n: p for n, p in named.items() if train.optimizer == "muon" and is_matrix(n, p)}
        quantised = train.optimizer == "adamw_8bit"
        eight = {n: p for n, p in named.items() if quantised and is_matrix(n, p)}
        others = {n: p for n, p in named.items() if n not in muon and n not in eight}
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
        if eight:
            in_8_bits = torchao_optim().AdamW8bit
            self.optimizers.append(
                in_8_bits(list(eight.values()), weight_decay=train.weight_decay, **settings)
            )
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
            with torch.compiler.set_stance("force_eager"):  # which torchao would compile
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
    """Text; the order of samples and the initial weights are drawn anew in every session."""
    return prepare_text(tmp_path_factory.mktemp("text"), SEED)


def sections(layout: str, **train: Any) -> dict[str, Mapping[str, Any]]:
    """A run's sections: small, in double precision, with a decay and a learning rate that show."""
    given = LAYOUTS[layout]
    model = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "sequence": 32, **given.get("model", {})}
    small = {"seed": SEED, "steps": STEPS, "warmup_steps": 2, "dtype": "fp64", "lr": 3e-3, "global_batch": 8}
    return {"model": model, "parallel": given["parallel"], "train": {**small, "micro_batch": 1, **train}}


def states(run: Run, step: int) -> dict[str, Tensor]:
    return read_tensors(run.directory / "checkpoints" / f"step-{step}")


CASES = [(layout, "linear") for layout in LAYOUTS]
CASES += [("pp 2", "cosine"), ("dp 2, ZeRO 3", "stable_decay"), ("ep 2 of dp 4, ZeRO 2", "constant")]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "schedule"), CASES)
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


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp 2", "dp 2, ZeRO 3", "ep 2"])
def test_moments_of_8_bits_are_as_near_as_the_librarys(tmp_path: Path, data: Path, layout: str) -> None:
    """Layouts round other blocks: as far from torch's AdamW as torchao in one process, or little more."""
    given = sections(layout, dtype="fp32", optimizer="adamw_8bit")
    run = run_layout(tmp_path, data, **given)
    exact = run.config.changed(train={"optimizer": "adamw"})
    library, fp32 = (run_plain(config, data, TorchTrainer) for config in (run.config, exact))
    assert run.losses == pytest.approx(library.losses, rel=2e-3)
    ours, theirs, size = 0.0, 0.0, 0.0
    found = run.parameters()
    for (name, expected), (_, rounded) in zip(
        fp32.model.named_parameters(), library.model.named_parameters(), strict=True
    ):
        ours += (found[name] - expected).square().sum().item()
        theirs += (rounded - expected).square().sum().item()
        size += expected.square().sum().item()
    assert 0 < ours <= 4 * theirs, "at most twice as far"
    assert theirs < 1e-2 * size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "train"),
    [
        ("tp 2 x dp 2, ZeRO 1", {"optimizer": "muon", "average": 0.9, "schedule": "stable_decay"}),
        ("dp 2, ZeRO 3", {"optimizer": "adamw_8bit", "dtype": "bf16", "average": 0.5}),
    ],
)
def test_a_run_that_resumes_goes_on_bit_for_bit(
    tmp_path: Path, data: Path, layout: str, train: Mapping[str, Any]
) -> None:
    given = sections(layout, **train)
    undisturbed = run_layout(tmp_path, data, **given)
    plan = run_plan(small_config(tmp_path, **given), data)
    half = trained(plan, STEPS // 2)
    whole = trained(plan, resume=True)
    assert [*half.losses, *whole.losses] == undisturbed.losses
    found, expected = states(whole, STEPS), states(undisturbed, STEPS)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_muon_goes_on_in_another_layout(tmp_path: Path, data: Path, capsys: Capture) -> None:
    """With its momentum and the average, which is also exported; other optimizers are refused."""
    train = {"optimizer": "muon", "average": 0.9}
    undisturbed = run_layout(tmp_path, data, **sections("tp 2", **train))
    plan = run_plan(small_config(tmp_path, **sections("tp 2", **train)), data)
    trained(plan, STEPS // 2)
    parallel = plan.config.parallel.model_copy(update={"tp": 1, "dp": 2, "zero": 3})
    moved = run_plan(plan.config.model_copy(update={"parallel": parallel}), data)
    run = trained(moved, resume=True)
    found, expected = states(run, STEPS), states(undisturbed, STEPS)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-7, atol=1e-9)
    folder = tmp_path / "averaged"
    assert called(capsys, "checkpoint", "export", run.directory, folder, "--average").code == 0
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        norm = file.get_tensor("model.norm.weight")
    assert torch.equal(norm, found["average.final_norm.weight"].float())
    check_begin(moved.config.changed(train={"average": 0.0}), RunOptions(resume=True), moved.shape)
    says = r"has the states of train\.optimizer=muon, this run has train\.optimizer=adamw"
    with pytest.raises(CheckpointError, match=says):
        check_begin(moved.config.changed(train={"optimizer": "adamw"}), RunOptions(resume=True), moved.shape)


@pytest.mark.slow
def test_what_cannot_go_on_as_configured_is_refused(tmp_path: Path, data: Path, capsys: Capture) -> None:
    run = run_layout(tmp_path, data, until=2, **sections("tp 2"))
    shape = run.shape
    averaged = run.config.changed(train={"average": 0.9})
    with pytest.raises(CheckpointError, match=r"no average of the weights, this run has train\.average=0\.9"):
        check_begin(averaged, RunOptions(resume=True), shape)
    shorter = run.config.changed(train={"steps": 1})
    with pytest.raises(CheckpointError, match=r"step 2, beyond train\.steps=1; raise train\.steps above 2"):
        check_begin(shorter, RunOptions(resume=True), shape)
    eight = run.config.changed(train={"optimizer": "adamw_8bit"})
    check_begin(eight, RunOptions(resume=True), shape)
    outcome = called(capsys, "checkpoint", "export", run.directory, tmp_path / "none", "--average")
    refused(outcome, "has no average of the weights", "train.average", "--average")
    assert not (tmp_path / "none").exists()
