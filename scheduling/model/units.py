"""Units of a chunk: consecutive parts of the model that are scheduled as one.

A unit's graph is the sequence of its parts' graphs, so an order of issue may reach from one layer into the
next and over the ends of the model: a collective at the end of a layer hides behind the next layer's compute.
Operators and values carry the index and the name of their part: ``1.layer/qkv``. A part alone is a unit with
the part's name and operators.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.operators import Graph, Operator, Part, Value
from braid.scheduling.model.parameters import Parameters
from braid.scheduling.text.pattern import ENDS, counted, is_layer


@dataclass(frozen=True)
class Unit:
    """A unit: consecutive parts of a chunk that are scheduled as one graph."""

    members: tuple[str, ...]
    """Names of the parts, in the order of the forward pass."""
    layers: tuple[int, ...]
    """Index in the model of each part's layer; -1 for the embedding, the number of layers for the head."""

    @property
    def name(self) -> str:
        """Name of the unit: ``layer``, or ``embedding+3*layer+head``."""
        return unit_name(self.members)


def unit_name(members: Sequence[str]) -> str:
    """Return the name of the unit that consists of these parts, such as ``embedding+3*layer``."""
    return "+".join(counted(members))


@lru_cache(maxsize=4096)
def chunk_parts(layout: ParallelLayout, kinds: tuple[str, ...], chunk: int) -> tuple[tuple[str, int], ...]:
    """Return (part name, layer index) of every part of a chunk in the order of the forward pass.

    The index is -1 for the embedding and the number of layers for the head. ``kinds``: kind of every model
    layer.
    """
    layers = len(kinds)
    first = [(ENDS[0], -1)] if layout.is_first(chunk) else []
    last = [(ENDS[1], layers)] if layout.is_last(chunk) else []
    return (*first, *((kinds[number], number) for number in layout.layers_of(chunk, layers)), *last)


def chunk_units(layout: ParallelLayout, kinds: tuple[str, ...], chunk: int, unit_layers: int) -> list[Unit]:
    """Divide a chunk into units; return them in the order of the forward pass.

    ``unit_layers``: most layers of a unit; layers are spread evenly, and embedding and head join the adjacent
    unit. 0: every part is a unit. ``kinds``: kind of every model layer.
    """
    parts = chunk_parts(layout, kinds, chunk)
    layers = [part for part in parts if is_layer(part[0])]
    if not unit_layers or not layers:
        return [Unit((name,), (number,)) for name, number in parts]
    count = -(-len(layers) // unit_layers)
    bounds = [len(layers) * n // count for n in range(count + 1)]
    groups = [layers[begin:end] for begin, end in pairwise(bounds)]
    groups[0] = [part for part in parts if part[1] < 0] + groups[0]
    groups[-1] = groups[-1] + [part for part in parts if part[1] == len(kinds)]
    return [Unit(tuple(n for n, _ in group), tuple(i for _, i in group)) for group in groups]


def units_in_use(
    layout: ParallelLayout, kinds: tuple[str, ...], unit_layers: int
) -> dict[str, tuple[str, ...]]:
    """Return {unit name: names of its parts} for all units of a model. ``kinds``: kind of every layer."""
    return {
        unit.name: unit.members
        for chunk in range(layout.chunks)
        for unit in chunk_units(layout, kinds, chunk, unit_layers)
    }


def chunk_parameters(
    parts: Mapping[str, Part],
    layout: ParallelLayout,
    kinds: tuple[str, ...],
    chunk: int,
) -> Parameters:
    """Return the parameters of a chunk.

    The table of a tied head counts, even if the embedding on the same stage holds it.
    """
    return sum((part.parameters for part in members_of(parts, layout, kinds, chunk)), Parameters())


def members_of(
    parts: Mapping[str, Part],
    layout: ParallelLayout,
    kinds: tuple[str, ...],
    chunk: int,
    unit_layers: int = 0,
) -> list[Part]:
    """Return the parts of a chunk, also those inside units, in the order of the forward pass.

    ``parts``: the model's units by name.
    """
    units = [parts[unit.name] for unit in chunk_units(layout, kinds, chunk, unit_layers)]
    return [member for unit in units for member in unit.members or (unit,)]


def unit_parts(
    parts: Mapping[str, Part], layout: ParallelLayout, kinds: tuple[str, ...], unit_layers: int
) -> dict[str, Part]:
    """Join a model's parts to units of at most ``unit_layers`` layers; return the units by name.

    With ``unit_layers`` 0 every part is a unit.
    """
    if not unit_layers:
        return dict(parts)
    return {
        name: parts[name] if len(members) == 1 else joined([parts[member] for member in members])
        for name, members in units_in_use(layout, kinds, unit_layers).items()
    }


def placed(index: int, part: str, name: str) -> str:
    """Return the name that an operator, module or value of a part has in a unit: ``INDEX.PART/NAME``."""
    return f"{index}.{part}/{name}"


def joined(members: Sequence[Part]) -> Part:
    """Join consecutive parts into one unit, in which each part's output is the input of the next part.

    A head in a unit does not run its whole backward pass at once (`Part.balanced`).
    """
    members = [part.balanced() for part in members]
    forward: list[Operator] = []
    backward: list[list[Operator]] = []
    values: dict[str, Value] = {}
    inputs: list[str] = []
    constants: list[str] = []
    handed_on = "x"
    for index, part in enumerate(members):
        names = _Names(index, part, handed_on if index else "x")
        forward += [names.operator(op) for op in part.forward.operators]
        backward.append([names.operator(op) for op in part.backward.operators])
        for value in part.values.values():
            alias = None if value.alias_of is None else names.value(value.alias_of)
            whole = None if value.piece_of is None else names.value(value.piece_of)
            keeps = None if value.keeps is None else names.value(value.keeps)
            of = None if value.gradient_of is None else names.value(value.gradient_of)
            name = names.value(value.name)
            renamed = replace(value, name=name, alias_of=alias, piece_of=whole, keeps=keeps, gradient_of=of)
            values.setdefault(name, renamed)
        inputs += [name for name in part.inputs if name in part.constants or not index]
        constants += part.constants
        handed_on = names.value(part.output)
    return Part(
        name=unit_name([part.name for part in members]),
        forward=Graph(operators=tuple(forward)),
        backward=Graph(operators=tuple(op for ops in reversed(backward) for op in ops)),
        values=values,
        inputs=_once(inputs),
        output=handed_on,
        constants=_once(constants),
        members=tuple(members),
    )


@dataclass(frozen=True)
class _Names:
    """Translates names of operators and values of a part into their names in its unit."""

    index: int
    part: Part
    x: str
    """Name that the part's input has in the unit."""

    def operator(self, op: Operator) -> Operator:
        return replace(
            op,
            name=placed(self.index, self.part.name, op.name),
            place=self.index,
            reads=tuple(map(self.value, op.reads)),
            writes=tuple(map(self.value, op.writes)),
        )

    def value(self, name: str) -> str:
        if (whole := self.part.values[name].gradient_of) is not None:
            return f"d.{self.value(whole)}"
        if name in self.part.constants:
            return name
        if name in self.part.inputs:
            return self.x
        return placed(self.index, self.part.name, name)


def _once(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
