"""The built-in layers as modules, and the protocol by which a user's own layer plugs in.

A layer definition has two parts that must fit each other: the operator graph, written forward (`graph`), and,
for every operator with a module, the module with the global names of its parameters (`modules`).
"""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from braid.actors.stage.model.context import ModuleContext
from braid.actors.stage.state.parameters import (
    INITIAL_DEVIATION,
    GlobalParameter,
    OperatorModule,
    ParameterSlice,
    cut,
    cut_by_row,
    whole,
)
from braid.kernels.operators.cross_entropy import CrossEntropyLoss
from braid.kernels.operators.dropout import Dropout
from braid.kernels.operators.embedding import PositionEmbedding, VocabularyEmbedding
from braid.kernels.operators.expert_rows import ExpertLoad, ExpertRows
from braid.kernels.operators.grouped_linear import GroupedLinear
from braid.kernels.operators.permute import Regroup
from braid.kernels.operators.router import Router
from braid.scheduling.model.builder import LayerBuilder
from braid.scheduling.model.layers import transformer_layer
from braid.scheduling.text.pattern import DENSE, UNIFORM


class LayerDefinition(Protocol):
    """A kind of layer; `docs/examples/parallel_layer.py` is an example of a user-defined kind."""

    def graph(self, g: LayerBuilder) -> str:
        """Write the operators, from ``g.input()`` on; return the name of the layer's output."""

    def modules(self, context: ModuleContext, index: int) -> dict[str, OperatorModule]:
        """Return the modules of layer ``index``, by name, for every operator that has a module."""


class TransformerLayer:
    """The pre-norm Llama or GPT layer, depending on ``model.family``."""

    def graph(self, g: LayerBuilder) -> str:
        return transformer_layer(g)

    def modules(self, context: ModuleContext, index: int) -> dict[str, OperatorModule]:
        shape, prefix = context.shape, f"layers.{index}"
        widths = {"q": shape.query_width, "k": shape.kv_width, "v": shape.kv_width}
        qkv = {f"{prefix}.qkv.{part}": width for part, width in widths.items()}
        experts = shape.experts and shape.kinds[index] != DENSE
        inside = self._experts(context, prefix) if experts else self._mlp(context, prefix, shape.ffn)
        heads = {"head_norm": context.head_norm(f"{prefix}.q_norm", f"{prefix}.k_norm")}
        return {
            "attention_norm": context.norm(f"{prefix}.attention_norm"),
            "qkv": context.columns(qkv, shape.hidden, bias=shape.biases_of_qkv),
            **(heads if shape.head_norm else {}),
            "attention": context.attention(),
            "projection": context.rows(f"{prefix}.projection", shape.query_width, shape.hidden, matrix="o"),
            "attention_residual": context.residual(f"{prefix}.projection" * shape.bias_of_projection),
            "mlp_norm": context.norm(f"{prefix}.mlp_norm"),
            **inside,
            "mlp_residual": context.residual(f"{prefix}.mlp_out" * shape.biases),
        }

    def _mlp(
        self, context: ModuleContext, prefix: str, width: int, part: str = ""
    ) -> dict[str, OperatorModule]:
        """Return the modules of an MLP; ``part``: prefix of the names of its operators and parameters."""
        shape = context.shape
        inner = ("gate", "up") if shape.gated else ("up",)
        mlp_in = {f"{prefix}.{part}mlp_in.{name}": width for name in inner}
        return {
            f"{part}mlp_in": context.columns(mlp_in, shape.hidden, bias=shape.biases),
            f"{part}activation": context.activation(),
            f"{part}mlp_out": context.rows(f"{prefix}.{part}mlp_out", width, shape.hidden, matrix="down"),
        }

    def _experts(self, context: ModuleContext, prefix: str) -> dict[str, OperatorModule]:
        shape, found = context.shape, expert_modules(context, prefix)
        if shape.shared_experts:
            width = shape.shared_experts * shape.expert_width
            found |= self._mlp(context, prefix, width, "shared_")
            found["expert_sum"] = context.residual()
        return found


def expert_modules(context: ModuleContext, name: str) -> dict[str, OperatorModule]:
    """Return the modules of a mixture of experts, by operator: experts are divided over ``ep``, the width of
    each expert over ``tp``. ``name``: prefix of the layer."""
    shape, sizes, operators = context.shape, context.sizes, context.operators
    capacity = shape.capacity(sizes.local_tokens) if shape.capacity_factor else None
    rows = ExpertRows(
        experts=shape.experts,
        tp=sizes.tensor,
        tp_rank=context.place.on(sizes.tensor_axis),
        ep=sizes.ep,
        ep_rank=context.place.on("ep"),
        capacity=capacity,
    )
    visits = sizes.micro_batch * shape.sequence * shape.top_k
    places = {"experts": shape.experts, "capacity": capacity}
    width, hidden = shape.expert_width, shape.hidden
    into = {f"{name}.experts.{part}.weight": (width, hidden) for part in ("gate", "up")}
    out_of = {f"{name}.experts.down.weight": (hidden, width)}
    return {
        "router": _router(context, f"{name}.router"),
        "router_load": OperatorModule(module=ExpertLoad(visits, context.dtype)),
        "router_rows": OperatorModule(module=rows),
        "permute": OperatorModule(module=operators.permute(**places)),
        "expert_order": OperatorModule(module=Regroup()),
        "expert_in": _grouped(context, into, {1: context.tensor}, INITIAL_DEVIATION),
        "activation": context.activation(),
        "expert_out": _grouped(context, out_of, {2: context.tensor}, context.smaller),
        "expert_return": OperatorModule(module=Regroup(back=True)),
        "unpermute": OperatorModule(module=operators.unpermute(**places)),
    }


def _router(context: ModuleContext, name: str) -> OperatorModule:
    shape = context.shape
    router = Router(
        hidden=shape.hidden,
        experts=shape.experts,
        top_k=shape.top_k,
        softmax_after=shape.softmax_after,
        normalised=shape.normalised,
        balance_loss=shape.balance_loss,
        z_loss=shape.z_loss,
        bias_balanced=shape.balance_rate > 0,
        mixer_jitter=shape.mixer_jitter,
        evenly=shape.route_evenly,
        **context.home,
    )
    size = (shape.experts, shape.hidden)
    weight = GlobalParameter(name=f"{name}.weight", shape=size, deviation=INITIAL_DEVIATION, hidden=False)
    slices = {"weight": whole(weight)}
    if shape.balance_rate:
        bias = GlobalParameter(name=f"{name}.bias", shape=(shape.experts,), sign_rate=shape.balance_rate)
        slices["bias"] = whole(bias)
    return OperatorModule(module=router, slices=slices)


def _grouped(
    context: ModuleContext,
    matrices: Mapping[str, tuple[int, int]],
    cuts: Mapping[int, tuple[str, ...]],
    deviation: float,
) -> OperatorModule:
    """Build the grouped matrices of this rank's experts: one global tensor, or several whose experts
    alternate.

    ``matrices``: (outputs, inputs) of one expert, by the global tensor's name; ``cuts``: mesh factors that
    cut a tensor's dim.
    """
    experts, place = context.shape.experts, context.place
    sources = [
        GlobalParameter(name=name, shape=(experts, *size), deviation=deviation)
        for name, size in matrices.items()
    ]
    slices = cut_by_row(sources, place, {0: place.mesh.factors_of("ep"), **cuts})
    held = experts // context.sizes.ep
    inputs = slices[0].sizes[2]
    outputs = sum(prod(piece.sizes) for piece in slices) // (held * inputs)
    module = GroupedLinear(experts=held, inputs=inputs, outputs=outputs, **context.home)
    return OperatorModule(module=module, slices={"weight": slices})


def load_layers(references: Mapping[str, str]) -> dict[str, LayerDefinition]:
    """Return the built-in layer and the user's own layers (`ModelConfig.own_layers`), by kind."""
    own = {
        kind: load_layer(reference, "model.layer" if kind == UNIFORM else f"model.layer.{kind}")
        for kind, reference in references.items()
    }
    return {**dict.fromkeys((UNIFORM, DENSE), TransformerLayer()), **own}


def load_layer(reference: str, key: str = "model.layer") -> LayerDefinition:
    """Load the class that ``reference`` names (``package.module:Class`` or ``path/to/file.py:Class``) and
    return an instance; ``key`` is the setting to name in errors.

    Its module is executed, with all rights of the user. Raise ValueError if it cannot be loaded.
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
    """Load a file as a module, under a name that no other module has."""
    name = f"braid_layer_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their annotations there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def embedding_modules(context: ModuleContext) -> dict[str, OperatorModule]:
    shape = context.shape
    size = (shape.vocabulary, shape.hidden)
    table = _table("embedding.weight", size)
    (piece,) = cut([table], context.place, {0: context.tensor})
    embedding = VocabularyEmbedding(hidden=shape.hidden, **_rows(context, piece), **context.home)
    modules = {"embedding": OperatorModule(module=embedding, slices={"weight": (piece,)})}
    if shape.family == "gpt":
        positions = PositionEmbedding(
            sequence=shape.sequence,
            own=context.order.own,
            hidden=shape.hidden,
            token_offset=context.place.on("tp") * context.sizes.local_tokens,
            **context.home,
        )
        size = (shape.sequence, shape.hidden)
        table = _table("positions.weight", size)
        modules["positions"] = OperatorModule(module=positions, slices={"weight": whole(table)})
    if shape.dropout:
        modules["embedding_dropout"] = OperatorModule(module=Dropout(shape.dropout))
    return modules


def _table(name: str, size: tuple[int, int]) -> GlobalParameter:
    return GlobalParameter(name=name, shape=size, deviation=INITIAL_DEVIATION, hidden=False)


def head_modules(context: ModuleContext) -> dict[str, OperatorModule]:
    """Return the modules of the head part: final norm, vocabulary-parallel logits, cross-entropy.

    If the head is tied, its matrix is the embedding's table.
    """
    shape = context.shape
    name = "embedding" if shape.tied_head else "head"
    head = context.columns({name: shape.vocabulary}, shape.hidden, bias=shape.head_bias, hidden=False)
    rows = _rows(context, head.slices["weight"][0])
    statistics = context.operators.cross_entropy_statistics(**rows, **shape.loss_terms)
    return {
        "final_norm": context.norm("final_norm"),
        "head": head,
        "loss_statistics": OperatorModule(module=statistics),
        "loss": OperatorModule(module=CrossEntropyLoss(groups=context.sizes.tensor)),
    }


def _rows(context: ModuleContext, piece: ParameterSlice) -> dict[str, Any]:
    """Return the range of vocabulary rows that this rank has of a table, as arguments of operators."""
    return {"rows": piece.sizes[0], "first_row": piece.offsets[0], "vocabulary": context.shape.vocabulary}
