"""Adapters written as `peft` reads them: one file of tensors, and a description."""

import json
import re
import shutil
from pathlib import Path
from typing import Final

import torch

from braid.actors.stage.files.hub_files import stored_tensors
from braid.actors.stage.state.exchange import EXPORT_DTYPES, adapters_in, write_tensors
from braid.scheduling.model.shape import ModelShape

ADAPTERS: Final = "adapter_model.safetensors"
DESCRIPTION: Final = "adapter_config.json"
_IN_LAYER = re.compile(r".+\.\d+\.(.+)")
"""Pattern of a module's name: where its layer is, and its name inside the layer."""


def export_adapters(
    checkpoint: Path, directory: Path, shape: ModelShape, dtype: str, base: Path | None, state: str
) -> Path:
    """Write the adapters of a verified checkpoint into an empty directory; return the file that holds them.

    ``dtype``: a key of `EXPORT_DTYPES`; ``base``: directory of the model that the adapters belong to;
    ``state``: kind of state that is written, the weights or their average. A
    matrix that `transformers` has in one with others (GPT-2's queries, keys and values) makes one adapter of
    as many times the rank: the first factors one below the other, the second ones along the diagonal. Raise
    `ValueError` if `transformers` has no such model or `peft` no such adapters, `OSError` if a file cannot be
    written.
    """
    lora, adapters, kind = shape.lora, adapters_in(checkpoint, state), EXPORT_DTYPES[dtype]
    assert lora is not None
    content, ranks, transposed = {}, {}, False
    for tensor in stored_tensors(shape):
        pairs = [(rows, adapters.get(name)) for name, rows in tensor.sources]
        first = [factors[0] for _, factors in pairs if factors is not None]
        if not first:
            continue
        second = [torch.empty(rows, 0) if factors is None else factors[1] for rows, factors in pairs]
        module = tensor.name.removesuffix(".weight")
        for factor, value in (("A", torch.cat(first)), ("B", torch.block_diag(*second))):
            content[f"base_model.model.{module}.lora_{factor}.weight"] = value.to(kind).contiguous()
        inside = _IN_LAYER.fullmatch(module)
        assert inside is not None, f"{module} is in no layer"
        ranks[inside[1]] = lora.rank * len(first)
        transposed |= tensor.transposed
    if shape.experts and (mlp := [name for name in ranks if name.startswith("mlp.")]):
        raise ValueError(
            f"adapters of {mlp[0]} in layers without experts cannot be exported: `peft` takes the name for "
            f"that of experts' matrices; export the whole model with `--merge`, or train with "
            f"model.lora.targets=[q, k, v, o]"
        )
    file = directory / ADAPTERS
    write_tensors(file, content)
    larger = {name: rank for name, rank in ranks.items() if rank != lora.rank}
    description = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": [*ranks],
        "rank_pattern": larger,
        "alpha_pattern": {name: lora.scale * rank for name, rank in larger.items()},
        "fan_in_fan_out": transposed,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (directory / DESCRIPTION).write_text(json.dumps(description, indent=2), encoding="utf-8")
    shutil.copymode(directory / DESCRIPTION, file)  # safetensors creates files that only the owner may read
    return file
