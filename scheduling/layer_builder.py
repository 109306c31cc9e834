"""What layers are written with: operators of a transformer, whose sizes follow from shapes and kind.

A value is a number of tokens on this rank x a width, which may be cut over the ranks of tensor parallelism.
From these follow what an operator computes (FLOPs), what it keeps for its backward pass, what a collective
sends; nothing is priced by hand. How a graph is differentiated: `braid.scheduling.graph_builder`.

With sequence parallelism a rank holds t = T/tp tokens of full width outside the tensor-parallel region
(before a gather, after a scatter) and T tokens of its part of the width inside.
"""

from dataclasses import dataclass

from braid.scheduling.graph_builder import GraphBuilder
from braid.scheduling.operators import Kind, Part, Precision
from braid.scheduling.sizes import PartSizes


@dataclass(frozen=True)
class Dims:
    """Of a value: tokens on this rank, and width over all ranks, of which this one holds 1/``cut``."""

    tokens: int
    width: int
    cut: int = 1

    @property
    def elements(self) -> int:
        """On this rank."""
        return self.tokens * self.width // self.cut


class LayerBuilder:
    """Writes a part of the model forward; every method returns the name of the value that it makes.

    Collectives over an axis of degree one vanish and return what they were given. `ValueError` for a graph
    that cannot be differentiated, or whose widths do not fit.
    """

    def __init__(self, name: str, sizes: PartSizes) -> None:
        self.sizes = sizes
        self.shape = sizes.shape
        self._graph = GraphBuilder(name, sizes.axes)
        self._dims: dict[str, Dims] = {}

    def dims(self, value: str) -> Dims:
        """The size of a value."""
        return self._dims[value]

    def _made(self, value: str, dims: Dims) -> str:
        self._dims[value] = dims
        return value

    # -- what comes in and goes out ------------------------------------------------------------------------

    def input(self, name: str = "x") -> str:
        """The residual stream: this rank's tokens of full width."""
        dims = Dims(self.sizes.local_tokens, self.shape.hidden)
        return self._made(self._graph.input(name, dims.elements), dims)

    def token_ids(self, name: str) -> str:
        """An index for every token, without a gradient."""
        return self._made(self._graph.constant(name, self.sizes.tokens), Dims(self.sizes.tokens, 1))

    def factor(self, name: str) -> str:
        """A number without a gradient."""
        return self._made(self._graph.constant(name, 1, Precision.STATISTIC), Dims(1, 1))

    def build(self, output: str) -> Part:
        """Close the part whose result is ``output``, and derive its backward graph."""
        return self._graph.build(output)

    # -- operators -------------------------------------------------------------------------------------------

    def norm(self, name: str, x: str) -> str:
        """RMSNorm, which keeps one number of each token, or LayerNorm, which keeps two."""
        dims = self._dims[x]
        statistics = 2 if self.shape.biases else 1
        return self._made(self._graph.norm(name, x, dims.tokens, statistics_each=statistics), dims)

    def columns(self, name: str, x: str, width: int, kind: Kind = Kind.GEMM) -> str:
        """A matrix whose ``width`` outputs are cut over ``tp``; every rank has all inputs."""
        dims = self._dims[x]
        if dims.cut > 1:
            raise ValueError(f"{name}: {x} is cut over tp; use rows, or gather it first")
        made = Dims(dims.tokens, width, self.sizes.tp)
        return self._made(self._graph.gemm(name, x, made.elements, self._flops(dims, width), kind), made)

    def rows(self, name: str, x: str, width: int, kind: Kind = Kind.GEMM) -> str:
        """A matrix whose inputs are cut over ``tp``: every rank has a part of each sum; scatter adds them."""
        dims = self._dims[x]
        if dims.cut != self.sizes.tp:
            raise ValueError(f"{name}: {x} is not cut over tp; use columns")
        made = Dims(dims.tokens, width)
        return self._made(self._graph.gemm(name, x, made.elements, self._flops(dims, width), kind), made)

    def _flops(self, x: Dims, width: int) -> int:
        """This rank's share of x times a matrix with ``width`` outputs."""
        return 2 * x.tokens * x.width * width // self.sizes.tp

    def activation(self, name: str, x: str) -> str:
        """SwiGLU, which multiplies one half of the width by the other, or GELU."""
        dims = self._dims[x]
        made = Dims(dims.tokens, dims.width // 2 if self.shape.gated else dims.width, dims.cut)
        return self._made(self._graph.activation(name, x, made.elements), made)

    def residual(self, name: str, branch: str, skip: str) -> str:
        """Add a branch to the residual stream (or two branches to each other)."""
        return self._made(self._graph.residual(name, branch, skip), self._dims[skip])

    def custom(
        self,
        name: str,
        *reads: str,
        like: str | None = None,
        flops: int = 0,
        saved_elements: int | None = None,
        splits_weight_gradient: bool = False,
    ) -> str:
        """A module of the user's own (`AutogradOperator`), with one output.

        Unless told otherwise it makes what is as large as its first input (``like``: another value), keeps
        its inputs, and computes so little that its time is that of its memory accesses.
        """
        dims = self._dims[like or reads[0]]
        kept = sum(self._dims[x].elements for x in reads) if saved_elements is None else saved_elements
        y = self._graph.custom(
            name,
            reads,
            dims.elements,
            saved_elements=kept,
            flops=flops,
            splits_weight_gradient=splits_weight_gradient,
        )
        return self._made(y, dims)

    def attention(self, name: str, qkv: str) -> str:
        """Causal attention over the whole sequence, of which a rank holds 1/cp.

        It keeps its turned q, k, v, and the log-sum-exp of every query head's scores. Keys and values of
        other ranks of context parallelism are gathered (``all_gather``) or passed around while attending
        (``ring``). The sequence is cut so that every rank, and every step of the ring, has equal work.
        """
        shape, sizes, g = self.shape, self.sizes, self._graph
        cp, tokens = sizes.cp, self._dims[qkv].tokens
        made = Dims(tokens, shape.query_width, self._dims[qkv].cut)
        # Scores and values, 2 x 2 x T x s x Q, halved because attention is causal.
        flops = 2 * tokens * shape.sequence * shape.query_width // sizes.tp
        outputs, kv = made.elements, 2 * tokens * shape.kv_width // sizes.tp
        statistics = tokens * shape.heads // sizes.tp
        if cp == 1:
            return self._made(g.attention(name, qkv, outputs, flops, outputs + kv, statistics), made)
        if sizes.context == "all_gather":
            others = g.gather("kv_gather", qkv, "cp", kv)
            saved = outputs + cp * kv
            a = g.attention(name, qkv, outputs, flops, saved, statistics, more=(others,))
            return self._made(a, made)
        passed = g.shift("kv_shift_1", qkv, "cp", kv)
        a = g.attention(f"{name}_0", qkv, outputs, flops // cp, outputs + kv, statistics)
        for step in range(1, cp):
            here = passed
            if step < cp - 1:
                passed = g.shift(f"kv_shift_{step + 1}", here, "cp", kv)
            own = name if step == cp - 1 else f"{name}_{step}"
            a = g.attention(own, qkv, outputs, flops // cp, kv, statistics, more=(here, a))
        return self._made(a, made)

    # -- experts ---------------------------------------------------------------------------------------------

    def router(self, name: str, x: str) -> tuple[str, str]:
        """Score the experts for every token: the weights of the chosen (differentiable) and the choice."""
        tokens, top_k = self._dims[x].tokens, self.shape.top_k
        gates, choice = self._graph.router(name, x, tokens, self.shape.experts, top_k)
        return self._made(gates, Dims(tokens, top_k)), self._made(choice, Dims(tokens, top_k))

    def permute(self, name: str, x: str, choice: str) -> str:
        """Bring a copy of every token into the order of each expert that it visits.

        With balanced routing every rank works on as many tokens as it sends, ``top_k`` times its own; a
        capacity factor below 1 drops tokens, one above 1 bounds how far a rank may be over the average.
        """
        dims, shape = self._dims[x], self.shape
        made = Dims(round(dims.tokens * shape.top_k * min(1.0, shape.capacity_factor)), dims.width)
        return self._made(self._graph.permute(name, x, choice, made.elements), made)

    def unpermute(self, name: str, x: str, gates: str, choice: str) -> str:
        """Bring tokens back into their order and add what their experts made of them, weighted."""
        made = Dims(self._dims[choice].tokens, self._dims[x].width)
        return self._made(self._graph.unpermute(name, x, gates, choice, made.elements), made)

    # -- the model's ends ------------------------------------------------------------------------------------

    def embedding(self, name: str, tokens: str) -> str:
        """Look tokens up in this rank's rows of the vocabulary; scatter adds what the ranks found."""
        made = Dims(self._dims[tokens].tokens, self.shape.hidden)
        return self._made(self._graph.embedding(name, tokens, made.elements), made)

    def positions(self, name: str, x: str) -> str:
        """Add learned positions."""
        return self._made(self._graph.positions(name, x), self._dims[x])

    def cross_entropy(self, name: str, logits: str, targets: str, scale: str) -> str:
        """The sum of token losses over a vocabulary that is cut over ``tp``."""
        tokens = self._dims[logits].tokens
        return self._made(self._graph.cross_entropy(name, logits, targets, scale, tokens), Dims(1, 1))

    # -- collectives -----------------------------------------------------------------------------------------

    def gather(self, name: str, x: str, axis: str = "tp") -> str:
        """Gather the tokens of all ranks along an axis; its backward adds up and scatters gradients."""
        dims = self._dims[x]
        made = Dims(dims.tokens * self.sizes.degree(axis), dims.width, dims.cut)
        return self._made(self._graph.gather(name, x, axis), made)

    def scatter(self, name: str, x: str, axis: str = "tp") -> str:
        """Add up what all ranks along an axis have, and keep this rank's tokens."""
        dims = self._dims[x]
        made = Dims(dims.tokens // self.sizes.degree(axis), dims.width, dims.cut)
        return self._made(self._graph.scatter(name, x, axis), made)

    def all_to_all(self, name: str, x: str, axis: str = "ep") -> str:
        """Give every rank along an axis its part; its backward does the same the other way."""
        return self._made(self._graph.all_to_all(name, x, axis), self._dims[x])
