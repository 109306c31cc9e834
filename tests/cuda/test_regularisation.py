"""Dropout, label smoothing and z-loss in all layouts: what plain PyTorch trains, with masks by NumPy.

On the model of the CUDA machine (`tests.cuda.training`): memory is as predicted, to the byte.
"""

from typing import Any

import pytest
import torch

from tests.cuda.training import Runs, assert_near, assert_predicted, assert_same_bits, sections
from tests.end_to_end.command import ROOT
from tests.end_to_end.plain_regularisation import REGULARISED, RegularisedTrainer

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("regularised"))


GPT = {"family": "gpt", "tied_head": True, "hidden": 36}
MOE = {"family": "moe", "layers": 2, "experts": 4, "top_k": 2, "ffn": 32, "shared_experts": 1}
DOCUMENTS = {"data": {"document_mask": True, "restart_positions": True}}
AGAIN = {**REGULARISED, "recompute": "full"}
CASES: dict[str, dict[str, Any]] = {
    "tp 2": sections("megatron", {"tp": 2}, GPT, REGULARISED),
    "pp 3": sections("megatron", {"pp": 3}, {"layers": 6}, {**REGULARISED, "global_batch": 6}),
    "dp 2, ZeRO 3": sections("ddp", {"dp": 2, "zero": 3}, GPT, REGULARISED),
    "ep 2": sections("expert_overlap", {"dp": 2, "ep": 2}, MOE, REGULARISED),
    "two strands, repeated": sections("dhelix", {"tp": 2, "pp": 2}, None, AGAIN),
    "units, weight gradients late": sections("braid:w", {"tp": 2, "dp": 2, "zero": 2}, GPT, AGAIN),
    "ring, documents": sections("wavelet", {"cp": 2, "context": "ring"}, None, REGULARISED, **DOCUMENTS),
    "degrees": sections(
        "oases", {"tp": 4, "tensor_degrees": "4 2 1 2"}, None, {**REGULARISED, "micro_batch": 4}
    ),
    "a capacity": sections(
        "wavelet", {"tp": 2, "dp": 2, "ep": 2}, {**MOE, "capacity_factor": 0.7}, {**AGAIN, "micro_batch": 2}
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_regularised_run(runs: Runs, name: str) -> None:
    content = CASES[name]
    outcome, run = runs.of(content)
    assert run.faults == []
    assert_predicted(outcome, run)
    kept = ("tp", "cp") if "capacity_factor" in content["model"] else ()
    assert_near(run, runs.plain(content, *kept, trainer_of=RegularisedTrainer), 1e-9, 1e-9)


def test_own_layers_drop_what_they_add_to_the_residual_stream(runs: Runs) -> None:
    """And not what they add to each other. Masks are the same whether one rank has all features or two."""
    own = {"layer": f"{ROOT}/docs/examples/parallel_layer.py:ParallelLayer", "layers": 2}
    one, two = (runs.of(sections("braid:w", {"tp": tp}, own, REGULARISED))[1] for tp in (1, 2))
    assert two.losses == pytest.approx(one.losses, rel=1e-12)
    torch.testing.assert_close(two.parameters(), one.parameters(), rtol=1e-9, atol=1e-12)
    plain = runs.of(sections("megatron", {}, own))[1]
    assert plain.losses[0] != one.losses[0]


def test_a_step_that_is_repeated_has_the_same_masks(runs: Runs) -> None:
    again = [runs.of(sections("megatron", {"tp": 2}, GPT, AGAIN))[1] for _ in range(2)]
    assert_same_bits(*again)
