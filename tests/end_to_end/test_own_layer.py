"""The documented example of a user's own layer trains like the same layer written with autograd."""

import pickle
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from braid.actors.controller.planning import model_graphs, plan_run
from braid.actors.controller.profiling import measure
from braid.actors.stage.model.layers import load_layer, load_layers
from braid.jobs.bench.plain_torch import (
    Layer,
    PlainModel,
    PlainTrainer,
    Projections,
    Rotary,
    Seen,
    load_named,
)
from braid.scheduling.model.shape import ModelShape
from tests.actors.test_profiling import operators_of
from tests.end_to_end.command import ROOT, overlap_of, write_config
from tests.end_to_end.runs import (
    BYTES_VOCABULARY,
    KeptRanks,
    Run,
    plain_steps,
    run_layout,
    run_plan,
    small_config,
    whole_model,
)
from tests.in_process import Capture, called

EXAMPLE = ROOT / "docs" / "examples" / "parallel_layer.py"
REFERENCE = f"{EXAMPLE}:ParallelLayer"


class PlainParallelLayer(Layer):
    """y = x + attention(norm(x)) + mlp(norm(x)), by autograd."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self.norm = self.attention_norm
        del self.attention_norm, self.mlp_norm
        self.mlp_in = Projections(shape.hidden, {"up": shape.ffn}, bias=False)

    def forward(self, x_BSD: Tensor, rotary: Rotary | None, seen: Seen) -> Tensor:
        n_BSD = self.norm(x_BSD)
        (up_BSF,) = self.mlp_in(n_BSD)
        mlp = self.mlp_out(torch.relu(up_BSF).square())
        return x_BSD + self.attention(n_BSD, rotary, seen) + mlp


def plain_losses(run: Run, data: Path) -> list[float]:
    """The losses of the plain model from the same initial values; kinds of the user's own are the example."""
    shape, own, train = run.shape, run.config.model.own_layers, run.config.train
    kinds = [PlainParallelLayer if kind in own else Layer for kind in shape.kinds]
    model = PlainModel(shape, torch.float64, layer=lambda number: kinds[number](shape))
    ours = whole_model(shape, dtype=torch.float64, layers=load_layers(own))
    pieces = [piece for parameter in ours.parameters for piece in parameter.slices]
    load_named(model, {piece.source.name: piece.source.initial(0) for piece in pieces})
    return [loss for loss, _ in plain_steps(PlainTrainer(model, train), train, data, shape.sequence)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "schedule", "recompute", "pattern"),
    [(1, "megatron", "none", "layer"), (2, "megatron", "full", "layer own")]
    + [(2, "intra_batch", recompute, "layer own") for recompute in ("none", "full")],
)
def test_own_layer_against_autograd(
    tmp_path: Path, data: Path, tp: int, schedule: str, recompute: str, pattern: str
) -> None:
    layer = REFERENCE if pattern == "layer" else {"own": REFERENCE}
    run = run_layout(
        tmp_path / "runs",
        data,
        model={"layer": layer, "layers": 2, "pattern": pattern},
        train={"steps": 6, "dtype": "fp64", "recompute": recompute},
        parallel={"tp": tp},
        overlap=overlap_of(schedule),
    )
    assert run.losses == pytest.approx(plain_losses(run, data), rel=1e-9)


def test_operators_of_all_kinds_are_measured(tmp_path: Path) -> None:
    """One stage holds one kind and its neighbour another: they send each other messages."""
    layers = {"layer": {"parallel": REFERENCE}, "pattern": "2*layer 2*parallel", "layers": 4}
    config = small_config(tmp_path, model={**layers, "hidden": 32, "sequence": 16}, parallel={"pp": 2})
    shape = config.check(BYTES_VOCABULARY)
    parts = model_graphs(config, shape)
    profile = measure(run_plan(config), KeptRanks(config), parts, rounds=2)
    operators = {op.key for op in operators_of(parts)}
    assert operators <= set(profile.solo_ns)
    assert {"layer/qkv", "parallel/qkv"} <= operators
    taken = plan_run(config.with_schedule("dhelix"), shape, profile).taken
    assert taken.step_ns > 0
    paired = {side.unit for sides in taken.code.schedule.programs if len(sides) > 1 for side in sides}
    assert all(any(kind in unit for unit in paired) for kind in ("layer", "parallel"))


def test_files_with_dataclasses(tmp_path: Path) -> None:
    """Annotations that are texts are looked up in their module; files of one name are two modules."""
    head = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom typing import ClassVar\n"
    )
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        text = f"{head}@dataclass\nclass Mine:\n    kinds: ClassVar[str] = '{folder}'\n    size: int = 3\n"
        (tmp_path / folder / "mine.py").write_text(text)
    first, second = (load_layer(f"{tmp_path}/{folder}/mine.py:Mine") for folder in ("a", "b"))
    assert [one.kinds for one in (first, second)] == ["a", "b"]  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(first)) == first
    (tmp_path / "mine.py").write_text("1 / 0")
    before = set(sys.modules)
    with pytest.raises(ZeroDivisionError):
        load_layer(f"{tmp_path}/mine.py:Mine")
    assert set(sys.modules) == before


def test_a_dry_run_says_that_it_loads_the_layer(tmp_path: Path, capsys: Capture) -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 50
    config = write_config(tmp_path, data={"files": [str(EXAMPLE)]}, model={"layers": 2})
    for options, says in (((), False), (("--set", f"model.layer={REFERENCE}"), True)):
        done = called(capsys, "train", config, "--dry-run", *options)
        assert (done.code, "its code runs" in done.output) == (0, says)
