"""Layers with tensor-parallel degrees of their own: losses, norms and checkpoints of one process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.command import overlap_of
from tests.end_to_end.runs import PlainRun, planned, prepare_text, run_layout, run_plain, small_config

SEED, STEPS = 17, 4
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"family": "llama", "kv_heads": 4},
    "gpt": {"family": "gpt", "kv_heads": 4},
    "tied llama": {"family": "llama", "kv_heads": 4, "tied_head": True},
    "moe": {
        "family": "moe",
        "kv_heads": 4,
        "experts": 4,
        "top_k": 2,
        "ffn": 96,
        "balance_loss": 0.02,
        "pattern": "layer dense",
    },
}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "megatron", {"tp": 2, "tensor_degrees": "2 2*1 2"}),
    ("gpt", "oases", {"tp": 2, "tensor_degrees": "2 2*1 2"}),
    ("llama", "braid:w", {"tp": 4, "tensor_degrees": "4 2 1 2 4"}),
    ("gpt", "ddp", {"tp": 4, "tensor_degrees": "4 2 1 2 4"}),
    ("llama", "wavelet", {"tp": 4, "tensor_degrees": "2*1 2*4"}),
    ("tied llama", "megatron", {"tp": 4, "tensor_degrees": "2*1 2*2"}),
    ("llama", "megatron:folded", {"tp": 2, "pp": 2, "tensor_degrees": "2 2*1 2"}),
    ("llama", "ddp", {"tp": 2, "dp": 2, "zero": 1, "tensor_degrees": "2 2*1 2"}),
    ("gpt", "braid:w", {"tp": 4, "dp": 2, "zero": 3, "tensor_degrees": "4 2 1 2"}),
    ("moe", "megatron", {"tp": 2, "tensor_degrees": "2 2*1 2"}),
    ("moe", "wavelet", {"tp": 4, "tensor_degrees": "2 4 1 2"}),
    ("moe", "ddp", {"tp": 2, "dp": 2, "zero": 3, "tensor_degrees": "2 2*1 2"}),
    ("moe", "ddp", {"tp": 2, "dp": 4, "ep": 2, "zero": 3, "tensor_degrees": "2 2*1 2"}),
    ("moe", "braid:w", {"tp": 2, "dp": 2, "ep": 2, "zero": 1, "tensor_degrees": "2 2*1 2"}),
]
RECOMPUTING: list[tuple[str, str, str, dict[str, Any]]] = [
    ("llama", "full none fine selective", "oases", {"tp": 4, "tensor_degrees": "4 2 1 2"}),
    ("gpt", "2*full none full", "braid:w", {"tp": 2, "dp": 2, "zero": 3, "tensor_degrees": "2 2*1 2"}),
    ("moe", "none full fine none", "braid:w", {"tp": 2, "pp": 2, "tensor_degrees": "2 2*1 2"}),
    ("llama", "none full none fine", "dualpipev", {"pp": 2}),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_text(tmp_path_factory.mktemp("degrees"), SEED)


_PLAIN: dict[tuple[str, int], PlainRun] = {}


def overrides(model: str, layers: int) -> dict[str, Mapping[str, Any]]:
    return {
        "model": {**MODELS[model], "layers": layers},
        "train": {"dtype": "fp64", "seed": SEED, "steps": STEPS, "global_batch": 16, "micro_batch": 4},
        "cluster": {"cpus_per_rank": 0.1},
    }


def plain(model: str, layers: int, folder: Path, data: Path) -> PlainRun:
    if (model, layers) not in _PLAIN:
        _PLAIN[model, layers] = run_plain(small_config(folder, **overrides(model, layers)), data)
    return _PLAIN[model, layers]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "schedule", "parallel"),
    CASES,
    ids=[f"{m} {s} {' x '.join(f'{a} {d}' for a, d in p.items())}" for m, s, p in CASES],
)
def test_losses_are_those_of_plain_pytorch(
    tmp_path: Path, data: Path, model: str, schedule: str, parallel: Mapping[str, Any]
) -> None:
    compare(tmp_path, data, model, schedule, parallel)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "policies", "schedule", "parallel"), RECOMPUTING, ids=[f"{m} {p}" for m, p, _, _ in RECOMPUTING]
)
def test_so_are_those_of_layers_that_recompute_by_policies_of_their_own(
    tmp_path: Path, data: Path, model: str, policies: str, schedule: str, parallel: Mapping[str, Any]
) -> None:
    compare(tmp_path, data, model, schedule, parallel, recompute=policies)


def compare(
    tmp_path: Path,
    data: Path,
    model: str,
    schedule: str,
    parallel: Mapping[str, Any],
    recompute: str = "none",
) -> None:
    """Losses, norms and parameters of a run and of plain PyTorch."""
    layers = 5 if parallel.get("tensor_degrees", "").count(" ") == 4 else 4
    expected = plain(model, layers, tmp_path / "plain", data)
    sections = {**overrides(model, layers), "parallel": parallel, "overlap": overlap_of(schedule)}
    sections["train"] = {**sections["train"], "recompute": recompute}
    sections["overlap"] = planned(tmp_path / "plans", sections)
    run = run_layout(tmp_path / "run", data, **sections)
    assert run.losses == pytest.approx(expected.losses, rel=1e-9, abs=0)
    assert run.gradient_norms == pytest.approx(expected.gradient_norms, rel=1e-9, abs=0)
    trained = {name: tensor.detach() for name, tensor in expected.model.named_parameters()}
    torch.testing.assert_close(run.parameters(), trained, rtol=1e-7, atol=1e-9)
