"""The peer whose experts are cut over replicas trains what one process trains, one expert after the other."""

from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.nn import functional as F

from braid.jobs.benchmarks.expert_peers import EP, Mixture
from braid.jobs.benchmarks.plain_torch import PlainSizes
from braid.scheduling.spec import ModelShape
from tests.end_to_end.plain_experts import ExpertModel, Weight
from tests.forking import run_forked
from tests.jobs.test_peers import OPTIMIZER, SIZES, check_trained, plain_training, process_group, train


def shape_of(**changes: Any) -> ModelShape:
    mixture: dict[str, Any] = {"experts": 6, "top_k": 2, "expert_ffn": 24}
    losses = {"balance_loss": 0.1, "z_loss": 0.01}
    return ModelShape(**{"family": "moe", **SIZES, **mixture, **losses, **changes})


def expert_model(shape: ModelShape) -> ExpertModel:
    """Drawn anew, with norms that are not ones, so that a weight that is not loaded shows."""
    torch.manual_seed(4)
    model = ExpertModel(PlainSizes.of(shape), shape, torch.float32, groups=())
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Weight):
                module.weight.normal_(std=0.2)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "mixture", "optimizer"),
    [
        (2, {}, {}),
        (3, {"normalised": False, "top_k": 3}, {"clip_norm": 0.0}),  # which would hide a wrong scale
    ],
)
def test_peer_trains_the_plain_mixture(
    world_size: int, mixture: dict[str, Any], optimizer: dict[str, Any]
) -> None:
    shape = shape_of(**mixture)
    (losses, parameters), norms = plain_training(expert_model(shape), **optimizer)
    alone = shape_of(**mixture, balance_loss=0.0, z_loss=0.0)
    (without, _), _ = plain_training(expert_model(alone), **optimizer)
    assert losses != pytest.approx(without, rel=2e-4), "auxiliary losses are part of what is compared"
    assert min(norms) > OPTIMIZER["clip_norm"]
    ranks = train(EP, world_size, expert_model(shape), experts=shape, **optimizer)
    assert len({tuple(found) for found, _ in ranks}) == 1, "all ranks return one loss"
    check_trained(ranks, losses, parameters)


def visit_one(rank: int, port: int) -> None:
    """A rank of two with an expert each; all tokens visit that of the first."""
    with process_group(rank, 2, port):
        torch.manual_seed(6)
        mixture = Mixture(shape_of(hidden=8, experts=2, top_k=1, expert_ffn=12), dist.group.WORLD)
        with torch.no_grad():
            mixture.router.weight.copy_(torch.tensor([1.0, -1.0])[:, None].expand(2, 8))
        x_BSD = torch.rand(2, 3, 8, requires_grad=True)
        y_BSD = mixture(x_BSD)
        y_BSD.backward(torch.ones_like(y_BSD))
        gate, up, down = (mixture.experts[name].weight for name in ("gate", "up", "down"))  # the same on both
        expected = F.linear(F.silu(F.linear(x_BSD, gate[0])) * F.linear(x_BSD, up[0]), down[0])
        torch.testing.assert_close(y_BSD, expected)
        assert x_BSD.grad is not None
        assert bool(x_BSD.grad.any())
        for weight in (gate, up, down):
            assert weight.grad is not None
            assert bool(weight.grad.any()) == (rank == 0)


@pytest.mark.slow
def test_a_rank_that_nobody_visits_takes_part() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_forked(visit_one, (store.port,), nprocs=2)
