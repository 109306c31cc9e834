"""Operators, and the graphs of operators that make up the passes of a layer.

Operators read and write named *values*; the forward pass's values that a backward operator reads are saved,
and a value dies with its last reader. This file does not know how an operator computes.
`braid.scheduling.model.builder.LayerBuilder` writes graphs.

Names: the gradient of value ``x`` is ``d.x``; until all readers of ``x`` have contributed, the partial sums
are ``d.x~1``, ``d.x~2``, ...
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.partition import Region
from braid.scheduling.model.parameters import Parameters
from braid.scheduling.text.pattern import is_layer, measured_kind


class Phase(StrEnum):
    """What an operator computes for its module; it selects the module's method that the executor calls."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    INPUT_GRADIENT = "input_gradient"
    WEIGHT_GRADIENT = "weight_gradient"
    GRADIENT = "gradient"
    """Input and weight gradients in one operator, for modules where two would not pay off (norms, biases)."""


class Kind(StrEnum):
    GEMM = "gemm"
    ATTENTION = "attention"
    ROTARY = "rotary"
    """Splits queries, keys and values into rotated queries, and rotated keys with values (context
    parallelism)."""
    NORM = "norm"
    ACTIVATION = "activation"
    RESIDUAL = "residual"
    EMBEDDING = "embedding"
    CROSS_ENTROPY = "cross_entropy"
    ADD = "add"
    CUSTOM = "custom"
    ROUTER = "router"
    """Scores experts for every token, chooses the best ones, and computes where rows go."""
    PERMUTE = "permute"
    """Reorders rows of tokens by expert, or reorders them back and sums them with weights."""
    GROUPED_GEMM = "grouped_gemm"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    SEND_RECEIVE = "send_receive"
    """A ring shift: each rank sends to the next rank and receives from the previous (context parallelism)."""

    @property
    def communicates(self) -> bool:
        return self in _COLLECTIVES


_COLLECTIVES = frozenset(
    (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.ALL_TO_ALL, Kind.SEND_RECEIVE)
)


class Precision(StrEnum):
    """Storage type of a value; its bytes per element follow from the run's dtype (`bytes_each`)."""

    ACTIVATION = "activation"
    STATISTIC = "statistic"
    INDEX = "index"

    def bytes_each(self, activation_bytes: int) -> int:
        """Return bytes per element if activations take ``activation_bytes``; statistics take at least 4
        bytes."""
        match self:
            case Precision.ACTIVATION:
                return activation_bytes
            case Precision.STATISTIC:
                return max(4, activation_bytes)
            case Precision.INDEX:
                return 8


@dataclass(frozen=True)
class Piece:
    """Marks an operator as one of the pieces into which a partition cuts a collective or adjacent operator.

    `braid.scheduling.generate.partitions` makes pieces.
    """

    whole: str
    """Name of the operator that is cut."""
    number: int
    """Number of the piece, from 1."""
    ways: int
    measured_as: str
    """Name, inside its part, under which profiles hold the operator that is cut."""
    share: float = 1.0
    """Fraction of the whole operator's computation or payload."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """A named tensor that operators read and write; ``elements`` is its number of elements on one rank."""

    name: str
    elements: int
    precision: Precision = Precision.ACTIVATION
    statistics: int = 0
    """Number of additional elements of statistic precision inside an opaque value (attention's
    log-sum-exp)."""
    alias_of: str | None = None
    """Name of the value whose memory this value shares; None if it has memory of its own."""
    rows: int = 1
    """Number of tokens, each with equally many elements."""
    region: Region | None = None
    """Rows and columns that this value holds, if it is a piece of another value; else None."""
    piece_of: str | None = None
    """Name of the whole value that also holds the rows of this piece; None if there is no such value."""
    keeps: str | None = None
    """Name of another value that this opaque value keeps alive: attention's saved value holds its output."""
    gradient_of: str | None = None
    """Name of the value whose whole gradient this value is; None for partial sums and all other values."""

    @property
    def columns(self) -> int:
        """Number of elements per token."""
        return self.elements // self.rows

    def bytes(self, activation_bytes: int) -> int:
        """Return the value's bytes on one rank if an activation element takes ``activation_bytes``."""
        plain = self.elements * self.precision.bytes_each(activation_bytes)
        return plain + self.statistics * Precision.STATISTIC.bytes_each(activation_bytes)


class OperatorKey(NamedTuple):
    """Name under which a profile lists an operator: ``PART/OPERATOR``."""

    part: str
    operator: str

    def __str__(self) -> str:
        return f"{self.part}/{self.operator}"

    @classmethod
    def parse(cls, text: str) -> "OperatorKey":
        """Parse the text that ``str`` returns for a key."""
        part, _, operator = text.partition("/")
        return cls(part, operator)


@dataclass(frozen=True, kw_only=True)
class Operator:
    """A node of a graph. ``module`` names the holder of the parameters; ``axis`` is a collective's mesh axis.

    ``name`` is unique in its graph, also where several parts form one unit (``1.layer/qkv.again``); it is
    composed of ``place`` (index of the part in the unit), ``part`` and ``own_name`` (``qkv.again``).
    ``measured_as`` (``qkv``) is its name, inside the part, in profiles.
    """

    name: str
    kind: Kind
    phase: Phase
    module: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    stream: Stream = Stream.COMPUTE
    axis: str | None = None
    flops: int = 0
    bytes: int = 0
    """Bytes that each rank sends in a collective if an activation element takes two bytes; 0 for compute."""
    part: str = ""
    place: int = 0
    own_name: str = ""
    """Name of the operator inside its part; by default ``name``."""
    measured_as: str = ""
    """Name of the operator in the same part whose measured time applies; by default ``own_name``."""
    piece: Piece | None = None

    def __post_init__(self) -> None:
        if not self.own_name:
            object.__setattr__(self, "own_name", self.name)
        if not self.measured_as:
            object.__setattr__(self, "measured_as", self.own_name)

    @cached_property
    def key(self) -> str:
        """Name under which a profile lists the operator: ``PART/OPERATOR``."""
        return str(OperatorKey(measured_kind(self.part), self.measured_as))

    @property
    def completes(self) -> bool:
        """Whether this operator writes the last piece of a value and so completes the whole value."""
        return self.piece is not None and len(self.writes) > 1

    def completed_by(self, other: "Operator") -> bool:
        """Return whether this operator writes a piece of a value of which ``other`` writes the last piece."""
        if self is other or self.piece is None or other.piece is None or not other.completes:
            return False
        return self.piece.whole == other.piece.whole and self.place == other.place

    @property
    def adds_gradients(self) -> bool:
        return self.phase in (Phase.WEIGHT_GRADIENT, Phase.GRADIENT)


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Operators of one pass in an order that respects their data dependences."""

    operators: tuple[Operator, ...]

    def __post_init__(self) -> None:
        names = [op.name for op in self.operators]
        assert len(set(names)) == len(names), f"operator names are not unique: {names}"
        for name in names:
            if not name or name.split() != [name] or "#" in name:
                raise ValueError(f"operator {name!r}: a name is one word without '#', as schedules are text")

    def named(self, name: str) -> Operator:
        """Return the operator with that name; `KeyError` if there is none."""
        for op in self.operators:
            if op.name == name:
                return op
        raise KeyError(name)

    @property
    def flops(self) -> int:
        """Floating-point operations of all operators on one rank."""
        return sum(op.flops for op in self.operators)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A layer, the embedding or the head: its forward and its backward graph, which share values.

    A part that ends the model may run its backward pass `at_once`: its forward graph then holds all operators
    of both passes, and its empty backward graph only passes on the gradients of the inputs.
    """

    name: str
    forward: Graph
    backward: Graph
    values: Mapping[str, Value]
    inputs: tuple[str, ...]
    output: str
    constants: tuple[str, ...] = ()
    """Names of the inputs that the executor provides, not the previous part (tokens, targets, loss_scale)."""
    modules: Mapping[str, Parameters] = field(default_factory=dict)
    """Module name -> its trained parameters, if it has any; empty for a unit of several parts."""
    frozen: Mapping[str, Parameters] = field(default_factory=dict)
    """Module name -> its parameters that are not trained, likewise."""
    members: tuple["Part", ...] = ()
    """Parts that were joined, if this is a unit of several parts; else empty."""

    @property
    def parameters(self) -> Parameters:
        """All modules' trained parameters; a head that shares the embedding's table counts the
        table too."""
        counts = [member.parameters for member in self.members] or self.modules.values()
        return sum(counts, Parameters())

    @property
    def frozen_parameters(self) -> Parameters:
        """All modules' parameters that are not trained, likewise."""
        counts = [member.frozen_parameters for member in self.members] or self.frozen.values()
        return sum(counts, Parameters())

    @property
    def has_layers(self) -> bool:
        """Whether the part is or contains a layer. Embedding and head alone are too short to be worth a
        search."""
        return any(is_layer(member.name) for member in self.members or (self,))

    @property
    def evaluation(self) -> Graph:
        """Forward graph without any gradient operators, for validation."""
        return Graph(operators=tuple(op for op in self.forward.operators if op.phase is Phase.FORWARD))

    def without_gradients(self, module: str) -> "Part":
        """Return the part with a backward graph that ends here: one operator drops the output's gradient,
        which nothing needs if the part begins the model and is not trained. ``module``: that of the
        operator."""
        drop = Operator(
            name=f"{module}.drop",
            kind=Kind.EMBEDDING,
            phase=Phase.INPUT_GRADIENT,
            module=module,
            reads=(f"d.{self.output}",),
            writes=(),
            part=self.name,
        )
        return replace(self, backward=Graph(operators=(drop,)))

    def at_once(self) -> "Part":
        """Return the part with its backward operators moved to the end of its forward graph.

        Between the passes it then keeps only the gradients of its inputs. Weight gradients come before the
        input gradients of their modules, so that inputs that only weight gradients read die first. Raises
        `ValueError` if the backward pass reads the gradient of the part's output, which another part would
        compute.
        """
        gradient = f"d.{self.output}"
        if any(gradient in op.reads for op in self.backward.operators):
            raise ValueError(f"{self.name}: {gradient} comes from another part; only a loss starts at once")
        weights = {op.module: op for op in self.backward.operators if op.phase is Phase.WEIGHT_GRADIENT}
        order = list(self.forward.operators)
        for op in self.backward.operators:
            if op.phase is Phase.INPUT_GRADIENT and op.module in weights:
                order.append(weights.pop(op.module))
            if op not in order:
                order.append(op)
        return replace(self, forward=Graph(operators=tuple(order)), backward=Graph(operators=()))

    def balanced(self) -> "Part":
        """Return an `at_once` part with the operators from the first gradient collective on in its backward
        graph.

        In a paired block the forward pass with the head is the longer chain of compute and transfers, for
        which the other pass waits; this shortens it. The largest values are dead by then.
        """
        operators = self.forward.operators
        tail = next(
            (n for n, op in enumerate(operators) if op.phase is not Phase.FORWARD and op.kind.communicates),
            len(operators),
        )
        return replace(
            self,
            forward=Graph(operators=operators[:tail]),
            backward=Graph(operators=(*operators[tail:], *self.backward.operators)),
        )

    def saved(self) -> tuple[str, ...]:
        """Return the names of the values that the forward pass keeps for the backward pass, in writing order.

        These are values (inputs too) that backward operators read, and finished gradients of inputs.
        """
        needed = {name for op in self.backward.operators for name in op.reads}
        needed |= {f"d.{name}" for name in self.inputs}
        written = [*self.inputs, *(name for op in self.forward.operators for name in op.writes)]
        recomputed = {n for op in self.backward.operators if op.phase is Phase.RECOMPUTE for n in op.writes}
        return tuple(name for name in written if name in needed and name not in recomputed)

    def saved_bytes(self, activation_bytes: int) -> int:
        """Return the bytes of the values in `saved`, which one micro-batch keeps; aliases count once."""
        owners = {self.values[name].alias_of or name for name in self.saved()} - set(self.constants)
        return sum(self.values[name].bytes(activation_bytes) for name in owners)
