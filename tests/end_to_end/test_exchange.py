"""Weights go from and to `transformers` without the change of a bit, and train there and here alike.

Inputs are fresh in every session: the seed stands in the tests' names, and BRAID_TEST_SEED sets it.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from braid.actors.config import Config, load_config
from braid.actors.stage.files.hub_files import StoredTensor
from braid.actors.stage.state import exchange as exchanging
from braid.jobs.bench.plain_torch import PlainModel, PlainTrainer, load_named
from braid.jobs.cli import main
from braid.scheduling.model.presets.hugging_face import initial_shape
from tests.end_to_end.plain_experts import ExpertModel
from tests.end_to_end.runs import (
    Run,
    expected_validation,
    plain_steps,
    prepare_text,
    run_layout,
    run_plan,
    small_config,
    trained,
    validated,
)
from tests.foreign_models import (
    KINDS,
    LONG,
    SEQUENCE,
    LossOf,
    assert_same_bits,
    in_float64,
    opened,
    random_model,
    tensors_in,
)

SEED = int(os.environ["BRAID_TEST_SEED"])
STEPS = 10
FROZEN: Mapping[str, Any] = {"lr": 1e-300, "steps": 20}
"""A learning rate that moves no bit: the checkpoint holds what was imported."""
EXPERTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    f"ep {ep}{' x ' * bool(name)}{name}": {"parallel": {"dp": ep, "ep": ep, **parallel}}
    for ep in (2, 4)
    for name, parallel in {
        "": {},
        "tp 2": {"tp": 2},
        "pp 2": {"pp": 2},
        "cp 2": {"cp": 2, "dp": ep // 2},
        "ZeRO 1": {"zero": 1},
        "ZeRO 3": {"zero": 3},
    }.items()
}
LAYOUTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "one rank": {},
    "tp 2": {"parallel": {"tp": 2}},
    "pp 2": {"parallel": {"pp": 2}},
    "pp 2 folded": {"parallel": {"pp": 2}, "overlap": {"schedule": "megatron", "pipeline": "folded"}},
    "tp 2 x pp 2": {"parallel": {"tp": 2, "pp": 2}},
    "ep 2, overlapped": {"parallel": {"dp": 2, "ep": 2}, "overlap": {"schedule": "expert_overlap"}},
    **EXPERTS,
}

MOE: Mapping[str, Any] = {"family": "moe", "experts": 4, "top_k": 2}
QWEN3: Mapping[str, Any] = {**MOE, "expert_ffn": 48, "head_dim": 24, "head_norm": True}
OURS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "llama, tied, wide heads": {"tied_head": True, "head_dim": 24},
    "llama 3.1": {"rotary_scaling": {"factor": 4.0, "original_sequence": 64}},
    "llama, linear": {"rotary_scaling": {"factor": 2.0}},
    "mistral": {},
    "qwen2": {"tied_head": True, "qkv_bias": True},
    "qwen3": {"head_dim": 24, "head_norm": True},
    "mixtral": MOE,
    "qwen3 moe": QWEN3,
    "qwen3 moe, sparse, tied": {
        **QWEN3,
        "top_k": 3,
        "normalised": False,
        "pattern": "dense layer 2*dense",
        "tied_head": True,
    },
    "phi moe": {
        **MOE,
        **dict.fromkeys(("layer_norm", "qkv_bias", "projection_bias", "head_bias"), True),
        "mixer_jitter": 0.01,
        "rotary_scaling": {
            "factor": 1.0,
            "factors": LONG["short_factor"],
            "magnitude": LONG["short_mscale"],
            "original_sequence": SEQUENCE,
        },
    },
    "phi moe, bare": {**MOE, "layer_norm": True, "mixer_jitter": 0.3},
    "gpt2": {"family": "gpt", "kv_heads": 4, "tied_head": True},
    "gpt2, head of its own, narrow": {"family": "gpt", "kv_heads": 4, "ffn": 100},
}
"""What the kinds are called here; other sizes are those of `SMALL`."""
MIXTURES = [kind for kind, model in OURS.items() if "experts" in model]


class Exchange:
    def __init__(self, path: Path, seed: int) -> None:
        self._path, self._seed = path, seed
        self.data = prepare_text(path, seed)
        self.stored = cache(self._stored)
        self._references: dict[tuple[str, str], tuple[list[float], list[float]]] = {}

    def _stored(self, kind: str, dtype: torch.dtype = torch.float32, shard: str = "5GB") -> Path:
        """A random model as `transformers` saves it."""
        directory = self._path / "stored" / f"{kind} {dtype} {shard}"
        random_model(kind, self._seed).to(dtype).save_pretrained(directory, max_shard_size=shard)
        return directory

    def run(
        self,
        kind: str,
        layout: str,
        directory: Path | None,
        until: int | None = None,
        model: Mapping[str, Any] = MappingProxyType({}),
        **train: Any,
    ) -> Run:
        """Ours, from the weights in a directory, or from our own initial values."""
        model = {**OURS[kind], **model, **({"initial": str(directory)} if directory else {})}
        overrides = {"model": model, "train": {"steps": STEPS, "seed": self._seed, **train}}
        return run_layout(self._path / "runs", self.data, until, **overrides, **LAYOUTS[layout])

    def reference(self, kind: str, config: Config) -> tuple[list[float], list[float]]:
        """Losses and gradient norms of `transformers` and torch's AdamW under the same settings."""
        train = config.train
        key = kind, train.dtype
        if key not in self._references:
            model = opened(self.stored(kind))
            model.train(not kind.startswith("phi"))  # where it trains, it draws experts at random
            with in_float64(model) if train.dtype == "fp64" else nullcontext():
                trainer = PlainTrainer(LossOf(model), train)
                losses, norms = zip(*plain_steps(trainer, train, self.data, SEQUENCE), strict=True)
                self._references[key] = [*losses], [*norms]
        return self._references[key]

    def exported(self, run: Run, *options: str) -> Path:
        """What ``braid checkpoint export`` makes of a run."""
        target = self._path / f"exported-{sum(1 for _ in self._path.iterdir())}"
        assert command("checkpoint", "export", str(run.directory), str(target), *options) == 0
        return target


def command(*arguments: str) -> int:
    """``braid ARGUMENTS`` in this process; the exit code."""
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    return int(left.value.code or 0)


@pytest.fixture(scope="module", params=[SEED], ids=lambda seed: f"seed={seed}")
def exchange(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exchange:
    return Exchange(tmp_path_factory.mktemp("exchange"), request.param)


def logits(model: Any, tokens_BS: Tensor) -> Tensor:
    with torch.no_grad():
        found = model.eval()(tokens_BS)
    return found if isinstance(found, Tensor) else found.logits


def assert_same_logits(ours: Path, theirs: Path) -> None:
    """Of two directories, as `transformers` reads them."""
    tokens = torch.arange(SEQUENCE).unsqueeze(0)
    assert torch.equal(*(logits(opened(one), tokens) for one in (ours, theirs)))


QUICK = [("llama", "tp 2", "fp32"), ("gpt2", "pp 2", "fp32")]
QUICK += [("qwen3", "tp 2", "fp64"), ("mixtral", "ep 2", "fp64")]
CASES = [("llama", layout, "fp32") for layout in LAYOUTS if "ep" not in layout]
CASES += [("gpt2", "pp 2", "fp32"), ("gpt2, head of its own, narrow", "tp 2 x pp 2", "fp32")]
CASES += [("llama, tied, wide heads", "pp 2", "fp32")]
CASES += [(kind, "tp 2", "fp64") for kind in ("llama 3.1", "qwen2", "qwen3")]
CASES += [(("mixtral", "qwen3 moe")[turn % 2], layout, "fp64") for turn, layout in enumerate(EXPERTS)]
CASES += [("qwen3 moe, sparse, tied", "tp 2 x pp 2", "fp64"), ("phi moe, bare", "tp 2", "fp64")]
CASES += [("phi moe", layout, "fp64") for layout in ("ep 2 x cp 2", "ep 2, overlapped")]
TOLERANCE = {"fp32": 2e-5, "fp64": 1e-9}


@pytest.mark.parametrize(
    ("kind", "layout", "dtype"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_training_goes_on_as_in_transformers(exchange: Exchange, kind: str, layout: str, dtype: str) -> None:
    run = exchange.run(kind, layout, exchange.stored(kind), dtype=dtype)
    losses, norms = exchange.reference(kind, run.config)
    assert len(run.losses) == STEPS
    assert run.losses == pytest.approx(losses, rel=TOLERANCE[dtype], abs=0)
    assert run.gradient_norms == pytest.approx(norms, rel=TOLERANCE[dtype], abs=0)
    assert max(norms) > run.config.train.clip_norm, "nothing was clipped: too easy a test"
    assert losses[-1] < losses[0] - 0.1, "nothing was learned: too easy a test"


EXPORTED = ("mistral", "llama, linear", "qwen3 moe, sparse, tied", "gpt2, head of its own, narrow")


@pytest.mark.parametrize("kind", ["llama", *(pytest.param(k, marks=pytest.mark.slow) for k in EXPORTED)])
def test_exported_model_gives_the_same_logits(exchange: Exchange, kind: str) -> None:
    """Trained here from our own initial values; read by `transformers`, in its words and in its float32.

    Of the other kinds losses are the same for weights that come back without the change of a bit.
    """
    run = exchange.run(kind, "tp 2", None)
    there = opened(exchange.exported(run))
    assert there.dtype == torch.float32
    mixture = kind in MIXTURES
    here = ExpertModel(run.shape, torch.float32, ()) if mixture else PlainModel(run.shape)
    load_named(here, run.parameters())
    held_out = validated(exchange.data, SEQUENCE, run.config.train.validation_samples)
    ours, theirs = logits(here, held_out[:, :-1]), logits(there, held_out[:, :-1])
    assert ours.abs().max() > 0.5, "all logits are near zero: too easy a test"
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)

    # What the ranks themselves computed, each on its share of the model, is in the report.
    loss = F.cross_entropy(theirs.flatten(0, 1), held_out[:, 1:].flatten()).item()
    assert run.report["validation"] == pytest.approx(expected_validation(loss, held_out), rel=1e-5)


DENSE, EXPERT = ("tp 2", "tp 2 x pp 2"), ("ep 2", "ep 2 x tp 2")
BACK = [(kind, (EXPERT if kind in MIXTURES else DENSE)[turn % 2]) for turn, kind in enumerate(KINDS)]


@pytest.mark.parametrize(("kind", "layout"), BACK)
def test_there_and_back_changes_no_bit(exchange: Exchange, kind: str, layout: str) -> None:
    run = exchange.run(kind, layout, exchange.stored(kind), until=1, **FROZEN)
    target = exchange.exported(run)
    assert_same_bits(tensors_in(target), tensors_in(exchange.stored(kind)))
    assert initial_shape(target, {}) == initial_shape(exchange.stored(kind), {})
    assert_same_logits(target, exchange.stored(kind))


def test_a_capacity_is_of_training(exchange: Exchange, capsys: pytest.CaptureFixture[str]) -> None:
    """So are losses of routers: a run sets them beside weights that know nothing of them."""
    more = {"capacity_factor": 0.5, "balance_loss": 0.01, "z_loss": 0.001}
    run = exchange.run("mixtral", "ep 2", exchange.stored("mixtral"), until=1, model=more, **FROZEN)
    assert run.shape == replace(initial_shape(exchange.stored("mixtral"), {}), **more)
    assert_same_bits(tensors_in(exchange.exported(run)), tensors_in(exchange.stored("mixtral")))
    assert "model.capacity_factor=0.5; the exported model drops none" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_many_files(exchange: Exchange, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """No more is read at once than is written into a file, of the tensors of all experts too."""
    load, held = exchanging._load, []

    def noting(reader: Any, group: Sequence[StoredTensor], **options: Any) -> Any:
        parts = load(reader, group, **options)
        held.append((sum(t.numel() for _, t in parts.values()), sum(math.prod(t.shape) for t in group)))
        return parts

    monkeypatch.setattr(exchanging, "_load", noting)
    stored = exchange.stored(kind, torch.float32, "100KB")
    assert len(list(stored.glob("*.safetensors"))) > 2
    run = exchange.run(kind, "ep 2" if kind == "mixtral" else "tp 2", stored, until=1, **FROZEN)
    target = exchange.exported(run, "--max-file-gb", "0.0001")
    assert len(held) > 2
    assert all(read == written for read, written in held)
    files = sorted(target.glob("*.safetensors"))
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert len(files) > 2
    assert {target / name for name in index["weight_map"].values()} == set(files)
    tensors = tensors_in(target)
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in tensors.values())
    assert_same_bits(tensors, tensors_in(exchange.stored(kind)))
    assert_same_logits(target, stored)


def test_16_bits(exchange: Exchange) -> None:
    """Half as many bits in, the same out; and masters keep the bits that 16 cannot hold."""
    stored = exchange.stored("llama", torch.bfloat16)
    run = exchange.run("llama", "tp 2", stored, until=1, **FROZEN)
    target = exchange.exported(run, "--dtype", "bf16")
    assert_same_bits(tensors_in(target), tensors_in(stored))
    assert opened(target).dtype == torch.bfloat16
    wide = exchange.run("llama", "tp 2", exchange.stored("llama"), until=1, dtype="bf16", **FROZEN)
    assert_same_bits(tensors_in(exchange.exported(wide)), tensors_in(exchange.stored("llama")))


@pytest.mark.slow
def test_a_resumed_run_does_not_begin_anew(exchange: Exchange) -> None:
    """Nor does the configuration that it has written down."""
    overrides = {"model": {"initial": str(exchange.stored("llama"))}, "train": {"steps": 4}}
    folder, data = exchange.data.parent, exchange.data
    plan, other = (run_plan(small_config(folder / name, **overrides), data) for name in ("resumed", "whole"))
    begun = trained(plan, until=2)
    assert begun.losses + trained(plan, resume=True).losses == trained(other).losses
    written = load_config(plan.config.run_directory / "config.yaml")
    assert written.model.shape(257) == plan.shape == initial_shape(exchange.stored("llama"), {})
