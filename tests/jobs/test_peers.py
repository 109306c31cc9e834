"""Every peer trains the model that the plain loop trains, with experts one after the other: same losses, same
parameters."""

import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import distributed as dist
from torch.distributed.pipelining.schedules import FORWARD, FULL_BACKWARD, OVERLAP_F_B, _Action
from torch.nn import functional as F

from braid.actors.config import TrainConfig, parse_config
from braid.jobs.bench.peers import (
    DUALPIPEV,
    DUALPIPEV_THREADS,
    PIPELINE,
    TP,
    TP_PIPELINE,
    Peer,
    PeerPlan,
)
from braid.jobs.bench.plain_torch import PlainModel, PlainTrainer
from braid.jobs.bench.replicated_peers import CP, DDP, EP, FSDP2, FSDP2_KEPT, KINDS, DdpPeer, Mixture
from braid.jobs.bench.threaded_overlap import BACKWARD_THREAD, ThreadedOverlap
from braid.scheduling.model.shape import ModelShape
from tests.end_to_end.plain_experts import ExpertModel, Weight
from tests.forking import run_forked

SIZES = {"hidden": 32, "ffn": 48, "layers": 5, "heads": 4, "kv_heads": 2, "head_dim": 8}
SIZES |= {"vocabulary": 64, "sequence": 16}
OPTIMIZER: dict[str, Any] = {
    "lr": 1e-2,
    "betas": (0.9, 0.95),
    "eps": 1e-3,  # as large as the gradients: AdamW with a small one hardly sees their scale
    "weight_decay": 0.1,
    "clip_norm": 0.1,
}
MICRO_BATCH, MICRO_BATCHES, STEPS = 2, 6, 4
TIMEOUT_S = 30


LLAMA = ModelShape(family="llama", **SIZES)


def plan_of(kind: str, shape: ModelShape, messages: bool = False, **train: Any) -> PeerPlan:
    batch = {"micro_batch": MICRO_BATCH, "global_batch": MICRO_BATCH * MICRO_BATCHES, "seed": 1}
    config = parse_config({"train": {**batch, **OPTIMIZER, **train}})
    return PeerPlan(kind=kind, config=config, shape=shape, messages=messages)


def batches() -> list[torch.Tensor]:
    """Token ids of every step, samples x (sequence + 1)."""
    draw = torch.Generator().manual_seed(5)
    shape = (MICRO_BATCH * MICRO_BATCHES, SIZES["sequence"] + 1)
    return [torch.randint(SIZES["vocabulary"], shape, generator=draw) for _ in range(STEPS)]


def plain_model() -> PlainModel:
    """The model that all start from. Norms are not ones, so that a weight that is not loaded shows."""
    torch.manual_seed(3)
    model = PlainModel(LLAMA)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    return model


def named(model: PlainModel) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


Trained = tuple[list[float], dict[str, torch.Tensor]]
"""Losses of the steps, and the parameters after them."""


def plain_training(model: PlainModel | None = None, **changes: Any) -> tuple[Trained, list[float]]:
    """What the plain loop reaches, and its gradient norms."""
    model = model or plain_model()
    constant: dict[str, Any] = {"steps": 1, "min_lr_fraction": 1.0, "warmup_steps": 0}
    trainer = PlainTrainer(model, TrainConfig(**{**constant, **OPTIMIZER, **changes}))
    done = [trainer.step(step, tokens.split(MICRO_BATCH)) for step, tokens in enumerate(batches())]
    return ([loss for loss, _ in done], named(model)), [norm for _, norm in done]


@contextmanager
def process_group(rank: int, world_size: int, port: int) -> Iterator[None]:
    """This process is a rank of gloo's, over loopback."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    yield
    dist.barrier()
    dist.destroy_process_group()


def run_rank(rank: int, plan: PeerPlan, world_size: int, port: int, folder: Path) -> None:
    """One process: train from the weights in the folder, leave losses and parameters there."""
    weights, kind = torch.load(folder / "weights"), plan.kind
    with process_group(rank, world_size, port):
        peer = KINDS[kind](plan, rank, world_size)
        peer.load(weights)
        losses = [peer.step(tokens) for tokens in batches()]
        if kind in (TP, TP_PIPELINE):
            check_messages(replace(plan, messages=True), rank, world_size, weights, losses)
        torch.save((losses, dict(peer.parameters())), folder / f"{rank}")
        if isinstance(peer, DdpPeer):
            check_collectives(kind, peer)
        names = [thread.name for thread in threading.enumerate()]
        assert sum(name.startswith(BACKWARD_THREAD) for name in names) == (kind == DUALPIPEV_THREADS)


def check_messages(
    plan: PeerPlan, rank: int, world_size: int, weights: Mapping[str, Any], losses: Sequence[float]
) -> None:
    """The same peer with Braid's exchange instead of gloo's: the same bits, in all its collectives."""
    peer = Peer(plan, rank, world_size)
    peer.load(weights)
    assert [peer.step(tokens) for tokens in batches()] == losses
    layers = sum(len(stage.layers) for stage in peer.stages.values())
    least = 2 * 4 * layers * MICRO_BATCHES * STEPS  # a gather and a scatter beside attention and MLP, twice
    assert peer._messages.calls >= least


def check_collectives(kind: str, peer: Peer) -> None:
    """One more step: gradients are summed once, and parameters gathered as often as the kind says."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        peer.step(batches()[0])
    counts = {event.key: event.count for event in profile.key_averages() if event.key.startswith("gloo:")}
    layers, micro_batches = SIZES["layers"], MICRO_BATCHES // dist.get_world_size()
    if kind == DDP:
        assert counts == {"gloo:all_reduce": 1 + 1}  # a bucket, and the loss
        return
    if kind == EP:
        # numbers of rows, rows there and back, and their gradients; and the norm of experts' gradients
        assert counts == {"gloo:all_to_all": 5 * layers * micro_batches, "gloo:all_reduce": 1 + 1 + 1}
        return
    if kind == CP:
        passes = layers * MICRO_BATCHES  # on all ranks
        assert counts == {"gloo:all_gather": passes, "gloo:all_to_all": passes, "gloo:all_reduce": 1 + 1}
        return
    gathers = layers + 1 if kind == FSDP2_KEPT else (2 * layers + 1) * micro_batches
    # gloo's reduce-scatters are all-reduces; those of norm and loss come after them
    assert counts == {"gloo:all_gather": gathers, "gloo:all_reduce": layers + 1 + 2}


def train(plan: PeerPlan, world_size: int, model: PlainModel | None = None) -> list[Trained]:
    """Losses and parameters of every rank of a peer that starts from a model."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(named(model or plain_model()), folder / "weights")
        run_forked(run_rank, (plan, world_size, store.port, folder), nprocs=world_size)
        return [torch.load(folder / f"{rank}") for rank in range(world_size)]


def check_trained(
    ranks: Sequence[Trained], losses: Sequence[float], parameters: Mapping[str, torch.Tensor]
) -> None:
    """The ranks of a peer have trained the plain model together."""
    assert ranks[0][0] == pytest.approx(losses, rel=2e-5)
    assert {name for _, found in ranks for name in found} == parameters.keys()
    for _, found in ranks:
        for name, value in found.items():
            torch.testing.assert_close(value, parameters[name], rtol=2e-5, atol=2e-5, msg=name)


ON_TWO = (TP, PIPELINE, DUALPIPEV, DUALPIPEV_THREADS, DDP, FSDP2, FSDP2_KEPT, CP)
RUNS = [*((kind, 2) for kind in ON_TWO), (TP_PIPELINE, 4), (CP, 4)]


def test_every_kind_is_run() -> None:
    assert {kind for kind, _ in RUNS} == KINDS.keys() - {EP}, "its model has experts: below"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "world_size"), RUNS)
def test_peer_trains_the_plain_model(kind: str, world_size: int) -> None:
    (losses, parameters), norms = plain_training()
    assert min(norms) > OPTIMIZER["clip_norm"], "clipping is part of what is compared"
    ranks = train(plan_of(kind, LLAMA), world_size)
    assert len({tuple(found) for found, _ in ranks}) == 1, "all ranks return one loss"
    check_trained(ranks, losses, parameters)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DDP, FSDP2, CP])
def test_gradients_of_replicas_have_the_scale_of_one_process(kind: str) -> None:
    """Without clipping, which brings gradients of any scale to the same."""
    (losses, _), _ = plain_training(clip_norm=0.0)
    for found, _ in train(plan_of(kind, LLAMA, clip_norm=0.0), 2):
        assert found == pytest.approx(losses, rel=2e-5)


class Meeting(ThreadedOverlap):
    """Halves that wait for each other: run one after the other, they would wait in vain."""

    def __init__(self) -> None:
        super().__init__()
        self.meeting = threading.Barrier(2)

    def _forward(self, action: Any, ctx: Any) -> None:
        self.meeting.wait(TIMEOUT_S)

    _backward = _forward


class Failing(ThreadedOverlap):
    def _forward(self, action: Any, ctx: Any) -> None:
        pass

    def _backward(self, action: Any, ctx: Any) -> None:
        raise RuntimeError("backward failed")


def test_both_halves_of_an_overlapped_action_run_at_once_and_errors_arrive() -> None:
    both = _Action(-1, OVERLAP_F_B, None, (_Action(0, FORWARD, 2), _Action(1, FULL_BACKWARD, 0)))
    Meeting()(both, cast(Any, None))
    with pytest.raises(RuntimeError, match="backward failed"):
        Failing()(both, cast(Any, None))


# -- experts that are cut over replicas ----------------------------------------------------------------------


def shape_of(**changes: Any) -> ModelShape:
    mixture: dict[str, Any] = {"experts": 6, "top_k": 2, "expert_ffn": 24}
    losses = {"balance_loss": 0.1, "z_loss": 0.01}
    return ModelShape(**{"family": "moe", **SIZES, **mixture, **losses, **changes})


def expert_model(shape: ModelShape) -> ExpertModel:
    """Drawn anew, with norms that are not ones, so that a weight that is not loaded shows."""
    torch.manual_seed(4)
    model = ExpertModel(shape, torch.float32, groups=())
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
    ranks = train(plan_of(EP, shape, **optimizer), world_size, expert_model(shape))
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
        y_BSD = mixture.mlp(x_BSD)
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
