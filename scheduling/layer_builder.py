"""What layers are written with: the kinds of operators of a transformer, a method each.

A value is a number of tokens on this rank x a width, which may be cut over the ranks of tensor parallelism.
From these follow what an operator computes (FLOPs), what it keeps for its backward pass, what a collective
sends; nothing is priced by hand. A method says all of a kind: the size of what it makes, its FLOPs, its
parameters, what it keeps and what its backward pass reads.

With sequence parallelism a rank holds t = T/tp tokens of full width outside the tensor-parallel region
(before a gather, after a scatter) and T tokens of its part of the width inside.
"""

from dataclasses import replace

from braid.scheduling.graph_builder import Dims, GraphBuilder, gradient_of
from braid.scheduling.operators import Kind, Operator, Pass, Precision
from braid.scheduling.sizes import PartSizes


class LayerBuilder(GraphBuilder):
    """Writes a part of the model forward; every method returns the name of the value that it makes.

    Collectives over an axis of degree one vanish and return what they were given. `ValueError` for a graph
    that cannot be differentiated, or whose widths do not fit.
    """

    def __init__(self, name: str, sizes: PartSizes) -> None:
        super().__init__(name)
        self.sizes = sizes
        self.shape = sizes.shape

    # -- what comes in -------------------------------------------------------------------------------------

    def input(self, name: str = "x") -> str:
        """The residual stream, from the part before: this rank's tokens of full width."""
        return self._input(name, Dims(self.sizes.local_tokens, self.shape.hidden))

    def token_ids(self, name: str) -> str:
        """An index for every token, without a gradient."""
        return self._input(name, Dims(self.sizes.tokens, 1), Precision.INDEX)

    def factor(self, name: str) -> str:
        """A number without a gradient."""
        return self._input(name, Dims(1, 1), Precision.STATISTIC)

    # -- operators -----------------------------------------------------------------------------------------

    def norm(self, name: str, x: str) -> str:
        """RMSNorm, which keeps one number of each token, or LayerNorm, which keeps two.

        Its backward also adds the gradient that reaches ``x`` around the norm.
        """
        dims = self.dims(x)
        y = self._value(f"{name}.out", dims)
        numbers = Dims(dims.tokens, 2 if self.shape.biases else 1)
        statistics = self._value(f"{name}.statistics", numbers, Precision.STATISTIC)
        op = self._emit(name, Kind.NORM, (x,), (y, statistics))
        self._holds(name, whole=dims.width * (2 if self.shape.biases else 1))
        gradient = gradient_of(op, (f"d.{y}", x, statistics), phase=Pass.GRADIENT)
        self._gradient_with_skip(gradient, x)
        return y

    def head_norm(self, name: str, qkv: str) -> str:
        """RMSNorm over every head of queries and of keys, which keeps one number of each; values as they are.

        Every rank has both weights whole, and norms its own heads.
        """
        shape, dims = self.shape, self.dims(qkv)
        y = self._value(f"{name}.out", dims)
        numbers = Dims(dims.tokens, shape.heads + shape.kv_heads, dims.cut)
        statistics = self._value(f"{name}.statistics", numbers, Precision.STATISTIC)
        op = self._emit(name, Kind.NORM, (qkv,), (y, statistics))
        self._holds(name, whole=2 * shape.head_dim)
        self._one_gradient(gradient_of(op, (f"d.{y}", qkv, statistics), phase=Pass.GRADIENT), (qkv,))
        return y

    def columns(self, name: str, x: str, width: int, kind: Kind = Kind.GEMM, *, bias: bool = False) -> str:
        """A matrix (of every expert: ``GROUPED_GEMM``) whose ``width`` outputs are cut over ``tp``.

        Every rank has all inputs. ``bias``: it has one, which is cut too.
        """
        if self.dims(x).cut > 1:
            raise ValueError(f"{name}: {x} is cut over tp; use rows, or gather it first")
        self._holds(name, cut=width // self.sizes.tp if bias else 0)
        return self._matrix(name, x, Dims(self.dims(x).tokens, width, self.sizes.tp), kind)

    def rows(self, name: str, x: str, width: int, kind: Kind = Kind.GEMM) -> str:
        """A matrix whose inputs are cut over ``tp``: every rank has a part of each sum; scatter adds them."""
        if self.dims(x).cut != self.sizes.tp:
            raise ValueError(f"{name}: {x} is not cut over tp; use columns")
        return self._matrix(name, x, Dims(self.dims(x).tokens, width), kind)

    def _matrix(self, name: str, x: str, made: Dims, kind: Kind) -> str:
        y = self._value(f"{name}.out", made)
        weights = self.dims(x).width * made.width
        flops = 2 * made.tokens * weights // self.sizes.tp
        op = self._emit(name, kind, (x,), (y,), flops=flops)
        if kind is Kind.GROUPED_GEMM:
            self._holds(name, experts=self.shape.experts * weights // (self.sizes.tp * self.sizes.ep))
        else:
            self._holds(name, cut=weights // self.sizes.tp)
        self._both_gradients(op, (f"d.{y}",), (x,), (x,))
        return y

    def activation(self, name: str, x: str) -> str:
        """SwiGLU, which multiplies one half of the width by the other, or GELU."""
        dims = self.dims(x)
        width = dims.width // 2 if self.shape.gated else dims.width
        y = self._value(f"{name}.out", replace(dims, width=width))
        op = self._emit(name, Kind.ACTIVATION, (x,), (y,))
        self._one_gradient(gradient_of(op, (f"d.{y}", x)), (x,))
        return y

    def residual(self, name: str, branch: str, skip: str, *, bias: bool = False) -> str:
        """Add a branch (and the bias of its last matrix) to the residual stream or another branch."""
        y = self._value(f"{name}.out", self.dims(skip))
        op = self._emit(name, Kind.RESIDUAL, (branch, skip), (y,))
        self._holds(name, whole=self.dims(skip).width if bias else 0)
        gradient = gradient_of(op, (f"d.{y}",), phase=Pass.GRADIENT)
        self._one_gradient(gradient, (branch, skip), alias=f"d.{y}")
        return y

    def custom(
        self,
        name: str,
        *reads: str,
        like: str | None = None,
        flops: int = 0,
        saved_elements: int | None = None,
        parameters: int = 0,
        splits_weight_gradient: bool = False,
    ) -> str:
        """A module of the user's own (`AutogradOperator`), with one output and one opaque saved value.

        Unless told otherwise it makes what is as large as its first input (``like``: another value), keeps
        its inputs, has no ``parameters`` (on a rank), and computes so little that its time is that of its
        memory accesses.
        """
        y = self._value(f"{name}.out", self.dims(like or reads[0]))
        kept = sum(self.dims(x).elements for x in reads) if saved_elements is None else saved_elements
        saved = self._value(f"{name}.saved", Dims(1, kept))
        op = self._emit(name, Kind.CUSTOM, reads, (y, saved), flops=flops)
        self._holds(name, cut=parameters)
        receivers = tuple(x for x in reads if x not in self._constants)
        sources = (f"d.{y}", saved)
        if splits_weight_gradient:
            self._both_gradients(op, sources, (), receivers)
        else:  # one operator, with the FLOPs of both
            gradient = gradient_of(op, sources, "dgrad", Pass.GRADIENT, flops=2 * flops)
            self._one_gradient(gradient, receivers)
        return y

    def attention(self, name: str, qkv: str) -> str:
        """Causal attention over the whole sequence, of which a rank holds 1/cp.

        It keeps its turned q, k, v, and the log-sum-exp of every query head's scores. With context
        parallelism queries are turned apart from keys and values, and those of other ranks are gathered
        (``all_gather``) or passed around while attending (``ring``). The sequence is cut so that every rank,
        and every step of the ring, has equal work.
        """
        if self.sizes.cp == 1:
            return self._attend(name, qkv)
        q, kv = self._split_heads(f"{name}_split", qkv)
        if self.sizes.context == "all_gather":
            return self._attend_gathered(name, q, self.gather("kv_gather", kv, "cp"))
        return self._attend_ring(name, q, kv)

    def _attention_flops(self, dims: Dims, steps: int = 1) -> int:
        """Scores and values, 2 x 2 x T x s x Q, halved because attention is causal; 1/``steps`` of them."""
        return 2 * dims.tokens * self.shape.sequence * self.shape.query_width // dims.cut // steps

    def _log_sums(self, dims: Dims) -> int:
        """One of every token and query head of the rank."""
        return dims.tokens * self.shape.heads // dims.cut

    def _attend(self, name: str, qkv: str) -> str:
        """One kernel; what it keeps is one opaque value."""
        shape, dims = self.shape, self.dims(qkv)
        y = self._value(f"{name}.out", replace(dims, width=shape.query_width))
        kept = replace(dims, width=shape.query_width + 2 * shape.kv_width)
        saved = self._value(f"{name}.saved", kept, statistics=self._log_sums(dims), keeps=y)
        flops = self._attention_flops(dims)
        op = self._emit(name, Kind.ATTENTION, (qkv,), (y, saved), flops=flops)
        self._one_gradient(gradient_of(op, (f"d.{y}", saved), flops=2 * flops), (qkv,))
        return y

    def _split_heads(self, name: str, qkv: str) -> tuple[str, str]:
        """Queries, and keys with values; queries and keys turned by their positions."""
        dims = self.dims(qkv)
        q = self._value(f"{name}.q", replace(dims, width=self.shape.query_width))
        kv = self._value(f"{name}.kv", replace(dims, width=2 * self.shape.kv_width))
        op = self._emit(name, Kind.ROTARY, (qkv,), (q, kv))
        self._one_gradient(gradient_of(op, (f"d.{q}", f"d.{kv}")), (qkv,))
        return q, kv

    def _attend_gathered(self, name: str, q: str, kv: str) -> str:
        """To the keys of all ranks, which are kept in the order of the sequence."""
        dims = self.dims(q)
        y = self._value(f"{name}.out", dims)
        saved = self._value(f"{name}.saved", self.dims(kv), statistics=self._log_sums(dims), keeps=y)
        flops = self._attention_flops(dims)
        op = self._emit(name, Kind.ATTENTION, (q, kv), (y, saved), flops=flops)
        self._one_gradient(gradient_of(op, (f"d.{y}", saved, q), flops=2 * flops), (q, kv))
        return y

    def _attend_ring(self, name: str, q: str, kv: str) -> str:
        """To the keys of one rank after the other, which travel around the ring meanwhile.

        Every step adds to a wide output and its log-sum-exp, in place. Gradients of keys go back around.
        """
        steps, dims = self.sizes.cp, self.dims(q)
        flops, sums = self._attention_flops(dims, steps), self._log_sums(dims)
        y, saved = f"{name}.out", f"{name}.saved"
        here, passed = kv, kv
        so_far: tuple[str, ...] = ()
        made: tuple[str, ...]
        for step in range(steps):
            if step < steps - 1:
                passed = self._shift(f"kv_shift_{step + 1}", here, "cp", self.dims(kv))
                own = f"{name}_{step}"
                alias = so_far[0] if so_far else None
                statistics = 0 if alias else dims.elements + sums
                made = (
                    self._value(f"{own}.partial", replace(dims, width=0), statistics=statistics, alias=alias),
                )
            else:
                own = name
                self._value(y, dims)
                self._value(saved, replace(dims, width=0), statistics=sums, keeps=y)
                made = y, saved
            op = self._emit(own, Kind.ATTENTION, (q, here, *so_far), made, flops=flops)
            gradient = gradient_of(op, (f"d.{y}", saved, q, here), flops=2 * flops)
            self._one_gradient(gradient, (q, here))
            here, so_far = passed, made
        return y

    # -- experts -------------------------------------------------------------------------------------------

    def router(self, name: str, x: str) -> tuple[str, str]:
        """Score the experts for every token: the weights of the chosen (differentiable) and the choice."""
        shape, tokens = self.shape, self.dims(x).tokens
        gates = self._value(f"{name}.out", Dims(tokens, shape.top_k), Precision.STATISTIC)
        choice = self._value(f"{name}.choice", Dims(tokens, shape.top_k), Precision.INDEX)
        scores = self._value(f"{name}.scores", Dims(tokens, shape.experts), Precision.STATISTIC)
        flops = 2 * self.dims(x).elements * shape.experts
        op = self._emit(name, Kind.ROUTER, (x,), (gates, choice, scores), flops=flops)
        self._holds(name, whole=self.dims(x).width * shape.experts)
        self._both_gradients(op, (f"d.{gates}", scores), (x,), (x,))
        return gates, choice

    def permute(self, name: str, x: str, choice: str) -> str:
        """Bring a copy of every token into the order of each expert that it visits.

        With balanced routing every rank works on as many tokens as it sends, ``top_k`` times its own; a
        capacity factor below 1 drops tokens, one above 1 bounds how far a rank may be over the average.
        """
        dims, shape = self.dims(x), self.shape
        visits = round(dims.tokens * shape.top_k * min(1.0, shape.capacity_factor))
        y = self._value(f"{name}.out", Dims(visits, dims.width))
        op = self._emit(name, Kind.PERMUTE, (x, choice), (y,))
        self._one_gradient(gradient_of(op, (f"d.{y}", choice)), (x,))
        return y

    def unpermute(self, name: str, x: str, gates: str, choice: str) -> str:
        """Bring tokens back into their order and add what their experts made of them, weighted."""
        y = self._value(f"{name}.out", Dims(self.dims(choice).tokens, self.dims(x).width))
        op = self._emit(name, Kind.PERMUTE, (x, gates, choice), (y,))
        self._one_gradient(gradient_of(op, (f"d.{y}", x, gates, choice)), (x, gates))
        return y

    # -- the model's ends ----------------------------------------------------------------------------------

    def embedding(self, name: str, tokens: str) -> str:
        """Look tokens up in this rank's rows of the vocabulary; scatter adds what the ranks found."""
        y = self._value(f"{name}.out", Dims(self.dims(tokens).tokens, self.shape.hidden))
        op = self._emit(name, Kind.EMBEDDING, (tokens,), (y,))
        rows = self.sizes.vocabulary_rows
        self._holds(name, cut=rows * self.shape.hidden, tied=self.shape.tied_head)
        self._one_gradient(gradient_of(op, (f"d.{y}", tokens), "wgrad", Pass.WEIGHT_GRADIENT), ())
        return y

    def positions(self, name: str, x: str) -> str:
        """Add learned positions."""
        y = self._value(f"{name}.out", self.dims(x))
        op = self._emit(name, Kind.EMBEDDING, (x,), (y,))
        self._holds(name, whole=self.shape.sequence * self.shape.hidden)
        self._one_gradient(gradient_of(op, (f"d.{y}",), phase=Pass.GRADIENT), (x,), alias=f"d.{y}")
        return y

    def cross_entropy(self, name: str, logits: str, targets: str, scale: str) -> str:
        """The sum of token losses over a vocabulary that is cut over ``tp``, whose statistics are gathered.

        Its backward writes d.logits over the logits, of which it is the last reader.
        """
        tokens, tp, module = self.dims(logits).tokens, self.sizes.tp, f"{name}_statistics"
        statistics = self._value(f"{module}.out", Dims(tokens, 3), Precision.STATISTIC)
        partition = self._value(f"{name}.partition", Dims(tokens, 1), Precision.STATISTIC)
        loss = self._value(name, Dims(1, 1), Precision.STATISTIC)
        op = self._emit(module, Kind.CROSS_ENTROPY, (logits, targets), (statistics,))
        if tp > 1:
            made = Dims(tokens * tp, 3)
            (statistics,) = self._collective(f"{name}_gather", Kind.ALL_GATHER, statistics, "tp", made).writes
        self._emit(name, Kind.CROSS_ENTROPY, (statistics,), (loss, partition))
        gradient = gradient_of(replace(op, name=name), (logits, partition, targets, scale))
        self._one_gradient(gradient, (logits,), alias=logits)
        return loss

    # -- collectives ---------------------------------------------------------------------------------------

    def gather(self, name: str, x: str, axis: str = "tp") -> str:
        """Gather the tokens of all ranks along an axis; its backward adds up and scatters gradients."""
        return self._gather(name, x, axis, self.dims(x))

    def scatter(self, name: str, x: str, axis: str = "tp") -> str:
        """Add up what all ranks along an axis have, and keep this rank's tokens."""
        dims, degree = self.dims(x), self.sizes.degree(axis)
        made = replace(dims, tokens=dims.tokens // degree)
        return self._exchange(name, x, axis, made, Kind.REDUCE_SCATTER, Kind.ALL_GATHER)

    def all_to_all(self, name: str, x: str, axis: str = "ep") -> str:
        """Give every rank along an axis its part; its backward does the same the other way."""
        return self._exchange(name, x, axis, self.dims(x), Kind.ALL_TO_ALL, Kind.ALL_TO_ALL)

    def _gather(self, name: str, x: str, axis: str, part: Dims) -> str:
        """Gather what has the size ``part`` of a value."""
        made = replace(part, tokens=part.tokens * self.sizes.degree(axis))
        return self._exchange(name, x, axis, made, Kind.ALL_GATHER, Kind.REDUCE_SCATTER)

    def _shift(self, name: str, x: str, axis: str, made: Dims) -> str:
        """Send what has the size ``made`` to the next rank of a ring and receive from the one before.

        A whole all-gather would repeat: only what the next step needs is there at a time.
        """
        op = self._collective(name, Kind.SEND_RECEIVE, x, axis, made)
        self._one_gradient(gradient_of(op, (f"d.{name}.out",)), (x,))
        return op.writes[0]

    def _exchange(self, name: str, x: str, axis: str, made: Dims, kind: Kind, backward: Kind) -> str:
        if self.sizes.degree(axis) == 1:
            return x
        op = self._collective(name, kind, x, axis, made)
        self._one_gradient(replace(gradient_of(op, (f"d.{name}.out",)), kind=backward), (x,))
        return op.writes[0]

    def _collective(self, name: str, kind: Kind, x: str, axis: str, made: Dims) -> Operator:
        """A collective that makes a value; who emits it says what its backward pass is.

        In a ring, and pairwise, each rank sends all parts of the whole but one; in a shift, what it makes.
        """
        degree, precision = self.sizes.degree(axis), self._values[x].precision
        whole = made.elements if kind is Kind.ALL_GATHER else self.dims(x).elements
        width = precision.bytes_each(2)
        shifts = kind is Kind.SEND_RECEIVE
        sent = width * made.elements if shifts else width * whole * (degree - 1) // degree
        y = self._value(f"{name}.out", made, precision)
        return self._emit(
            name,
            kind,
            (x,),
            (y,),
            axis=axis,
            stream=self.sizes.stream(axis),
            sent_bytes=sent,
        )
