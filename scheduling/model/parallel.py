"""Writes inputs, collectives, attention and experts into a layer's graph: the operators of several ranks.

With sequence parallelism a rank holds t = T/tp tokens of full width outside the tensor-parallel region
(before a gather, after a scatter) and, inside it, T tokens of its part of the width.
"""

from dataclasses import dataclass, replace

from braid.scheduling.model.graph import Dims, GraphBuilder, gradient_of
from braid.scheduling.model.operators import Kind, Operator, Precision
from braid.scheduling.text.pattern import TOKEN_NUMBERS, documents_seen


@dataclass(frozen=True)
class Routed:
    """Names of a router's results, which say to which experts tokens go and to which ranks their rows."""

    gates: str
    choice: str
    sent: str
    """Value with the number of rows that this rank sends to every rank of ep, on the way to the experts."""
    returned: str
    shares: str
    """Value with the number of rows of every tensor-parallel rank that holds the same experts."""
    sources: str
    """Value with the number of rows from every source (rank of tp and ep) for every expert of this rank."""
    sizes: str
    """Value with the number of rows of every expert of this rank."""


class ParallelBuilder(GraphBuilder):
    """Writes operators of several ranks; a collective over an axis of degree one returns its input's name."""

    # -- inputs --------------------------------------------------------------------------------------------

    def input(self, name: str = "x") -> str:
        """Add the residual stream as input: this rank's tokens of full width."""
        self._stream.add(name)
        return self._input(name, Dims(self.sizes.local_tokens, self.shape.hidden))

    def _token_numbers(self) -> tuple[str, ...]:
        """Add, if it is missing, the input with a number for each of this rank's tokens, from which dropout
        draws; return its name. Without dropout there is no such input, and the result is empty."""
        if not self.shape.dropout:
            return ()
        if TOKEN_NUMBERS not in self._values:
            self._input(TOKEN_NUMBERS, Dims(self.sizes.local_tokens, 1), Precision.INDEX)
        return (TOKEN_NUMBERS,)

    def _documents(self, degree: int = 0) -> str:
        """Add, if it is missing, the input that describes a micro-batch's documents; return its name.

        ``degree``: tensor-parallel degree of the layer if it is its own, else 0 (`documents_seen`).
        """
        name = documents_seen(degree)
        if name not in self._values:
            self._input(name, Dims(self.sizes.tokens, 1), Precision.INDEX)
        return name

    def token_ids(self, name: str) -> str:
        """Add an input without gradient that holds one index per token; return its name."""
        return self._input(name, Dims(self.sizes.tokens, 1), Precision.INDEX)

    def factor(self, name: str) -> str:
        """Add an input without gradient that holds a single number; return its name."""
        return self._input(name, Dims(1, 1), Precision.STATISTIC)

    # -- collectives ---------------------------------------------------------------------------------------

    def gather(self, name: str, x: str, axis: str = "", shares: str | None = None) -> str:
        """Write an all-gather of tokens over an axis; its backward pass reduce-scatters gradients.

        ``axis``: by default the axis over which the part's matrices are cut. ``shares``: name of the value
        with each rank's number of tokens (`Routed.shares`); by default all ranks have equally many.
        """
        dims, axis = self.dims(x), axis or self.sizes.tensor_axis
        result = replace(dims, tokens=dims.tokens * self.sizes.degree(axis))
        kinds = Kind.ALL_GATHER, Kind.REDUCE_SCATTER
        return self._exchange(name, x, axis, result, kinds, (shares, shares) if shares else None)

    def scatter(self, name: str, x: str, axis: str = "", shares: str | None = None) -> str:
        """Write a reduce-scatter over an axis: a sum over ranks, of which each keeps its own tokens.

        Its backward pass gathers gradients. ``axis``, ``shares``: as in `gather`.
        """
        dims, axis = self.dims(x), axis or self.sizes.tensor_axis
        result = replace(dims, tokens=dims.tokens // self.sizes.degree(axis))
        kinds = Kind.REDUCE_SCATTER, Kind.ALL_GATHER
        return self._exchange(name, x, axis, result, kinds, (shares, shares) if shares else None)

    def all_to_all(self, name: str, x: str, sent: str, returned: str) -> str:
        """Write an all-to-all of rows over ``ep``; the backward pass sends their gradients back.

        ``sent``, ``returned``: names of the values with the number of rows to and from each rank (`Routed`).
        """
        kinds = Kind.ALL_TO_ALL, Kind.ALL_TO_ALL
        return self._exchange(name, x, "ep", self.dims(x), kinds, (sent, returned))

    def _shift(self, name: str, x: str, axis: str, result: Dims) -> str:
        """Write a ring shift: send ``x`` to the next rank along ``axis``, receive a value of size ``result``
        from the previous one.

        Unlike an all-gather it holds only the values of the next step in memory.
        """
        op = self._collective(name, Kind.SEND_RECEIVE, x, axis, result)
        self._one_gradient(gradient_of(op, (f"d.{name}.out",)), (x,))
        return op.writes[0]

    def _exchange(
        self,
        name: str,
        x: str,
        axis: str,
        result: Dims,
        kinds: tuple[Kind, Kind],
        extents: tuple[str, str] | None,
    ) -> str:
        """Write a collective and its backward pass.

        ``kinds``: kinds of collective in the forward and backward pass; ``extents``: names of the values with
        the row counts of both, None if all ranks have equally many rows.
        """
        if self.sizes.degree(axis) == 1:
            return x
        sent, returned = extents or ("", "")
        op = self._collective(name, kinds[0], x, axis, result, sent)
        reads = (f"d.{name}.out", returned) if returned else (f"d.{name}.out",)
        self._one_gradient(replace(gradient_of(op, reads), kind=kinds[1]), (x,))
        return op.writes[0]

    def _collective(
        self, name: str, kind: Kind, x: str, axis: str, result: Dims, extents: str = ""
    ) -> Operator:
        """Write the forward operator of a collective; the caller defines its backward pass.

        ``result``: size of the result; ``extents``: name of the value with row counts. Ring and pairwise
        algorithms send all but one rank's part of the whole; a shift sends as much as it receives.
        """
        degree, precision = self.sizes.degree(axis), self._values[x].precision
        whole = result.elements if kind is Kind.ALL_GATHER else self.dims(x).elements
        width = precision.bytes_each(2)
        shifts = kind is Kind.SEND_RECEIVE
        sent_bytes = width * result.elements if shifts else width * whole * (degree - 1) // degree
        if kind is Kind.ALL_REDUCE:
            sent_bytes *= 2
        in_place = x if kind is Kind.ALL_REDUCE else None
        y = self._value(f"{name}.out", result, precision, alias=in_place)
        return self._emit(
            name,
            kind,
            (x, extents) if extents else (x,),
            (y,),
            axis=axis,
            stream=self.sizes.stream(axis),
            sent_bytes=sent_bytes,
        )

    # -- attention -------------------------------------------------------------------------------------------

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

    # -- experts ---------------------------------------------------------------------------------------------

    def router(self, name: str, x: str) -> Routed:
        """Write the router: score the experts for every token, choose the best, and compute where rows go.

        If no token is dropped, ranks first exchange their numbers of rows for every expert.
        """
        shape, tokens = self.shape, self.dims(x).tokens
        gates = self._value(f"{name}.out", Dims(tokens, shape.top_k), Precision.STATISTIC)
        choice = self._value(f"{name}.choice", Dims(tokens, shape.top_k), Precision.INDEX)
        counts = self._value(f"{name}.counts", Dims(1, shape.experts), Precision.INDEX)
        scores = self._value(f"{name}.scores", Dims(tokens, shape.experts), Precision.STATISTIC)
        flops = 2 * self.dims(x).elements * shape.experts
        op = self._emit(name, Kind.ROUTER, (x,), (gates, choice, counts, scores), flops=flops)
        self._holds(name, self.dims(x).width * shape.experts, "whole")
        self._holds(name, shape.experts if shape.balance_rate > 0 else 0, "whole")
        for_losses: tuple[str, ...] = ()
        if shape.balance_loss or shape.z_loss:
            for_losses = (self._load(f"{name}_load", counts), self._loss_scale())
        self._both_gradients(op, (f"d.{gates}", scores, choice), (x,), (x,), for_losses)
        return self._routed(f"{name}_rows", gates, choice, counts)

    def _load(self, name: str, counts: str) -> str:
        """Write the computation of each expert's load: its share of all routed rows of the micro-batch,
        summed over the ranks that hold its tokens. ``counts``: name of this rank's row counts."""
        load = self._value(f"{name}.out", self.dims(counts), Precision.STATISTIC)
        self._emit(name, Kind.ROUTER, (counts,), (load,))
        for axis in ("tp", "cp"):
            if self.sizes.degree(axis) > 1:
                result = self.dims(load)
                (load,) = self._collective(f"{name}_{axis}", Kind.ALL_REDUCE, load, axis, result).writes
        return load

    def _loss_scale(self) -> str:
        return "loss_scale" if "loss_scale" in self._values else self.factor("loss_scale")

    def _routed(self, name: str, gates: str, choice: str, counts: str) -> Routed:
        """Write the computation of the row counts in `Routed`, from all ranks' counts; with a capacity they
        are constant, so that ranks exchange nothing."""
        shape, sizes = self.shape, self.sizes
        if not shape.capacity_factor:
            for axis in ("ep", sizes.tensor_axis):
                if (degree := sizes.degree(axis)) > 1:
                    result = replace(self.dims(counts), tokens=self.dims(counts).tokens * degree)
                    gathered = self._collective(f"{name}_{axis}", Kind.ALL_GATHER, counts, axis, result)
                    (counts,) = gathered.writes
        sources, experts = sizes.tensor * sizes.ep, shape.experts // sizes.ep
        extents = {
            "there": 0,  # a list of numbers on the host: no device memory
            "back": 0,
            "shares": 0,
            "sources": sources * experts,
            "sizes": 0,
        }
        extent_names = [
            self._value(f"{name}.{key}", Dims(1, count), Precision.INDEX) for key, count in extents.items()
        ]
        self._emit(name, Kind.ROUTER, (counts,), tuple(extent_names))
        return Routed(gates, choice, *extent_names)

    def permute(self, name: str, x: str, choice: str) -> str:
        """Add an operator that copies the rows of ``x`` into the order of their experts, one row for each
        expert that ``choice`` names; return the name of its result.

        The size assumes balanced routing, in which a rank works on as many rows as it sends: ``top_k`` times
        its tokens. With a capacity every expert takes a fixed number of rows from each rank; more rows are
        dropped, fewer are padded.
        """
        dims, shape = self.dims(x), self.shape
        visits = dims.tokens * shape.top_k
        if shape.capacity_factor:
            visits = shape.experts * shape.capacity(dims.tokens)
        y = self._value(f"{name}.out", Dims(visits, dims.width))
        op = self._emit(name, Kind.PERMUTE, (x, choice), (y,))
        self._one_gradient(gradient_of(op, (f"d.{y}", choice)), (x,))
        return y

    def regroup(self, name: str, x: str, sources: str) -> str:
        """Write the reordering of received rows from the order (source, expert) to the order of experts, or
        back.

        ``sources``: name of the row counts `Routed.sources`. Nothing is written if rows have a single source,
        or if a rank has a single expert.
        """
        sizes = self.sizes
        if sizes.tensor * sizes.ep == 1 or self.shape.experts == sizes.ep:
            return x
        y = self._value(f"{name}.out", self.dims(x))
        op = self._emit(name, Kind.PERMUTE, (x, sources), (y,))
        self._one_gradient(gradient_of(op, (f"d.{y}", sources)), (x,))
        return y

    def unpermute(self, name: str, x: str, gates: str, choice: str) -> str:
        """Write the sum of the experts' results for every token, weighted by its gates, in the tokens'
        order."""
        y = self._value(f"{name}.out", Dims(self.dims(choice).tokens, self.dims(x).width))
        op = self._emit(name, Kind.PERMUTE, (x, gates, choice), (y,))
        self._one_gradient(gradient_of(op, (f"d.{y}", x, gates, choice)), (x, gates))
        return y
