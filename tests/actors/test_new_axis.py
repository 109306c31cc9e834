"""An axis that no product code knows: a parameter cut over it, another one summed over it.

Four ranks, dp 2 x toy 2. Rows of ``w`` are cut over ``toy``; ``b`` is whole everywhere. The loss is the sum
over tokens of ``|w x|^2 / 2 + b x``: for its rows of ``w`` a rank sees the tokens of all of its toy group,
and for ``b`` its own alone. Everything else must follow from the placements.
"""

import copy
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from braid.actors.controller.recovery import newest_common
from braid.actors.stage.checkpoint import Saves, load_checkpoint, read_tensors, save_group
from braid.actors.stage.copies import Copies
from braid.actors.stage.exchange import _boxes, _read
from braid.actors.stage.global_state import UPDATES
from braid.actors.stage.gloo_streams import HostStreams
from braid.actors.stage.gradients import GradientBuckets
from braid.actors.stage.hub_files import StoredTensor
from braid.actors.stage.mesh import build_mesh, make_world
from braid.actors.stage.messages import CopiesHeld, Rendezvous, Rescue
from braid.actors.stage.optimizer import Optimizer, OptimizerSettings
from braid.actors.stage.parameters import GlobalParameter, Place, StageParameter, cut, whole
from braid.actors.stage.rescue import held_slices, write_slices
from braid.actors.stage.telemetry import Recorder
from braid.scheduling.mesh import MeshShape
from braid.scheduling.schedule import Reduce
from braid.scheduling.spec import ParallelLayout
from tests.forking import run_forked

pytestmark = pytest.mark.slow

SHAPE: Final = MeshShape((("pp", 1), ("dp", 2), ("toy", 2)), cut=("pp", "toy"))
W: Final = GlobalParameter(name="w", shape=(5, 3), deviation=0.5)
B: Final = GlobalParameter(name="b", shape=(3,), constant=0.25)
TOKENS, STEPS, SEED = 4, 4, 11
"""Tokens of a rank."""
LOST: Final = 3
LIMIT: Final = timedelta(seconds=60)
SETTINGS: Final = OptimizerSettings(
    lr=0.05,
    min_lr_fraction=1.0,
    warmup_steps=0,
    steps=100,
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.1,
    clip_norm=3.0,
)


def tokens(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(TOKENS, 3, generator=generator, dtype=torch.float64)


def parameters_at(place: Place, device: torch.device) -> list[StageParameter]:
    found = []
    for slices in (cut([W], place, {0: ("toy",)}), whole(B)):
        tensor = nn.Parameter(torch.empty(slices[0].sizes, dtype=torch.float64, device=device))
        found.append(StageParameter(tensor=tensor, slices=slices, chunk=0))
    return found


class Trained:
    """One process with everything: plain PyTorch."""

    def __init__(self) -> None:
        self.w = nn.Parameter(W.initial(SEED).double())
        self.b = nn.Parameter(B.initial(SEED).double())
        self.adamw = torch.optim.AdamW(
            [{"params": [self.w], "weight_decay": 0.1}, {"params": [self.b], "weight_decay": 0.0}],
            lr=0.05,
            betas=(0.9, 0.95),
            eps=1e-8,
        )

    def step(self, step: int) -> tuple[float, float]:
        """Loss and norm."""
        x = torch.cat([tokens(rank, step) for rank in range(SHAPE.ranks)])
        loss = (x @ self.w.T).square().sum() / 2 + (x @ self.b).sum()
        self.adamw.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_([self.w, self.b], 3.0)
        self.adamw.step()
        return loss.item(), norm.item()

    def state(self) -> dict[str, Tensor]:
        """As a checkpoint holds it."""
        found = {UPDATES: self.adamw.state[self.w]["step"].view(1).double()}
        for name, tensor in (("w", self.w), ("b", self.b)):
            found[f"parameter.{name}"] = tensor.detach()
            for kind in ("exp_avg", "exp_avg_sq"):
                found[f"{kind}.{name}"] = self.adamw.state[tensor][kind]
        return found


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-12, atol=1e-12)


def run_rank(rank: int, folder: str, port: int) -> None:
    home = Path(folder)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=LIMIT)
    make_world("gloo", dist.PrefixStore("one", store), rank, SHAPE.ranks, LIMIT)
    mesh = build_mesh(ParallelLayout(), rank, timeout=LIMIT, shape=SHAPE)
    parameters = parameters_at(mesh.place, torch.device("cpu"))
    w, b = parameters
    assert (w.summed_over(SHAPE), b.summed_over(SHAPE)) == (("dp",), ("dp", "toy"))
    for parameter in parameters:
        parameter.initialise(SEED)
    streams = HostStreams()
    gradients = GradientBuckets(parameters, mesh, streams, Recorder(streams), 1 << 20)
    optimizer = Optimizer(gradients, SETTINGS)
    plain, copies = Trained(), Copies()
    copies.join(optimizer, "toy", SHAPE, 1, None, LIMIT)
    states = []
    for step in range(STEPS):
        group = SHAPE.members(mesh.position, ("toy",))
        x, own = torch.cat([tokens(one, step) for one in group]), tokens(rank, step)
        (piece,) = w.slices
        y = x @ piece.of_local(w.tensor).detach().T
        w.gradient.add_(y.T @ x)
        b.gradient.add_(own.sum(0))
        parts = torch.stack([y.square().sum() / 2, (own @ b.tensor.detach()).sum()])
        dist.all_reduce(parts)
        for reduce in (Reduce(0, "toy"), Reduce(0, "dp")):
            gradients.start(reduce)
            gradients.wait(reduce)
        gradients.square()
        gradients.start(Reduce(None, "toy"))
        gradients.wait(Reduce(None, "toy"))
        norm, _ = optimizer.step(step)
        loss, expected = plain.step(step)
        assert abs(parts.sum().item() - loss) <= 1e-12 * abs(loss)
        assert abs(norm - expected) <= 1e-12 * expected
        copies.keep(optimizer, step + 1, wait=True)
        states.append(copy.deepcopy(plain.state()))
    for parameter, source in ((w, plain.w), (b, plain.b)):
        (piece,) = parameter.slices
        torch.testing.assert_close(piece.of_local(parameter.tensor), piece.of_global(source))

    # A checkpoint, by all ranks, read by this one and by all.
    saved = home / "saved"
    written = Saves(optimizer, save_group(LIMIT)).save(saved)
    assert not written.failure
    dist.barrier()
    same(read_tensors(saved), states[-1])
    for master in optimizer.masters:
        master.data.add_(1.0)
    load_checkpoint(saved, optimizer, STEPS)
    for parameter, source in ((w, plain.w), (b, plain.b)):
        torch.testing.assert_close(parameter.tensor, parameter.slices[0].of_global(source))

    # Copies: all go back a step; the lost rank's state comes from one who holds the same slices.
    held: list[CopiesHeld] = [CopiesHeld(own=(), partner=None, partners=())] * SHAPE.ranks
    dist.all_gather_object(held, copies.held())
    common = newest_common(held, SHAPE, STEPS - 1)
    assert common is not None
    assert common[0] == STEPS - 1
    copies.restore(optimizer, *common)
    for parameter in parameters:
        (piece,) = parameter.slices
        state = states[STEPS - 2][f"parameter.{piece.source.name}"]
        torch.testing.assert_close(parameter.tensor.detach(), piece.of_global(state))

    # Rescue: the others write what they hold of all.
    held[LOST] = CopiesHeld(own=(), partner=None, partners=())
    common = newest_common(held, SHAPE, STEPS - 1)
    assert common is not None
    assert LOST not in common[1]
    dist.barrier()
    copies.leave()
    dist.destroy_process_group()
    if rank != LOST:
        survivors = tuple(r for r in range(SHAPE.ranks) if r != LOST)
        make_world("gloo", dist.PrefixStore("two", store), survivors.index(rank), len(survivors), LIMIT)
        meeting = Rendezvous(address="", port=0, generation=2)
        plan = Rescue(meeting=meeting, survivors=survivors, step=common[0], sources=tuple(common[1]))

        def model_of(place: Place, device: torch.device) -> Any:
            return SimpleNamespace(parameters=parameters_at(place, device))

        write_slices(home / "rescued", held_slices(copies, rank, plan, SHAPE, model_of))
        same(read_tensors(home / "rescued"), states[STEPS - 2])
        dist.barrier()
        dist.destroy_process_group()
    # Exchange: a rank reads its slice of a stored tensor.
    with safe_open(home / "w.safetensors", framework="pt") as file:
        stored = StoredTensor(name="w", sources=(("w", 5),), columns=3)
        ((expert, box, target),) = _boxes(w.slices[0], torch.empty_like(w.tensor), by_expert=False)
        assert expert is None
        target.copy_(_read(file.get_slice("w"), stored, box, 0))
    assert torch.equal(target, w.slices[0].of_global(W.initial(SEED)))
    store.set(f"done {rank}", "")
    if rank == 0:
        store.wait([f"done {one}" for one in range(SHAPE.ranks)], LIMIT)


def test_everything_follows_from_placements(tmp_path: Path) -> None:
    save_file({"w": W.initial(SEED)}, tmp_path / "w.safetensors")
    for name in ("saved", "rescued"):
        (tmp_path / name).mkdir()
    free = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = free.port
    del free
    run_forked(run_rank, (str(tmp_path), port), nprocs=SHAPE.ranks)
