"""Scaled rotary frequencies: those of `transformers`, and what cannot be."""

import re
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from braid.scheduling.model.presets.library import model_preset
from braid.scheduling.model.rotary import RotaryScaling


@pytest.mark.parametrize("kind", ["llama3", "linear"])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.2-1b"])
def test_frequencies_are_those_of_transformers(kind: str, name: str) -> None:
    """In fp32, in which theirs are."""
    shape = model_preset(name)
    scaling = shape.rotary_scaling
    assert scaling is not None
    content: dict[str, Any] = {"rope_type": kind, "factor": scaling.factor}
    if kind == "llama3":
        content |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    else:
        scaling = RotaryScaling(factor=scaling.factor)
    config = LlamaConfig(head_dim=shape.head_dim, rope_theta=shape.rotary_base, rope_scaling=content)
    theirs, factor = ROPE_INIT_FUNCTIONS[kind](config)
    assert factor == 1.0
    plain = [shape.rotary_base ** (-2 * i / shape.head_dim) for i in range(shape.head_dim // 2)]
    frequencies = scaling.frequencies(plain)
    ours = torch.tensor(frequencies)
    torch.testing.assert_close(ours, theirs, rtol=3e-6, atol=0)
    kept = sum(one == other for one, other in zip(frequencies, plain, strict=True))
    assert (0 < kept < len(plain)) == (kind == "llama3")


def test_factors_of_their_own_are_those_of_transformers() -> None:
    factors = [1.0 + i / 7 for i in range(32)]
    content = {"rope_type": "longrope", "short_factor": factors, "long_factor": [9.0] * 32, "factor": 2.0}
    config = LlamaConfig(
        head_dim=64, rope_theta=1e4, rope_scaling={**content, "original_max_position_embeddings": 64}
    )
    theirs, _ = ROPE_INIT_FUNCTIONS["longrope"](config)
    scaling = RotaryScaling(factor=1.0, factors=tuple(factors), original_sequence=64)
    ours = torch.tensor(scaling.frequencies([1e4 ** (-i / 32) for i in range(32)]))
    torch.testing.assert_close(ours, theirs, rtol=3e-6, atol=0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"factor": 0.0}, "factor=0.0 must be greater than zero"),
        ({"high_frequency_factor": 1.0}, "high_frequency_factor=1.0 must be greater than low_"),
        ({"factors": (1.0, -1.0)}, "factors=[1.0, -1.0] must be greater than zero"),
        ({"factors": (1.0,), "original_sequence": None}, "factors need original_sequence"),
    ],
)
def test_scaling_that_cannot_be(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(says)}"):
        RotaryScaling(**{"factor": 8.0, "original_sequence": 64, **changes})
