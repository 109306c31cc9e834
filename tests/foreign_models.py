"""Models of `transformers`, made at random: what weights are exchanged with, and the reference for it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.utils import logging

logging.disable_progress_bar()

VOCABULARY = 261
"""More than the bytes, and not even: tensor-parallel ranks hold unequal shares."""
SEQUENCE = 32
NO_TOKENS: Mapping[str, Any] = {"bos_token_id": None, "eos_token_id": None}


def _llama(kind: type[PreTrainedConfig] = LlamaConfig, **changes: Any) -> PreTrainedConfig:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    content = {**sizes, "num_key_value_heads": 2, "vocab_size": VOCABULARY, **NO_TOKENS, **changes}
    return kind(max_position_embeddings=SEQUENCE, rope_theta=50_000.0, rms_norm_eps=1e-6, **content)


def _gpt2(**changes: Any) -> GPT2Config:
    sizes = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": SEQUENCE, "vocab_size": VOCABULARY}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2Config(**{**sizes, **dropout, **NO_TOKENS, **changes})


LLAMA3: Mapping[str, Any] = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""Of waves of 6, 24, 94 and more tokens: one stays, one is between, the others become longer."""


def _qwen3_moe(**changes: Any) -> PreTrainedConfig:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 24}
    return _llama(Qwen3MoeConfig, **{**sizes, **changes})


def _phi_moe(**changes: Any) -> PreTrainedConfig:
    return _llama(PhimoeConfig, **{"num_local_experts": 4, "sliding_window": None, **changes})


LONG: Mapping[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.05, 1.1, 1.3, 1.7, 2.0, 2.5, 3.0],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
    "short_mscale": 1.25,
    "long_mscale": 1.5,
    "original_max_position_embeddings": SEQUENCE,
}
"""A factor for each of eight frequencies."""

KINDS: Mapping[str, Callable[[], Any]] = {
    "llama": _llama,
    "llama, tied, wide heads": lambda: _llama(tie_word_embeddings=True, head_dim=24),
    "llama 3.1": lambda: _llama(rope_scaling=dict(LLAMA3)),
    "llama, linear": lambda: _llama(rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "mistral": lambda: _llama(MistralConfig, sliding_window=SEQUENCE),
    "qwen2": lambda: _llama(Qwen2Config, tie_word_embeddings=True),
    "qwen3": lambda: _llama(Qwen3Config, head_dim=24),
    "mixtral": lambda: _llama(MixtralConfig, num_local_experts=4),
    "qwen3 moe": lambda: _qwen3_moe(norm_topk_prob=True),
    "qwen3 moe, sparse, tied": lambda: _qwen3_moe(
        decoder_sparse_step=2, mlp_only_layers=[3], num_experts_per_tok=3, tie_word_embeddings=True
    ),
    "phi moe": lambda: _phi_moe(attention_bias=True, lm_head_bias=True, rope_scaling=dict(LONG)),
    "phi moe, bare": lambda: _phi_moe(router_jitter_noise=0.3),
    "gpt2": _gpt2,
    "gpt2, head of its own, narrow": lambda: _gpt2(
        tie_word_embeddings=False, n_inner=100, layer_norm_epsilon=1e-6
    ),
}


@torch.no_grad()
def random_model(kind: str, seed: int) -> PreTrainedModel:
    """A model of one of `KINDS`, in which no tensor is constant: norms and biases are told apart too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(KINDS[kind]())
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


def opened(directory: Path) -> PreTrainedModel:
    """What `transformers` makes of a directory."""
    return AutoModelForCausalLM.from_pretrained(directory, use_safetensors=True)


@contextmanager
def in_float64(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """A model in float64, with what `transformers` always computes in fp32 too: norms, rotary angles."""
    wide = {"float": torch.float64, "float32": torch.float64}
    with patch.multiple(torch, **wide), patch.object(torch.Tensor, "float", torch.Tensor.double):
        model.double()
        if hasattr(model.config, "num_local_experts"):
            model.set_experts_implementation("eager")  # its grouped products know no float64
        if (rotary := getattr(model.base_model, "rotary_emb", None)) is not None:
            model.base_model.rotary_emb = type(rotary)(model.config)
        yield model


def tensors_in(directory: Path) -> dict[str, Tensor]:
    """All tensors of a directory's safetensors files, by name."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
    return found


def assert_same_bits(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> None:
    """Equal names, dtypes and bits."""
    assert some.keys() == others.keys()
    for name, tensor in some.items():
        assert tensor.dtype == others[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), others[name].view(torch.uint8)), name


class LossOf(nn.Module):
    """A model of `transformers` as the plain training loop wants it."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def loss_sum(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Sum of the tokens' cross-entropies, in nats."""
        logits_BSV = self.model(tokens_BS).logits
        return F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten(), reduction="sum")
