"""Layouts of up to four ranks and two stages train as one rank does, and that as plain PyTorch does.

Inputs are fresh in every session: the seed stands in the tests' names, and BRAID_TEST_SEED sets it.
"""

import json
import math
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.runs import PlainRun, Run, prepare_text, run_layout, run_plain

SEED = int(os.environ["BRAID_TEST_SEED"])
STEPS = 10
TOLERANCE = {"fp64": 1e-9, "fp32": 2e-5}

Overrides = Mapping[str, Mapping[str, Any]]

FOLDED = {"overlap": {"schedule": "megatron", "pipeline": "folded"}}
LAYOUTS: Mapping[str, Overrides] = {
    "one rank": {},
    "tp 2": {"parallel": {"tp": 2}},
    "pp 2": {"parallel": {"pp": 2}},
    "pp 2 folded": {"parallel": {"pp": 2}, **FOLDED},
    "dp 2": {"parallel": {"dp": 2}},
    "tp 2 x pp 2": {"parallel": {"tp": 2, "pp": 2}},
    "tp 2 x pp 2 folded": {"parallel": {"tp": 2, "pp": 2}, **FOLDED},
    "dp 2 x tp 2": {"parallel": {"dp": 2, "tp": 2}},
    "dp 2, zero 1": {"parallel": {"dp": 2, "zero": 1}},
    "pp 2 x dp 2, zero 1": {"parallel": {"pp": 2, "dp": 2, "zero": 1}},
    "dp 2, zero 3": {"parallel": {"dp": 2, "zero": 3}, "overlap": {"schedule": "ddp"}},
    "pp 2 x dp 2, zero 2": {"parallel": {"pp": 2, "dp": 2, "zero": 2}},
    "pp 2 x dp 2, zero 3": {"parallel": {"pp": 2, "dp": 2, "zero": 3}},
    "pp 2 folded x dp 2, zero 3": {
        "parallel": {"pp": 2, "dp": 2, "zero": 3},
        "overlap": {"schedule": "megatron", "pipeline": "folded"},
    },
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"family": "llama"},
    "tied llama": {"family": "llama", "tied_head": True},
    "gpt": {"family": "gpt", "kv_heads": 4},
}
TIED_LAYOUTS = (
    "pp 2 folded",
    "tp 2 x pp 2",
    "pp 2 x dp 2, zero 1",
    "dp 2, zero 3",
    "pp 2 x dp 2, zero 3",
    "pp 2 folded x dp 2, zero 3",
)
FP32_LAYOUTS = ("one rank", "tp 2", "pp 2 folded", "dp 2, zero 1", "dp 2, zero 3")
CASES = [
    *((model, layout, "fp64") for model in ("llama", "gpt") for layout in LAYOUTS),
    *(("tied llama", layout, "fp64") for layout in TIED_LAYOUTS),
    *(("llama", layout, "fp32") for layout in FP32_LAYOUTS),
]


class Runs:
    """Runs of this module by what they are, each done once."""

    def __init__(self, path: Path, seed: int) -> None:
        self._path = path
        self._seed = seed
        self._runs: dict[str, Run] = {}
        self._plain: dict[tuple[str, str], PlainRun] = {}

    @cached_property
    def data(self) -> Path:
        """The corpus that all runs train on."""
        return prepare_text(self._path, self._seed)

    def of(
        self, model: str, layout: str, dtype: str, recompute: str = "none", until: int | None = None
    ) -> Run:
        """Through controller and processes."""
        key = json.dumps([model, layout, dtype, recompute, until])
        if key not in self._runs:
            overrides = {
                "model": MODELS[model],
                "train": {
                    "dtype": dtype,
                    "recompute": recompute,
                    "seed": self._seed,
                    "steps": STEPS,
                    "validation_samples": 7,  # the last micro-batch is not full
                },
                **LAYOUTS[layout],
            }
            self._runs[key] = run_layout(self._path / "runs", self.data, until, **overrides)
        return self._runs[key]

    def plain(self, run: Run, model: str) -> PlainRun:
        """By the plain loop, in this process."""
        key = model, run.config.train.dtype
        if key not in self._plain:
            self._plain[key] = run_plain(run.config, self.data)
        return self._plain[key]


@pytest.fixture(scope="module", params=[SEED], ids=lambda seed: f"seed={seed}")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("layouts"), request.param)


def _slow_cases() -> list[Any]:
    """Two ranks of one family are enough for a quick look; the rest takes minutes."""
    return [
        pytest.param(*case, id=", ".join(case))
        if case[0] == "llama" and case[2] == "fp64" and " x " not in case[1]
        else pytest.param(*case, id=", ".join(case), marks=pytest.mark.slow)
        for case in CASES
    ]


@pytest.mark.parametrize(("model", "layout", "dtype"), _slow_cases())
def test_layout_trains_as_plain_pytorch_does(runs: Runs, model: str, layout: str, dtype: str) -> None:
    run = runs.of(model, layout, dtype)
    plain = runs.plain(run, model)
    tolerance = TOLERANCE[dtype]
    assert len(run.losses) == STEPS
    assert run.losses == pytest.approx(plain.losses, rel=tolerance, abs=0)
    # A norm sums what rounding did to every gradient: seen 2.2e-5 apart where losses were within 2e-5.
    norms = 5 * tolerance if dtype == "fp32" else tolerance
    assert run.gradient_norms == pytest.approx(plain.gradient_norms, rel=norms, abs=0)
    assert [record.lr for record in run.records] == pytest.approx(plain.lr, rel=1e-12)
    assert max(plain.gradient_norms) > run.config.train.clip_norm, "nothing was clipped: too easy a test"
    assert plain.losses[-1] < plain.losses[0] - 0.1, "nothing was learned: too easy a test"

    assert run.report["validation"] == pytest.approx(plain.validation, rel=tolerance)

    if dtype == "fp64":  # in fp32, Adam blows up the rounding of gradients that are zero in truth
        trained = {name: tensor.detach() for name, tensor in plain.model.named_parameters()}
        torch.testing.assert_close(run.parameters(), trained, rtol=1e-8, atol=1e-10)


def assert_identical(run: Run, other: Run) -> None:
    """Same losses, norms and final parameters, bit for bit."""
    assert run.losses == other.losses
    assert run.gradient_norms == other.gradient_norms
    ours, theirs = run.parameters(), other.parameters()
    assert ours.keys() == theirs.keys()
    different = [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]
    assert not different


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout", "dtype"),
    [
        ("llama", "pp 2", "fp64"),
        ("llama", "pp 2 folded", "fp64"),
        ("llama", "pp 2 folded", "fp32"),
        ("gpt", "pp 2", "fp64"),
        ("gpt", "pp 2 folded", "fp64"),
    ],
)
def test_pipelines_change_no_bit(runs: Runs, model: str, layout: str, dtype: str) -> None:
    """A pipeline adds the same numbers in the same order as one rank does, and clips by the same factor."""
    assert_identical(runs.of(model, layout, dtype), runs.of(model, "one rank", dtype))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "gpt"])
@pytest.mark.parametrize("layout", ["tp 2 x pp 2", "tp 2 x pp 2 folded"])
def test_pipelines_of_tensor_groups_change_no_bit(runs: Runs, model: str, layout: str) -> None:
    assert_identical(runs.of(model, layout, "fp64"), runs.of(model, "tp 2", "fp64"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one rank", "tp 2"])
@pytest.mark.parametrize("recompute", ["selective", "full", "fine"])
def test_recomputation_changes_no_bit(runs: Runs, layout: str, recompute: str) -> None:
    """Every parameter's gradient is in the norm, and every update in the steps after it."""
    run, kept = runs.of("llama", layout, "fp32", recompute, until=6), runs.of("llama", layout, "fp32")
    assert run.losses == kept.losses[:6]
    assert run.gradient_norms == kept.gradient_norms[:6]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one rank", "tp 2"])
def test_bf16_stays_close_to_fp32(runs: Runs, layout: str) -> None:
    run = runs.of("llama", layout, "bf16", until=10)
    assert all(map(math.isfinite, run.losses + run.gradient_norms))
    assert run.losses == pytest.approx(runs.of("llama", "one rank", "fp32").losses[:10], rel=2e-2)
