"""Adapters train here and in `peft` alike, in every layout; the base stays as it was, to the bit.

Inputs are fresh in every session: the seed stands in the tests' names, and BRAID_TEST_SEED sets it.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from braid.actors.config import ConfigError
from braid.actors.controller.ranks.processes import ProcessLauncher
from braid.actors.controller.state.manifest import CheckpointError
from braid.actors.controller.state.recovery import newest_common
from braid.actors.stage.files.hub_files import stored_tensors
from braid.actors.stage.rank.interface import Rank
from braid.jobs.bench.plain_torch import PlainTrainer
from braid.jobs.training.beside_weights import check_base, keep_base
from braid.scheduling.model.lora import Lora
from tests.actors.ranks import Ranks, Waiting
from tests.actors.test_bytes_of_shares import assert_bytes
from tests.end_to_end.runs import (
    Run,
    initial_parameters,
    plain_steps,
    planned,
    prepare_text,
    run_layout,
    run_plan,
    small_config,
    trained,
)
from tests.end_to_end.test_exchange import OURS, command, logits
from tests.foreign_models import (
    SEQUENCE,
    LossOf,
    in_float64,
    opened,
    random_model,
    tensors_in,
)
from tests.in_process import called, refused

SEED = int(os.environ["BRAID_TEST_SEED"])
STEPS = 6
LORA: Mapping[str, Any] = {"rank": 4, "alpha": 6}
ATTENTION: Mapping[str, str] = {
    "qkv.q": "self_attn.q_proj",
    "qkv.k": "self_attn.k_proj",
    "qkv.v": "self_attn.v_proj",
    "projection": "self_attn.o_proj",
}
NAMES: Mapping[str, str] = {
    **ATTENTION,
    "mlp_in.gate": "mlp.gate_proj",
    "mlp_in.up": "mlp.up_proj",
    "mlp_out": "mlp.down_proj",
}
"""Our names of matrices -> those of `transformers`."""
LAYOUTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "one rank": {},
    "tp 2": {"parallel": {"tp": 2}},
    "tp 2, degrees": {"parallel": {"tp": 2, "tensor_degrees": [1, 2, 2, 1]}},
    "tp 2, braid": {"parallel": {"tp": 2}, "overlap": {"schedule": "braid"}},
    "pp 2": {"parallel": {"pp": 2}},
    "dp 2, ZeRO 2, ddp": {"parallel": {"dp": 2, "zero": 2}, "overlap": {"schedule": "ddp"}},
    "dp 2, ZeRO 3": {"parallel": {"dp": 2, "zero": 3}},
    "dp 2 x pp 2, ZeRO 3, split": {
        "parallel": {"dp": 2, "pp": 2, "zero": 3},
        "overlap": {"schedule": "zbv"},
    },
    "cp 2, recomputed": {"parallel": {"cp": 2}, "train": {"recompute": "full"}},
    "ep 2, ZeRO 3": {"parallel": {"dp": 2, "ep": 2, "zero": 3}},
}
CASES = [("llama", layout) for layout in LAYOUTS if layout not in ("tp 2", "pp 2", "ep 2, ZeRO 3")]
CASES += [("mixtral", "ep 2, ZeRO 3"), ("qwen3", "tp 2"), ("qwen2", "pp 2")]


class Adapters:
    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.seed = path, seed
        self.data = prepare_text(path, seed)
        self.stored = cache(self._stored)
        self.trained = cache(self._trained)
        self.reference = cache(self._reference)

    def _stored(self, kind: str) -> Path:
        directory = self.path / "stored" / kind
        random_model(kind, self.seed).save_pretrained(directory)
        return directory

    def sections(self, kind: str, layout: str, **train: Any) -> dict[str, Mapping[str, Any]]:
        """The configuration of a run that trains adapters on a stored model."""
        found = LAYOUTS[layout]
        model = {**OURS[kind], "initial": str(self.stored(kind)), "lora": LORA}
        settings = {"steps": STEPS, "seed": self.seed, "dtype": "fp64", "lr": 3e-3}
        sections = {**found, "model": model, "train": {**settings, **found.get("train", {}), **train}}
        if "overlap" in sections:
            sections["overlap"] = planned(self.path / "plans", sections)
        return sections

    def run(self, kind: str, layout: str = "one rank", until: int | None = None, **train: Any) -> Run:
        """A run through the controller, in float64."""
        return run_layout(self.path / "runs", self.data, until, **self.sections(kind, layout, **train))

    def _trained(self, kind: str) -> Run:
        return self.run(kind, dtype="fp32")

    def _reference(self, kind: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
        """Losses, gradient norms, and adapters after the steps, of `peft` and torch's AdamW."""
        config = small_config(self.path / "references", **self.sections(kind, "one rank"))
        initial = initial_parameters(config.check(257), self.seed)
        parameters = {theirs(name): name for name in initial if ".lora_" in name}
        targets = [*({*NAMES.values()} if kind != "mixtral" else {*ATTENTION.values()})]
        model = opened(self.stored(kind))
        settings = LoraConfig(r=LORA["rank"], lora_alpha=LORA["alpha"], target_modules=targets)
        with in_float64(model):
            wrapped = get_peft_model(model, settings).double()
            factors = {name: p for name, p in wrapped.named_parameters() if p.requires_grad}
            assert factors.keys() == parameters.keys()
            with torch.no_grad():
                for name, parameter in factors.items():
                    parameter.copy_(initial[parameters[name]])
            trainer = PlainTrainer(LossOf(wrapped), config.train)  # type: ignore[arg-type]
            losses, norms = zip(*plain_steps(trainer, config.train, self.data, SEQUENCE), strict=True)
        return [*losses], [*norms], {parameters[name]: p.detach() for name, p in factors.items()}


def theirs(name: str) -> str:
    """The name of an adapter's factor in `peft`."""
    found = re.fullmatch(r"layers\.(\d+)\.(.*)\.lora_(a|b)", name)
    assert found is not None
    layer, matrix, factor = found.groups()
    return f"base_model.model.model.layers.{layer}.{NAMES[matrix]}.lora_{factor.upper()}.default.weight"


@pytest.fixture(scope="module", params=[SEED], ids=lambda seed: f"seed={seed}")
def adapters(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("lora"), request.param)


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_adapters_train_as_in_peft(adapters: Adapters, kind: str, layout: str) -> None:
    losses, norms, factors = adapters.reference(kind)
    run = adapters.run(kind, layout)
    assert run.losses == pytest.approx(losses, rel=1e-9)
    assert run.gradient_norms == pytest.approx(norms, rel=1e-9)
    ours = run.parameters()
    assert ours.keys() == factors.keys(), "checkpoints hold what is trained"
    for name, factor in factors.items():
        torch.testing.assert_close(ours[name], factor, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["llama", "qwen3 moe", "phi moe", "gpt2"])
def test_adapters_and_merged_models_are_exported(adapters: Adapters, kind: str, tmp_path: Path) -> None:
    run, base, tokens = adapters.trained(kind), adapters.stored(kind), torch.arange(SEQUENCE).unsqueeze(0)
    for name, options in (("adapters", ()), ("merged", ("--merge",))):
        assert command("checkpoint", "export", str(run.directory), str(tmp_path / name), *options) == 0
    if kind == "llama":
        factors, written = run.parameters(), tensors_in(tmp_path / "adapters")
        assert len(written) == len(factors)
        for name, factor in factors.items():
            assert torch.equal(written[theirs(name).replace(".default", "")], factor)
    description = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert description["base_model_name_or_path"] == str(base)
    adapted = PeftModel.from_pretrained(opened(base), str(tmp_path / "adapters"))
    merged = opened(tmp_path / "merged")
    torch.testing.assert_close(logits(merged, tokens), logits(adapted, tokens), rtol=0, atol=1e-5)
    assert (logits(merged, tokens) - logits(opened(base), tokens)).abs().max() > 1e-2
    together = tensors_in(tmp_path / "merged")
    changed = {name for name, tensor in tensors_in(base).items() if not torch.equal(tensor, together[name])}
    modules = tuple(f".{module}.weight" for module in description["target_modules"])
    assert changed == {name for name in together if name.endswith(modules)}


def test_ranks_without_a_share_train_along(adapters: Adapters, tmp_path: Path) -> None:
    """The smallest adapters have less to update than four ranks can share."""
    sections = adapters.sections("llama", "one rank")
    sections["model"] = {**sections["model"], "lora": {"rank": 1, "alpha": 1, "targets": ["k"]}}
    alone = run_layout(tmp_path, adapters.data, **sections)
    copies = {"checkpoint": {"copies_every": 1}}
    four = run_layout(tmp_path, adapters.data, **sections, **copies, parallel={"dp": 4, "zero": 3})
    assert four.losses == pytest.approx(alone.losses, rel=1e-9)
    ours = four.parameters()
    for name, factor in alone.parameters().items():
        torch.testing.assert_close(ours[name], factor, rtol=1e-9, atol=1e-12)


class Watched(Waiting):
    """A rank that shows the part of the base that it holds."""

    def base(self) -> dict[tuple[str, tuple[int, ...]], Tensor]:
        """Slices of parameters that are not trained, by name and offsets."""
        return {
            (piece.source.name, piece.offsets): piece.of_local(shard.tensor.detach()).clone()
            for shard in self._parts.buckets.frozen
            for piece in shard.slices
        }


def test_the_base_stays_through_steps_and_failures(adapters: Adapters, tmp_path: Path) -> None:
    """To the bit, in shards; a rank that is lost comes back with its base, and goes on as before."""
    sections = adapters.sections("llama", "dp 2, ZeRO 3", dtype="fp32")
    config = small_config(tmp_path, **sections, checkpoint={"copies_every": 1})
    stored, group = adapters.stored("llama"), ProcessLauncher(config, serve=Watched).start(2)
    try:
        ranks = Ranks(config, adapters.data, group)
        ranks.begin(1)
        before = ranks.all(Watched.base)
        states = ranks.train(range(4))
        for here, then in zip(ranks.all(Watched.base), before, strict=True):
            assert here.keys() == then.keys()
            assert all(torch.equal(tensor, then[key]) for key, tensor in here.items())
        held = ranks.lose([1], 1)
        step, sources = newest_common(held, ranks.layout.mesh, 4) or (-1, [])
        ranks.all(Rank.restore_copies, step, sources)
        assert ranks.train(range(step, 4)) == states[step:]
        for here, then in zip(ranks.all(Watched.base), before, strict=True):
            assert all(torch.equal(tensor, then[key]) for key, tensor in here.items())
    finally:
        group.shutdown()
    tensors = tensors_in(stored)
    whole = {
        name: tensors[entry.name] for entry in stored_tensors(ranks.plan.shape) for name, _ in entry.sources
    }
    for (name, offsets), tensor in ((key, each) for rank in before for key, each in rank.items()):
        box = tuple(slice(at, at + size) for at, size in zip(offsets, tensor.shape, strict=True))
        assert torch.equal(tensor, whole[name][box])
    count = sum(tensor.numel() for rank in before for tensor in rank.values())
    assert count == sum(tensor.numel() for tensor in tensors.values()), "two ranks share the base"


def test_a_resumed_run_goes_on_in_its_layout_and_in_another_and_with_no_other_adapters(
    adapters: Adapters, tmp_path: Path
) -> None:
    """In its own to the bit."""
    sections = adapters.sections("llama", "tp 2")
    sections["model"] = {**sections["model"], "lora": {**LORA, "targets": ["q", "v", "down"]}}
    whole = run_layout(tmp_path / "whole", adapters.data, **sections)
    half = run_layout(tmp_path / "half", adapters.data, 2, **sections)
    other = half.config.changed(model={"lora": Lora(rank=8)})
    with pytest.raises(CheckpointError, match=r"of a model with lora=.*'rank': 4.*'rank': 8"):
        trained(run_plan(other, adapters.data), resume=True)
    again = trained(run_plan(half.config, adapters.data), 4, resume=True)
    assert again.losses == whole.losses[2:4]
    moved = trained(run_plan(half.config.changed(parallel={"tp": 1, "pp": 2}), adapters.data), resume=True)
    assert moved.losses == pytest.approx(whole.losses[4:], rel=1e-9)
    torch.testing.assert_close(moved.parameters(STEPS), whole.parameters(), rtol=1e-9, atol=1e-12)


def test_merging_what_cannot_be_merged_is_refused(
    adapters: Adapters, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def merged(run: Run) -> str:
        outcome = called(capsys, "checkpoint", "export", run.directory, tmp_path / "new", "--merge")
        assert not (tmp_path / "new").exists()
        return refused(outcome)

    sections = adapters.sections("llama", "one rank", steps=1, dtype="fp32")
    base = tmp_path / "base"
    shutil.copytree(adapters.stored("llama"), base)
    whole = run_layout(tmp_path, adapters.data, **{**sections, "model": {"kv_heads": 4}})
    assert "holds a whole model, no adapters; leave it out" in merged(whole)
    random = run_layout(tmp_path, adapters.data, **{**sections, "model": {"kv_heads": 4, "lora": LORA}})
    assert "has no model.initial" in merged(random)
    moved = run_layout(tmp_path, adapters.data, **{**sections, "model": {"initial": str(base), "lora": LORA}})
    keep_base(moved.config, moved.directory)  # as `braid train` does
    check_base(moved.directory, base)
    weights = next(base.glob("*.safetensors"))
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "has changed since the run" in merged(moved)
    with pytest.raises(ConfigError, match="bring them back, or begin a run of another name"):
        check_base(moved.directory, base)
    shutil.rmtree(base)
    assert "is not a directory any more, and its adapters cannot be merged; bring" in merged(moved)


def test_adapters_that_peft_takes_for_those_of_experts_are_refused(
    adapters: Adapters, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside experts; the whole model can be written, and the adapters of attention alone."""
    kind = "qwen3 moe, sparse, tied"
    run = adapters.trained(kind)
    outcome = called(capsys, "checkpoint", "export", run.directory, tmp_path / "adapters")
    assert "mlp.gate_proj" in refused(outcome, "experts", "--merge")
    assert called(capsys, "checkpoint", "export", run.directory, tmp_path / "merged", "--merge").code == 0
    base, merged = (tensors_in(folder) for folder in (adapters.stored(kind), tmp_path / "merged"))
    changed = {
        name.split(".", 3)[-1] for name, tensor in base.items() if not torch.equal(tensor, merged[name])
    }
    assert changed == {f"{name}.weight" for name in NAMES.values()}


WEIGHED: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any], str]] = {
    "tp 2 x dp 2, ZeRO 3": ({"tp": 2, "dp": 2, "zero": 3}, {}, "megatron"),
    "dp 2 x pp 2, ZeRO 3, tied": ({"dp": 2, "pp": 2, "zero": 3}, {"tied_head": True}, "zbv"),
    "dp 2, ZeRO 1": ({"dp": 2, "zero": 1}, {}, "ddp"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", WEIGHED)
def test_ranks_hold_what_is_predicted(tmp_path: Path, case: str) -> None:
    parallel, model, schedule = WEIGHED[case]
    sizes = {"layers": 4, "kv_heads": 4, "hidden": 256, "lora": LORA, **model}
    train = {"global_batch": 16, "dtype": "fp32", "recompute": "full" if "ZeRO 1" in case else "none"}
    config = small_config(
        tmp_path, model=sizes, train=train, parallel=parallel, overlap={"schedule": schedule}
    )
    assert_bytes(config, tmp_path)
