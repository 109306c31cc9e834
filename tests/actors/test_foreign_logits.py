"""Logits of imported weights are those of `transformers`, computed operator by operator on one rank."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from braid.actors.stage.exchange import load_initial
from braid.actors.stage.model import StageModel
from braid.actors.stage.parameters import Place
from braid.actors.stage.shares import bucket_plans, updated_by
from braid.scheduling.layers import built_in_parts
from braid.scheduling.operators import Kind
from braid.scheduling.presets.hugging_face import CONFIG, hugging_face_config, initial_shape
from braid.scheduling.presets.library import model_preset
from braid.scheduling.sizes import part_sizes
from braid.scheduling.spec import ParallelLayout
from tests.foreign_models import KINDS, SEQUENCE, VOCABULARY, in_float64, opened, random_model

SAMPLES = 3


@torch.no_grad()
def logits_here(directory: Path, tokens_BS: Tensor, dtype: torch.dtype) -> Tensor:
    """The head's logits, T x V, of the model in a directory."""
    shape, layout = initial_shape(directory, {}), ParallelLayout()
    sizes = part_sizes(shape, layout, micro_batch=len(tokens_BS))
    place, device = Place.of(layout.mesh, 0), torch.device("cpu")
    model = StageModel(shape=shape, layout=layout, place=place, sizes=sizes, device=device, dtype=dtype)
    shares = updated_by(bucket_plans(model.parameters, place), model.parameters)
    masters = [parameter.tensor for parameter in model.parameters]
    optimizer: Any = SimpleNamespace(masters=masters, shares=shares, restored=lambda steps: None)
    load_initial(directory, shape, optimizer)

    parts = built_in_parts(sizes)
    tokens_T, values = tokens_BS.flatten(), dict[str, Any]()
    for instance in model.chunks[0]:
        part = parts[instance.name]
        values = {"tokens": tokens_T, "x": values.get("x")}
        for op in part.forward.operators:
            if op.kind is Kind.CROSS_ENTROPY:
                break
            made = instance.modules[op.module](*(values[name] for name in op.reads))
            values |= zip(op.writes, made, strict=True)
        values["x"] = values.get(part.output)
    found: Tensor = values["head.out"]
    return found


@pytest.mark.parametrize(
    "name",
    [
        "llama-3.1-8b",
        "llama-3.2-1b",
        "mistral-7b-v0.1",
        "qwen2.5-0.5b",
        "qwen3-0.6b",
        "mixtral-8x7b",
        "mixtral-8x22b",
        "qwen3-30b-a3b",
        "qwen3-235b-a22b",
        "phi-3.5-moe",
    ],
)
def test_parameters_of_presets_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    shape = model_preset(name)
    (tmp_path / CONFIG).write_text(json.dumps(hugging_face_config(shape, "float32")))
    assert initial_shape(tmp_path, {}) == shape
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    random_model(kind, 1).save_pretrained(tmp_path)
    tokens_BS = torch.randint(VOCABULARY, (SAMPLES, SEQUENCE), generator=torch.Generator().manual_seed(2))
    model = opened(tmp_path).eval()
    with torch.no_grad():
        narrow = model(tokens_BS).logits.flatten(0, 1)
        with in_float64(model):
            wide = model(tokens_BS).logits.flatten(0, 1)
    assert wide.dtype == torch.float64
    assert wide.abs().max() > 0.5, "all logits are near zero: too easy a test"
    for theirs, tolerance in ((narrow, 1e-5), (wide, 1e-10)):
        ours = logits_here(tmp_path, tokens_BS, theirs.dtype)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)
