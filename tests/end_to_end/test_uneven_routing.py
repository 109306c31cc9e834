"""Routing that is far from balanced, over two ranks that have half of the experts each: as plain PyTorch.

Every token's embedding has one large element in common, and the router's weights for it decide how experts
are chosen: as Zipf's law has it, or one expert by all tokens and another one by none. That a capacity bounds
memory whatever is chosen is in `tests.scheduling.test_memory`, where all tokens are alike.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from braid.jobs.benchmarks.plain_torch import PlainSizes, load_named
from braid.jobs.display import experts_line
from tests.end_to_end.plain_experts import ExpertModel
from tests.end_to_end.runs import (
    Run,
    plain_steps,
    plain_trainer,
    prepare_text,
    run_layout,
    tokens_of_ranks,
)
from tests.foreign_models import random_model

SEED, STEPS, EXPERTS = 11, 6, 4
LIKED: Mapping[str, tuple[float, ...]] = {
    "zipf": tuple((-torch.arange(1.0, EXPERTS + 1).log()).tolist()),
    "one hot, one never": (40.0, 0.0, 0.0, -40.0),
}
MODEL = {"family": "moe", "experts": EXPERTS, "top_k": 2}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text on whose tokens such routers agree."""
    return prepare_text(tmp_path_factory.mktemp("uneven"), SEED)


def uneven(folder: Path, liked: tuple[float, ...]) -> Path:
    """A Mixtral whose routers prefer experts by as much."""
    model = random_model("mixtral", SEED)
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding[:, 0] = 6 * embedding.std()
        for layer in model.model.layers:
            gate = layer.mlp.gate.weight
            gate.normal_(std=gate.shape[1] ** -0.5)
            gate[:, 0] = torch.tensor(liked, dtype=gate.dtype) / 3
            layer.post_attention_layernorm.weight[0] = 1.0
    model.save_pretrained(folder)
    return folder


def train(folder: Path, data: Path, model: Mapping[str, Any], **train: Any) -> Run:
    settings = {"dtype": "fp64", "seed": SEED, "steps": STEPS, **train}
    return run_layout(folder, data, model=model, train=settings, parallel={"dp": 2, "ep": 2})


@pytest.mark.slow
@pytest.mark.parametrize("liked", LIKED)
@pytest.mark.parametrize("capacity", [0.0, 0.8], ids=["dropless", "capacity"])
def test_losses_are_those_of_plain_pytorch(tmp_path: Path, data: Path, liked: str, capacity: float) -> None:
    initial = uneven(tmp_path / "weights", LIKED[liked])
    model = {**MODEL, "initial": str(initial), "capacity_factor": capacity, "balance_loss": 0.01}
    begin = train(tmp_path / "begin", data, model, lr=1e-300, steps=1)
    run = train(tmp_path / "run", data, model)

    shape, settings = run.shape, run.config.train
    groups = tokens_of_ranks(shape, run.config.parallel, settings.micro_batch)
    plain = ExpertModel(PlainSizes.of(shape), shape, torch.float64, groups)
    load_named(plain, begin.parameters())
    steps = plain_steps(plain_trainer(plain, settings), settings, data, shape.sequence)
    for record, (loss, norm) in zip(run.records, steps, strict=True):
        assert record.loss == pytest.approx(loss, rel=1e-9, abs=0)
        assert record.grad_norm == pytest.approx(norm, rel=1e-9, abs=0)
        counted, found = plain.take_counted(), record.experts
        assert found is not None
        assert [list(visits) for visits in found.visits] == [one.visits.tolist() for one in counted]
        total = sum(sum(visits) for visits in found.visits)
        if capacity:
            dropped = sum(one.dropped for one in counted)
            assert dropped > total * 0.2
            assert found.dropped == pytest.approx(dropped / total, abs=1e-5)
            assert found.rank_imbalance is None
        else:
            # What a step waits for is told: rows of the fullest rank over the average one's.
            halves = [sum(visits[: EXPERTS // 2]) * 2 / sum(visits) for visits in found.visits]
            fullest = [max(half, 2 - half) for half in halves]
            assert found.rank_imbalance == pytest.approx(sum(fullest) / len(fullest), abs=1e-5)
            assert found.rank_imbalance > 1.2
        if liked == "zipf":
            assert found.imbalance > 1.3
        else:
            assert all(visits[0] * 2 == sum(visits) and visits[3] == 0 for visits in found.visits)
    line = experts_line(run.report["experts"]["last"])
    assert ("of visits dropped" in line) == bool(capacity)
    assert ("fullest rank" in line) == (not capacity)
