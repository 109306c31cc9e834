"""Converts the ``config.json`` of a Hugging Face directory to a `ModelShape`, and back.

The known `architectures` compute exactly what Braid's families compute; a model that differs in any way is
refused, never approximated. Settings of training alone are not read: dropout and ``router_jitter_noise`` of
Mixtral (noise on the router's input), which Braid lacks, and ``router_aux_loss_coef``. The latter is the
factor of a loss over the tokens of all layers together; Braid's ``model.balance_loss`` is one for each layer
and micro-batch, and no factor makes the two equal. A run from such weights has no such loss, unless its
configuration sets one.

A Mistral that attends to all earlier tokens computes what a Llama computes, and is written as a Llama.
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
"""Kind of rotary embedding in `transformers` -> fields of `RotaryScaling` that it sets."""
_OF_TRAINING: Final = ("capacity_factor", "balance_loss", "z_loss")
"""Fields of a mixture of experts that come from the run's configuration, never from ``config.json``."""


def architecture_of(shape: ModelShape) -> Architecture:
    """Return the architecture of `transformers` that computes models of this shape.

    Router losses and expert capacities, which concern only training, are ignored. Raises `ValueError` if no
    architecture fits.
    """
    traits = {name: value for name in TRAITS if (value := getattr(shape, name))}
    same = (
        candidate
        for candidate in ARCHITECTURES
        if candidate.family == shape.family and traits.keys() - candidate.keys.keys() == candidate.traits
    )
    arch = next(same, None)
    if arch is None:
        shown = "".join(f", model.{name}={str(value).lower()}" for name, value in sorted(traits.items()))
        raise ValueError(
            f"model.family={shape.family!r}{shown} has no Hugging Face form here; llama, with at most one of "
            f"model.qkv_bias and model.head_norm, moe with model.head_norm, with model.layer_norm and "
            f"model.mixer_jitter or with none of them, and gpt have one"
        )
    if (kind := _kind_of(shape.rotary_scaling)) not in arch.rotary:
        raise ValueError(
            f"model.rotary_scaling of the kind {kind!r} has no equal in {arch.name} of `transformers`; "
            f"it has {', '.join(map(repr, arch.rotary))}"
        )
    every_layer = shape.expert_layers == shape.layers
    wrong = {
        "balance_rate": (shape.balance_rate, "no bias takes part in the choice of experts"),
        "shared_experts": (shape.experts and shape.shared_experts, "no expert is visited by every token"),
    }
    if arch is GPT2:
        wide = shape.heads * shape.head_dim == shape.hidden
        wrong["kv_heads"] = (shape.kv_heads != shape.heads, "it is model.heads, the number of query heads")
        wrong["head_dim"] = (not wide, "it is model.hidden / model.heads")
    elif arch is MIXTRAL:
        wrong["pattern"] = (not every_layer, "without model.head_norm every layer has experts")
        wrong["normalised"] = (not _normalised(shape), "without model.head_norm gates sum to 1")
    elif arch is PHI_MOE:
        biases = shape.projection_bias == shape.qkv_bias
        wrong["pattern"] = (not every_layer, "every layer has experts")
        wrong["mixer_jitter"] = (not shape.mixer_jitter, "gates are SparseMixer's")
        wrong["top_k"] = (shape.top_k != 2, "a token visits two experts")
        wrong["projection_bias"] = (not biases, "all of attention's matrices have biases, or none has")
    for field, (is_wrong, why) in wrong.items():
        if is_wrong:
            value = getattr(shape, field)
            shown = str(value).lower() if isinstance(value, bool) else repr(value)
            raise ValueError(f"model.{field}={shown} has no equal in `transformers`: in {arch.name} {why}")
    return arch


def _normalised(shape: ModelShape) -> bool:
    """Return whether the gates of each token sum to 1: they are divided by their sum, or a softmax over the
    chosen experts."""
    return shape.normalised or shape.softmax_after


def hugging_face_config(
    shape: ModelShape, dtype: str, tokens: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the content of ``config.json`` for a model whose weights have the dtype ``dtype`` (``float32``,
    ...).

    ``tokens``: key in the file (``eos_token_id``, ...) -> id of a special token. Dropout is left out: Braid
    has none.
    """
    architecture = architecture_of(shape)
    further: dict[str, Any] = {}
    if architecture in (MIXTRAL, PHI_MOE):
        shape = replace(shape, ffn=shape.expert_width)
    if architecture is QWEN3_MOE:
        dense = [index for index, kind in enumerate(shape.kinds) if kind == DENSE]
        further = {"decoder_sparse_step": 1, "mlp_only_layers": dense}
        shape = replace(shape, expert_ffn=shape.expert_width, normalised=_normalised(shape))
    if (scaling := shape.rotary_scaling) is not None:
        kind = _kind_of(scaling)
        sizes = {SCALING[field]: getattr(scaling, field) for field in _ROTARY[kind]}
        if kind == "longrope":  # the factors for longer samples, which this model does not support
            factors = [scaling.factor * number for number in scaling.factors]
            sizes |= {"short_factor": factors, "long_factor": factors, "long_mscale": scaling.magnitude}
        further["rope_scaling"] = {"rope_type": kind, **sizes}
    return {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        **{key: getattr(shape, field) for field, key in architecture.keys.items()},
        **{key: values[0] for key, values in architecture.fixed.items()},
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
        **tokens,
        **architecture.written,
        **further,
    }


def initial_shape(directory: Path, configured: Mapping[str, Any]) -> ModelShape:
    """Return the shape of the model in a Hugging Face directory; the ``configured`` fields must agree with
    it.

    If positions are rotary, ``sequence`` may be shorter than the longest that the model supports; losses and
    capacity of a mixture of experts are taken from ``configured``. If a field disagrees, the `ValueError`
    names the configuration's key, its value, the directory's value and the remedy.
    """
    content = _content(directory / CONFIG)
    shape = _shape(content, directory / CONFIG)
    if shape.family != "gpt" and configured.get("sequence", shape.sequence) < shape.sequence:
        shape = replace(shape, sequence=configured["sequence"])
    if shape.family == "moe":
        shape = replace(shape, **{field: configured[field] for field in _OF_TRAINING if field in configured})
    _check_window(content, shape.sequence, directory / CONFIG)
    for field, value in configured.items():
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
            f"give the directory that holds {CONFIG} and model.safetensors, or a name on the Hub as org/name"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it holds no keys and values")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        of_a_run = "`braid checkpoint export RUN` writes it, for adapters with `... --merge`"
        raise ValueError(f"{path} cannot be read: {reason}; model.initial needs it; {of_a_run}") from None
    return content


def _shape(content: Mapping[str, Any], path: Path) -> ModelShape:
    architecture = _architecture(content, path)
    rotary = _rotary(content, architecture, path)
    if "rope_theta" in rotary:
        content = {**content, "rope_theta": rotary["rope_theta"]}
    for key, values in architecture.fixed.items():
        if content.get(key, values[0]) not in values:
            raise ValueError(
                f"{path}: {key}={content[key]!r} is not what Braid computes; "
                f"only {values[0]!r} can be imported"
            )
    sizes = {field: _size(content, key, architecture, path) for field, key in architecture.keys.items()}
    heads, hidden = sizes["heads"], sizes["hidden"]
    if architecture is GPT2 and isinstance(heads, int) and isinstance(hidden, int):
        sizes |= {"kv_heads": heads, "head_dim": hidden // max(1, heads)}
    fields = {"family": architecture.family, **sizes, **dict.fromkeys(architecture.traits, True)}
    shape = from_mapping(ModelShape, fields, str(path))
    if architecture is QWEN3_MOE:
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
    """Return the pattern of layer kinds of a Qwen3-MoE: every ``decoder_sparse_step``-th layer has experts,
    except those in ``mlp_only_layers``."""
    step, dense = content.get("decoder_sparse_step", 1), content.get("mlp_only_layers") or []
    if type(step) is not int or step < 1:
        raise ValueError(f"{path}: decoder_sparse_step={step!r} must be a whole number of at least 1")
    if not isinstance(dense, list) or any(type(index) is not int for index in dense):
        raise ValueError(f"{path}: mlp_only_layers={dense!r} must be a list of numbers of layers")
    sparse = [index not in dense and (index + 1) % step == 0 for index in range(layers)]
    return pattern_of([UNIFORM if has_experts else DENSE for has_experts in sparse])


def _check_window(content: Mapping[str, Any], sequence: int, path: Path) -> None:
    """Raise `ValueError` unless every token of a sample attends to all earlier tokens, as in Braid."""
    kinds = content.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or set(map(str, kinds)) - {"full_attention"}):
        raise ValueError(
            f"{path}: layer_types={kinds!r} is not what Braid computes; only 'full_attention' is"
        )
    arch = _architecture(content, path)
    window = content.get("sliding_window", arch.window)
    if arch.window != 0 and window is not None and not (isinstance(window, int) and window >= sequence):
        raise ValueError(
            f"{path}: sliding_window={window!r} hides tokens of a sequence of {sequence}, and Braid attends "
            f"to all; set model.sequence to at most the window"
        )


def _architecture(content: Mapping[str, Any], path: Path) -> Architecture:
    kind = content.get("model_type")
    names = content.get("architectures")
    for arch in ARCHITECTURES:
        if kind == arch.model_type and names in (None, *([name] for name in (arch.name, *arch.other_names))):
            break
    else:
        if isinstance(kind, str) and kind in REFUSED:
            raise ValueError(f"{path}: model_type={kind!r} cannot be imported: {REFUSED[kind]}")
        shown = f"model_type={kind!r}, architectures={names!r}"
        can = " or ".join(f"{arch.model_type!r} ({arch.name})" for arch in ARCHITECTURES)
        raise ValueError(f"{path}: {shown} cannot be imported; it must be {can}")
    if content.get("quantization_config") is not None:
        raise ValueError(f"{path}: quantization_config: quantised weights cannot be imported")
    return arch


def _rotary(content: Mapping[str, Any], arch: Architecture, path: Path) -> Mapping[str, Any]:
    """Return the file's settings of rotary scaling, which newer files have under ``rope_parameters``.

    Raises `ValueError` for a kind of rotary embedding that Braid cannot compute.
    """
    key = "rope_scaling" if content.get("rope_scaling") else "rope_parameters"
    rotary = content.get(key) or {}
    if not isinstance(rotary, Mapping):
        raise ValueError(f"{path}: {key}={rotary!r} must hold keys and values")
    partial = rotary.get("partial_rotary_factor", content.get("partial_rotary_factor"))
    nested = any(isinstance(value, Mapping) for value in rotary.values())
    if _kind(rotary) not in arch.rotary or partial not in (None, 1.0) or nested:
        shown = f"{key}={dict(rotary)!r}" if partial in (None, 1.0) else f"partial_rotary_factor={partial!r}"
        raise ValueError(
            f"{path}: {shown} is not what Braid computes; only {', '.join(map(repr, arch.rotary))} of all "
            f"dimensions are"
        )
    return rotary


def _kind_of(scaling: RotaryScaling | None) -> str:
    """Return the name that `transformers` gives to the kind of rotary embedding with this scaling."""
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
    settings = {**rotary, **({outer: content[outer]} if outer in content else {})}
    if missing := [SCALING[field] for field in fields if SCALING[field] not in settings]:
        raise ValueError(f"{path}: {missing[0]} is missing, which rope_type {_kind(rotary)!r} needs")
    values = {"factor": 1.0, **{field: settings[SCALING[field]] for field in fields}}
    return from_mapping(RotaryScaling, values, str(path))


def _size(content: Mapping[str, Any], key: str, architecture: Architecture, path: Path) -> Any:
    for name in (key, OTHER_NAMES.get(key)):
        if name is not None and content.get(name) is not None:
            return content[name]
    if key not in architecture.defaults:
        raise ValueError(f"{path}: {key} is missing")
    default = architecture.defaults[key]
    try:
        return default(content) if callable(default) else default
    except (KeyError, TypeError, ZeroDivisionError):
        raise ValueError(f"{path}: {key} is missing, and what it follows from is wrong") from None
