"""``config.json`` of a Hugging Face directory as a `ModelShape`, and back.

What the known `architectures` compute is what Braid's families compute, to the last operator; what differs in
any other way is refused, never approximated. What is of training alone is not read: dropout and the noise on
what enters routers (``router_jitter_noise`` of Mixtral), which Braid does not have, and
``router_aux_loss_coef``. That is the factor of a loss over the tokens of all layers together; ours,
``model.balance_loss``, is one of each layer and micro-batch: no factor makes the two equal. A run that begins
with such weights has none, unless its configuration says so.

A Mistral that attends to all earlier tokens computes what a Llama does, and is written as one.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from braid.scheduling.model.presets.architectures import (
    ARCHITECTURES,
    GPT2,
    MIXTRAL,
    OTHER_NAMES,
    PHI_MOE,
    QWEN3_MOE,
    REFUSED,
    TRAITS,
    Architecture,
)
from braid.scheduling.model.rotary import RotaryScaling
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.text.pattern import DENSE, UNIFORM, pattern_of
from braid.scheduling.text.records import from_mapping

CONFIG: Final = "config.json"
SCALING: Final = {
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_sequence": "original_max_position_embeddings",
    "factors": "short_factor",
    "magnitude": "short_mscale",
}
"""Field of `RotaryScaling` -> key of ``rope_parameters`` or ``rope_scaling``."""
_ROTARY: Final = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_frequency_factor", "high_frequency_factor", "original_sequence"),
    "longrope": ("factors", "magnitude", "original_sequence"),
}
"""Fields of `RotaryScaling` that each known kind of rotary embedding has."""
_OF_TRAINING: Final = ("capacity_factor", "balance_loss", "z_loss")
"""Fields of a mixture of experts that a run decides, whatever its weights come from."""


def architecture_of(shape: ModelShape) -> Architecture:
    """The architecture that computes what a model of this shape computes; `ValueError` if there is none.

    Losses of routers and capacities of experts are of training, and no part of that.
    """
    traits = {name: value for name in TRAITS if (value := getattr(shape, name))}
    same = (
        known
        for known in ARCHITECTURES
        if known.family == shape.family and traits.keys() - known.keys.keys() == known.traits
    )
    found = next(same, None)
    if found is None:
        shown = "".join(f", model.{name}={str(value).lower()}" for name, value in sorted(traits.items()))
        raise ValueError(
            f"model.family={shape.family!r}{shown} has no Hugging Face form here; llama, with at most one of "
            f"model.qkv_bias and model.head_norm, moe with model.head_norm, with model.layer_norm and "
            f"model.mixer_jitter or with none of them, and gpt have one"
        )
    if (kind := _kind_of(shape.rotary_scaling)) not in found.rotary:
        raise ValueError(
            f"model.rotary_scaling of the kind {kind!r} has no equal in {found.name} of `transformers`; "
            f"it has {', '.join(map(repr, found.rotary))}"
        )
    if found is GPT2 and (shape.kv_heads != shape.heads or shape.heads * shape.head_dim != shape.hidden):
        raise ValueError(
            f"GPT-2 has as many key-value heads as query heads, each as wide as hidden / heads; model.heads="
            f"{shape.heads}, model.kv_heads={shape.kv_heads}, model.head_dim={shape.head_dim}, "
            f"model.hidden={shape.hidden} have no equal in `transformers`"
        )
    if shape.balance_rate:
        raise ValueError(
            f"model.balance_rate={shape.balance_rate:g} has no Hugging Face form here: neither Mixtral nor "
            f"Qwen3-MoE has a bias that takes part in the choice of experts"
        )
    if shape.experts and shape.shared_experts:
        raise ValueError(
            f"model.shared_experts={shape.shared_experts} has no Hugging Face form here: neither Mixtral nor "
            f"Qwen3-MoE has experts that every token visits"
        )
    dense = shape.expert_layers < shape.layers
    if found is MIXTRAL and (dense or not _normalised(shape)):
        raise ValueError(
            f"Mixtral has experts in every layer, and divides gates by their sum; model.pattern="
            f"{shape.pattern!r}, model.normalised={str(shape.normalised).lower()} have no equal in "
            f"`transformers` without model.head_norm"
        )
    wrong = {
        "pattern": dense,
        "mixer_jitter": not shape.mixer_jitter,
        "top_k": shape.top_k != 2,
        "projection_bias": shape.projection_bias != shape.qkv_bias,
    }
    if found is PHI_MOE and any(wrong.values()):
        field = next(name for name, is_wrong in wrong.items() if is_wrong)
        raise ValueError(
            f"Phi-3.5-MoE has experts in every layer, of which a token visits two by SparseMixer's gates, "
            f"and biases on all of attention's matrices or on none; model.{field}={getattr(shape, field)!r} "
            f"has no equal in `transformers`"
        )
    return found


def _normalised(shape: ModelShape) -> bool:
    """Whether a token's gates sum to 1: a softmax over the chosen is one over all, divided by their sum."""
    return shape.normalised or shape.softmax_after


def hugging_face_config(
    shape: ModelShape, dtype: str, tokens: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """The contents of ``config.json`` for a model whose weights are stored as ``dtype`` (``float32``, ...).

    ``tokens``: ids of special tokens, by their keys there. Dropout is left out, as Braid has none.
    """
    known = architecture_of(shape)
    more: dict[str, Any] = {}
    if known in (MIXTRAL, PHI_MOE):
        shape = replace(shape, ffn=shape.expert_width)
    if known is QWEN3_MOE:
        dense = [index for index, kind in enumerate(shape.kinds) if kind == DENSE]
        more = {"decoder_sparse_step": 1, "mlp_only_layers": dense}
        shape = replace(shape, expert_ffn=shape.expert_width, normalised=_normalised(shape))
    if (scaling := shape.rotary_scaling) is not None:
        kind = _kind_of(scaling)
        sizes = {SCALING[field]: getattr(scaling, field) for field in _ROTARY[kind]}
        if kind == "longrope":  # those for longer samples, which this model is not for
            factors = [scaling.factor * one for one in scaling.factors]
            sizes |= {"short_factor": factors, "long_factor": factors, "long_mscale": scaling.magnitude}
        more["rope_scaling"] = {"rope_type": kind, **sizes}
    return {
        "architectures": [known.name],
        "model_type": known.model_type,
        **{key: getattr(shape, field) for field, key in known.keys.items()},
        **{key: values[0] for key, values in known.fixed.items()},
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
        **tokens,
        **known.written,
        **more,
    }


def initial_shape(directory: Path, given: Mapping[str, Any]) -> ModelShape:
    """The shape of the model in a directory; fields that are ``given`` are compared with it.

    Where positions are rotary, ``sequence`` may be shorter than the longest that the model was made for; the
    losses and the capacity of a mixture of experts are as given. `ValueError` names the configuration's key,
    its value, the directory's and the remedy.
    """
    content = _content(directory / CONFIG)
    shape = _shape(content, directory / CONFIG)
    if shape.family != "gpt" and given.get("sequence", shape.sequence) < shape.sequence:
        shape = replace(shape, sequence=given["sequence"])
    if shape.family == "moe":
        shape = replace(shape, **{field: given[field] for field in _OF_TRAINING if field in given})
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
    rotary = _rotary(content, known, path)
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
    shape = from_mapping(ModelShape, given, str(path))
    if known is QWEN3_MOE:
        shape = replace(shape, pattern=_pattern(content, shape.layers, path))
    scaling, sequence = _scaling(content, path, rotary), shape.sequence
    if scaling is not None and scaling.factors:
        sequence = min(sequence, scaling.original_sequence or sequence)
    try:
        shape = replace(shape, rotary_scaling=scaling, sequence=sequence)
        architecture_of(shape)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return shape


def _pattern(content: Mapping[str, Any], layers: int, path: Path) -> str:
    """Which layers have experts: every ``decoder_sparse_step``-th, but for ``mlp_only_layers``."""
    step, dense = content.get("decoder_sparse_step", 1), content.get("mlp_only_layers") or []
    if type(step) is not int or step < 1:
        raise ValueError(f"{path}: decoder_sparse_step={step!r} must be a whole number of at least 1")
    if not isinstance(dense, list) or any(type(index) is not int for index in dense):
        raise ValueError(f"{path}: mlp_only_layers={dense!r} must be a list of numbers of layers")
    sparse = [index not in dense and (index + 1) % step == 0 for index in range(layers)]
    return pattern_of([UNIFORM if one else DENSE for one in sparse])


def _check_window(content: Mapping[str, Any], sequence: int, path: Path) -> None:
    """`ValueError` unless every token attends to all before it, as here."""
    kinds = content.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or set(map(str, kinds)) - {"full_attention"}):
        raise ValueError(
            f"{path}: layer_types={kinds!r} is not what Braid computes; only 'full_attention' is"
        )
    known = _architecture(content, path)
    window = content.get("sliding_window", known.window)
    if known.window != 0 and window is not None and not (isinstance(window, int) and window >= sequence):
        raise ValueError(
            f"{path}: sliding_window={window!r} hides tokens of a sequence of {sequence}, and Braid attends "
            f"to all; set model.sequence to at most the window"
        )


def _architecture(content: Mapping[str, Any], path: Path) -> Architecture:
    kind = content.get("model_type")
    names = content.get("architectures")
    for known in ARCHITECTURES:
        if kind == known.model_type and names in (None, *([one] for one in (known.name, *known.other_names))):
            break
    else:
        if isinstance(kind, str) and kind in REFUSED:
            raise ValueError(f"{path}: model_type={kind!r} cannot be imported: {REFUSED[kind]}")
        shown = f"model_type={kind!r}, architectures={names!r}"
        can = " or ".join(f"{known.model_type!r} ({known.name})" for known in ARCHITECTURES)
        raise ValueError(f"{path}: {shown} cannot be imported; it must be {can}")
    if content.get("quantization_config") is not None:
        raise ValueError(f"{path}: quantization_config: quantised weights cannot be imported")
    return known


def _rotary(content: Mapping[str, Any], known: Architecture, path: Path) -> Mapping[str, Any]:
    """What is said of the rotary embedding: newer files keep it in ``rope_parameters``, with its base."""
    key = "rope_scaling" if content.get("rope_scaling") else "rope_parameters"
    found = content.get(key) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"{path}: {key}={found!r} must hold keys and values")
    partial = found.get("partial_rotary_factor", content.get("partial_rotary_factor"))
    nested = any(isinstance(value, Mapping) for value in found.values())
    if _kind(found) not in known.rotary or partial not in (None, 1.0) or nested:
        shown = f"{key}={dict(found)!r}" if partial in (None, 1.0) else f"partial_rotary_factor={partial!r}"
        raise ValueError(
            f"{path}: {shown} is not what Braid computes; only {', '.join(map(repr, known.rotary))} of all "
            f"dimensions are"
        )
    return found


def _kind_of(scaling: RotaryScaling | None) -> str:
    """What `transformers` calls such a rotary embedding."""
    if scaling is None:
        return "default"
    if scaling.factors:
        return "longrope"
    return "linear" if scaling.original_sequence is None else "llama3"


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
    found = {"factor": 1.0, **{field: given[SCALING[field]] for field in fields}}
    return from_mapping(RotaryScaling, found, str(path))


def _size(content: Mapping[str, Any], key: str, known: Architecture, path: Path) -> Any:
    for name in (key, OTHER_NAMES.get(key)):
        if name is not None and content.get(name) is not None:
            return content[name]
    if key not in known.defaults:
        raise ValueError(f"{path}: {key} is missing")
    default = known.defaults[key]
    try:
        return default(content) if callable(default) else default
    except (KeyError, TypeError, ZeroDivisionError):
        raise ValueError(f"{path}: {key} is missing, and what it follows from is wrong") from None
