"""The built-in layers as modules, and the protocol by which a user's own layer plugs in.

A layer definition gives two things that must fit each other: the operator graph, written forward (`graph`),
and, for every operator with a module, the module with the global names of its parameters (`modules`).
"""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch

from braid.actors.stage.expert_modules import expert_modules
from braid.actors.stage.parameters import (
    INITIAL_DEVIATION,
    GlobalParameter,
    OperatorModule,
    Place,
    cut,
    whole,
)
from braid.kernels.family import TORCH, OperatorFamily
from braid.kernels.operators.context_attention import context_attention
from braid.kernels.operators.context_blocks import Order, causal_order
from braid.kernels.operators.cross_entropy import CrossEntropyLoss
from braid.kernels.operators.embedding import PositionEmbedding, VocabularyEmbedding
from braid.kernels.operators.head_norm import HeadNorm
from braid.kernels.operators.linear import Linear
from braid.kernels.operators.residual import Residual
from braid.scheduling.layer_builder import LayerBuilder
from braid.scheduling.layers import transformer_layer
from braid.scheduling.pattern import DENSE, UNIFORM
from braid.scheduling.sizes import PartSizes
from braid.scheduling.spec import ModelShape


@dataclass(frozen=True, kw_only=True)
class ModuleContext:
    """What building a module needs to know: sizes, the place in the tensor group, device, dtype, kernels."""

    sizes: PartSizes
    place: Place
    device: torch.device
    dtype: torch.dtype
    operators: OperatorFamily = TORCH

    @property
    def shape(self) -> ModelShape:
        """The model's shape."""
        return self.sizes.shape

    @property
    def tensor(self) -> tuple[str, ...]:
        """The factors that matrices are cut over."""
        return self.place.mesh.factors_of(self.sizes.tensor_axis)

    # The builders below are what layer definitions are written with.

    def norm(self, name: str) -> OperatorModule:
        """RMSNorm or LayerNorm over the hidden size, replicated over ``tp``."""
        hidden = self.shape.hidden
        weight = whole(GlobalParameter(name=f"{name}.weight", shape=(hidden,), constant=1.0))
        centers = self.shape.norms_center
        kind = self.operators.layer_norm if centers else self.operators.rms_norm
        module = kind(hidden=hidden, eps=self.shape.norm_eps, device=self.device, dtype=self.dtype)
        if not centers:
            return OperatorModule(module=module, slices={"weight": weight})
        bias = whole(GlobalParameter(name=f"{name}.bias", shape=(hidden,)))
        return OperatorModule(module=module, slices={"weight": weight, "bias": bias})

    def head_norm(self, q_name: str, k_name: str) -> OperatorModule:
        """RMSNorm over every head of queries and keys, whose weights are replicated over ``tp``."""
        shape, tp = self.shape, self.sizes.tensor
        weights = {
            key: whole(GlobalParameter(name=f"{name}.weight", shape=(shape.head_dim,), constant=1.0))
            for key, name in (("q_weight", q_name), ("k_weight", k_name))
        }
        module = HeadNorm(
            heads=shape.heads // tp,
            kv_heads=shape.kv_heads // tp,
            head_dim=shape.head_dim,
            eps=shape.norm_eps,
            device=self.device,
            dtype=self.dtype,
        )
        return OperatorModule(module=module, slices=weights)

    def columns(self, names: dict[str, int], inputs: int, *, bias: bool = False) -> OperatorModule:
        """A weight whose outputs are split over ``tp``: ``names`` maps global names to output widths."""
        weights = [
            GlobalParameter(name=f"{name}.weight", shape=(width, inputs), deviation=INITIAL_DEVIATION)
            for name, width in names.items()
        ]
        slices = {"weight": cut(weights, self.place, {0: self.tensor})}
        if bias:
            biases = [GlobalParameter(name=f"{name}.bias", shape=(width,)) for name, width in names.items()]
            slices["bias"] = cut(biases, self.place, {0: self.tensor})
        outputs = sum(piece.sizes[0] for piece in slices["weight"])
        module = Linear(inputs=inputs, outputs=outputs, bias=bias, device=self.device, dtype=self.dtype)
        return OperatorModule(module=module, slices=slices)

    def rows(self, name: str, inputs: int, outputs: int) -> OperatorModule:
        """A weight whose inputs are split over ``tp``; it feeds the residual stream, so it begins smaller."""
        deviation = INITIAL_DEVIATION / (2 * self.shape.layers) ** 0.5
        weight = GlobalParameter(name=f"{name}.weight", shape=(outputs, inputs), deviation=deviation)
        slices = cut([weight], self.place, {1: self.tensor})
        module = Linear(
            inputs=slices[0].sizes[1], outputs=outputs, bias=False, device=self.device, dtype=self.dtype
        )
        return OperatorModule(module=module, slices={"weight": slices})

    def residual(self, bias_name: str = "") -> OperatorModule:
        """An addition; with the bias of the row-parallel weight before it, if that has one of a name."""
        hidden, bias = self.shape.hidden, bool(bias_name)
        module = Residual(hidden=hidden, bias=bias, device=self.device, dtype=self.dtype)
        if not bias:
            return OperatorModule(module=module)
        slices = whole(GlobalParameter(name=f"{bias_name}.bias", shape=(hidden,)))
        return OperatorModule(module=module, slices={"bias": slices})

    def attention(self) -> OperatorModule:
        """This rank's heads, and with context parallelism its tokens."""
        shape, sizes = self.shape, self.sizes
        settings: dict[str, Any] = {
            "heads": shape.heads // sizes.tensor,
            "kv_heads": shape.kv_heads // sizes.tensor,
            "head_dim": shape.head_dim,
            "sequence": shape.sequence,
            "rotary_base": None if shape.family == "gpt" else shape.rotary_base,
            "rotary_scaling": shape.rotary_scaling,
        }
        if sizes.cp == 1 and not shape.documents:
            return OperatorModule(module=self.operators.attention(**settings))
        parts = context_attention(**settings, order=self.order, ring=sizes.context == "ring")
        return OperatorModule(module=parts.pop(""), parts=parts)

    @property
    def order(self) -> Order:
        """Which tokens of a sample this rank has."""
        return causal_order(self.sizes.cp, self.place.on("cp"), self.shape.sequence)

    def activation(self) -> OperatorModule:
        """SwiGLU or GELU."""
        return OperatorModule(module=self.operators.swiglu() if self.shape.gated else self.operators.gelu())


class LayerDefinition(Protocol):
    """A kind of layer; see `docs/examples/parallel_layer.py` for one of a user's own."""

    def graph(self, g: LayerBuilder) -> str:
        """Write the operators, from ``g.input()`` on; returns the value that the layer hands on."""

    def modules(self, context: ModuleContext, index: int) -> dict[str, OperatorModule]:
        """For every operator that has a module, the module of layer ``index``, by the operator's name."""


class TransformerLayer:
    """The pre-norm Llama or GPT layer, as ``model.family`` says."""

    def graph(self, g: LayerBuilder) -> str:
        """That of `braid.scheduling.layers.transformer_layer`."""
        return transformer_layer(g)

    def modules(self, context: ModuleContext, index: int) -> dict[str, OperatorModule]:
        """Modules of the operators but for the collectives."""
        shape, prefix = context.shape, f"layers.{index}"
        qkv = {f"{prefix}.qkv.{part}": width for part, width in _qkv_widths(shape).items()}
        experts = shape.experts and shape.kinds[index] != DENSE
        inside = self._experts(context, prefix) if experts else self._mlp(context, prefix, shape.ffn)
        heads = {"head_norm": context.head_norm(f"{prefix}.q_norm", f"{prefix}.k_norm")}
        return {
            "attention_norm": context.norm(f"{prefix}.attention_norm"),
            "qkv": context.columns(qkv, shape.hidden, bias=shape.biases_of_qkv),
            **(heads if shape.head_norm else {}),
            "attention": context.attention(),
            "projection": context.rows(f"{prefix}.projection", shape.query_width, shape.hidden),
            "attention_residual": context.residual(f"{prefix}.projection" * shape.bias_of_projection),
            "mlp_norm": context.norm(f"{prefix}.mlp_norm"),
            **inside,
            "mlp_residual": context.residual(f"{prefix}.mlp_out" * shape.biases),
        }

    def _mlp(
        self, context: ModuleContext, prefix: str, width: int, part: str = ""
    ) -> dict[str, OperatorModule]:
        """``part``: what names of operators and parameters begin with."""
        shape = context.shape
        inner = ("gate", "up") if shape.gated else ("up",)
        mlp_in = {f"{prefix}.{part}mlp_in.{name}": width for name in inner}
        return {
            f"{part}mlp_in": context.columns(mlp_in, shape.hidden, bias=shape.biases),
            f"{part}activation": context.activation(),
            f"{part}mlp_out": context.rows(f"{prefix}.{part}mlp_out", width, shape.hidden),
        }

    def _experts(self, context: ModuleContext, prefix: str) -> dict[str, OperatorModule]:
        shape, found = context.shape, expert_modules(context, prefix)
        if shape.shared_experts:
            width = shape.shared_experts * shape.expert_width
            found |= self._mlp(context, prefix, width, "shared_")
            found["expert_sum"] = context.residual()
        return found


def _qkv_widths(shape: ModelShape) -> dict[str, int]:
    return {"q": shape.query_width, "k": shape.kv_width, "v": shape.kv_width}


def load_layers(references: Mapping[str, str]) -> dict[str, LayerDefinition]:
    """The built-in layer and the user's own (`ModelConfig.own_layers`), by kind."""
    own = {
        kind: load_layer(reference, "model.layer" if kind == UNIFORM else f"model.layer.{kind}")
        for kind, reference in references.items()
    }
    return {**dict.fromkeys((UNIFORM, DENSE), TransformerLayer()), **own}


def load_layer(reference: str, key: str = "model.layer") -> LayerDefinition:
    """The class that a key names: ``package.module:Class`` or ``path/to/file.py:Class``.

    Its module runs: it can do whatever the user can.
    """
    place, _, class_name = reference.rpartition(":")
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        definition: LayerDefinition = getattr(module, class_name)()
    except (ImportError, OSError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(
            f"{key}={reference!r} cannot be loaded ({error}); "
            f"write it as 'package.module:Class' or, from the configuration's folder, 'path/to/file.py:Class'"
        ) from error
    return definition


def _from_file(path: Path) -> ModuleType:
    """The module that a file holds, under a name that no other module has."""
    name = f"braid_layer_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up there what their annotations mean
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def embedding_weight(shape: ModelShape) -> GlobalParameter:
    """The table of token embeddings."""
    size = (shape.vocabulary, shape.hidden)
    return GlobalParameter(name="embedding.weight", shape=size, deviation=INITIAL_DEVIATION)


def head_weight(shape: ModelShape) -> GlobalParameter:
    """The output matrix: the embedding's own table where the head is tied."""
    if shape.tied_head:
        return embedding_weight(shape)
    size = (shape.vocabulary, shape.hidden)
    return GlobalParameter(name="head.weight", shape=size, deviation=INITIAL_DEVIATION)


def embedding_modules(context: ModuleContext) -> dict[str, OperatorModule]:
    """Modules of the embedding part."""
    shape, sizes = context.shape, context.sizes
    (piece,) = cut([embedding_weight(shape)], context.place, {0: context.tensor})
    module = VocabularyEmbedding(
        rows=piece.sizes[0],
        hidden=shape.hidden,
        first_row=piece.offsets[0],
        vocabulary=shape.vocabulary,
        device=context.device,
        dtype=context.dtype,
    )
    modules = {"embedding": OperatorModule(module=module, slices={"weight": (piece,)})}
    if shape.family == "gpt":
        positions = PositionEmbedding(
            sequence=shape.sequence,
            own=context.order.own,
            hidden=shape.hidden,
            token_offset=context.place.on("tp") * sizes.local_tokens,
            device=context.device,
            dtype=context.dtype,
        )
        table = GlobalParameter(
            name="positions.weight", shape=(shape.sequence, shape.hidden), deviation=INITIAL_DEVIATION
        )
        modules["positions"] = OperatorModule(module=positions, slices={"weight": whole(table)})
    return modules


def head_modules(context: ModuleContext) -> dict[str, OperatorModule]:
    """Modules of the head part: final norm, vocabulary-parallel logits, cross-entropy."""
    shape = context.shape
    of_head = {"weight": cut([head_weight(shape)], context.place, {0: context.tensor})}
    (piece,) = of_head["weight"]
    rows, offset = piece.sizes[0], piece.offsets[0]
    linear = Linear(
        inputs=shape.hidden, outputs=rows, bias=shape.head_bias, device=context.device, dtype=context.dtype
    )
    if shape.head_bias:
        bias = GlobalParameter(name="head.bias", shape=(shape.vocabulary,))
        of_head["bias"] = cut([bias], context.place, {0: context.tensor})
    return {
        "final_norm": context.norm("final_norm"),
        "head": OperatorModule(module=linear, slices=of_head),
        "loss_statistics": OperatorModule(
            module=context.operators.cross_entropy_statistics(
                rows=rows, first_row=offset, vocabulary=shape.vocabulary
            )
        ),
        "loss": OperatorModule(module=CrossEntropyLoss(groups=context.sizes.tensor)),
    }
