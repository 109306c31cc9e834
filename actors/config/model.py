"""The model's section of the configuration: sizes, a preset, or imported weights."""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from braid.scheduling.model.lora import Lora
from braid.scheduling.model.rotary import RotaryScaling
from braid.scheduling.model.shape import FAMILIES, ModelShape
from braid.scheduling.schedule.gone import replacement
from braid.scheduling.text.pattern import UNIFORM, built_in_kinds
from braid.scheduling.text.records import from_mapping
from braid.scheduling.text.suggestions import must_be_one_of

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]
AtLeast0 = Annotated[float, Field(ge=0)]
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""Of names of runs and data sets, which become names of folders."""


class ConfigError(ValueError):
    """A configuration that cannot run; the message names key, value and remedy."""


@contextlib.contextmanager
def as_config_error(where: str = "") -> Iterator[None]:
    """Convert a `ValueError` of the block, or of the decorated function, to `ConfigError`, prefixed by
    ``where``."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{where}{error}") from None


def one_of(options: Iterable[str], gone: Iterable[str] = ()) -> AfterValidator:
    """Annotate a string that must be one of ``options``, which `wording.in_words` reads.

    ``gone``: names of schedules that earlier versions had.
    """
    return AfterValidator(partial(_check_choice, tuple(options), tuple(gone)))


def _check_choice(options: tuple[str, ...], gone: tuple[str, ...], value: str) -> str:
    if value not in options:
        raise ValueError(replacement(value) if value in gone else must_be_one_of(value, options))
    return value


def shown(value: Any) -> str:
    """Format a value as in YAML, where that differs from Python."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    return json.dumps(value) if isinstance(value, bool) or value is None else repr(value)


def clash(holder: BaseModel, key: str, other: str, remedy: str) -> ValueError:
    """Return the error that the values of two keys of a section exclude each other."""
    values = [(name, attrgetter(name)(holder)) for name in (key, other)]
    plain = (bool, int, float, str, tuple)
    told = [f"{name}={shown(value)}" if isinstance(value, plain) else name for name, value in values]
    return ValueError(f"{' does not go with '.join(told)}; {remedy}")


class Section(BaseModel):
    """A part of the configuration: frozen, and without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _empty_sections_have_defaults(cls, content: Any) -> Any:
        """Read a section that holds nothing, or null, as if it were left out."""
        if not isinstance(content, Mapping):
            return {} if content is None else content
        sections = {name for name, info in cls.model_fields.items() if isinstance(info.default, Section)}
        return {key: value for key, value in content.items() if value is not None or key not in sections}

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_no_truth_values(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse ``lr: true`` and ``page: 1``, which pydantic would convert."""
        types = _scalar_types(cls.model_fields[info.field_name or ""].annotation)
        entries = value if isinstance(value, list | tuple) else [value]
        if types & {int, float} and bool not in types and any(isinstance(entry, bool) for entry in entries):
            raise PydanticCustomError("number_type", "must be a number")
        if bool in types and not types & {int, float} and type(value) in (int, float):
            raise PydanticCustomError("truth_value_type", "must be true or false")
        return value


def _scalar_types(annotation: Any) -> set[Any]:
    """Return the types inside unions, tuples and `Annotated`."""
    return {kind for inner in get_args(annotation) for kind in _scalar_types(inner)} or {annotation}


def _layers(value: Any) -> Any:
    texts = (*value, *value.values()) if isinstance(value, dict) and value else (value,)
    if value is not None and not all(isinstance(text, str) for text in texts):
        raise ValueError("must be text, 'package.module:Class' or 'file.py:Class', or such texts by name")
    return value


def _record(kind: type[Any]) -> BeforeValidator:
    """Annotate a mapping that is read as a dataclass of type ``kind``."""

    def read(value: Any) -> Any:
        if value is None or isinstance(value, kind):
            return value
        try:
            return from_mapping(kind, value, "it")
        except ValueError as error:
            raise ValueError(re.sub(r"^it(: |\.| )", "", str(error))) from None

    return BeforeValidator(read)


class ModelConfig(Section):
    """The model: a preset (`braid presets`), sizes, or a preset with some of them changed.

    Sizes that are left out follow from ``hidden``.
    """

    preset: str | None = None  # sizes of a known model (`braid presets`); keys that are given change it
    # RMSNorm, SwiGLU, rotary; LayerNorm, GELU, biases, positions; or experts
    family: Annotated[str, one_of(FAMILIES)] = "llama"
    hidden: Positive = 256  # width of the residual stream
    layers: Positive = 4  # transformer layers
    heads: Positive = 8  # attention heads
    kv_heads: Positive | None = None  # default: heads (no grouping)
    head_dim: Positive | None = None  # default: hidden / heads
    ffn: Positive | None = None  # default: 4 x hidden (gpt), 8/3 x hidden rounded up to 64 (llama)
    vocabulary: Positive | None = None  # default: the tokenizer's, rounded up to 64
    sequence: Positive = 256  # tokens of a sample
    tied_head: bool = False  # the output matrix is the table of token embeddings
    norm_eps: Above0 = 1e-5  # added to the variance in norms
    rotary_base: Above0 = 10000.0  # base of the wavelengths of rotary positions
    # what becomes of those waves, for more tokens than a model was first trained on: as in Llama 3.1, or,
    # without original_sequence, all of them factor times as long; factors: as in Phi-3.5-MoE, each its own
    rotary_scaling: Annotated[RotaryScaling | None, _record(RotaryScaling)] = None
    qkv_bias: bool = False  # biases on queries, keys and values (Qwen2.5), in families without other biases
    projection_bias: bool = False  # a bias on what attention hands on (Phi-3.5-MoE), in such families
    head_bias: bool = False  # a bias on the logits (Phi-3.5-MoE)
    head_norm: bool = False  # RMSNorm over every head of queries and keys, before they are turned (Qwen3)
    layer_norm: bool = False  # LayerNorms with biases, in place of RMSNorms (Phi-3.5-MoE)
    experts: Count = 0  # family moe: MLPs of which every token visits some
    top_k: Count = 0  # experts that every token visits
    # tokens that an expert takes of each rank, over the average: more are dropped; 0: all that come
    capacity_factor: AtLeast0 = 0.0
    expert_ffn: Count = 0  # width of an expert; 0: ffn
    shared_experts: Count = 0  # that every token visits, beside top_k of the others
    softmax_after: bool = False  # gates: softmax over the chosen experts' scores, not over all experts'
    normalised: bool = True  # gates of a token are divided by their sum
    # gates: each a softmax over the experts that score at most twice this part below the best one left
    # (SparseMixer, Phi-3.5-MoE: 0.01)
    mixer_jitter: AtLeast0 = 0.0
    balance_loss: AtLeast0 = 0.0  # factor of the loss that balances experts
    # step of a bias on every expert's score that balances experts instead of a loss (Wang et al. 2024): 0.001
    balance_rate: AtLeast0 = 0.0
    z_loss: AtLeast0 = 0.0  # factor of the loss that keeps the router's logits small
    # a layer of your own: "package.module:Class" or "file.py:Class"; or several by name, for the pattern
    layer: Annotated[str | dict[str, str] | None, BeforeValidator(_layers)] = None
    # which layers follow each other, such as "2*layer wide", repeated until there are model.layers of them:
    # "layer" is the family's own, "dense" (family moe) one without experts, others are names in model.layer
    pattern: str = UNIFORM
    # a Hugging Face directory with initial weights, or its name on the Hub (org/name): config.json and
    # model.safetensors (Llama, Mistral, Qwen2.5, Qwen3, GPT-2, Mixtral, Qwen3-MoE, Phi-3.5-MoE)
    initial: Path | None = None
    # low-rank adapters, which alone are trained: {rank: 8, alpha: 16, targets: [q, k, v, o, gate, up, down]};
    # without targets all of these matrices that the model has
    lora: Annotated[Lora | None, _record(Lora)] = None

    @property
    def own_layers(self) -> dict[str, str]:
        """The user's layers by kind; a layer without a name replaces the family's own."""
        return {UNIFORM: self.layer} if isinstance(self.layer, str) else self.layer or {}

    @as_config_error()
    def shape(self, vocabulary: int) -> ModelShape:
        """Return the sizes with all defaults filled in; ``vocabulary`` is the tokenizer's."""
        known = self.preset is not None or self.initial is not None
        if self.lora is not None and self.own_layers:
            raise ConfigError(f"model.lora does not go with model.layer={self.layer!r}; leave one out")
        shape = self._known_shape(vocabulary) if known else self._given_shape(vocabulary)
        shape = replace(shape, lora=self.lora)
        kinds = list(dict.fromkeys((*built_in_kinds(shape.family), *self.own_layers)))
        for kind in shape.kinds:
            if kind not in kinds:
                raise ConfigError(
                    f"model.pattern={self.pattern!r} has a layer {kind!r}, which is not known; "
                    f"write its class under model.layer.{kind}, or use {' or '.join(kinds)}"
                )
        for kind, layer in self.own_layers.items():
            if kind not in shape.kinds:
                raise ConfigError(
                    f"model.layer.{kind}={layer!r} is not used: model.pattern={self.pattern!r} has no "
                    f"layer of that name; add it there, or leave it out"
                )
        return shape

    def _given_shape(self, vocabulary: int) -> ModelShape:
        if self.head_dim is None and self.hidden % self.heads:
            raise ConfigError(
                f"model.hidden={self.hidden} is not divisible by model.heads={self.heads}; "
                f"change one of them or set model.head_dim"
            )
        if self.vocabulary is not None and self.vocabulary < vocabulary:
            raise ConfigError(
                f"model.vocabulary={self.vocabulary} is smaller than the tokenizer's {vocabulary} tokens"
            )
        defaults = {
            "ffn": 4 * self.hidden if self.family == "gpt" else _rounded_up(self.hidden * 8 // 3),
            "kv_heads": self.heads,
            "head_dim": self.hidden // self.heads,
            "vocabulary": _rounded_up(vocabulary),
        }
        keys = [field.name for field in fields(ModelShape) if field.name in ModelConfig.model_fields]
        given = {key: getattr(self, key) for key in keys if getattr(self, key) is not None}
        return ModelShape(**{**defaults, **given})

    def _known_shape(self, vocabulary: int) -> ModelShape:
        """Return the preset's sizes, changed by keys that the configuration sets; or the sizes of
        ``initial``, with which these keys must agree."""
        from braid.scheduling.model.presets.library import known_shape

        apart = {"preset", "layer", "initial", "lora"}
        given = {key: getattr(self, key) for key in self.model_fields_set - apart}
        shape = known_shape(self.preset, self.initial, given)
        if self.initial is not None and self.layer is not None:
            raise ConfigError(f"model.initial does not go with model.layer={self.layer!r}; leave one out")
        if shape.vocabulary < vocabulary:
            initial = self.initial is not None
            key, remedy = ("initial", "use its tokenizer") if initial else ("preset", "set model.vocabulary")
            raise ConfigError(
                f"model.{key}={str(getattr(self, key))!r} has a vocabulary of {shape.vocabulary}, too small "
                f"for the tokenizer's {vocabulary} tokens; {remedy}"
            )
        return shape


def _rounded_up(count: int) -> int:
    """Round up to a multiple of 64."""
    return -(-count // 64) * 64
