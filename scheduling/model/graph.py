"""Builds the forward graph of a part of the model and derives its backward graph in reverse order.

This file holds the code that all kinds of operators share; the kinds are methods of
`braid.scheduling.model.builder.LayerBuilder`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.mesh import beyond
from braid.scheduling.model.operators import Graph, Kind, Operator, Part, Phase, Precision, Value
from braid.scheduling.model.parameters import HeldAs, HeldTensor, Parameters
from braid.scheduling.model.sizes import PartSizes


@dataclass(frozen=True)
class Dims:
    """Size of a value: number of tokens on a rank, and full width, of which the rank holds a 1/``cut``
    slice."""

    tokens: int
    width: int
    cut: int = 1

    @property
    def elements(self) -> int:
        """Number of elements on one rank."""
        return self.tokens * self.width // self.cut


class GraphBuilder:
    """A part of the model under construction: its values, its operators in order, and how to differentiate
    each operator."""

    def __init__(self, name: str, sizes: PartSizes) -> None:
        self.name, self.sizes, self.shape = name, sizes, sizes.shape
        self.beyond = beyond(sizes.own) if sizes.own else ""
        """Axis of the ranks of ``tp`` that hold copies of the part's matrices, since its tensor-parallel
        degree is smaller than ``tp``; empty otherwise."""
        self.frozen = sizes.shape.lora is not None
        """Whether parameters are not trained, unless they are adapters."""
        self._stream: set[str] = set()
        """Names of values that hold the residual stream."""
        self._dims: dict[str, Dims] = {}
        self._values: dict[str, Value] = {}
        self._inputs: list[str] = []
        self._constants: list[str] = []
        self._forward: list[Operator] = []
        self._backward: list[Operator] = []
        self._reverse: list[Callable[[], None]] = []
        """Functions that each append the backward operators of one forward operator, in forward order."""
        self._readers: dict[str, int] = {}
        self._arrived: dict[str, int] = {}
        self._modules: dict[str, Parameters] = {}
        self._frozen: dict[str, Parameters] = {}

    # -- values --------------------------------------------------------------------------------------------

    def dims(self, value: str) -> Dims:
        """Return tokens and width of a value, given its name."""
        return self._dims[value]

    def _value(
        self,
        name: str,
        dims: Dims,
        precision: Precision = Precision.ACTIVATION,
        *,
        statistics: int = 0,
        alias: str | None = None,
        keeps: str | None = None,
        gradient_of: str | None = None,
    ) -> str:
        """Add a new value of size ``dims`` and return its name.

        ``statistics``, ``keeps``, ``gradient_of``: as in `Value`; ``alias``: name of a value whose memory it
        shares.
        """
        if name in self._values:
            raise ValueError(f"{self.name}: value {name} is written twice; give every operator its own name")
        owner = self._values[alias].alias_of or alias if alias else None
        self._dims[name] = dims
        self._values[name] = Value(
            name=name,
            elements=dims.elements,
            rows=dims.tokens,
            precision=precision,
            statistics=statistics,
            alias_of=owner,
            keeps=keeps,
            gradient_of=gradient_of,
        )
        return name

    def _input(self, name: str, dims: Dims, precision: Precision = Precision.ACTIVATION) -> str:
        """Add an input of the part and return its name.

        An activation is the previous part's output; other inputs are constants without gradient.
        """
        self._inputs.append(self._value(name, dims, precision))
        if precision is not Precision.ACTIVATION:
            self._constants.append(name)
        return name

    # -- operators -----------------------------------------------------------------------------------------

    def _holds(
        self,
        module: str,
        elements: int,
        held: HeldAs = "cut",
        *,
        adapter: bool = False,
        matrix: bool = False,
    ) -> None:
        """Add a tensor to a module's parameters on a rank, in the order in which the module holds them.

        ``elements``: number on this rank; with 0 nothing is added. ``adapter``: whether the tensor is trained
        while other parameters are frozen; ``matrix``: whether it holds matrices of hidden layers.
        """
        apart: tuple[str, ...] = ()
        if self.beyond and held != "whole":
            apart = (self.beyond, "edp" if held == "experts" else "dp")
        if apart == ("tp", "dp"):  # every rank of tp holds the whole tensor
            held, apart = "whole", ()
        counts = self._frozen if self.frozen and not adapter else self._modules
        if elements:
            tensor = HeldTensor(elements, held, matrix, apart)
            counts[module] = counts.get(module, Parameters()) + Parameters((tensor,))

    def _trains(self, module: str) -> bool:
        """Return whether a module has weight gradients: all have, unless parameters are frozen and the module
        has no adapters."""
        return not self.frozen or module in self._modules

    def _emit(
        self,
        name: str,
        kind: Kind,
        reads: tuple[str, ...],
        writes: tuple[str, ...],
        *,
        flops: int = 0,
        axis: str | None = None,
        stream: Stream = Stream.COMPUTE,
        sent_bytes: int = 0,
    ) -> Operator:
        """Append a forward operator and return it.

        `_one_gradient`, `_both_gradients` or `_gradient_with_skip` must then define its backward pass.
        """
        if len(set(reads)) < len(reads):
            raise ValueError(f"{self.name}: operator {name} reads the same value twice: {', '.join(reads)}")
        for x in reads:
            self._readers[x] = self._readers.get(x, 0) + 1
        op = Operator(
            name=name,
            kind=kind,
            phase=Phase.FORWARD,
            module=name,
            reads=reads,
            writes=writes,
            stream=stream,
            axis=axis,
            flops=flops,
            bytes=sent_bytes,
        )
        self._forward.append(op)
        return op

    def _gradient_of_all(self, op: Operator, reads: tuple[str, ...]) -> Operator:
        """Return the operator that computes the input gradients of ``op``, and its weight gradients if it has
        trained parameters."""
        trains = self._trains(op.module)
        return gradient_of(op, reads, phase=Phase.GRADIENT if trains else Phase.INPUT_GRADIENT)

    def _one_gradient(
        self,
        gradient: Operator,
        receivers: tuple[str, ...],
        alias: str | None = None,
        apart: tuple[str, ...] = (),
    ) -> None:
        """Define a backward pass that consists of one operator, ``gradient``, which writes the gradients of
        ``receivers``.

        ``alias``: value whose memory holds them, except the gradients of ``apart``.
        """
        self._reverse.append(lambda: self._contribute(gradient, receivers, alias, apart))

    def _both_gradients(
        self,
        op: Operator,
        reads: tuple[str, ...],
        inputs: tuple[str, ...],
        receivers: tuple[str, ...],
        constants: tuple[str, ...] = (),
        weight_flops: int | None = None,
    ) -> None:
        """Define a backward pass of two operators: input gradients (dgrad) and weight gradients (wgrad).

        The first reads ``reads`` and writes the gradients of ``receivers``; the second reads ``reads`` and
        ``inputs``. Both also read ``constants``, values without gradient. ``weight_flops``: FLOPs of the
        second, by default those of ``op``. A module without trained parameters has the first operator only.
        """

        def reverse() -> None:
            self._contribute(gradient_of(op, (*reads, *constants), "dgrad"), receivers)
            if self._trains(op.module):
                read = (*reads, *inputs, *constants)
                self._backward.append(gradient_of(op, read, "wgrad", Phase.WEIGHT_GRADIENT, weight_flops))

        self._reverse.append(reverse)

    def _gradient_with_skip(self, gradient: Operator, x: str) -> None:
        """Define a backward pass of one operator, which computes the gradient of ``x`` and adds the partial
        gradient that other readers of ``x`` have contributed."""

        def reverse() -> None:
            skip = self._partial(x)
            reads = (*gradient.reads, skip) if skip else gradient.reads
            self._backward.append(replace(gradient, reads=reads, writes=(self._arrive(x),)))

        self._reverse.append(reverse)

    def _partial(self, x: str) -> str | None:
        """Return the name of the partial sum of ``x``'s gradient so far; None if nothing was contributed."""
        return f"d.{x}~{self._arrived[x]}" if self._arrived.get(x) else None

    def _arrive(self, x: str, alias: str | None = None) -> str:
        """Add the value that the next contribution to ``x``'s gradient writes, and return its name: ``d.x``
        if it is the last contribution, else a partial sum."""
        count = self._arrived[x] = self._arrived.get(x, 0) + 1
        last = count == self._readers[x]
        name, whole = (f"d.{x}", x) if last else (f"d.{x}~{count}", None)
        return self._value(name, self._dims[x], self._values[x].precision, alias=alias, gradient_of=whole)

    def _contribute(
        self,
        operator: Operator,
        receivers: Iterable[str],
        alias: str | None = None,
        apart: tuple[str, ...] = (),
    ) -> None:
        """Append a backward operator that contributes to the gradients of the values ``receivers``.

        If a value has a partial gradient already, an operator that adds both follows.
        """
        partials = {x: self._partial(x) for x in receivers}
        shared = {x: None if x in apart else alias for x in partials}
        writes = tuple(
            self._value(f"d.{x}@{operator.module}", self._dims[x], self._values[x].precision, alias=shared[x])
            if partial
            else self._arrive(x, shared[x])
            for x, partial in partials.items()
        )
        self._backward.append(replace(operator, writes=writes))
        for (x, partial), part in zip(partials.items(), writes, strict=True):
            if partial:
                addition = Operator(
                    name=f"{operator.module}.{x}.add",
                    kind=Kind.ADD,
                    phase=Phase.INPUT_GRADIENT,
                    module=operator.module,
                    reads=(partial, part),
                    writes=(self._arrive(x),),
                )
                self._backward.append(addition)

    # -- the whole part ------------------------------------------------------------------------------------

    def build(self, output: str) -> Part:
        """Return the finished part, whose result is the value ``output``, with its derived backward graph."""
        if output in self._readers:
            raise ValueError(f"{self.name}: the output {output} must not be read inside the part")
        if self._values[output].precision is Precision.ACTIVATION:
            self._value(f"d.{output}", self._dims[output], gradient_of=output)
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
            modules=dict(self._modules),
            frozen=dict(self._frozen),
        )

    def _graph(self, operators: list[Operator]) -> Graph:
        named = (replace(op, part=self.name, own_name=op.name, measured_as=op.name) for op in operators)
        return Graph(operators=tuple(named))

    def _check_gradients(self) -> None:
        for op in self._backward:
            if missing := [name for name in op.reads if name not in self._values]:
                raise ValueError(
                    f"{self.name}: {op.name} needs {missing[0]}, which no operator writes; "
                    f"use every operator's result, once more or as the part's output"
                )


def gradient_of(
    op: Operator,
    reads: tuple[str, ...],
    suffix: str = "grad",
    phase: Phase = Phase.INPUT_GRADIENT,
    flops: int | None = None,
) -> Operator:
    """Return a backward operator of ``op`` named ``NAME.SUFFIX``, whose ``writes`` the caller must set.

    ``flops``: by default those of ``op``.
    """
    name, flops = f"{op.name}.{suffix}", op.flops if flops is None else flops
    return replace(op, name=name, phase=phase, reads=reads, writes=(), flops=flops)
