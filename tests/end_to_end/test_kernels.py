"""Training with Triton's kernels, in its interpreter, gives the curve of PyTorch's."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from braid.actors.config import ConfigError, parse_config
from tests.end_to_end.command import braid, write_config, write_corpus
from tests.end_to_end.runs import BYTES_VOCABULARY, Run, prepare_text, run_layout

TOLERANCE = {"fp32": 2e-5, "bf16": 1e-2}
STEPS = 3

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks on the CPU need the interpreter")


def trained(path: Path, data: Path, kernels: str, model: dict[str, Any], tp: int, dtype: str) -> Run:
    """A tiny model's first steps."""
    train = {"steps": STEPS, "global_batch": 2, "warmup_steps": 1, "validation_samples": 2}
    return run_layout(
        path / kernels,
        data,
        model={"hidden": 32, "layers": 1, "sequence": 16, **model},
        train={**train, "dtype": dtype, "kernels": kernels},
        parallel={"tp": tp},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "tp", "dtype"),
    [
        ({"family": "llama", "kv_heads": 2}, 2, "fp32"),
        ({"family": "gpt", "kv_heads": 4}, 1, "bf16"),
    ],
    ids=["llama, tp 2, fp32", "gpt, bf16"],
)
def test_the_curve_of_triton_is_that_of_torch(
    tmp_path: Path, model: dict[str, Any], tp: int, dtype: str
) -> None:
    data = prepare_text(tmp_path, seed=tp, files=2)
    by_torch, by_triton = (
        trained(tmp_path, data, kernels, model, tp, dtype) for kernels in ("torch", "triton")
    )
    assert len(by_torch.losses) == STEPS
    assert by_triton.losses == pytest.approx(by_torch.losses, rel=TOLERANCE[dtype], abs=0)
    ours, theirs = by_triton.parameters(), by_torch.parameters()
    same = [torch.equal(ours[name], theirs[name]) for name in theirs]
    assert not all(same), "the same bits everywhere: were these Triton's kernels?"


def test_triton_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config({"train": {"kernels": "triton"}})
    assert config.check(BYTES_VOCABULARY)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"train\.kernels='triton': Triton is not installed"):
        config.check(BYTES_VOCABULARY)


def test_triton_without_a_device_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    write_corpus(tmp_path)
    write_config(tmp_path, train={"kernels": "triton"})
    outcome = braid(tmp_path, "train", "run.yaml")
    assert outcome.code == 2
    assert "train.kernels='triton': this rank has no CUDA device" in outcome.errors
    assert "Traceback" not in outcome.output + outcome.errors
