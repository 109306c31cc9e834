"""Scaled rotary frequencies: those of `transformers`, and what cannot be."""

import re
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from braid.scheduling.presets.library import model_preset
from braid.scheduling.rotary import RotaryScaling


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
    ours = torch.tensor([scaling(frequency) for frequency in plain])
    torch.testing.assert_close(ours, theirs, rtol=3e-6, atol=0)
    kept = sum(scaling(frequency) == frequency for frequency in plain)
    assert (0 < kept < len(plain)) == (kind == "llama3")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"factor": 0.0}, "factor=0.0 must be greater than zero"),
        ({"low_frequency_factor": -1.0}, "low_frequency_factor=-1.0 must be greater than zero"),
        ({"high_frequency_factor": 1.0}, "high_frequency_factor=1.0 must be greater than low_"),
        ({"original_sequence": 0}, "original_sequence=0 must be greater than zero"),
    ],
)
def test_scaling_that_cannot_be(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(says)}"):
        RotaryScaling(**{"factor": 8.0, "original_sequence": 64, **changes})
