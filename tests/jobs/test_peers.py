"""Every peer trains the model that the plain loop trains: same losses, same parameters."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from braid.actors.config import TrainConfig, parse_config
from braid.jobs.bench.peers import DDP, FSDP2, KINDS, TP_PIPELINE, Peer, PeerPlan
from braid.jobs.bench.plain_torch import PlainModel, PlainTrainer
from braid.scheduling.model.shape import ModelShape
from tests.forking import run_forked

SIZES: dict[str, Any] = {"hidden": 32, "ffn": 48, "layers": 5, "heads": 4, "kv_heads": 2, "head_dim": 8}
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


SHAPE = ModelShape(family="llama", **SIZES)


def batches() -> list[Tensor]:
    """Token ids of every step, samples x (sequence + 1)."""
    draw = torch.Generator().manual_seed(5)
    shape = (MICRO_BATCH * MICRO_BATCHES, SIZES["sequence"] + 1)
    return [torch.randint(SIZES["vocabulary"], shape, generator=draw) for _ in range(STEPS)]


def plain_model() -> PlainModel:
    """The model that all start from. Norms are not ones, so that a weight that is not loaded shows."""
    torch.manual_seed(3)
    model = PlainModel(SHAPE)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    return model


def named(model: PlainModel) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


Trained = tuple[list[float], dict[str, Tensor]]
"""Losses of the steps, and the parameters after them."""


def plain_training(changes: Mapping[str, Any]) -> tuple[Trained, list[float]]:
    model = plain_model()
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


def run_rank(rank: int, plans: Sequence[PeerPlan], world_size: int, port: int, folder: Path) -> None:
    """One process: train every peer from the weights in the folder, leave losses and parameters there."""
    weights = torch.load(folder / "weights")
    with process_group(rank, world_size, port):
        for number, plan in enumerate(plans):
            peer = Peer(plan, rank, world_size)
            for name, parameter in peer.named():
                value = weights[name]
                if isinstance(parameter, DTensor):
                    mesh, placements = parameter.device_mesh, parameter.placements
                    value = distribute_tensor(value, mesh, placements, src_data_rank=None)
                parameter.data.copy_(value)
            losses = [peer.step(tokens) for tokens in batches()]
            trained = {
                name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
                for name, value in peer.named()
            }
            torch.save((losses, trained), folder / f"{number}-{rank}")


WHOLE_SUM = {"clip_norm": 0.0}
"""Clipping brings gradients of any scale to the same, and so would hide a wrong one."""
RUNS: dict[int, list[tuple[str, dict[str, Any]]]] = {
    2: [*((kind, {}) for kind in KINDS if kind != TP_PIPELINE), (DDP, WHOLE_SUM), (FSDP2, WHOLE_SUM)],
    4: [(TP_PIPELINE, {})],
}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", RUNS)
def test_peers_train_the_plain_model(tmp_path: Path, world_size: int) -> None:
    batch = {"micro_batch": MICRO_BATCH, "global_batch": MICRO_BATCH * MICRO_BATCHES, "seed": 1}
    plans = [
        PeerPlan(kind=kind, config=parse_config({"train": {**batch, **OPTIMIZER, **changes}}), shape=SHAPE)
        for kind, changes in RUNS[world_size]
    ]
    torch.save(named(plain_model()), tmp_path / "weights")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_forked(run_rank, (plans, world_size, store.port, tmp_path), nprocs=world_size)
    for number, (kind, changes) in enumerate(RUNS[world_size]):
        (losses, parameters), norms = plain_training(changes)
        assert min(norms) > OPTIMIZER["clip_norm"], "clipping is part of what is compared"
        ranks: list[Trained] = [torch.load(tmp_path / f"{number}-{rank}") for rank in range(world_size)]
        assert len({tuple(told) for told, _ in ranks}) == 1, f"{kind}: all ranks return one loss"
        assert ranks[0][0] == pytest.approx(losses, rel=2e-5), kind
        assert {name for _, trained in ranks for name in trained} == parameters.keys()
        for _, trained in ranks:
            for name, value in trained.items():
                expected = parameters[name]
                torch.testing.assert_close(value, expected, rtol=2e-5, atol=2e-5, msg=f"{kind} {name}")
