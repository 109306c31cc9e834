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
from torch import Tensor
from torch import distributed as dist
from torch.distributed.pipelining.schedules import FORWARD, FULL_BACKWARD, OVERLAP_F_B, _Action
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F

from braid.actors.config import TrainConfig, parse_config
from braid.jobs.bench.peer_hooks import BACKWARD_THREAD, ThreadedOverlap
from braid.jobs.bench.peer_layers import OF_EXPERTS, Mixture
from braid.jobs.bench.peers import (
    CP,
    DDP,
    DUALPIPEV_THREADS,
    EP,
    FSDP2,
    FSDP2_KEPT,
    KINDS,
    REPLICATED,
    TP,
    TP_PIPELINE,
    Peer,
    PeerPlan,
)
from braid.jobs.bench.plain_torch import PlainModel, PlainTrainer
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


def shape_of(kind: str, **changes: Any) -> ModelShape:
    if kind != EP:
        return ModelShape(family="llama", **SIZES)
    mixture: dict[str, Any] = {
        "experts": 6,
        "top_k": 2,
        "expert_ffn": 24,
        "balance_loss": 0.1,
        "z_loss": 0.01,
    }
    return ModelShape(**{"family": "moe", **SIZES, **mixture, **changes})


def batches() -> list[Tensor]:
    """Token ids of every step, samples x (sequence + 1)."""
    draw = torch.Generator().manual_seed(5)
    shape = (MICRO_BATCH * MICRO_BATCHES, SIZES["sequence"] + 1)
    return [torch.randint(SIZES["vocabulary"], shape, generator=draw) for _ in range(STEPS)]


def plain_model(shape: ModelShape) -> PlainModel:
    """The model that all start from. Norms are not ones, so that a weight that is not loaded shows."""
    torch.manual_seed(3)
    model = ExpertModel(shape, torch.float32, groups=()) if shape.experts else PlainModel(shape)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Weight):
                module.weight.normal_(std=0.2)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    return model


def named(model: PlainModel) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


Trained = tuple[list[float], dict[str, Tensor]]
"""Losses of the steps, and the parameters after them."""


def plain_training(shape: ModelShape, changes: Mapping[str, Any]) -> tuple[Trained, list[float]]:
    """What the plain loop reaches, and its gradient norms."""
    model = plain_model(shape)
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


@torch.no_grad()
def loaded(plan: PeerPlan, rank: int, world_size: int, weights: Mapping[str, Tensor]) -> Peer:
    """A peer that starts from these parameters of the whole model."""
    peer = Peer(plan, rank, world_size)
    for name, parameter in peer.named():
        value = part_of(name, weights[name], rank, world_size)
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            value = distribute_tensor(value, mesh, placements, src_data_rank=None)
        parameter.copy_(value)
    return peer


def part_of(name: str, value: Tensor, rank: int, world_size: int) -> Tensor:
    """Each rank has experts of its own."""
    return value.chunk(world_size)[rank] if OF_EXPERTS in name else value


def run_rank(rank: int, plan: PeerPlan, world_size: int, port: int, folder: Path) -> None:
    """One process: train from the weights in the folder, leave losses and parameters there."""
    weights, kind = torch.load(folder / "weights"), plan.kind
    with process_group(rank, world_size, port):
        peer = loaded(plan, rank, world_size, weights)
        losses = [peer.step(tokens) for tokens in batches()]
        trained = {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
            for name, value in peer.named()
        }
        torch.save((losses, trained), folder / f"{rank}")
        if kind in (TP, TP_PIPELINE):
            messages = loaded(replace(plan, messages=True), rank, world_size, weights)
            assert [messages.step(tokens) for tokens in batches()] == losses, (
                "Braid's exchange: the same bits"
            )
            layers = sum(len(stage.layers) for stage in messages.stages.values())
            # A gather and a scatter beside attention and MLP, twice: all of its collectives.
            assert messages.messages.calls >= 2 * 4 * layers * MICRO_BATCHES * STEPS
        if kind in REPLICATED:
            check_collectives(kind, peer)
        names = [thread.name for thread in threading.enumerate()]
        assert sum(name.startswith(BACKWARD_THREAD) for name in names) == (kind == DUALPIPEV_THREADS)


def check_collectives(kind: str, peer: Peer) -> None:
    """One more step: gradients are summed once, and parameters gathered as often as the kind says."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        peer.step(batches()[0])
    counts = {event.key: event.count for event in profile.key_averages() if event.key.startswith("gloo:")}
    layers, micro_batches = SIZES["layers"], MICRO_BATCHES // dist.get_world_size()
    gathers = {FSDP2_KEPT: layers + 1, FSDP2: (2 * layers + 1) * micro_batches}
    exchanges = {
        EP: 5 * layers * micro_batches,  # numbers of rows, rows there and back, and their gradients
        CP: 2 * layers * MICRO_BATCHES,  # on all ranks
    }
    expected = {"gloo:all_reduce": 1 + 1}  # a bucket; the loss with the square of experts' gradients
    if kind in gathers:
        # gloo's reduce-scatters are all-reduces; those of the loss and, to clip, of the norm come after them
        sums = 2 if peer.train.clip_norm else 1
        expected = {"gloo:all_gather": gathers[kind], "gloo:all_reduce": layers + 1 + sums}
    if kind in exchanges:
        expected["gloo:all_to_all"] = exchanges[kind]
    assert counts == expected


WHOLE_SUM = {"clip_norm": 0.0}
"""Clipping brings gradients of any scale to the same, and so would hide a wrong one."""
UNLIKE = {"normalised": False, "top_k": 3}
RUNS: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    *((kind, 2, {}, {}) for kind in KINDS if kind != TP_PIPELINE),
    *((kind, 4, {}, {}) for kind in (TP_PIPELINE, CP)),
    *((kind, 2, {}, WHOLE_SUM) for kind in (DDP, FSDP2, CP)),
    (EP, 3, UNLIKE, WHOLE_SUM),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "world_size", "mixture", "changes"), RUNS)
def test_peer_trains_the_plain_model(
    kind: str, world_size: int, mixture: dict[str, Any], changes: dict[str, Any]
) -> None:
    shape = shape_of(kind, **mixture)
    (losses, parameters), norms = plain_training(shape, changes)
    assert min(norms) > OPTIMIZER["clip_norm"], "clipping is part of what is compared"
    if kind == EP:
        (without, _), _ = plain_training(replace(shape, balance_loss=0.0, z_loss=0.0), changes)
        assert losses != pytest.approx(without, rel=2e-4), "auxiliary losses are part of what is compared"
    batch = {"micro_batch": MICRO_BATCH, "global_batch": MICRO_BATCH * MICRO_BATCHES, "seed": 1}
    config = parse_config({"train": {**batch, **OPTIMIZER, **changes}})
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(named(plain_model(shape)), folder / "weights")
        plan = PeerPlan(kind=kind, config=config, shape=shape)
        run_forked(run_rank, (plan, world_size, store.port, folder), nprocs=world_size)
        ranks: Sequence[Trained] = [torch.load(folder / f"{rank}") for rank in range(world_size)]
    assert len({tuple(told) for told, _ in ranks}) == 1, "all ranks return one loss"
    assert ranks[0][0] == pytest.approx(losses, rel=2e-5)
    assert {name for _, trained in ranks for name in trained} == parameters.keys()
    for rank, (_, trained) in enumerate(ranks):
        for name, value in trained.items():
            expected = part_of(name, parameters[name], rank, world_size)
            torch.testing.assert_close(value, expected, rtol=2e-5, atol=2e-5, msg=name)


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


def visit_one(rank: int, port: int) -> None:
    """A rank of two with an expert each; all tokens visit that of the first."""
    with process_group(rank, 2, port):
        torch.manual_seed(6)
        shape = shape_of(EP, hidden=8, experts=2, top_k=1, expert_ffn=12)
        mixture = Mixture(shape, cast(dist.ProcessGroup, dist.group.WORLD))
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
