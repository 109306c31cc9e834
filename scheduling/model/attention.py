"""Writes attention into a layer's graph: one operator, or several if ranks split the tokens of a sequence."""

from dataclasses import replace

from braid.scheduling.model.collectives import CollectiveBuilder
from braid.scheduling.model.graph import Dims, gradient_of
from braid.scheduling.model.operators import Kind, Precision
from braid.scheduling.text.pattern import documents_seen


class AttentionBuilder(CollectiveBuilder):
    """Writes causal attention into a layer's graph."""

    def attention(self, name: str, qkv: str) -> str:
        """Write causal attention over the whole sequence, of whose tokens a rank holds 1/cp; return the
        output.

        The backward pass keeps rotated q, k, v and every query head's log-sum-exp. With context parallelism,
        queries are rotated apart from keys and values, and other ranks' keys and values are gathered
        (``all_gather``) or passed around while attending (``ring``). The sequence is cut so that every rank,
        and every step of the ring, has equal work.
        """
        if self.sizes.cp == 1 and not self.shape.documents:
            return self._attend(name, qkv)
        documents = (self._documents(self.sizes.own),) if self.shape.documents else ()
        q, kv = self._split_heads(f"{name}_split", qkv, documents)
        if self.sizes.context == "all_gather" and self.sizes.cp > 1:
            return self._attend_gathered(name, q, self.gather("kv_gather", kv, "cp"), documents)
        return self._attend_ring(name, q, kv, documents)

    def _documents(self, degree: int = 0) -> str:
        """Add, if it is missing, the input that describes a micro-batch's documents; return its name.

        ``degree``: tensor-parallel degree of the layer if it is its own, else 0 (`documents_seen`).
        """
        name = documents_seen(degree)
        if name not in self._values:
            self._input(name, Dims(self.sizes.tokens, 1), Precision.INDEX)
        return name

    def _attention_flops(self, dims: Dims, steps: int = 1) -> int:
        """Return one step's FLOPs of attention: 2 x 2 x T x s x Q for scores and values, halved by causality
        and divided by the number of ``steps``."""
        return 2 * dims.tokens * self.shape.sequence * self.shape.query_width // dims.cut // steps

    def _log_sums(self, dims: Dims) -> int:
        """Return the number of log-sum-exps: one for every token and query head on the rank."""
        return dims.tokens * self.shape.heads // dims.cut

    def _attend(self, name: str, qkv: str) -> str:
        """Write attention as one operator, which saves one opaque value for the backward pass."""
        shape, dims = self.shape, self.dims(qkv)
        y = self._value(f"{name}.out", replace(dims, width=shape.query_width))
        saved_dims = replace(dims, width=shape.query_width + 2 * shape.kv_width)
        saved = self._value(f"{name}.saved", saved_dims, statistics=self._log_sums(dims), keeps=y)
        flops = self._attention_flops(dims)
        op = self._emit(name, Kind.ATTENTION, (qkv,), (y, saved), flops=flops)
        self._one_gradient(gradient_of(op, (f"d.{y}", saved), flops=2 * flops), (qkv,))
        return y

    def _split_heads(self, name: str, qkv: str, documents: tuple[str, ...]) -> tuple[str, str]:
        """Write the operator that splits ``qkv``; return the names of the rotated queries, and of the rotated
        keys with the values."""
        dims = self.dims(qkv)
        q = self._value(f"{name}.q", replace(dims, width=self.shape.query_width))
        kv = self._value(f"{name}.kv", replace(dims, width=2 * self.shape.kv_width))
        op = self._emit(name, Kind.ROTARY, (qkv, *documents), (q, kv))
        self._one_gradient(gradient_of(op, (f"d.{q}", f"d.{kv}", *documents)), (qkv,))
        return q, kv

    def _attend_gathered(self, name: str, q: str, kv: str, documents: tuple[str, ...]) -> str:
        """Write attention of this rank's queries to the gathered keys and values of all ranks, in the order
        of the sequence."""
        dims = self.dims(q)
        y = self._value(f"{name}.out", dims)
        saved = self._value(f"{name}.saved", self.dims(kv), statistics=self._log_sums(dims), keeps=y)
        flops = self._attention_flops(dims)
        op = self._emit(name, Kind.ATTENTION, (q, kv, *documents), (y, saved), flops=flops)
        gradient = gradient_of(op, (f"d.{y}", saved, q, *documents), flops=2 * flops)
        self._one_gradient(gradient, (q, kv))
        return y

    def _attend_ring(self, name: str, q: str, kv: str, documents: tuple[str, ...]) -> str:
        """Write ring attention: this rank's queries attend to one rank's keys and values after the other,
        while these travel around the ring.

        Every step adds, in place, to an output of wider precision and to its log-sum-exp. Gradients of keys
        and values travel back.
        """
        steps, dims = self.sizes.cp, self.dims(q)
        flops, sums = self._attention_flops(dims, steps), self._log_sums(dims)
        y, saved = f"{name}.out", f"{name}.saved"
        keys, passed = kv, kv
        so_far: tuple[str, ...] = ()
        results: tuple[str, ...]
        for step in range(steps):
            if step < steps - 1:
                passed = self._shift(f"kv_shift_{step + 1}", keys, "cp", self.dims(kv))
                node = f"{name}_{step}"
                alias = so_far[0] if so_far else None
                statistics = 0 if alias else dims.elements + sums
                results = (
                    self._value(
                        f"{node}.partial", replace(dims, width=0), statistics=statistics, alias=alias
                    ),
                )
            else:
                node = name
                self._value(y, dims)
                self._value(saved, replace(dims, width=0), statistics=sums, keeps=y)
                results = y, saved
            op = self._emit(node, Kind.ATTENTION, (q, keys, *so_far, *documents), results, flops=flops)
            gradient = gradient_of(op, (f"d.{y}", saved, q, keys, *documents), flops=2 * flops)
            self._one_gradient(gradient, (q, keys))
            keys, so_far = passed, results
        return y
