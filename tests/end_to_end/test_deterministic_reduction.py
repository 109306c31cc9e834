"""With ``train.deterministic_reduction`` no number of data-parallel ranks changes a bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.runs import Run, prepare_text, run_layout


def train(path: Path, data: Path, dp: int, tp: int, family: str) -> Run:
    """Twenty steps of twelve samples."""
    sections: dict[str, Any] = {
        "model": {"family": family, "layers": 2, "kv_heads": None},
        "train": {"global_batch": 12, "micro_batch": 1, "deterministic_reduction": True, "clip_norm": 2.0},
        "parallel": {"dp": dp, "tp": tp},
    }
    return run_layout(path, data, **sections)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tp", "degrees"), [("llama", 1, (1, 3)), ("gpt", 2, (1, 2))])
def test_replicas_change_no_bit(tmp_path: Path, family: str, tp: int, degrees: tuple[int, ...]) -> None:
    data = prepare_text(tmp_path, 11, files=4)
    first, *others = (train(tmp_path / str(dp), data, dp, tp, family) for dp in degrees)
    assert min(first.gradient_norms) < 2 < max(first.gradient_norms), "some steps are clipped"
    for run in others:
        assert run.losses == first.losses
        assert run.gradient_norms == first.gradient_norms
        parameters = run.parameters()
        assert not [
            name for name, own in first.parameters().items() if not torch.equal(own, parameters[name])
        ]
