"""``config.json`` of a Hugging Face directory as a `ModelShape`, and back.

Two architectures are known: Llama (family ``llama``) and GPT-2 (family ``gpt``), which compute what Braid's
families compute, to the last operator; what differs in any other way is refused, never approximated.
Dropout is not read: Braid has none. Keys are those of `transformers`, old and new.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from braid.scheduling.records import from_mapping
from braid.scheduling.spec import ModelShape

CONFIG: Final = "config.json"


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


LLAMA: Final = Architecture(
    family="llama",
    model_type="llama",
    name="LlamaForCausalLM",
    keys={
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
    },
    defaults={
        "num_key_value_heads": lambda content: content["num_attention_heads"],
        "head_dim": lambda content: content["hidden_size"] // content["num_attention_heads"],
        "max_position_embeddings": lambda content: 2048,
        "tie_word_embeddings": lambda content: False,
        "rms_norm_eps": lambda content: 1e-6,
        "rope_theta": lambda content: 10000.0,
    },
    fixed={"hidden_act": ("silu", "swish"), "attention_bias": (False,), "mlp_bias": (False,)},
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

ARCHITECTURES: Final = (LLAMA, GPT2)


def architecture_of(shape: ModelShape) -> Architecture:
    """The architecture that computes what a model of this shape computes; `ValueError` if there is none."""
    found = next((known for known in ARCHITECTURES if known.family == shape.family), None)
    if found is None:
        raise ValueError(
            f"model.family={shape.family!r} has no Hugging Face form here; llama and gpt have one"
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
    return content


def initial_shape(directory: Path, given: Mapping[str, Any]) -> ModelShape:
    """The shape of the model in a directory; fields that are ``given`` are compared with it.

    A Llama's ``sequence`` may be shorter than the longest that it was made for. `ValueError` names the
    configuration's key, its value, the directory's and the remedy.
    """
    shape = _read_shape(directory / CONFIG)
    if shape.family == "llama" and given.get("sequence", shape.sequence) < shape.sequence:
        shape = ModelShape(**{**vars(shape), "sequence": given["sequence"]})
    for field, value in given.items():
        if value is not None and value != getattr(shape, field):
            raise ValueError(
                f"model.{field}={value!r}, but {directory / CONFIG} of model.initial says "
                f"{getattr(shape, field)!r}; leave model.{field} out"
            )
    return shape


def _read_shape(path: Path) -> ModelShape:
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
    known = _architecture(content, path)
    content |= _rotary(content, path)
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
    shape = from_mapping(ModelShape, {"family": known.family, **sizes}, str(path))
    architecture_of(shape)
    return shape


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


def _rotary(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The rotary base, which newer files keep in ``rope_parameters``; other kinds of rotary are refused."""
    found: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        inner = content.get(key)
        if inner is None:
            continue
        if not isinstance(inner, Mapping):
            raise ValueError(f"{path}: {key}={inner!r} must hold keys and values")
        kind = inner.get("rope_type", inner.get("type", "default"))
        if kind != "default" or inner.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(f"{path}: {key}={dict(inner)!r} is not what Braid computes; only 'default' is")
        if "rope_theta" in inner:
            found["rope_theta"] = inner["rope_theta"]
    return found


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
