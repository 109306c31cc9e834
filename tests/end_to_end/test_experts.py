"""Mixtures of experts over ep, tp, cp, pp and dp: losses of plain PyTorch, expert by expert."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.runs import PlainRun, planned, prepare_text, run_layout, run_plain, small_config

SEED, STEPS = 3, 10
MIXTURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "losses": {"balance_loss": 0.05, "z_loss": 0.01, "shared_experts": 1, "expert_ffn": 48},
    "capacity": {"capacity_factor": 0.7, "balance_loss": 0.02},
    "mixed": {"pattern": "dense layer", "softmax_after": True, "capacity_factor": 1.5},
    "unnormalised": {"normalised": False, "top_k": 3},
}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("plain", "megatron", {}),
    ("losses", "megatron", {"tp": 2}),
    ("plain", "megatron", {"dp": 2}),
    ("plain", "megatron", {"dp": 2, "ep": 2}),
    ("losses", "ddp", {"dp": 4, "ep": 4}),
    ("losses", "megatron", {"dp": 2, "ep": 2, "tp": 2}),
    ("plain", "braid_together_2", {"dp": 4, "ep": 2, "zero": 1}),
    ("losses", "ddp", {"dp": 4, "ep": 2, "zero": 3}),
    ("mixed", "folded", {"dp": 2, "ep": 2, "pp": 2}),
    ("losses", "wavelet", {"dp": 2, "ep": 2, "cp": 2}),
    ("losses", "megatron", {"dp": 2, "ep": 4, "cp": 2, "context": "ring"}),
    ("plain", "wavelet", {"cp": 4, "ep": 2}),
    ("losses", "expert_overlap", {"dp": 2, "ep": 2}),
    ("mixed", "expert_overlap", {"dp": 2, "ep": 2, "pp": 2}),
    ("losses", "braid_w", {"dp": 2, "ep": 2}),
    ("plain", "dhelix", {"dp": 2, "ep": 2, "tp": 2}),
    ("mixed", "braid_w", {"dp": 2, "ep": 2, "pp": 2}),
    ("losses", "braid_w", {"dp": 2, "cp": 2, "ep": 2, "zero": 3}),
    ("capacity", "megatron", {"dp": 2, "ep": 2}),
    ("capacity", "wavelet", {"dp": 2, "ep": 2, "tp": 2}),
    ("capacity", "ddp", {"dp": 2, "ep": 4, "cp": 2, "zero": 3}),
    ("unnormalised", "wavelet", {"dp": 4, "ep": 4, "zero": 2}),
]


def overrides(mixture: str) -> dict[str, Mapping[str, Any]]:
    model = {"family": "moe", "kv_heads": 2, "experts": 8, "top_k": 2, "ffn": 96, "layers": 4}
    return {
        "model": {**model, **MIXTURES[mixture]},
        "train": {"dtype": "fp64", "seed": SEED, "steps": STEPS, "global_batch": 16},
        "cluster": {"cpus_per_rank": 0.1},
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_text(tmp_path_factory.mktemp("experts"), SEED)


_PLAIN: dict[tuple[Any, ...], PlainRun] = {}


def plain(mixture: str, parallel: Mapping[str, Any], folder: Path, data: Path) -> PlainRun:
    """Once for all layouts that route alike: with a capacity, what is dropped depends on them."""
    own = {axis: parallel.get(axis, 1) for axis in ("cp", "tp")} if "capacity" in mixture else {}
    key = (mixture, *own.values())
    if key not in _PLAIN:
        _PLAIN[key] = run_plain(small_config(folder, **{**overrides(mixture), "parallel": own}), data)
    return _PLAIN[key]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixture", "schedule", "parallel"),
    CASES,
    ids=[f"{m} {s} {' x '.join(f'{a} {d}' for a, d in p.items())}" for m, s, p in CASES],
)
def test_losses_are_those_of_plain_pytorch(
    tmp_path: Path, data: Path, mixture: str, schedule: str, parallel: Mapping[str, Any]
) -> None:
    expected = plain(mixture, parallel, tmp_path / "plain", data)
    sections = {**overrides(mixture), "parallel": parallel, "overlap": {"schedule": schedule}}
    sections["overlap"] = planned(tmp_path / "plans", sections)
    run = run_layout(tmp_path / "run", data, **sections)
    assert len(run.losses) == STEPS
    assert run.losses == pytest.approx(expected.losses, rel=1e-9, abs=0)
    assert run.gradient_norms == pytest.approx(expected.gradient_norms, rel=1e-9, abs=0)
    if mixture == "capacity":
        assert sum(layer.dropped for layer in expected.model.mixtures) > 0, "nothing was dropped: too easy"
