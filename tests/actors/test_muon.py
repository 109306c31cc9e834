"""Muon: in every layout the bits of `torch.optim.Muon` on whole matrices."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from braid.actors.stage.measure.telemetry import Recorder
from braid.actors.stage.rank.groups import build_mesh
from braid.actors.stage.run.gloo_streams import HostStreams
from braid.actors.stage.state import muon
from braid.actors.stage.state.buckets import RankBuckets
from braid.actors.stage.state.optimizer import Optimizer, OptimizerSettings
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.schedule import buckets
from tests.actors.test_buckets import SETTINGS, SHAPE, held
from tests.actors.test_kept_states import LIMIT, met, port_here
from tests.forking import run_forked

STEPS = 3
MOE = replace(SHAPE, family="moe", experts=4, top_k=2, shared_experts=1)
LAYOUTS = [
    (ParallelLayout(), SHAPE),
    (ParallelLayout(tp=2), SHAPE),
    (ParallelLayout(dp=4, ep=2, zero=2), MOE),
    (ParallelLayout(tp=2, tensor_degrees=(2, 1, 1, 2)), SHAPE),
    (ParallelLayout(dp=4, zero=3, shards=2), SHAPE),
]
MUON: dict[str, Any] = {**SETTINGS, "optimizer": "muon", "momentum": 0.9, "clip_norm": 0.0}


def drawn(name: str, shape: tuple[int, ...], step: int) -> torch.Tensor:
    """A gradient that all ranks draw alike."""
    generator = torch.Generator().manual_seed(int.from_bytes(name.encode(), "little") % (1 << 40) + step)
    return torch.randn(shape, generator=generator)


def trained(rank: int, layout: ParallelLayout, shape: Any) -> Optimizer:
    mesh = build_mesh(layout, rank, timeout=LIMIT)
    model = held(layout, shape, rank)
    model.initialise(7)
    streams = HostStreams()
    rank_buckets = RankBuckets(model.parameters, mesh, streams, Recorder(streams))
    optimizer = Optimizer(rank_buckets, OptimizerSettings(**MUON))
    for step in range(STEPS):
        for shard in optimizer.shards:
            for piece in shard.slices:
                gradient = drawn(piece.source.name, piece.source.shape, step)
                piece.of_local(shard.gradient).copy_(piece.of_global(gradient))
        rank_buckets.square()
        optimizer.begin(step).step()
    return optimizer


def whole_matrices(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """What torch makes of every tensor of matrices that the rank holds parts of."""
    sources = {p.source.name: p.source for s in optimizer.shards for p in s.slices if p.source.matrix}
    found = {}
    for name, source in sources.items():
        whole = source.initial(7)
        matrices = whole.view(-1, *whole.shape[-2:])
        for n, matrix in enumerate(matrices):
            weight = torch.nn.Parameter(matrix.clone())
            settings: dict[str, Any] = {"weight_decay": MUON["weight_decay"], "momentum": MUON["momentum"]}
            torch_muon = torch.optim.Muon([weight], lr=MUON["lr"], adjust_lr_fn="match_rms_adamw", **settings)
            for step in range(STEPS):
                gradient = drawn(name, source.shape, step).view(-1, *whole.shape[-2:])[n]
                weight.grad = gradient.clone()
                torch_muon.step()
            matrix.copy_(weight.detach())
        found[name] = whole
    return found


def run_rank(rank: int, number: int, least: int, port: int) -> None:
    layout, shape = LAYOUTS[number]
    buckets.LEAST_ELEMENTS = least
    muon.ROUND_ELEMENTS = 4096  # several rounds
    with met(rank, port, layout.ranks):
        optimizer = trained(rank, layout, shape)
        expected = whole_matrices(optimizer)
        pieces = 0
        for master, shard in zip(optimizer.masters, optimizer.shards, strict=True):
            for piece in shard.slices:
                if piece.source.matrix:
                    pieces += 1
                    found = piece.of_local(master.detach())
                    assert torch.equal(found, piece.of_global(expected[piece.source.name])), piece
        assert pieces


@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=lambda n: LAYOUTS[n][0].describe())
def test_matrices_are_updated_as_torch_updates_whole_ones(number: int) -> None:
    run_forked(run_rank, (number, 2048, port_here()), nprocs=LAYOUTS[number][0].ranks)
