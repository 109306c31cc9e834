"""The documented example of a user's own layer trains like the same layer written with autograd."""

import importlib.util
import pickle
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from braid.actors.stage.layers import load_layer
from braid.actors.stage.model import StageModel
from braid.actors.stage.parameters import Place
from braid.jobs.benchmarks.plain_torch import (
    Layer,
    PlainModel,
    PlainSettings,
    PlainSizes,
    PlainTrainer,
    Rotary,
    load_named,
)
from braid.jobs.cli import main
from braid.scheduling.layers import part_sizes
from braid.scheduling.operators import Kind
from braid.scheduling.spec import ModelShape, ParallelLayout
from tests.end_to_end.command import ROOT, write_config
from tests.end_to_end.runs import prepare_text, run_layout, sample_ids, windows

EXAMPLE = ROOT / "docs" / "examples" / "parallel_layer.py"
REFERENCE = f"{EXAMPLE}:ParallelLayer"


class PlainParallelLayer(Layer):
    """y = x + attention(norm(x)) + mlp(norm(x)), by autograd."""

    def __init__(self, sizes: PlainSizes) -> None:
        super().__init__(sizes)
        self.norm = self.attention_norm
        del self.attention_norm, self.mlp_norm
        self.mlp_in = nn.ModuleDict({"up": nn.Linear(sizes.hidden, sizes.ffn, bias=False)})

    def forward(self, x_BSD: Tensor, rotary: Rotary | None) -> Tensor:
        n_BSD = self.norm(x_BSD)
        mlp = self.mlp_out(torch.relu(self.mlp_in["up"](n_BSD)).square())
        return x_BSD + self.projection(self._attention(n_BSD, rotary)) + mlp


def plain_losses(
    shape: ModelShape, settings: PlainSettings, data: Path, batches: list[list[int]]
) -> list[float]:
    """The losses of the plain model from the example's initial values."""
    sizes = PlainSizes.of(shape)
    model = PlainModel(sizes)
    model.layers = nn.ModuleList(PlainParallelLayer(sizes) for _ in range(sizes.layers))
    model.to(torch.float64)
    layout = ParallelLayout()
    ours = StageModel(
        shape=shape,
        layout=layout,
        place=Place.of(layout.mesh, 0),
        sizes=part_sizes(shape, layout, 1),
        device=torch.device("meta"),
        dtype=torch.float64,
        definition=load_layer(REFERENCE),
    )
    pieces = [piece for parameter in ours.parameters for piece in parameter.slices]
    load_named(model, {piece.source.name: piece.source.initial(0) for piece in pieces})
    trainer = PlainTrainer(model, settings)
    samples = windows(data, "train", shape.sequence)
    return [trainer.step(step, samples[ids].split(2))[0] for step, ids in enumerate(batches)]


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "schedule"), [(1, "megatron"), (2, "megatron"), (2, "intra_batch")])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_own_layer_against_autograd(tmp_path: Path, tp: int, schedule: str, recompute: str) -> None:
    data = prepare_text(tmp_path, seed=tp)
    run = run_layout(
        tmp_path / "runs",
        data,
        model={"layer": REFERENCE, "layers": 2},
        train={"steps": 6, "dtype": "fp64", "recompute": recompute},
        parallel={"tp": tp},
        overlap={"schedule": schedule},
    )
    train = run.config.train
    settings = PlainSettings(**{name: getattr(train, name) for name in PlainSettings.__dataclass_fields__})
    count = len(windows(data, "train", run.shape.sequence))
    batches = [
        sample_ids(train.seed, count, step * train.global_batch, train.global_batch) for step in range(6)
    ]
    assert run.losses == pytest.approx(plain_losses(run.shape, settings, data, batches), rel=1e-9)


def test_own_layer_has_half_the_collectives() -> None:
    shape = ModelShape(
        family="llama",
        hidden=64,
        ffn=128,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocabulary=320,
        sequence=32,
    )
    sizes = part_sizes(shape, ParallelLayout(tp=2), 1)
    own = load_layer(REFERENCE).part(sizes)
    built_in = load_layer(None).part(sizes)
    for graph, twin in ((own.forward, built_in.forward), (own.backward, built_in.backward)):
        count = sum(op.kind.communicates for op in graph.operators)
        assert count * 2 == sum(op.kind.communicates for op in twin.operators)
    assert any(op.kind is Kind.ADD for op in own.backward.operators)


def test_example_is_importable_as_it_stands() -> None:
    spec = importlib.util.spec_from_file_location("example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


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


def test_a_dry_run_says_that_it_loads_the_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, data={"files": [str(EXAMPLE)]}, model={"layers": 2})
    for options, says in (((), False), (("--set", f"model.layer={REFERENCE}"), True)):
        with pytest.raises(SystemExit) as left:
            main(["train", str(config), "--dry-run", *options])
        assert not left.value.code
        assert ("its code runs" in capsys.readouterr().out) is says
