"""Writes a part of the model forward and derives its backward graph by walking it in reverse."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from braid.scheduling.operators import Graph, Kind, Operator, Part, Pass, Precision, Stream, Value


@dataclass(frozen=True, kw_only=True)
class AxisPlacement:
    """Degree of a mesh axis and the stream its collectives run on."""

    degree: int = 1
    stream: Stream = Stream.INTRA


@dataclass
class GraphBuilder:
    """Writes a part forward, operator by operator, and derives its backward graph.

    Every method returns the name of the value that the operator writes; collectives over an axis of degree
    one vanish and return their input. Graphs that cannot be differentiated raise `ValueError`.
    """

    name: str
    axes: Mapping[str, AxisPlacement] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._forward: list[Operator] = []
        self._backward: list[Operator] = []
        self._reverse: list[Callable[[], None]] = []
        self._values: dict[str, Value] = {}
        self._inputs: list[str] = []
        self._constants: list[str] = []
        self._readers: dict[str, int] = {}
        self._arrived: dict[str, int] = {}

    # -- values ------------------------------------------------------------------------------------------

    def input(self, name: str, elements: int) -> str:
        """Declare the differentiable value that the part before hands on."""
        self._value(name, elements)
        self._inputs.append(name)
        return name

    def constant(self, name: str, elements: int, precision: Precision = Precision.INDEX) -> str:
        """Declare a value that the executor provides and that has no gradient."""
        self._value(name, elements, precision)
        self._inputs.append(name)
        self._constants.append(name)
        return name

    def _value(
        self,
        name: str,
        elements: int,
        precision: Precision = Precision.ACTIVATION,
        *,
        statistics: int = 0,
        alias: str | None = None,
        keeps: str | None = None,
    ) -> str:
        if name in self._values:
            raise ValueError(f"{self.name}: value {name} is written twice; give every operator its own name")
        owner = self._values[alias].alias_of or alias if alias else None
        self._values[name] = Value(
            name=name,
            elements=elements,
            precision=precision,
            statistics=statistics,
            alias_of=owner,
            keeps=keeps,
        )
        return name

    def elements(self, value: str) -> int:
        """Elements of a value on one rank."""
        return self._values[value].elements

    # -- operators ---------------------------------------------------------------------------------------

    def norm(self, name: str, x: str, tokens: int, *, statistics_each: int = 1) -> str:
        """Normalise ``tokens`` tokens; ``statistics_each`` numbers of each are saved (LayerNorm: 2).

        Its backward also adds the gradient that reaches ``x`` around the norm.
        """
        y = self._value(f"{name}.out", self.elements(x))
        statistics = self._value(f"{name}.statistics", tokens * statistics_each, Precision.STATISTIC)
        op = self._emit(name, Kind.NORM, (x,), (y, statistics))

        def reverse() -> None:
            skip = self._partial(x)
            reads = (f"d.{y}", x, statistics, *((skip,) if skip else ()))
            gradient = _gradient(op, "grad", Pass.GRADIENT, reads)
            self._backward.append(replace(gradient, writes=(self._arrive(x),)))

        self._reverse.append(reverse)
        return y

    def gemm(self, name: str, x: str, elements: int, flops: int, kind: Kind = Kind.GEMM) -> str:
        """Multiply by a weight (of every expert: ``GROUPED_GEMM``); both gradients are operators."""
        y = self._value(f"{name}.out", elements)
        op = self._emit(name, kind, (x,), (y,), flops=flops)
        self._both_gradients(op, (f"d.{y}",), (x,), (x,))
        return y

    def attention(
        self,
        name: str,
        qkv: str,
        elements: int,
        flops: int,
        saved_elements: int,
        saved_statistics: int = 0,
        more: tuple[str, ...] = (),
    ) -> str:
        """Attend; what the kernel needs for its backward beside its output is one opaque saved value.

        ``more``: keys and values of other ranks, and what was attended to before (ring attention).
        """
        y = self._value(f"{name}.out", elements)
        saved = self._value(f"{name}.saved", saved_elements, statistics=saved_statistics, keeps=y)
        op = self._emit(name, Kind.ATTENTION, (qkv, *more), (y, saved), flops=flops)
        gradient = _gradient(op, "grad", Pass.INPUT_GRADIENT, (f"d.{y}", saved), flops=2 * flops)
        self._reverse.append(lambda: self._contribute(gradient, (qkv, *more)))
        return y

    def router(self, name: str, x: str, tokens: int, experts: int, top_k: int) -> tuple[str, str]:
        """Score ``experts`` for every token: the weights of the chosen (differentiable) and the choice."""
        flops = 2 * self.elements(x) * experts
        gates = self._value(f"{name}.out", tokens * top_k, Precision.STATISTIC)
        choice = self._value(f"{name}.choice", tokens * top_k, Precision.INDEX)
        scores = self._value(f"{name}.scores", tokens * experts, Precision.STATISTIC)
        op = self._emit(name, Kind.ROUTER, (x,), (gates, choice, scores), flops=flops)
        self._both_gradients(op, (f"d.{gates}", scores), (x,), (x,))
        return gates, choice

    def permute(self, name: str, x: str, choice: str, elements: int) -> str:
        """Bring a copy of every token into the order of each expert that it visits."""
        y = self._value(f"{name}.out", elements)
        op = self._emit(name, Kind.PERMUTE, (x, choice), (y,))
        gradient = _gradient(op, "grad", Pass.INPUT_GRADIENT, (f"d.{y}", choice))
        self._reverse.append(lambda: self._contribute(gradient, (x,)))
        return y

    def unpermute(self, name: str, x: str, gates: str, choice: str, elements: int) -> str:
        """Bring tokens back into their order and add what their experts made of them, weighted."""
        y = self._value(f"{name}.out", elements)
        op = self._emit(name, Kind.PERMUTE, (x, gates, choice), (y,))
        reads = (f"d.{y}", x, gates, choice)
        gradient = _gradient(op, "grad", Pass.INPUT_GRADIENT, reads)
        self._reverse.append(lambda: self._contribute(gradient, (x, gates)))
        return y

    def activation(self, name: str, x: str, elements: int) -> str:
        """Apply a pointwise (possibly gated) function without parameters."""
        y = self._value(f"{name}.out", elements)
        op = self._emit(name, Kind.ACTIVATION, (x,), (y,))
        gradient = _gradient(op, "grad", Pass.INPUT_GRADIENT, (f"d.{y}", x))
        self._reverse.append(lambda: self._contribute(gradient, (x,)))
        return y

    def residual(self, name: str, branch: str, skip: str) -> str:
        """Add a branch (and its bias, if the module has one) to the residual stream."""
        y = self._value(f"{name}.out", self.elements(skip))
        op = self._emit(name, Kind.RESIDUAL, (branch, skip), (y,))
        gradient = _gradient(op, "grad", Pass.GRADIENT, (f"d.{y}",))
        self._reverse.append(lambda: self._contribute(gradient, (branch, skip), alias=f"d.{y}"))
        return y

    def custom(
        self,
        name: str,
        reads: tuple[str, ...],
        elements: int,
        *,
        saved_elements: int = 0,
        flops: int = 0,
        splits_weight_gradient: bool = False,
    ) -> str:
        """A user's own module (`AutogradOperator`): one output, one opaque saved value."""
        y = self._value(f"{name}.out", elements)
        saved = self._value(f"{name}.saved", saved_elements)
        op = self._emit(name, Kind.CUSTOM, reads, (y, saved), flops=flops)
        receivers = tuple(x for x in reads if x not in self._constants)
        sources = (f"d.{y}", saved)
        if splits_weight_gradient:
            self._both_gradients(op, sources, (), receivers)
        else:  # one operator, with the FLOPs of both
            gradient = _gradient(op, "dgrad", Pass.INPUT_GRADIENT, sources, 2 * flops)
            self._reverse.append(lambda: self._contribute(gradient, receivers))
        return y

    def embedding(self, name: str, tokens: str, elements: int) -> str:
        """Look tokens up in this rank's rows of the vocabulary."""
        y = self._value(f"{name}.out", elements)
        op = self._emit(name, Kind.EMBEDDING, (tokens,), (y,))
        gradient = _gradient(op, "wgrad", Pass.WEIGHT_GRADIENT, (f"d.{y}", tokens))
        self._reverse.append(lambda: self._backward.append(gradient))
        return y

    def positions(self, name: str, x: str) -> str:
        """Add learned positions."""
        y = self._value(f"{name}.out", self.elements(x))
        op = self._emit(name, Kind.EMBEDDING, (x,), (y,))
        gradient = _gradient(op, "grad", Pass.GRADIENT, (f"d.{y}",))
        self._reverse.append(lambda: self._contribute(gradient, (x,), alias=f"d.{y}"))
        return y

    def cross_entropy(self, name: str, logits: str, targets: str, scale: str, tokens: int) -> str:
        """Vocabulary-parallel cross-entropy: local statistics, one gather over ``tp``, the loss.

        Its backward writes d.logits over the logits, of which it is the last reader.
        """
        module = f"{name}_statistics"
        statistics = self._value(f"{module}.out", 3 * tokens, Precision.STATISTIC)
        partition = self._value(f"{name}.partition", tokens, Precision.STATISTIC)
        loss = self._value(name, 1, Precision.STATISTIC)
        op = self._emit(module, Kind.CROSS_ENTROPY, (logits, targets), (statistics,))
        gathered = self._collective(f"{name}_gather", Kind.ALL_GATHER, statistics, "tp")
        self._emit(name, Kind.CROSS_ENTROPY, (gathered,), (loss, partition))
        reads = (logits, partition, targets, scale)
        gradient = replace(_gradient(op, "grad", Pass.INPUT_GRADIENT, reads), name=f"{name}.grad")
        self._reverse.append(lambda: self._contribute(gradient, (logits,), alias=logits))
        return loss

    # -- collectives -------------------------------------------------------------------------------------

    def gather(self, name: str, x: str, axis: str, elements: int | None = None) -> str:
        """All-gather a value, or ``elements`` of it, along an axis; its backward is a reduce-scatter."""
        return self._exchange(name, x, axis, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, elements)

    def scatter(self, name: str, x: str, axis: str) -> str:
        """Reduce-scatter tokens along an axis; its backward is an all-gather."""
        return self._exchange(name, x, axis, Kind.REDUCE_SCATTER, Kind.ALL_GATHER)

    def all_to_all(self, name: str, x: str, axis: str) -> str:
        """Give every rank along an axis its part; its backward does the same the other way."""
        return self._exchange(name, x, axis, Kind.ALL_TO_ALL, Kind.ALL_TO_ALL)

    def shift(self, name: str, x: str, axis: str, elements: int) -> str:
        """Send ``elements`` of ``x`` to the next rank of a ring and receive as many from the one before.

        A whole all-gather would repeat: only what the next step needs is there at a time.
        """
        y = self._value(f"{name}.out", elements)
        op = self._emit(name, Kind.SEND_RECEIVE, (x,), (y,), axis=axis, sent_bytes=2 * elements)
        gradient = _gradient(op, "grad", Pass.INPUT_GRADIENT, (f"d.{y}",))
        self._reverse.append(lambda: self._contribute(gradient, (x,)))
        return y

    def _exchange(
        self, name: str, x: str, axis: str, kind: Kind, backward: Kind, elements: int | None = None
    ) -> str:
        y = self._collective(name, kind, x, axis, elements)
        if y != x:
            forward = self._forward[-1]
            gradient = replace(_gradient(forward, "grad", Pass.INPUT_GRADIENT, (f"d.{y}",)), kind=backward)
            self._reverse.append(lambda: self._contribute(gradient, (x,)))
        return y

    def _collective(self, name: str, kind: Kind, x: str, axis: str, elements: int | None = None) -> str:
        degree = self.axes.get(axis, AxisPlacement()).degree
        if degree == 1:
            return x
        gathers = kind is Kind.ALL_GATHER
        part = elements or self.elements(x)
        whole = part * degree if gathers else part
        precision = self._values[x].precision
        result = whole // degree if kind is Kind.REDUCE_SCATTER else whole
        y = self._value(f"{name}.out", result, precision)
        # In a ring, and pairwise, each rank sends all parts of the whole but one.
        sent = precision.bytes_each(2) * whole * (degree - 1) // degree
        self._emit(name, kind, (x,), (y,), axis=axis, sent_bytes=sent)
        return y

    # -- machinery ---------------------------------------------------------------------------------------

    def _emit(
        self,
        name: str,
        kind: Kind,
        reads: tuple[str, ...],
        writes: tuple[str, ...],
        *,
        flops: int = 0,
        axis: str | None = None,
        sent_bytes: int = 0,
    ) -> Operator:
        """Append a forward operator."""
        if len(set(reads)) < len(reads):
            raise ValueError(f"{self.name}: operator {name} reads the same value twice: {', '.join(reads)}")
        for x in reads:
            self._readers[x] = self._readers.get(x, 0) + 1
        op = Operator(
            name=name,
            kind=kind,
            phase=Pass.FORWARD,
            module=name,
            reads=reads,
            writes=writes,
            stream=self.axes[axis].stream if axis else Stream.COMPUTE,
            axis=axis,
            flops=flops,
            bytes=sent_bytes,
        )
        self._forward.append(op)
        return op

    def _both_gradients(
        self, op: Operator, reads: tuple[str, ...], inputs: tuple[str, ...], receivers: tuple[str, ...]
    ) -> None:
        """Gradients of values, from ``reads``, and of weights, from these and the operator's ``inputs``."""

        def reverse() -> None:
            self._contribute(_gradient(op, "dgrad", Pass.INPUT_GRADIENT, reads), receivers)
            self._backward.append(_gradient(op, "wgrad", Pass.WEIGHT_GRADIENT, (*reads, *inputs)))

        self._reverse.append(reverse)

    def _partial(self, x: str) -> str | None:
        """The partial gradient of ``x`` that has arrived so far, if any."""
        return f"d.{x}~{self._arrived[x]}" if self._arrived.get(x) else None

    def _arrive(self, x: str, alias: str | None = None) -> str:
        """Name the gradient of ``x`` that the next contribution writes: whole, or one more partial sum."""
        count = self._arrived[x] = self._arrived.get(x, 0) + 1
        name = f"d.{x}" if count == self._readers[x] else f"d.{x}~{count}"
        return self._value(name, self.elements(x), alias=alias)

    def _contribute(self, operator: Operator, receivers: Iterable[str], alias: str | None = None) -> None:
        """Emit a backward operator that adds to the gradients of the values ``receivers``.

        Where a part of a gradient has arrived before, an addition follows. ``alias``: the value that the
        operator hands on as it is.
        """
        partials = {x: self._partial(x) for x in receivers}
        writes = tuple(
            self._value(f"d.{x}@{operator.module}", self.elements(x), alias=alias)
            if partial
            else self._arrive(x, alias)
            for x, partial in partials.items()
        )
        self._backward.append(replace(operator, writes=writes))
        for (x, partial), part in zip(partials.items(), writes, strict=True):
            if partial:
                addition = Operator(
                    name=f"{operator.module}.{x}.add",
                    kind=Kind.ADD,
                    phase=Pass.INPUT_GRADIENT,
                    module=operator.module,
                    reads=(partial, part),
                    writes=(self._arrive(x),),
                )
                self._backward.append(addition)

    def build(self, output: str) -> Part:
        """Close the part whose result is ``output`` and derive its backward graph."""
        if output in self._readers:
            raise ValueError(f"{self.name}: the output {output} must not be read inside the part")
        if self._values[output].precision is Precision.ACTIVATION:
            self._value(f"d.{output}", self.elements(output))
        for reverse in reversed(self._reverse):
            reverse()
        self._check_gradients()
        return Part(
            name=self.name,
            forward=self._graph(self._forward),
            backward=self._graph(self._backward),
            values=dict(self._values),
            inputs=tuple(self._inputs),
            output=output,
            constants=tuple(self._constants),
        )

    def _graph(self, operators: list[Operator]) -> Graph:
        own = (replace(op, part=self.name, own_name=op.name, measured_as=op.name) for op in operators)
        return Graph(operators=tuple(own))

    def _check_gradients(self) -> None:
        for op in self._backward:
            if missing := [name for name in op.reads if name not in self._values]:
                raise ValueError(
                    f"{self.name}: {op.name} needs {missing[0]}, which no operator writes; "
                    f"use every operator's result, once more or as the part's output"
                )


def _gradient(
    op: Operator, suffix: str, phase: Pass, reads: tuple[str, ...], flops: int | None = None
) -> Operator:
    """A backward operator, of as many FLOPs as its forward one; who emits it says what it writes."""
    name, flops = f"{op.name}.{suffix}", op.flops if flops is None else flops
    return replace(op, name=name, phase=phase, reads=reads, writes=(), flops=flops)
