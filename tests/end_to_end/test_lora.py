"""Adapters train here and in `peft` alike, in every layout; the base stays as it was, to the bit.

Inputs are fresh in every session: the seed stands in the tests' names, and BRAID_TEST_SEED sets it.
"""

import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from braid.jobs.bench.plain_torch import PlainTrainer
from tests.end_to_end.runs import Run, initial_parameters, plain_steps, prepare_text, run_layout
from tests.foreign_models import SEQUENCE, LossOf, in_float64, opened, random_model

SEED = int(os.environ["BRAID_TEST_SEED"])
STEPS = 6
LORA: Mapping[str, Any] = {"rank": 4, "alpha": 6}
NAMES: Mapping[str, str] = {
    "qkv.q": "self_attn.q_proj",
    "qkv.k": "self_attn.k_proj",
    "qkv.v": "self_attn.v_proj",
    "projection": "self_attn.o_proj",
    "mlp_in.gate": "mlp.gate_proj",
    "mlp_in.up": "mlp.up_proj",
    "mlp_out": "mlp.down_proj",
}
"""Our names of matrices -> those of `transformers`."""
LAYOUTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "one rank": {},
    "tp 2": {"parallel": {"tp": 2}},
    "pp 2": {"parallel": {"pp": 2}},
    "dp 2, ZeRO 1": {"parallel": {"dp": 2, "zero": 1}},
    "dp 2, ZeRO 3": {"parallel": {"dp": 2, "zero": 3}},
}


class Adapters:
    """Models and runs of this module, each made once."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.seed = path, seed
        self.data = prepare_text(path, seed)
        self.stored = cache(self._stored)
        self.reference = cache(self._reference)

    def _stored(self, kind: str) -> Path:
        directory = self.path / "stored" / kind
        random_model(kind, self.seed).save_pretrained(directory)
        return directory

    def run(self, kind: str, layout: str = "one rank", until: int | None = None, **train: Any) -> Run:
        """Train adapters on a stored model, in float64."""
        model = {"initial": str(self.stored(kind)), "lora": LORA}
        settings = {"steps": STEPS, "seed": self.seed, "dtype": "fp64", **train}
        overrides = {"model": model, "train": settings, **LAYOUTS[layout]}
        overrides["parallel"] = {**overrides.get("parallel", {})}
        return run_layout(self.path / "runs", self.data, until, **overrides)

    def _reference(self, kind: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
        """Losses, gradient norms, and adapters after the steps, of `peft` and torch's AdamW."""
        from peft import LoraConfig, get_peft_model

        run = self.run(kind)
        model = opened(self.stored(kind))
        targets = [name.rpartition(".")[2] for name in NAMES.values()]
        config = LoraConfig(r=LORA["rank"], lora_alpha=LORA["alpha"], target_modules=targets)
        with in_float64(model):
            wrapped = get_peft_model(model, config).double()
            initial = initial_parameters(run.shape, self.seed)
            parameters = {theirs(name): name for name in initial if ".lora_" in name}
            trained = {name: p for name, p in wrapped.named_parameters() if p.requires_grad}
            assert trained.keys() == parameters.keys()
            with torch.no_grad():
                for name, parameter in trained.items():
                    parameter.copy_(initial[parameters[name]])
            trainer = PlainTrainer(LossOf(wrapped), run.config.train)
            losses, norms = zip(*plain_steps(trainer, run.config.train, self.data, SEQUENCE), strict=True)
        return [*losses], [*norms], {parameters[name]: p.detach() for name, p in trained.items()}


def theirs(name: str) -> str:
    """The name of an adapter's factor in `peft`."""
    found = re.fullmatch(r"layers\.(\d+)\.(.*)\.lora_(a|b)", name)
    assert found is not None
    layer, matrix, factor = found.groups()
    return f"base_model.model.model.layers.{layer}.{NAMES[matrix]}.lora_{factor.upper()}.default.weight"


@pytest.fixture(scope="module", params=[SEED], ids=lambda seed: f"seed={seed}")
def adapters(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("lora"), request.param)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_train_as_in_peft(adapters: Adapters, layout: str) -> None:
    losses, norms, factors = adapters.reference("llama")
    run = adapters.run("llama", layout)
    assert run.losses == pytest.approx(losses, rel=1e-9)
    assert run.gradient_norms == pytest.approx(norms, rel=1e-9)
    ours = run.parameters()
    assert ours.keys() == factors.keys(), "checkpoints hold what is trained"
    for name, factor in factors.items():
        torch.testing.assert_close(ours[name], factor, rtol=1e-9, atol=1e-12)
