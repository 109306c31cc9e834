"""``config.json`` of a Hugging Face directory as a `ModelShape`, and back.

Llama, Mistral, Qwen2 (and 2.5) and Qwen3 (family ``llama``) and GPT-2 (family ``gpt``) compute what Braid's
families compute, to the last operator; what differs in any other way is refused, never approximated.
Dropout is not read: Braid has none. Keys are those of `transformers`, old and new.

A Mistral that attends to all earlier tokens computes what a Llama does, and is written as one.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from braid.scheduling.records import from_mapping
from braid.scheduling.rotary import RotaryScaling
from braid.scheduling.spec import ModelShape

CONFIG: Final = "config.json"
TRAITS: Final = ("qkv_bias", "head_norm")
"""Fields of `ModelShape` that no key says, but the architecture."""
SCALING: Final = {
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_sequence": "original_max_position_embeddings",
}
"""Field of `RotaryScaling` -> key of ``rope_parameters`` or ``rope_scaling``."""
_ROTARY: Final = {"default": (), "linear": ("factor",), "llama3": tuple(SCALING)}
"""Fields of `RotaryScaling` that each known kind of rotary embedding has."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How a family is written in ``config.json``."""

    family: str
    model_type: str
    name: str
    """Of its class in `transformers`."""
    keys: Mapping[str, str]
    """Field of `ModelShape` -> key."""
    defaults: Mapping[str, Callable[[Mapping[str, Any]], Any]]
    """Key -> what `transformers` takes where the key is missing or null; other keys must be there."""
    fixed: Mapping[str, tuple[Any, ...]]
    """Key -> values that compute what Braid computes; the first is the default and is what is written."""
    traits: frozenset[str] = frozenset()
    """Those of `TRAITS` that its models have."""


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
_LLAMA_DEFAULTS: Final[Mapping[str, Callable[[Mapping[str, Any]], Any]]] = {
    "head_dim": lambda content: content["hidden_size"] // content["num_attention_heads"],
    "tie_word_embeddings": lambda content: False,
    "rms_norm_eps": lambda content: 1e-6,
    "rope_theta": lambda content: 10000.0,
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
        "max_position_embeddings": lambda content: 2048,
    },
    fixed={**_SILU, "attention_bias": (False,), "mlp_bias": (False,)},
)

QWEN2: Final = Architecture(
    family="llama",
    model_type="qwen2",
    name="Qwen2ForCausalLM",
    keys=_LLAMA_KEYS,
    defaults={**_LLAMA_DEFAULTS, "max_position_embeddings": lambda content: 32768},
    fixed={**_SILU, "use_sliding_window": (False,)},
    traits=frozenset({"qkv_bias"}),
)

QWEN3: Final = Architecture(
    family="llama",
    model_type="qwen3",
    name="Qwen3ForCausalLM",
    keys=_LLAMA_KEYS,
    defaults={
        **_LLAMA_DEFAULTS,
        "head_dim": lambda content: 128,
        "max_position_embeddings": lambda content: 32768,
    },
    fixed={**_SILU, "attention_bias": (False,), "use_sliding_window": (False,)},
    traits=frozenset({"head_norm"}),
)

MISTRAL: Final = Architecture(
    family="llama",
    model_type="mistral",
    name="MistralForCausalLM",
    keys=_LLAMA_KEYS,
    defaults={**_LLAMA_DEFAULTS, "max_position_embeddings": lambda content: 131072},
    fixed=_SILU,
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
        "tie_word_embeddings": lambda content: True,
        "layer_norm_epsilon": lambda content: 1e-5,
    },
    fixed={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
)

ARCHITECTURES: Final = (LLAMA, QWEN2, QWEN3, MISTRAL, GPT2)
"""The first that computes what a shape says is what it is written as."""


def architecture_of(shape: ModelShape) -> Architecture:
    """The architecture that computes what a model of this shape computes; `ValueError` if there is none."""
    traits = frozenset(name for name in TRAITS if getattr(shape, name))
    same = (known for known in ARCHITECTURES if (known.family, known.traits) == (shape.family, traits))
    found = next(same, None)
    if found is None:
        shown = "".join(f", model.{name}=true" for name in sorted(traits))
        raise ValueError(
            f"model.family={shape.family!r}{shown} has no Hugging Face form here; llama, with at most one of "
            f"{' and '.join(f'model.{name}' for name in TRAITS)}, and gpt have one"
        )
    if found is GPT2 and (shape.kv_heads != shape.heads or shape.heads * shape.head_dim != shape.hidden):
        raise ValueError(
            f"GPT-2 has as many key-value heads as query heads, each as wide as hidden / heads; model.heads="
            f"{shape.heads}, model.kv_heads={shape.kv_heads}, model.head_dim={shape.head_dim}, "
            f"model.hidden={shape.hidden} have no equal in `transformers`"
        )
    return found


def hugging_face_config(shape: ModelShape, dtype: str) -> dict[str, Any]:
    """The contents of ``config.json`` for a model whose weights are stored as ``dtype`` (``float32``, ...).

    Without ids of special tokens, which Braid does not know, and without dropout, which it does not have.
    """
    known = architecture_of(shape)
    content: dict[str, Any] = {
        "architectures": [known.name],
        "model_type": known.model_type,
        **{key: getattr(shape, field) for field, key in known.keys.items()},
        **{key: values[0] for key, values in known.fixed.items()},
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if known is GPT2:
        content |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    if (scaling := shape.rotary_scaling) is not None:
        kind = "linear" if scaling.original_sequence is None else "llama3"
        sizes = {SCALING[field]: getattr(scaling, field) for field in _ROTARY[kind]}
        content["rope_scaling"] = {"rope_type": kind, **sizes}
    return content


def initial_shape(directory: Path, given: Mapping[str, Any]) -> ModelShape:
    """The shape of the model in a directory; fields that are ``given`` are compared with it.

    A Llama's ``sequence`` may be shorter than the longest that it was made for. `ValueError` names the
    configuration's key, its value, the directory's and the remedy.
    """
    content = _content(directory / CONFIG)
    shape = _shape(content, directory / CONFIG)
    if shape.family == "llama" and given.get("sequence", shape.sequence) < shape.sequence:
        shape = replace(shape, sequence=given["sequence"])
    _check_window(content, shape.sequence, directory / CONFIG)
    for field, value in given.items():
        if value is not None and value != getattr(shape, field):
            raise ValueError(
                f"model.{field}={value!r}, but {directory / CONFIG} of model.initial says "
                f"{getattr(shape, field)!r}; leave model.{field} out"
            )
    return shape


def _content(path: Path) -> dict[str, Any]:
    if not path.parent.is_dir():
        where = "is not a directory" if path.parent.exists() else "does not exist"
        raise ValueError(
            f"model.initial={str(path.parent)!r} {where}; "
            f"give the directory that holds {CONFIG} and model.safetensors"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it holds no keys and values")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"{path} cannot be read: {reason}; model.initial needs it") from None
    return content


def _shape(content: Mapping[str, Any], path: Path) -> ModelShape:
    known = _architecture(content, path)
    rotary = _rotary(content, path)
    if "rope_theta" in rotary:
        content = {**content, "rope_theta": rotary["rope_theta"]}
    for key, values in known.fixed.items():
        if content.get(key, values[0]) not in values:
            raise ValueError(
                f"{path}: {key}={content[key]!r} is not what Braid computes; "
                f"only {values[0]!r} can be imported"
            )
    sizes = {field: _size(content, key, known, path) for field, key in known.keys.items()}
    heads, hidden = sizes["heads"], sizes["hidden"]
    if known is GPT2 and isinstance(heads, int) and isinstance(hidden, int):
        sizes |= {"kv_heads": heads, "head_dim": hidden // max(1, heads)}
    given = {"family": known.family, **sizes, **dict.fromkeys(known.traits, True)}
    shape = replace(
        from_mapping(ModelShape, given, str(path)), rotary_scaling=_scaling(content, path, rotary)
    )
    architecture_of(shape)
    return shape


def _check_window(content: Mapping[str, Any], sequence: int, path: Path) -> None:
    """`ValueError` unless every token attends to all before it, as here."""
    kinds = content.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or set(map(str, kinds)) - {"full_attention"}):
        raise ValueError(
            f"{path}: layer_types={kinds!r} is not what Braid computes; only 'full_attention' is"
        )
    if content["model_type"] != MISTRAL.model_type:
        return
    window = content.get("sliding_window", 4096)  # what `transformers` takes where the key is missing
    if window is not None and not (isinstance(window, int) and window >= sequence):
        raise ValueError(
            f"{path}: sliding_window={window!r} hides tokens of a sequence of {sequence}, and Braid attends "
            f"to all; set model.sequence to at most the window"
        )


def _architecture(content: Mapping[str, Any], path: Path) -> Architecture:
    kind = content.get("model_type")
    names = content.get("architectures")
    for known in ARCHITECTURES:
        if kind == known.model_type and names in (None, [known.name]):
            break
    else:
        shown = f"model_type={kind!r}, architectures={names!r}"
        can = " or ".join(f"{known.model_type!r} ({known.name})" for known in ARCHITECTURES)
        raise ValueError(f"{path}: {shown} cannot be imported; it must be {can}")
    if content.get("quantization_config") is not None:
        raise ValueError(f"{path}: quantization_config: quantised weights cannot be imported")
    return known


def _rotary(content: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """What is said of the rotary embedding: newer files keep it in ``rope_parameters``, with its base."""
    key = "rope_scaling" if content.get("rope_scaling") else "rope_parameters"
    found = content.get(key) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"{path}: {key}={found!r} must hold keys and values")
    partial = found.get("partial_rotary_factor", content.get("partial_rotary_factor"))
    nested = any(isinstance(value, Mapping) for value in found.values())
    if _kind(found) not in _ROTARY or partial not in (None, 1.0) or nested:
        shown = f"{key}={dict(found)!r}" if partial in (None, 1.0) else f"partial_rotary_factor={partial!r}"
        raise ValueError(
            f"{path}: {shown} is not what Braid computes; only {', '.join(map(repr, _ROTARY))} of all "
            f"dimensions are"
        )
    return found


def _kind(rotary: Mapping[str, Any]) -> str:
    return str(rotary.get("rope_type", rotary.get("type", "default")))


def _scaling(content: Mapping[str, Any], path: Path, rotary: Mapping[str, Any]) -> RotaryScaling | None:
    fields = _ROTARY[_kind(rotary)]
    if not fields:
        return None
    outer = SCALING["original_sequence"]
    given = {**rotary, **({outer: content[outer]} if outer in content else {})}
    if missing := [SCALING[field] for field in fields if SCALING[field] not in given]:
        raise ValueError(f"{path}: {missing[0]} is missing, which rope_type {_kind(rotary)!r} needs")
    return from_mapping(RotaryScaling, {field: given[SCALING[field]] for field in fields}, str(path))


def _size(content: Mapping[str, Any], key: str, known: Architecture, path: Path) -> Any:
    value = content.get(key)
    if value is not None:
        return value
    if key not in known.defaults:
        raise ValueError(f"{path}: {key} is missing")
    try:
        return known.defaults[key](content)
    except (KeyError, TypeError, ZeroDivisionError):
        raise ValueError(f"{path}: {key} is missing, and what it follows from is wrong") from None
