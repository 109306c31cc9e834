"""Operators and the graphs that a layer's passes are made of.

Operators read and write named *values*; what a backward operator reads of the forward pass is
what has to be saved, and a value dies with its last reader. Nothing here knows how an operator computes.
Graphs are written with `braid.scheduling.model.builder.LayerBuilder`.

Names: the gradient of value ``x`` is ``d.x``; while several readers of ``x`` still owe their part of it, the
partial sums are ``d.x~1``, ``d.x~2``, ...
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.partition import Region
from braid.scheduling.text.pattern import is_layer, measured_kind


class Phase(StrEnum):
    """What an operator does for its module: the method that the executor calls."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    INPUT_GRADIENT = "input_gradient"
    WEIGHT_GRADIENT = "weight_gradient"
    GRADIENT = "gradient"
    """Input and weight gradients in one operator, where splitting them would not pay (norms, biases)."""


class Kind(StrEnum):
    """The closed set of operator kinds."""

    GEMM = "gemm"
    ATTENTION = "attention"
    ROTARY = "rotary"
    """Queries apart from keys and values, turned by their positions (context parallelism)."""
    NORM = "norm"
    ACTIVATION = "activation"
    RESIDUAL = "residual"
    EMBEDDING = "embedding"
    CROSS_ENTROPY = "cross_entropy"
    ADD = "add"
    CUSTOM = "custom"
    ROUTER = "router"
    """Scores of every expert for every token, the best, and which rows go where (mixture of experts)."""
    PERMUTE = "permute"
    """Tokens brought into the order of their experts, or back and weighted."""
    GROUPED_GEMM = "grouped_gemm"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    SEND_RECEIVE = "send_receive"
    """A ring shift: every rank sends to the next and receives from the one before (context parallelism)."""

    @property
    def communicates(self) -> bool:
        """Whether the operator is a collective."""
        return self in _COLLECTIVES


_COLLECTIVES = frozenset(
    (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.ALL_TO_ALL, Kind.SEND_RECEIVE)
)


class Precision(StrEnum):
    """How a value is stored; its size in bytes follows from the run's dtype."""

    ACTIVATION = "activation"
    STATISTIC = "statistic"
    INDEX = "index"

    def bytes_each(self, activation_bytes: int) -> int:
        """Bytes of one element when activations take ``activation_bytes``; statistics take at least 4."""
        match self:
            case Precision.ACTIVATION:
                return activation_bytes
            case Precision.STATISTIC:
                return max(4, activation_bytes)
            case Precision.INDEX:
                return 8


@dataclass(frozen=True)
class Piece:
    """Which piece of a collective, or of an operator beside one, an operator is.

    (`braid.scheduling.generate.partitions`)
    """

    whole: str
    """Name of the operator that is cut."""
    number: int
    """From 1."""
    ways: int
    measured_as: str
    """The operator of the part that is cut."""
    share: float = 1.0
    """Of what that computes or moves."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """A tensor that operators hand on; ``elements`` are those on one rank."""

    name: str
    elements: int
    precision: Precision = Precision.ACTIVATION
    statistics: int = 0
    """Further elements, in statistic precision, that an opaque value holds (attention's log-sum-exp)."""
    alias_of: str | None = None
    """The value whose memory this one shares, if it has none of its own."""
    rows: int = 1
    """Tokens, of which it has elements each."""
    region: Region | None = None
    """What it has, of a piece of a value."""
    piece_of: str | None = None
    """The value that has these rows too, of a piece."""
    keeps: str | None = None
    """A value that it holds beside its own elements: attention's saved value holds the output."""

    @property
    def columns(self) -> int:
        """Elements of a token."""
        return self.elements // self.rows

    def bytes(self, activation_bytes: int) -> int:
        """Bytes on one rank when activations take ``activation_bytes`` each."""
        own = self.elements * self.precision.bytes_each(activation_bytes)
        return own + self.statistics * Precision.STATISTIC.bytes_each(activation_bytes)


@dataclass(frozen=True, kw_only=True)
class Operator:
    """A node of a graph. ``module`` names what holds the parameters; ``axis`` is a collective's mesh axis.

    ``name`` is unique in its graph, also where several parts are one unit (``1.layer/qkv.again``); ``part``,
    ``place`` (of the part in the unit), ``own_name`` (``qkv.again``) and ``measured_as`` (``qkv``) are what
    it is made of.
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
    """Bytes sent by each rank, for a collective, when activations take two bytes; else 0."""
    part: str = ""
    place: int = 0
    own_name: str = ""
    """In the part; by default the name."""
    measured_as: str = ""
    """The operator of the part whose time this one takes; by default itself."""
    piece: Piece | None = None

    def __post_init__(self) -> None:
        if not self.own_name:
            object.__setattr__(self, "own_name", self.name)
        if not self.measured_as:
            object.__setattr__(self, "measured_as", self.own_name)

    @cached_property
    def key(self) -> str:
        """Its name in a profile."""
        return f"{measured_kind(self.part)}/{self.measured_as}"

    @property
    def completes(self) -> bool:
        """Whether it brings the last piece of a value, which is whole then."""
        return self.piece is not None and len(self.writes) > 1

    def completed_by(self, other: "Operator") -> bool:
        """Whether another operator brings the last piece of what this one brings a piece of."""
        if self is other or self.piece is None or other.piece is None or not other.completes:
            return False
        return self.piece.whole == other.piece.whole and self.place == other.place

    @property
    def adds_gradients(self) -> bool:
        """Whether it adds to the gradients of parameters."""
        return self.phase in (Phase.WEIGHT_GRADIENT, Phase.GRADIENT)


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Operators of one pass in an order that respects their data."""

    operators: tuple[Operator, ...]

    def __post_init__(self) -> None:
        names = [op.name for op in self.operators]
        assert len(set(names)) == len(names), f"operator names are not unique: {names}"
        for name in names:
            if not name or name.split() != [name] or "#" in name:
                raise ValueError(f"operator {name!r}: a name is one word without '#', as schedules are text")

    def named(self, name: str) -> Operator:
        """The operator of that name; `KeyError` if there is none."""
        for op in self.operators:
            if op.name == name:
                return op
        raise KeyError(name)

    @property
    def flops(self) -> int:
        """Floating-point operations of all operators on one rank."""
        return sum(op.flops for op in self.operators)


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Numbers of parameters on the fullest rank of a tensor-parallel group."""

    dense: int = 0
    """Shared by all data- and context-parallel ranks."""
    experts: int = 0
    """Of experts that not all data-parallel ranks hold: shared by those that do (``edp``)."""
    whole: int = 0
    """Of the dense ones, those that every tensor-parallel rank holds whole (norms, biases, the router)."""
    tied: int = 0
    """Of the dense ones, those of a table that embedding and head have in common."""
    apart: tuple[tuple[tuple[str, ...], int], ...] = ()
    """Of both, those that are summed over other axes than their like, with the axes: matrices of layers whose
    tensor-parallel degree is one of their own."""

    @property
    def total(self) -> int:
        """Both."""
        return self.dense + self.experts

    def __add__(self, other: "Parameters") -> "Parameters":
        return Parameters(
            dense=self.dense + other.dense,
            experts=self.experts + other.experts,
            whole=self.whole + other.whole,
            tied=self.tied + other.tied,
            apart=_added(self.apart, other.apart),
        )

    def summed_apart(self, axis: str) -> int:
        """Of those `apart`, the ones that are summed over an axis."""
        return sum(count for axes, count in self.apart if axis in axes)


def _added(*several: tuple[tuple[tuple[str, ...], int], ...]) -> tuple[tuple[tuple[str, ...], int], ...]:
    found: dict[tuple[str, ...], int] = {}
    for axes, count in (pair for one in several for pair in one):
        found[axes] = found.get(axes, 0) + count
    return tuple(sorted(found.items()))


@dataclass(frozen=True, kw_only=True)
class Part:
    """A layer, the embedding or the head: forward and backward graphs over common values.

    A part that ends the model may run its backward pass `at_once`: its forward graph then holds all operators
    of both passes, and its backward graph is empty and only hands on the gradients of the inputs.
    """

    name: str
    forward: Graph
    backward: Graph
    values: Mapping[str, Value]
    inputs: tuple[str, ...]
    output: str
    constants: tuple[str, ...] = ()
    """Inputs that the executor provides instead of the part before (tokens, targets, loss_scale)."""
    modules: Mapping[str, Parameters] = field(default_factory=dict)
    """Those that have parameters; of a unit of several parts, none of its own."""
    members: tuple["Part", ...] = ()
    """Of a unit of several parts, these."""

    @property
    def parameters(self) -> Parameters:
        """Of its modules; a head that is tied to the embedding counts its table too."""
        own = [member.parameters for member in self.members] or self.modules.values()
        return sum(own, Parameters())

    @property
    def has_layers(self) -> bool:
        """False for the embedding or the head alone, which are too short to be worth a search."""
        return any(is_layer(member.name) for member in self.members or (self,))

    @property
    def evaluation(self) -> Graph:
        """The forward graph of a model that does not train: without gradients."""
        return Graph(operators=tuple(op for op in self.forward.operators if op.phase is Phase.FORWARD))

    def at_once(self) -> "Part":
        """The part with its backward pass at the end of its forward pass.

        Between the passes it keeps nothing but the gradients of its inputs. Weight gradients come before the
        input gradients of their modules: the inputs that only they read die first. `ValueError` for a part
        whose backward pass starts with the gradient of its output.
        """
        given = f"d.{self.output}"
        if any(given in op.reads for op in self.backward.operators):
            raise ValueError(f"{self.name}: {given} comes from another part; only a loss starts at once")
        weights = {op.module: op for op in self.backward.operators if op.phase is Phase.WEIGHT_GRADIENT}
        order = list(self.forward.operators)
        for op in self.backward.operators:
            if op.phase is Phase.INPUT_GRADIENT and op.module in weights:
                order.append(weights.pop(op.module))
            if op not in order:
                order.append(op)
        return replace(self, forward=Graph(operators=tuple(order)), backward=Graph(operators=()))

    def balanced(self) -> "Part":
        """Of a part that runs at once, from the first transfer of its gradients on as a backward pass again.

        In a paired block the forward pass with the head is the longer chain of compute and transfers, so that
        the other pass waits for it. The largest values are gone by then.
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
        """What the forward pass leaves to the backward pass, in the order of writing.

        Values (inputs too) that backward operators read, and gradients of inputs that are there already.
        """
        needed = {name for op in self.backward.operators for name in op.reads}
        needed |= {f"d.{name}" for name in self.inputs}
        written = [*self.inputs, *(name for op in self.forward.operators for name in op.writes)]
        recomputed = {n for op in self.backward.operators if op.phase is Phase.RECOMPUTE for n in op.writes}
        return tuple(name for name in written if name in needed and name not in recomputed)

    def saved_bytes(self, activation_bytes: int) -> int:
        """Bytes that one micro-batch keeps between forward and backward; aliases count once."""
        owners = {self.values[name].alias_of or name for name in self.saved()} - set(self.constants)
        return sum(self.values[name].bytes(activation_bytes) for name in owners)
