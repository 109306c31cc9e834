"""Dropout, label smoothing and z-loss in all layouts, on real ranks: what plain PyTorch trains on one.

Seed and cases are as in `tests.end_to_end.test_ranks`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from braid.actors.config import parse_config
from tests.end_to_end.plain_regularisation import REGULARISED, RegularisedTrainer
from tests.end_to_end.runs import planned, run_layout, run_plain, run_plan, trained
from tests.end_to_end.test_ranks import assert_alike, content, data

pytestmark = pytest.mark.slow

__all__ = ["data"]

GPT = {"family": "gpt", "kv_heads": 4, "tied_head": True}
MOE = {"family": "moe", "experts": 4, "top_k": 2, "ffn": 96, "shared_experts": 1, "balance_loss": 0.02}
CASES: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Mapping[str, Any]]]] = [
    ("ddp", {"dp": 2, "zero": 3}, GPT, {}),
    ("megatron", {"dp": 2, "ep": 2}, MOE, {"train": {"recompute": "selective"}}),
    ("dhelix", {"tp": 2, "pp": 2}, {}, {"train": {"recompute": "full"}}),
]
"""Schedule, layout, changes of the model, other sections."""


@pytest.mark.parametrize(
    ("schedule", "parallel", "model", "more"), CASES, ids=[f"{s}, {p}" for s, p, _, _ in CASES]
)
def test_ranks_train_as_plain_pytorch_does(
    tmp_path: Path,
    data: Path,
    schedule: str,
    parallel: dict[str, Any],
    model: dict[str, Any],
    more: dict[str, Mapping[str, Any]],
) -> None:
    train = {**REGULARISED, **more.get("train", {})}
    sections = content(schedule, parallel, **{**more, "model": model, "train": train})
    run = run_layout(tmp_path / "run", data, **{**sections, "overlap": planned(tmp_path / "plans", sections)})
    plain = run_plain(run.config, data, RegularisedTrainer)
    assert_alike(run, plain, 1e-9)
    ours = {name: tensor.detach() for name, tensor in plain.model.named_parameters()}
    torch.testing.assert_close(run.parameters(), ours, rtol=1e-8, atol=1e-10)


def test_a_run_goes_on_in_another_layout_with_the_same_masks(tmp_path: Path, data: Path) -> None:
    begun = run_layout(tmp_path, data, 3, **content("megatron", {"tp": 2}, train=REGULARISED))
    sections = {**begun.config.model_dump(mode="json"), "parallel": {"dp": 2, "zero": 1}}
    ended = trained(run_plan(parse_config(sections), data), resume=True)
    plain = run_plain(begun.config, data, RegularisedTrainer)
    assert begun.losses + ended.losses == pytest.approx(plain.losses, rel=1e-9, abs=0)
