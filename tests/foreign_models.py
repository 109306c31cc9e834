"""Models of `transformers`, made at random: what weights are exchanged with, and the reference for it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel
from transformers.utils import logging

logging.disable_progress_bar()

VOCABULARY = 261
"""More than the bytes, and not even: tensor-parallel ranks hold unequal shares."""
SEQUENCE = 32
NO_TOKENS: Mapping[str, Any] = {"bos_token_id": None, "eos_token_id": None}


def _llama(**changes: Any) -> LlamaConfig:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    content = {**sizes, "num_key_value_heads": 2, "vocab_size": VOCABULARY, **NO_TOKENS, **changes}
    return LlamaConfig(max_position_embeddings=SEQUENCE, rope_theta=50_000.0, rms_norm_eps=1e-6, **content)


def _gpt2(**changes: Any) -> GPT2Config:
    sizes = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": SEQUENCE, "vocab_size": VOCABULARY}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2Config(**{**sizes, **dropout, **NO_TOKENS, **changes})


KINDS: Mapping[str, Callable[[], Any]] = {
    "llama": _llama,
    "llama, tied, wide heads": lambda: _llama(tie_word_embeddings=True, head_dim=24),
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
