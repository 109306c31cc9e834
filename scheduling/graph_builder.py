"""Writes a part of the model forward and derives its backward graph by walking it in reverse."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

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
    one vanish and return their input.
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
        self, name: str, elements: int, precision: Precision = Precision.ACTIVATION, alias: str | None = None
    ) -> str:
        assert name not in self._values, f"value {name} is written twice"
        owner = self._values[alias].alias_of or alias if alias else None
        self._values[name] = Value(name=name, elements=elements, precision=precision, alias_of=owner)
        return name

    def elements(self, value: str) -> int:
        """Elements of a value on one rank."""
        return self._values[value].elements

    # -- operators ---------------------------------------------------------------------------------------

    def norm(self, name: str, x: str, tokens: int) -> str:
        """Normalise tokens; saves a statistic of each. Its backward also adds the gradient of a skip."""
        y = self._value(f"{name}.out", self.elements(x))
        statistics = self._value(f"{name}.statistics", tokens, Precision.STATISTIC)
        self._emit(name, Kind.NORM, (x,), (y, statistics), differentiable=(x,))

        def reverse() -> None:
            partial = self._partial(x)
            reads = (f"d.{y}", x, statistics, *((partial,) if partial else ()))
            self._emit_gradient(f"{name}.grad", Kind.NORM, Pass.GRADIENT, name, reads, (self._arrive(x),))

        self._reverse.append(reverse)
        return y

    def gemm(self, name: str, x: str, elements: int, flops: int) -> str:
        """Multiply by a weight; input and weight gradients are separate operators."""
        y = self._value(f"{name}.out", elements)
        self._emit(name, Kind.GEMM, (x,), (y,), differentiable=(x,), flops=flops)

        def reverse() -> None:
            self._contribute(
                x, f"{name}.dgrad", Kind.GEMM, Pass.INPUT_GRADIENT, name, (f"d.{y}",), flops=flops
            )
            reads = (f"d.{y}", x)
            self._emit_gradient(
                f"{name}.wgrad", Kind.GEMM, Pass.WEIGHT_GRADIENT, name, reads, (), flops=flops
            )

        self._reverse.append(reverse)
        return y

    def attention(self, name: str, qkv: str, elements: int, flops: int, saved_elements: int) -> str:
        """Attend; what the kernel needs for its backward is one opaque saved value."""
        y = self._value(f"{name}.out", elements)
        saved = self._value(f"{name}.saved", saved_elements)
        self._emit(name, Kind.ATTENTION, (qkv,), (y, saved), differentiable=(qkv,), flops=flops)

        def reverse() -> None:
            reads = (f"d.{y}", saved)
            self._contribute(
                qkv, f"{name}.grad", Kind.ATTENTION, Pass.INPUT_GRADIENT, name, reads, flops=2 * flops
            )

        self._reverse.append(reverse)
        return y

    def activation(self, name: str, x: str, elements: int) -> str:
        """Apply a pointwise (possibly gated) function without parameters."""
        y = self._value(f"{name}.out", elements)
        self._emit(name, Kind.ACTIVATION, (x,), (y,), differentiable=(x,))
        self._reverse.append(
            lambda: self._contribute(
                x, f"{name}.grad", Kind.ACTIVATION, Pass.INPUT_GRADIENT, name, (f"d.{y}", x)
            )
        )
        return y

    def residual(self, name: str, branch: str, skip: str) -> str:
        """Add a branch (and its bias, if the module has one) to the residual stream."""
        y = self._value(f"{name}.out", self.elements(skip))
        self._emit(name, Kind.RESIDUAL, (branch, skip), (y,), differentiable=(branch, skip))

        def reverse() -> None:
            assert self._partial(skip) is None and self._partial(branch) is None, (
                "a residual's operands must not be read again after it"
            )
            writes = (self._arrive(branch, alias=f"d.{y}"), self._arrive(skip, alias=f"d.{y}"))
            self._emit_gradient(f"{name}.grad", Kind.RESIDUAL, Pass.GRADIENT, name, (f"d.{y}",), writes)

        self._reverse.append(reverse)
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
        self._emit(name, Kind.CUSTOM, reads, (y, saved), differentiable=reads, flops=flops)

        def reverse() -> None:
            sources = (f"d.{y}", saved)
            partials = [self._partial(x) for x in reads]
            fresh = tuple(
                self._arrive(x) if partial is None else self._value(f"d.{x}@{name}", self.elements(x))
                for x, partial in zip(reads, partials, strict=True)
            )
            self._emit_gradient(
                f"{name}.dgrad", Kind.CUSTOM, Pass.INPUT_GRADIENT, name, sources, fresh, flops=2 * flops
            )
            for x, partial, part in zip(reads, partials, fresh, strict=True):
                if partial is not None:
                    self._add(x, partial, part, name)
            if splits_weight_gradient:
                self._emit_gradient(
                    f"{name}.wgrad", Kind.CUSTOM, Pass.WEIGHT_GRADIENT, name, sources, (), flops=flops
                )

        self._reverse.append(reverse)
        return y

    def embedding(self, name: str, tokens: str, elements: int) -> str:
        """Look tokens up in this rank's rows of the vocabulary."""
        y = self._value(f"{name}.out", elements)
        self._emit(name, Kind.EMBEDDING, (tokens,), (y,), differentiable=())
        self._reverse.append(
            lambda: self._emit_gradient(
                f"{name}.wgrad", Kind.EMBEDDING, Pass.WEIGHT_GRADIENT, name, (f"d.{y}", tokens), ()
            )
        )
        return y

    def positions(self, name: str, x: str) -> str:
        """Add learned positions."""
        y = self._value(f"{name}.out", self.elements(x))
        self._emit(name, Kind.EMBEDDING, (x,), (y,), differentiable=(x,))

        def reverse() -> None:
            writes = (self._arrive(x, alias=f"d.{y}"),)
            self._emit_gradient(f"{name}.grad", Kind.EMBEDDING, Pass.GRADIENT, name, (f"d.{y}",), writes)

        self._reverse.append(reverse)
        return y

    def cross_entropy(self, name: str, logits: str, targets: str, scale: str, tokens: int) -> str:
        """Vocabulary-parallel cross-entropy: local statistics, one gather over ``tp``, the loss.

        Its backward writes d.logits over the logits, of which it is the last reader.
        """
        statistics = self._value(f"{name}_statistics.out", 3 * tokens, Precision.STATISTIC)
        partition = self._value(f"{name}.partition", tokens, Precision.STATISTIC)
        loss = self._value(name, 1, Precision.STATISTIC)
        module = f"{name}_statistics"
        self._emit(module, Kind.CROSS_ENTROPY, (logits, targets), (statistics,), differentiable=(logits,))
        gathered = self._collective(f"{name}_gather", Kind.ALL_GATHER, statistics, "tp")
        self._emit(name, Kind.CROSS_ENTROPY, (gathered,), (loss, partition), differentiable=())

        def reverse() -> None:
            d_logits = self._arrive(logits, alias=logits)
            reads = (logits, partition, targets, scale)
            self._emit_gradient(
                f"{name}.grad", Kind.CROSS_ENTROPY, Pass.INPUT_GRADIENT, module, reads, (d_logits,)
            )

        self._reverse.append(reverse)
        return loss

    # -- collectives -------------------------------------------------------------------------------------

    def gather(self, name: str, x: str, axis: str) -> str:
        """All-gather tokens along an axis; its backward is a reduce-scatter."""
        return self._exchange(name, x, axis, Kind.ALL_GATHER, Kind.REDUCE_SCATTER)

    def scatter(self, name: str, x: str, axis: str) -> str:
        """Reduce-scatter tokens along an axis; its backward is an all-gather."""
        return self._exchange(name, x, axis, Kind.REDUCE_SCATTER, Kind.ALL_GATHER)

    def _exchange(self, name: str, x: str, axis: str, kind: Kind, backward: Kind) -> str:
        y = self._collective(name, kind, x, axis)
        if y != x:
            self._readers[x] = self._readers.get(x, 0) + 1
            placement = self.axes[axis]

            def reverse() -> None:
                self._contribute(
                    x,
                    f"{name}.grad",
                    backward,
                    Pass.INPUT_GRADIENT,
                    name,
                    (f"d.{y}",),
                    stream=placement.stream,
                    axis=axis,
                    moved=_bytes_sent(max(self.elements(x), self.elements(y)), placement.degree),
                )

            self._reverse.append(reverse)
        return y

    def _collective(self, name: str, kind: Kind, x: str, axis: str) -> str:
        placement = self.axes.get(axis, AxisPlacement())
        if placement.degree == 1:
            return x
        small, large = self.elements(x), self.elements(x)
        if kind is Kind.ALL_GATHER:
            large = small * placement.degree
            y_elements = large
        else:
            small = large // placement.degree
            y_elements = small
        y = self._value(f"{name}.out", y_elements, self._values[x].precision)
        self._forward.append(
            Operator(
                name=name,
                kind=kind,
                phase=Pass.FORWARD,
                module=name,
                reads=(x,),
                writes=(y,),
                stream=placement.stream,
                axis=axis,
                bytes=_bytes_sent(large, placement.degree),
            )
        )
        return y

    # -- machinery ---------------------------------------------------------------------------------------

    def _emit(
        self,
        name: str,
        kind: Kind,
        reads: tuple[str, ...],
        writes: tuple[str, ...],
        *,
        differentiable: Iterable[str],
        flops: int = 0,
    ) -> None:
        for x in differentiable:
            self._readers[x] = self._readers.get(x, 0) + 1
        self._forward.append(
            Operator(
                name=name,
                kind=kind,
                phase=Pass.FORWARD,
                module=name,
                reads=reads,
                writes=writes,
                flops=flops,
            )
        )

    def _emit_gradient(
        self,
        name: str,
        kind: Kind,
        phase: Pass,
        module: str,
        reads: tuple[str, ...],
        writes: tuple[str, ...],
        *,
        flops: int = 0,
        stream: Stream = Stream.COMPUTE,
        axis: str | None = None,
        moved: int = 0,
    ) -> None:
        self._backward.append(
            Operator(
                name=name,
                kind=kind,
                phase=phase,
                module=module,
                reads=reads,
                writes=writes,
                flops=flops,
                stream=stream,
                axis=axis,
                bytes=moved,
            )
        )

    def _partial(self, x: str) -> str | None:
        """The partial gradient of ``x`` that has arrived so far, if any."""
        return f"d.{x}~{self._arrived[x]}" if self._arrived.get(x) else None

    def _arrive(self, x: str, alias: str | None = None) -> str:
        """Name the gradient of ``x`` that the next contribution writes: whole, or one more partial sum."""
        count = self._arrived[x] = self._arrived.get(x, 0) + 1
        name = f"d.{x}" if count == self._readers.get(x, 0) else f"d.{x}~{count}"
        return self._value(name, self.elements(x), alias=alias)

    def _contribute(
        self,
        x: str,
        name: str,
        kind: Kind,
        phase: Pass,
        module: str,
        reads: tuple[str, ...],
        *,
        flops: int = 0,
        stream: Stream = Stream.COMPUTE,
        axis: str | None = None,
        moved: int = 0,
    ) -> None:
        """Emit an operator that adds to the gradient of ``x``, and the addition where it is not the first."""
        partial = self._partial(x)
        target = self._arrive(x) if partial is None else self._value(f"d.{x}@{module}", self.elements(x))
        self._emit_gradient(
            name, kind, phase, module, reads, (target,), flops=flops, stream=stream, axis=axis, moved=moved
        )
        if partial is not None:
            self._add(x, partial, target, module)

    def _add(self, x: str, partial: str, part: str, module: str) -> None:
        name = f"{module}.{x}.add"
        self._emit_gradient(name, Kind.ADD, Pass.INPUT_GRADIENT, module, (partial, part), (self._arrive(x),))

    def build(self, output: str) -> Part:
        """Close the part whose result is ``output`` and derive its backward graph."""
        if self._values[output].precision is Precision.ACTIVATION:
            self._value(f"d.{output}", self.elements(output))
        for reverse in reversed(self._reverse):
            reverse()
        return Part(
            name=self.name,
            forward=Graph(operators=tuple(self._forward)),
            backward=Graph(operators=tuple(self._backward)),
            values=dict(self._values),
            inputs=tuple(self._inputs),
            output=output,
            constants=tuple(self._constants),
        )


def _bytes_sent(elements: int, degree: int) -> int:
    """Bytes each rank sends in a ring all-gather or reduce-scatter whose whole tensor has ``elements``."""
    return 2 * elements * (degree - 1) // degree
