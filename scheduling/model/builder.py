"""`LayerBuilder`, whose methods write the operators of layers: one method for each kind of operator.

A value is a number of tokens on this rank x a width, which may be cut over tensor-parallel ranks. An
operator's FLOPs, the values it keeps for its backward pass and the bytes a collective sends follow from these
sizes; nothing is priced by hand. A method defines a kind completely: the size of its result, FLOPs,
parameters, saved values and the inputs of its backward pass. This file has the operators of a single rank and
the model's ends; `parallel.py` has those of several ranks.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from braid.scheduling.model.graph import Dims, gradient_of
from braid.scheduling.model.operators import Kind, Phase, Precision
from braid.scheduling.model.parallel import ParallelBuilder

NOTHING: Final[Mapping[str, int]] = MappingProxyType({})


class LayerBuilder(ParallelBuilder):
    """Writes the forward graph of a part of the model; every method returns the name of its result.

    Collectives over an axis of degree one are left out: their methods return the input's name. Methods raise
    `ValueError` if the graph cannot be differentiated, or if widths do not fit.
    """

    # -- operators -----------------------------------------------------------------------------------------

    def norm(self, name: str, x: str) -> str:
        """Write RMSNorm, which saves one statistic per token, or LayerNorm, which saves two.

        Its backward operator also adds the gradient that reaches ``x`` past the norm (residual).
        """
        dims = self.dims(x)
        y = self._value(f"{name}.out", dims)
        numbers = Dims(dims.tokens, 2 if self.shape.norms_center else 1)
        statistics = self._value(f"{name}.statistics", numbers, Precision.STATISTIC)
        op = self._emit(name, Kind.NORM, (x,), (y, statistics))
        for _ in ("weight", "bias") if self.shape.norms_center else ("weight",):
            self._holds(name, dims.width, "whole")
        self._gradient_with_skip(self._gradient_of_all(op, (f"d.{y}", x, statistics)), x)
        return y

    def head_norm(self, name: str, qkv: str) -> str:
        """Write RMSNorm over each head of queries and of keys in ``qkv``; values pass unchanged.

        The operator saves one statistic per head. Every rank holds both weights whole and norms its own
        heads.
        """
        shape, dims = self.shape, self.dims(qkv)
        y = self._value(f"{name}.out", dims)
        numbers = Dims(dims.tokens, shape.heads + shape.kv_heads, dims.cut)
        statistics = self._value(f"{name}.statistics", numbers, Precision.STATISTIC)
        op = self._emit(name, Kind.NORM, (qkv,), (y, statistics))
        for _ in ("q", "k"):
            self._holds(name, shape.head_dim, "whole")
        self._one_gradient(self._gradient_of_all(op, (f"d.{y}", qkv, statistics)), (qkv,))
        return y

    def columns(
        self,
        name: str,
        x: str,
        width: int,
        *,
        bias: bool = False,
        experts: str | None = None,
        matrices: Mapping[str, int] = NOTHING,
        hidden: bool = True,
    ) -> str:
        """Write a column-parallel linear layer: its ``width`` outputs are cut over ``tp``, inputs are whole.

        ``bias``: whether it has a bias, which is also cut. ``experts``: name of the value with the number of
        rows of every expert (`Routed.sizes`); each expert then has a matrix of its own (grouped GEMM).
        ``matrices``: outputs of the matrices of which the layer consists, by `lora.TARGETS`, if these can
        have adapters.
        ``hidden``: whether both sides are hidden values, so that Muon may update the matrix.
        """
        if self.dims(x).cut > 1:
            raise ValueError(f"{name}: {x} is cut over tp; use rows, or gather it first")
        kind = Kind.GEMM if experts is None else Kind.GROUPED_GEMM
        result = Dims(self.dims(x).tokens, width, self.sizes.tensor)
        y = self._matrix(name, x, result, kind, experts, matrices, hidden=hidden)
        self._holds(name, width // self.sizes.tensor if bias else 0)
        return y

    def rows(self, name: str, x: str, width: int, *, experts: str | None = None, matrix: str = "") -> str:
        """Write a row-parallel linear layer: its inputs are cut over ``tp``, and each rank computes partial
        sums, which `scatter` adds.

        ``experts``: name of the value with the number of rows of every expert, as in `columns`; ``matrix``:
        one of `lora.TARGETS` if the layer can have adapters.
        """
        if self.dims(x).cut != self.sizes.tensor:
            raise ValueError(f"{name}: {x} is not cut over tp; use columns")
        kind = Kind.GEMM if experts is None else Kind.GROUPED_GEMM
        return self._matrix(name, x, Dims(self.dims(x).tokens, width), kind, experts, {matrix: width})

    def _matrix(
        self,
        name: str,
        x: str,
        result: Dims,
        kind: Kind,
        sizes: str | None,
        matrices: Mapping[str, int],
        *,
        hidden: bool = True,
    ) -> str:
        y = self._value(f"{name}.out", result)
        weights = self.dims(x).width * result.width
        adapters = self._adapters(name, self.dims(x), result, matrices)
        flops = 2 * result.tokens * (weights // self.sizes.tensor + adapters)
        row_counts = () if sizes is None else (sizes,)
        op = self._emit(name, kind, (x, *row_counts), (y,), flops=flops)
        if kind is Kind.GROUPED_GEMM:
            expert_elements = self.shape.experts * weights // (self.sizes.tensor * self.sizes.ep)
            self._holds(name, expert_elements, "experts" if self.sizes.ep > 1 else "cut", matrix=hidden)
        else:
            self._holds(name, weights // self.sizes.tensor, matrix=hidden)
        # An adapter's weight gradients recompute its inner product forward and backward: twice its FLOPs.
        weight_flops = 4 * result.tokens * adapters if adapters else None
        self._both_gradients(op, (f"d.{y}",), (x,), (x,), row_counts, weight_flops)
        return y

    def _adapters(self, name: str, x: Dims, result: Dims, matrices: Mapping[str, int]) -> int:
        """Add the adapters of a linear layer's ``matrices`` (name -> outputs) to its module; return their
        number of parameters on this rank.

        The factor beside the whole inputs or outputs is whole, the other is cut like the matrix.
        """
        lora = self.shape.lora
        outputs = [] if lora is None else [count for at, count in matrices.items() if lora.adapts(at)]
        if lora is None or not outputs:
            return 0
        inner, outer = x.width * lora.rank * len(outputs), sum(outputs) * lora.rank
        whole, cut = (inner, outer) if result.cut > 1 or x.cut == 1 else (outer, inner)
        cut //= self.sizes.tensor
        self._holds(name, cut, adapter=True)
        self._holds(name, whole, "whole", adapter=True)
        return cut + whole

    def activation(self, name: str, x: str) -> str:
        """Write the MLP's activation: SwiGLU, which halves the width, or GELU, according to the family."""
        dims = self.dims(x)
        width = dims.width // 2 if self.shape.gated else dims.width
        y = self._value(f"{name}.out", replace(dims, width=width))
        op = self._emit(name, Kind.ACTIVATION, (x,), (y,))
        self._one_gradient(gradient_of(op, (f"d.{y}", x)), (x,))
        return y

    def residual(self, name: str, branch: str, skip: str, *, bias: bool = False) -> str:
        """Write the sum of ``branch`` (plus a bias, with ``bias``) and ``skip``, the residual stream or
        another branch.

        If ``skip`` is the residual stream (the layer's input, or such a sum), the result is, too, and the
        branch is subject to dropout.
        """
        y = self._value(f"{name}.out", self.dims(skip))
        numbers: tuple[str, ...] = ()
        if skip in self._stream:
            self._stream.add(y)
            numbers = self._token_numbers()
        op = self._emit(name, Kind.RESIDUAL, (branch, skip, *numbers), (y,))
        self._holds(name, self.dims(skip).width if bias else 0, "whole")
        gradient = self._gradient_of_all(op, (f"d.{y}", *numbers))
        self._one_gradient(gradient, (branch, skip), alias=f"d.{y}", apart=(branch,) if numbers else ())
        return y

    def dropout(self, name: str, x: str) -> str:
        """Write dropout of ``x``, this rank's tokens of full width; without dropout return ``x``."""
        numbers = self._token_numbers()
        if not numbers:
            return x
        y = self._value(f"{name}.out", self.dims(x))
        op = self._emit(name, Kind.ACTIVATION, (x, *numbers), (y,))
        self._one_gradient(gradient_of(op, (f"d.{y}", *numbers)), (x,))
        return y

    def custom(
        self,
        name: str,
        *reads: str,
        like: str | None = None,
        flops: int = 0,
        saved_elements: int | None = None,
        parameters: int = 0,
        per_token: bool = False,
    ) -> str:
        """Write a user's module (`AutogradOperator`), with one output and one opaque saved value.

        ``per_token``: whether each token's output depends on that token alone. If not, ranks may not split a
        sample's tokens: with ``parallel.cp`` above 1 `ValueError` is raised.

        By default the output has the size of the first input (``like``: of that value), the module saves its
        inputs, it has no ``parameters`` (counted on one rank), and its time is that of its memory accesses.
        """
        if self.sizes.cp > 1 and not per_token:
            raise ValueError(
                f"parallel.cp={self.sizes.cp} leaves layer {self.name!r} with some of a sample's tokens, and "
                f"its operator {name!r} may need all; set parallel.cp to 1, or if it looks at one token at a "
                f"time, say so: custom({name!r}, ..., per_token=True)"
            )
        if self.sizes.own:
            raise ValueError(
                f"parallel.tensor_degrees: layer {self.name!r} has an operator of its own, {name!r}, and "
                f"cannot have another degree than parallel.tp={self.sizes.tp}"
            )
        y = self._value(f"{name}.out", self.dims(like or reads[0]))
        saved_count = sum(self.dims(x).elements for x in reads) if saved_elements is None else saved_elements
        saved = self._value(f"{name}.saved", Dims(1, saved_count))
        op = self._emit(name, Kind.CUSTOM, reads, (y, saved), flops=flops)
        self._holds(name, parameters, matrix=True)
        receivers = tuple(x for x in reads if x not in self._constants)
        # one operator, with the FLOPs of both gradients
        gradient = gradient_of(op, (f"d.{y}", saved), "dgrad", Phase.GRADIENT, flops=2 * flops)
        self._one_gradient(gradient, receivers)
        return y

    # -- the model's ends ----------------------------------------------------------------------------------

    def embedding(self, name: str, tokens: str) -> str:
        """Add an operator that looks up ``tokens`` (name of a value) in this rank's rows of the embedding
        table, and return the name of its result, which `scatter` sums over ``tp``."""
        y = self._value(f"{name}.out", Dims(self.dims(tokens).tokens, self.shape.hidden))
        op = self._emit(name, Kind.EMBEDDING, (tokens,), (y,))
        rows = self.sizes.vocabulary_rows
        self._holds(name, rows * self.shape.hidden, "tied" if self.shape.tied_head else "cut")
        if not self.frozen:
            self._one_gradient(gradient_of(op, (f"d.{y}", tokens), "wgrad", Phase.WEIGHT_GRADIENT), ())
        return y

    def positions(self, name: str, x: str) -> str:
        """Write the addition of learned position embeddings to ``x``."""
        documents = (self._documents(),) if self.shape.documents else ()
        y = self._value(f"{name}.out", self.dims(x))
        op = self._emit(name, Kind.EMBEDDING, (x, *documents), (y,))
        self._holds(name, self.shape.sequence * self.shape.hidden, "whole")
        self._one_gradient(self._gradient_of_all(op, (f"d.{y}", *documents)), (x,), alias=f"d.{y}")
        return y

    def cross_entropy(self, name: str, logits: str, targets: str, scale: str) -> str:
        """Write the cross-entropy of every token with logits cut over ``tp``; ranks gather its statistics.

        ``scale``: name of the input with the loss's scale. The backward operator overwrites the logits, which
        no later operator reads, with their gradient.
        """
        tokens, tp, module = self.dims(logits).tokens, self.sizes.tensor, f"{name}_statistics"
        statistics = self._value(f"{module}.out", Dims(tokens, 3), Precision.STATISTIC)
        partition = self._value(f"{name}.partition", Dims(tokens, 1), Precision.STATISTIC)
        loss = self._value(name, Dims(tokens, 1), Precision.STATISTIC)
        op = self._emit(module, Kind.CROSS_ENTROPY, (logits, targets), (statistics,))
        if tp > 1:
            gathered = Dims(tokens * tp, 3)
            (statistics,) = self._collective(
                f"{name}_gather", Kind.ALL_GATHER, statistics, self.sizes.tensor_axis, gathered
            ).writes
        self._emit(name, Kind.CROSS_ENTROPY, (statistics,), (loss, partition))
        gradient = gradient_of(replace(op, name=name), (logits, partition, targets, scale))
        self._one_gradient(gradient, (logits,), alias=logits)
        return loss
