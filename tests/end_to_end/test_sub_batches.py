"""Sub-batches side by side in every pass, whatever is recomputed: the bits of one after the other."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from braid.scheduling.lowering.recompute import RECOMPUTE_POLICIES
from tests.end_to_end.command import overlap_of
from tests.end_to_end.runs import planned, prepare_text, run_layout

SEED, STEPS, MICRO_BATCHES = 13, 3, 5
LAYOUTS: list[dict[str, Any]] = [{"tp": 2}, {"tp": 2, "pp": 2}, {"tp": 2, "dp": 2, "zero": 1}]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_text(tmp_path_factory.mktemp("sub-batches"), SEED)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [*RECOMPUTE_POLICIES, "full fine selective none"])
@pytest.mark.parametrize(
    "parallel", LAYOUTS, ids=lambda parallel: " x ".join(f"{axis} {n}" for axis, n in parallel.items())
)
def test_losses_are_those_of_one_after_the_other(
    tmp_path: Path, data: Path, parallel: Mapping[str, Any], policy: str
) -> None:
    """An odd number of micro-batches: the last one goes by itself."""
    batch = 2 * MICRO_BATCHES * parallel.get("dp", 1)
    train = {"steps": STEPS, "seed": SEED, "global_batch": batch, "recompute": policy}
    runs = []
    folded = ("oases:folded_sub_batches", "braid:folded_sub_batches") if parallel.get("pp", 1) > 1 else ()
    for schedule in ("megatron", "merak", "oases", "braid:sub_batches", *folded):
        sections = {"parallel": parallel, "train": train, "overlap": overlap_of(schedule)}
        sections["overlap"] = planned(tmp_path / "plans", sections)
        runs.append(run_layout(tmp_path / "runs", data, **sections))
    for run in runs[1:]:
        assert run.losses == runs[0].losses
        assert run.gradient_norms == runs[0].gradient_norms
        assert run.report["validation"] == runs[0].report["validation"]
