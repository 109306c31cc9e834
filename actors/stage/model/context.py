"""Tools for definitions of layers: sizes of a part on this rank, and builders of its modules."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from braid.actors.stage.state.parameters import (
    INITIAL_DEVIATION,
    GlobalParameter,
    OperatorModule,
    ParameterSlice,
    Place,
    adapter_of,
    cut,
    whole,
)
from braid.kernels.family import TORCH, OperatorFamily
from braid.kernels.operators.adapter import AdaptedLinear
from braid.kernels.operators.context_attention import context_attention
from braid.kernels.operators.context_blocks import TokenOrder, causal_order
from braid.kernels.operators.linear import Linear, Residual
from braid.kernels.operators.norm import HeadNorm
from braid.kernels.operators.operator import ComputeOperator, Home
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.model.sizes import PartSizes


@dataclass(frozen=True, kw_only=True)
class ModuleContext:
    """What building a module depends on: sizes, place in the mesh, device, dtype, kernels."""

    sizes: PartSizes
    place: Place
    device: torch.device
    dtype: torch.dtype
    operators: OperatorFamily = TORCH

    @property
    def shape(self) -> ModelShape:
        return self.sizes.shape

    @property
    def tensor(self) -> tuple[str, ...]:
        """The mesh factors along which matrices are cut."""
        return self.place.mesh.factors_of(self.sizes.tensor_axis)

    @property
    def home(self) -> Home:
        return {"device": self.device, "dtype": self.dtype}

    # Definitions of layers use the builders below.

    def norm(self, name: str) -> OperatorModule:
        """Build an RMSNorm or LayerNorm over the hidden size, replicated over ``tp``."""
        size = (self.shape.hidden,)
        slices = {"weight": whole(GlobalParameter(name=f"{name}.weight", shape=size, constant=1.0))}
        kind: Callable[..., ComputeOperator] = self.operators.rms_norm
        if self.shape.norms_center:
            kind = self.operators.layer_norm
            slices["bias"] = whole(GlobalParameter(name=f"{name}.bias", shape=size))
        module = kind(hidden=self.shape.hidden, eps=self.shape.norm_eps, **self.home)
        return OperatorModule(module=module, slices=slices)

    def head_norm(self, q_name: str, k_name: str) -> OperatorModule:
        """Build an RMSNorm over every head of queries and keys, with weights replicated over ``tp``."""
        sizes = {**self._heads, "eps": self.shape.norm_eps}
        weights = {
            key: whole(GlobalParameter(name=f"{name}.weight", shape=(self.shape.head_dim,), constant=1.0))
            for key, name in (("q_weight", q_name), ("k_weight", k_name))
        }
        return OperatorModule(module=HeadNorm(**sizes, **self.home), slices=weights)

    def columns(
        self, names: dict[str, int], inputs: int, *, bias: bool = False, hidden: bool = True
    ) -> OperatorModule:
        """Build a linear map whose outputs are cut over ``tp``; ``names`` maps global names to output
        widths. ``hidden``: whether outputs are hidden values (`GlobalParameter.hidden`)."""
        weights = [
            GlobalParameter(
                name=f"{name}.weight", shape=(width, inputs), deviation=INITIAL_DEVIATION, hidden=hidden
            )
            for name, width in names.items()
        ]
        slices = {"weight": cut(weights, self.place, {0: self.tensor})}
        if bias:
            biases = [GlobalParameter(name=f"{name}.bias", shape=(width,)) for name, width in names.items()]
            slices["bias"] = cut(biases, self.place, {0: self.tensor})
        return self._linear(slices, [name.rpartition(".")[2] for name in names], columns=True)

    def rows(self, name: str, inputs: int, outputs: int, *, matrix: str = "") -> OperatorModule:
        """Build a linear map whose inputs are cut over ``tp``. It feeds the residual stream, so initial
        weights are smaller. ``matrix``: one of `lora.TARGETS` if the map can have adapters."""
        weight = GlobalParameter(name=f"{name}.weight", shape=(outputs, inputs), deviation=self.smaller)
        slices = {"weight": cut([weight], self.place, {1: self.tensor})}
        return self._linear(slices, [matrix], columns=False)

    def _linear(
        self, slices: dict[str, tuple[ParameterSlice, ...]], matrices: Sequence[str], *, columns: bool
    ) -> OperatorModule:
        """Build a linear map, with adapters if the model has them for its matrices.

        ``matrices``: their `lora.TARGETS`, in the order of the weight's slices; ``columns``: whether outputs
        are cut over ``tp``, not inputs.
        """
        pieces, lora = slices["weight"], self.shape.lora
        ends = [*accumulate((piece.sizes[0] for piece in pieces), initial=0)]
        inputs, outputs, bias = pieces[0].sizes[1], ends[-1], "bias" in slices
        adapted = [
            (piece.source, range(*rows))
            for matrix, piece, rows in zip(matrices, pieces, pairwise(ends), strict=True)
            if lora is not None and lora.adapts(matrix)
        ]
        if lora is None or not adapted:
            module = Linear(inputs=inputs, outputs=outputs, bias=bias, **self.home)
            return OperatorModule(module=module, slices=slices)
        module = AdaptedLinear(
            inputs=inputs,
            outputs=outputs,
            bias=bias,
            adapted=[rows for _, rows in adapted],
            rank=lora.rank,
            scale=lora.scale,
            **self.home,
        )
        first, second = zip(*(adapter_of(source, lora.rank) for source, _ in adapted), strict=True)
        factors = {
            "a": cut(first, self.place, {} if columns else {1: self.tensor}),
            "b": cut(second, self.place, {0: self.tensor} if columns else {}),
        }
        return OperatorModule(module=module, slices={**slices, **factors})

    @property
    def smaller(self) -> float:
        """Standard deviation of initial weights that feed the residual stream."""
        return INITIAL_DEVIATION / (2 * self.shape.layers) ** 0.5

    def residual(self, bias_name: str = "") -> OperatorModule:
        """Build a residual addition; it adds the bias ``bias_name`` of the row-parallel weight before it."""
        hidden, bias = self.shape.hidden, bool(bias_name)
        slices = {"bias": whole(GlobalParameter(name=f"{bias_name}.bias", shape=(hidden,)))} if bias else {}
        module = Residual(hidden=hidden, bias=bias, dropout=self.shape.dropout, **self.home)
        return OperatorModule(module=module, slices=slices)

    def attention(self) -> OperatorModule:
        """Build attention for this rank's heads, and with context parallelism for this rank's tokens."""
        shape, sizes = self.shape, self.sizes
        settings = {
            **self._heads,
            "sequence": shape.sequence,
            "rotary_base": None if shape.family == "gpt" else shape.rotary_base,
            "rotary_scaling": shape.rotary_scaling,
        }
        if sizes.cp == 1 and not shape.documents:
            return OperatorModule(module=self.operators.attention(**settings))
        parts = context_attention(**settings, order=self.order, ring=sizes.context == "ring")
        return OperatorModule(module=parts.pop(""), parts=parts)

    @property
    def _heads(self) -> dict[str, Any]:
        """Numbers of this rank's query and key heads, and the heads' dimension."""
        shape, tp = self.shape, self.sizes.tensor
        return {"heads": shape.heads // tp, "kv_heads": shape.kv_heads // tp, "head_dim": shape.head_dim}

    @property
    def order(self) -> TokenOrder:
        """Token order: the tokens of a sample that this rank has, and the keys that they attend to."""
        return causal_order(self.sizes.cp, self.place.on("cp"), self.shape.sequence)

    def activation(self) -> OperatorModule:
        """Build SwiGLU or GELU."""
        return OperatorModule(module=self.operators.swiglu() if self.shape.gated else self.operators.gelu())
