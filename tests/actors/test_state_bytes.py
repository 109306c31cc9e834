"""Bytes of optimizers' states: the model of memory predicts those of the fullest rank, to the byte."""

from pathlib import Path
from typing import Any

import pytest
import torch

from braid.actors.stage.model.model import StageModel
from braid.actors.stage.state.optimizer import state_slots
from braid.actors.stage.state.parameters import Place
from braid.scheduling.model.sizes import PartSizes
from braid.scheduling.schedule import buckets
from braid.scheduling.schedule.memory import rank_memory
from braid.scheduling.schedule.states import ADAMW, OptimizerStates
from tests.actors.test_buckets import held_buckets
from tests.actors.test_bytes_of_shares import code_of
from tests.end_to_end.runs import run_plan, small_config

MOE: dict[str, Any] = {"family": "moe", "experts": 4, "top_k": 2, "expert_ffn": 96}
CASES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({}, {}),
    ({"tp": 2}, {"qkv_bias": True}),
    ({"pp": 2}, {"tied_head": True}),
    ({"dp": 2, "zero": 1}, {}),
    ({"dp": 3, "zero": 3}, {"family": "gpt"}),
    ({"dp": 2, "tp": 2, "zero": 2}, {"head_norm": True}),
    ({"dp": 4, "zero": 3, "shards": 2}, {}),
    ({"dp": 4, "ep": 2, "zero": 3}, MOE),
    ({"dp": 2, "ep": 2, "zero": 0}, {**MOE, "balance_rate": 0.01}),
    ({"dp": 2, "cp": 2, "ep": 2, "zero": 1}, MOE),
]
KEPT = [
    ADAMW,
    OptimizerStates("adamw", average=True),
    OptimizerStates("muon"),
    OptimizerStates("muon", average=True),
    OptimizerStates("adamw_8bit"),
    OptimizerStates("adamw_8bit", average=True),
]


@pytest.mark.parametrize("least", [buckets.LEAST_ELEMENTS, 4096])
@pytest.mark.parametrize(("parallel", "model"), CASES)
def test_the_fullest_rank_keeps_what_is_predicted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    parallel: dict[str, int],
    model: dict[str, Any],
    least: int,
) -> None:
    """Wherever ZeRO cuts matrices, tables and norms, in one bucket for each layer and in several."""
    monkeypatch.setattr(buckets, "LEAST_ELEMENTS", least)
    sizes = {"hidden": 96, "layers": 4, "heads": 4, "kv_heads": 4, "sequence": 32, **model}
    train = {"dtype": "fp32", "global_batch": 24}
    config = small_config(tmp_path, model=sizes, parallel=parallel, train=train)
    plan, layout = run_plan(config), config.layout()
    code = code_of(plan)
    found: dict[tuple[int, OptimizerStates], int] = {}
    for rank in range(layout.ranks):
        place = Place.of(layout.mesh, rank)
        sizes_here = PartSizes(plan.shape, layout, config.train.micro_batch)
        stage_model = StageModel(
            shape=plan.shape,
            layout=layout,
            place=place,
            sizes=sizes_here,
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
        shards = held_buckets(stage_model, layout).shards
        for kept in KEPT:
            held = sum(kept.bytes(shard.shape.numel(), 4, matrix=shard.parameter.matrix) for shard in shards)
            key = place.position["pp"], kept
            found[key] = max(found.get(key, 0), held)
            if kept.optimizer != "adamw_8bit":  # states are of the kinds that are counted
                slots = [shard.shape.numel() for kind, shard in state_slots(shards, kept)]
                masters = sum(shard.shape.numel() for shard in shards)
                assert held == 4 * (sum(slots) - masters)
    for (stage, kept), held in found.items():
        assert rank_memory(code, plan.shape, "fp32", stage, states=kept).optimizer_bytes == held, kept
