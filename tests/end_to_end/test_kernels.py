"""Training with Triton's kernels, in its interpreter, gives the curve of PyTorch's."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from braid.actors.config import ConfigError, parse_config
from tests.end_to_end.command import braid, write_config, write_corpus
from tests.end_to_end.runs import BYTES_VOCABULARY, run_layout

TOLERANCE = {"fp32": 2e-5, "bf16": 1e-2}
STEPS = 3

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks on the CPU need the interpreter")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "tp", "dtype"),
    [({"kv_heads": 2}, 2, "fp32"), ({"family": "gpt", "kv_heads": 4}, 1, "bf16")],
    ids=["llama, tp 2, fp32", "gpt, bf16"],
)
def test_the_curve_of_triton_is_that_of_torch(
    tmp_path: Path, data: Path, model: dict[str, Any], tp: int, dtype: str
) -> None:
    train = {"steps": STEPS, "global_batch": 2, "warmup_steps": 1, "validation_samples": 2, "dtype": dtype}
    sizes = {"hidden": 32, "layers": 1, "sequence": 16, **model}
    by_torch, by_triton = (
        run_layout(tmp_path, data, model=sizes, train={**train, "kernels": name}, parallel={"tp": tp})
        for name in ("torch", "triton")
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
    with pytest.raises(ConfigError, match=r"train\.kernels='triton': triton is not installed"):
        config.check(BYTES_VOCABULARY)


def test_triton_without_a_device_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    write_corpus(tmp_path)
    write_config(tmp_path, train={"kernels": "triton"})
    outcome = braid(tmp_path, "train", "run.yaml")
    assert outcome.code == 2
    assert "train.kernels='triton': this rank has no CUDA device" in outcome.errors
    assert "Traceback" not in outcome.output + outcome.errors
