"""A validation gives one number for given weights and text: in every layout, and in `transformers`.

Within documents: `test_masked_losses`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from braid.actors.config import Config
from braid.actors.controller.ranks.group import rendezvous
from braid.actors.stage.rank.interface import Rank
from tests.end_to_end.runs import KeptRanks, run_plan, small_config, validated
from tests.foreign_models import SEQUENCE, LossOf, in_float64, random_model

Sections = Mapping[str, Mapping[str, Any]]

SEED = 3
SAMPLES = 7
"""What no replicas and no micro-batches divide: there is always something to fill up."""
OF_LAYERS = {"recompute": "fine none full fine"}
LAYOUTS: list[tuple[Sections, int]] = [
    ({}, 1),
    ({}, 4),
    ({"parallel": {"tp": 2}}, 4),
    ({"parallel": {"cp": 2}}, 2),
    ({"parallel": {"dp": 3}}, 1),
    ({"parallel": {"dp": 3}}, 4),
    ({"parallel": {"tp": 2, "dp": 2}}, 1),
    ({"parallel": {"pp": 2, "dp": 3}, "overlap": {"schedule": "megatron", "pipeline": "folded"}}, 2),
    ({"parallel": {"dp": 3, "zero": 3}, "overlap": {"schedule": "ddp"}}, 2),
    ({"parallel": {"tp": 2, "dp": 2, "zero": 1, "tensor_degrees": "2 1 1 2"}, "train": OF_LAYERS}, 2),
]
EXPERTS: list[tuple[Sections, int]] = [({}, 1), ({"parallel": {"dp": 2, "ep": 2}}, 2)]


def by_ranks(config: Config, data: Path) -> float:
    """Nats per token of a validation by real ranks, which begin with the weights in ``model.initial``."""
    group = KeptRanks(config).start(config.layout().ranks)
    try:
        group.call_all(Rank.setup, run_plan(config, data), rendezvous(group, 60.0))
        group.call_all(Rank.load_initial, str(config.model.initial))
        facts = group.call(0, Rank.data_facts)
        targets = validated(data, SEQUENCE, SAMPLES)[:, 1:]
        assert facts["validation_tokens"] == targets.numel()
        assert facts["validation_bytes"] == (targets < 256).sum().item()
        return sum(map(sum, group.call_all(Rank.validate))) / facts["validation_tokens"]
    finally:
        group.shutdown()


def by_transformers(path: Path, data: Path, kind: str) -> float:
    """Nats per token of a random model, which is saved for the ranks to begin with."""
    model = random_model(kind, SEED).double()
    model.save_pretrained(path / "weights", save_original_format=True)
    held_out = validated(data, SEQUENCE, SAMPLES)
    with in_float64(model.eval()), torch.no_grad():
        return LossOf(model).loss_sum(held_out[:, :-1], held_out[:, 1:]).item() / held_out[:, 1:].numel()


@pytest.mark.parametrize(
    ("kind", "model", "layouts"),
    [("llama", {}, LAYOUTS), ("mixtral", {"family": "moe", "experts": 4, "top_k": 2}, EXPERTS)],
    ids=["llama", "mixtral"],
)
def test_every_layout_finds_the_loss_that_transformers_finds(
    tmp_path: Path, data: Path, kind: str, model: Mapping[str, Any], layouts: list[tuple[Sections, int]]
) -> None:
    expected = by_transformers(tmp_path, data, kind)
    train = {"dtype": "fp64", "global_batch": 24, "validation_samples": SAMPLES}
    more = {"model": {**model, "initial": str(tmp_path / "weights")}}
    found = []
    for layout, each in layouts:
        sections = {**layout, **more, "train": {**train, **layout.get("train", {}), "micro_batch": each}}
        found.append(by_ranks(small_config(tmp_path / "runs", **sections), data))
    assert found == pytest.approx([expected] * len(found), rel=1e-9, abs=0)
    assert found == pytest.approx(found[:1] * len(found), rel=1e-12, abs=0)
