"""Mixtures of experts over ep, tp, cp, pp and dp: losses of plain PyTorch, expert by expert."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from braid.actors.controller.routing import ExpertNumbers
from tests.end_to_end.command import overlap_of
from tests.end_to_end.runs import PlainRun, Run, planned, prepare_text, run_layout, run_plain, small_config

SEED, STEPS = 3, 10
MIXTURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "losses": {"balance_loss": 0.05, "z_loss": 0.01, "shared_experts": 1, "expert_ffn": 48},
    "capacity": {"capacity_factor": 0.7, "balance_loss": 0.02},
    "both": {"capacity_factor": 0.9, "balance_loss": 0.02, "z_loss": 0.01},
    "mixed": {"pattern": "dense layer", "softmax_after": True, "capacity_factor": 1.5},
    "bias": {"balance_rate": 0.02},
    "bias after": {"balance_rate": 0.05, "softmax_after": True, "capacity_factor": 1.2},
    "unnormalised": {"normalised": False, "top_k": 3},
}
EVERYWHERE: list[dict[str, Any]] = [
    {"dp": ep, "ep": ep, **more}
    for ep in (2, 4)
    for more in ({}, {"tp": 2}, {"pp": 2}, {"cp": 2, "dp": ep // 2}, {"zero": 1}, {"zero": 3})
]
"""Experts over ep alone, and with every other axis."""
TWO_STRANDS, ONE_OR_TWO = ("wavelet", "expert_overlap", "dhelix", "braid:w"), ("megatron", "ddp", "wavelet")
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("plain", "megatron", {}),
    ("losses", "megatron", {"tp": 2}),
    ("plain", "megatron", {"dp": 2}),
    *(("losses", TWO_STRANDS[n % 4], layout) for n, layout in enumerate(EVERYWHERE)),
    *(
        ("both", (ONE_OR_TWO, TWO_STRANDS)["pp" in layout][n % 3], layout)
        for n, layout in enumerate(EVERYWHERE)
    ),
    ("plain", "braid:together_2", {"dp": 4, "ep": 2, "zero": 1}),
    ("losses", "ddp", {"dp": 4, "ep": 2, "zero": 3}),
    ("mixed", "megatron:folded", {"dp": 2, "ep": 2, "pp": 2}),
    ("losses", "megatron", {"dp": 2, "ep": 4, "cp": 2, "context": "ring"}),
    ("plain", "wavelet", {"cp": 4, "ep": 2}),
    ("mixed", "expert_overlap", {"dp": 2, "ep": 2, "pp": 2}),
    ("mixed", "braid:w", {"dp": 2, "ep": 2, "pp": 2}),
    ("losses", "braid:w", {"dp": 2, "cp": 2, "ep": 2, "zero": 3}),
    ("bias", "braid:w", {"dp": 2, "ep": 2, "tp": 2, "zero": 1}),
    ("bias after", "wavelet", {"dp": 2, "cp": 2, "ep": 4, "zero": 3}),
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
    own = (
        {axis: parallel.get(axis, 1) for axis in ("cp", "tp")}
        if "capacity_factor" in MIXTURES[mixture]
        else {}
    )
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
    sections = {**overrides(mixture), "parallel": parallel, "overlap": overlap_of(schedule)}
    sections["overlap"] = planned(tmp_path / "plans", sections)
    run = run_layout(tmp_path / "run", data, **sections)
    assert len(run.losses) == STEPS
    assert run.losses == pytest.approx(expected.losses, rel=1e-9, abs=0)
    assert run.gradient_norms == pytest.approx(expected.gradient_norms, rel=1e-9, abs=0)
    _check_routing(run, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixture", "schedule", "parallel"),
    [
        ("losses", "braid:w", {"dp": 2, "ep": 2, "tp": 2}),
        ("mixed", "wavelet", {"dp": 2, "cp": 2, "ep": 4, "zero": 1}),
    ],
)
def test_losses_are_those_of_plain_pytorch_in_single_precision(
    tmp_path: Path, data: Path, mixture: str, schedule: str, parallel: Mapping[str, Any]
) -> None:
    """Over few steps: sooner or later one of two experts with nearly equal scores is chosen for another."""
    content = overrides(mixture)
    content |= {"train": {**content["train"], "dtype": "fp32", "steps": 4}, "parallel": parallel}
    expected = run_plain(small_config(tmp_path / "plain", **content), data)
    content["overlap"] = planned(tmp_path / "plans", {**content, "overlap": overlap_of(schedule)})
    run = run_layout(tmp_path / "run", data, **content)
    assert run.losses == pytest.approx(expected.losses, rel=2e-5, abs=0)
    assert run.gradient_norms == pytest.approx(expected.gradient_norms, rel=2e-5, abs=0)


@pytest.mark.slow
@pytest.mark.parametrize("mixture", ["losses", "both"])
@pytest.mark.parametrize("parallel", [{"dp": 2, "ep": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_what_is_recomputed_and_validated_is_not_counted_again(
    tmp_path: Path, data: Path, mixture: str, parallel: Mapping[str, Any]
) -> None:
    expected = plain(mixture, parallel, tmp_path / "plain", data)
    content = overrides(mixture)
    train = {**content["train"], "recompute": "full", "validate_every": 1}
    run = run_layout(tmp_path / "run", data, **{**content, "parallel": parallel, "train": train})
    assert all(record.validation_bits_per_byte is not None for record in run.records)
    assert run.losses == pytest.approx(expected.losses, rel=1e-9, abs=0)
    _check_routing(run, expected)


def _check_ranks(run: Run, found: ExpertNumbers) -> None:
    """Where all ranks exchange tokens, the fullest rank has most visits of all."""
    layout, shape = run.config.layout(), run.shape
    if layout.ep == 1 or shape.capacity_factor:
        assert found.rank_imbalance is None
    elif layout.ep == layout.dp * layout.cp:
        held = shape.experts // layout.ep
        each = [max(sum(row[at : at + held]) for at in range(0, len(row), held)) for row in found.visits]
        totals = [sum(row) / layout.ep for row in found.visits]
        expected = [most / average for most, average in zip(each, totals, strict=True)]
        assert found.rank_imbalance == pytest.approx(sum(expected) / len(expected), abs=1e-5)
        assert found.worst_rank_imbalance == pytest.approx(max(expected), abs=1e-5)


def _check_routing(run: Run, expected: PlainRun) -> None:
    """Integers as plain PyTorch counts them; what follows from them, and the auxiliary losses."""
    shape, dropped = run.shape, 0
    layers = tuple(n for n, kind in enumerate(shape.kinds) if kind != "dense")
    for record, counted in zip(run.records, expected.counted, strict=True):
        found = record.experts
        assert found is not None
        assert found.layers == layers
        assert [list(visits) for visits in found.visits] == [one.visits.tolist() for one in counted]
        total = record.tokens * shape.top_k
        assert all(sum(visits) == total for visits in found.visits)
        fullest = [max(visits) * shape.experts / total for visits in found.visits]
        assert found.imbalance == pytest.approx(sum(fullest) / len(layers), abs=1e-5)
        assert found.worst_imbalance == pytest.approx(max(fullest), abs=1e-5)
        loads = torch.tensor(found.visits, dtype=torch.float64) / total
        entropies = torch.distributions.Categorical(loads).entropy() / math.log(shape.experts)
        assert found.entropy == pytest.approx(float(entropies.mean()), abs=1e-5)
        assert found.worst_entropy == pytest.approx(float(entropies.min()), abs=1e-5)
        _check_ranks(run, found)
        assert found.unvisited == sum(visits.count(0) for visits in found.visits)
        if shape.capacity_factor:
            assert found.dropped is not None
            each = [one.dropped for one in counted]
            assert found.dropped == pytest.approx(sum(each) / len(layers) / total, abs=1e-5)
            assert found.worst_dropped == pytest.approx(max(each) / total, abs=1e-5)
            dropped += sum(each)
        for name, factor in (("balance", shape.balance_loss), ("z", shape.z_loss)):
            loss = getattr(found, f"{name}_loss")
            if not factor:
                assert loss is None
                continue
            assert loss == pytest.approx(sum(getattr(one, name) for one in counted) / record.tokens, rel=1e-9)
    if 0 < shape.capacity_factor < 1:
        assert dropped > 0, "nothing was dropped: too easy"
