"""Lists the architectures of `transformers` that Braid can compute, and their keys in ``config.json``.

Llama, Mistral, Qwen2 (and 2.5) and Qwen3 are of family ``llama``, GPT-2 of ``gpt``, Mixtral, Qwen3-MoE and
Phi-3.5-MoE of ``moe``. Keys are those of `transformers`, old and new.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

TRAITS: Final = ("qkv_bias", "projection_bias", "head_bias", "head_norm", "layer_norm", "mixer_jitter")
"""Boolean-like fields of `ModelShape` that tell architectures apart: an architecture has a trait always,
never, or if a key of ``config.json`` sets it."""
OTHER_NAMES: Final = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}
"""Key of ``config.json`` -> synonym that `transformers` reads too; version 5 always writes
``num_local_experts``."""
REFUSED: Final = {
    "deepseek_v2": "its attention is over compressed keys and values (multi-head latent attention)",
    "deepseek_v3": "its attention is over compressed keys and values (multi-head latent attention)",
    "qwen2_moe": "a gate of its own weighs its shared expert, token by token",
    "olmoe": "its norms of queries and keys are over all heads together",
}
"""``model_type`` -> the reason why Braid cannot import a model that looks like a supported one."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture of `transformers`, and how its ``config.json`` maps to a `ModelShape`."""

    family: str
    model_type: str
    name: str
    """Name of the model class in `transformers`."""
    other_names: tuple[str, ...] = ()
    """Other names that published files use for the model class."""
    keys: Mapping[str, str]
    """Field of `ModelShape` -> key of ``config.json``."""
    defaults: Mapping[str, Any]
    """Key -> default of `transformers` if the key is missing or null: a value, or a function of the file's
    content. Keys without a default are required."""
    fixed: Mapping[str, tuple[Any, ...]]
    """Key -> values of the key that Braid can compute; the first is the default, and the value that is
    written."""
    traits: frozenset[str] = frozenset()
    """Those of `TRAITS` that every model of the architecture has."""
    rotary: tuple[str, ...] = ("default", "linear", "llama3")
    """Kinds of rotary embeddings of the architecture that Braid can compute."""
    window: int | None = 0
    """Default of `transformers` if ``sliding_window`` is missing; 0 if the architecture ignores this key."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """Key -> value that is written to ``config.json`` but ignored in reading: training settings Braid
    lacks."""


_LLAMA_KEYS: Final = {
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocabulary": "vocab_size",
    "sequence": "max_position_embeddings",
    "tied_head": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "rotary_base": "rope_theta",
}
_LLAMA_DEFAULTS: Final[Mapping[str, Any]] = {
    "head_dim": lambda content: content["hidden_size"] // content["num_attention_heads"],
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 32768,
}
_SILU: Final = {"hidden_act": ("silu", "swish")}

LLAMA: Final = Architecture(
    family="llama",
    model_type="llama",
    name="LlamaForCausalLM",
    keys=_LLAMA_KEYS,
    defaults={
        **_LLAMA_DEFAULTS,
        "num_key_value_heads": lambda content: content["num_attention_heads"],
        "max_position_embeddings": 2048,
    },
    fixed={**_SILU, "attention_bias": (False,), "mlp_bias": (False,)},
)

QWEN2: Final = replace(
    LLAMA,
    model_type="qwen2",
    name="Qwen2ForCausalLM",
    defaults=_LLAMA_DEFAULTS,
    fixed={**_SILU, "use_sliding_window": (False,)},
    traits=frozenset({"qkv_bias"}),
)

QWEN3: Final = replace(
    LLAMA,
    model_type="qwen3",
    name="Qwen3ForCausalLM",
    defaults={**_LLAMA_DEFAULTS, "head_dim": 128},
    fixed={**_SILU, "attention_bias": (False,), "use_sliding_window": (False,)},
    traits=frozenset({"head_norm"}),
)

MISTRAL: Final = replace(
    LLAMA,
    model_type="mistral",
    name="MistralForCausalLM",
    defaults={**_LLAMA_DEFAULTS, "max_position_embeddings": 131072},
    fixed=_SILU,
    window=4096,
)

_EXPERT_KEYS: Final = {**_LLAMA_KEYS, "top_k": "num_experts_per_tok"}
_EXPERT_WRITTEN: Final = {"output_router_logits": False, "router_aux_loss_coef": 0.0}
"""Keys that switch off the loss that balances experts: Braid's is a loss per layer, that of `transformers`
one over all layers."""

MIXTRAL: Final = Architecture(
    family="moe",
    model_type="mixtral",
    name="MixtralForCausalLM",
    keys={**_EXPERT_KEYS, "experts": "num_local_experts"},
    defaults={
        **_LLAMA_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 131072,
    },
    fixed=_SILU,
    window=None,
    written={**_EXPERT_WRITTEN, "router_jitter_noise": 0.0, "sliding_window": None},
)

PHI_MOE: Final = replace(
    MIXTRAL,
    model_type="phimoe",
    name="PhimoeForCausalLM",
    other_names=("PhiMoEForCausalLM",),
    keys={
        **MIXTRAL.keys,
        "mixer_jitter": "router_jitter_noise",
        "qkv_bias": "attention_bias",
        "projection_bias": "attention_bias",
        "head_bias": "lm_head_bias",
    },
    defaults={
        **MIXTRAL.defaults,
        "router_jitter_noise": 0.01,
        "attention_bias": False,
        "lm_head_bias": False,
    },
    traits=frozenset({"layer_norm"}),
    rotary=("default", "longrope"),
    written={**_EXPERT_WRITTEN, "input_jitter_noise": 0.0, "sliding_window": None},
)

QWEN3_MOE: Final = replace(
    QWEN3,
    family="moe",
    model_type="qwen3_moe",
    name="Qwen3MoeForCausalLM",
    keys={
        **_EXPERT_KEYS,
        "experts": "num_experts",
        "expert_ffn": "moe_intermediate_size",
        "normalised": "norm_topk_prob",
    },
    defaults={**_LLAMA_DEFAULTS, "norm_topk_prob": False},
    written=_EXPERT_WRITTEN,
)

GPT2: Final = Architecture(
    family="gpt",
    model_type="gpt2",
    name="GPT2LMHeadModel",
    keys={
        "hidden": "n_embd",
        "ffn": "n_inner",
        "layers": "n_layer",
        "heads": "n_head",
        "vocabulary": "vocab_size",
        "sequence": "n_positions",
        "tied_head": "tie_word_embeddings",
        "norm_eps": "layer_norm_epsilon",
    },
    defaults={
        "n_inner": lambda content: 4 * content["n_embd"],
        "tie_word_embeddings": True,
        "layer_norm_epsilon": 1e-5,
    },
    fixed={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    written={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
)

ARCHITECTURES: Final = (LLAMA, QWEN2, QWEN3, MISTRAL, MIXTRAL, QWEN3_MOE, PHI_MOE, GPT2)
"""All known architectures; a shape is written as the first of them that can compute it."""
