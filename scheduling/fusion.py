"""Runs of a chunk: consecutive parts of the model that are scheduled as one.

A run's graph is its parts' graphs, one after the other, so an order of issue may reach from one layer into
the next and over the ends of the model: a collective at the end of a layer hides behind the next layer's
compute. Operators and values carry the place and the name of their part: ``1.layer/qkv``. A part that is
alone is a run with its own name and its own operators.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, pairwise

from braid.scheduling.operators import Graph, Operator, Part, Value
from braid.scheduling.spec import ParallelLayout

_GRADIENT = re.compile(r"d\.(.+?)((?:[~@].*)?)")


@dataclass(frozen=True)
class Run:
    """Consecutive parts of a chunk."""

    members: tuple[str, ...]
    """Names of the parts, in the order of the forward pass."""
    layers: tuple[int, ...]
    """Number of each part's layer in the whole model; the embedding has -1, the head the number of layers."""

    @property
    def name(self) -> str:
        """``layer``, or ``embedding+3*layer+head``."""
        return run_name(self.members)


def run_name(members: Sequence[str]) -> str:
    """The name of a run."""
    counted = [(name, len(list(group))) for name, group in groupby(members)]
    return "+".join(name if count == 1 else f"{count}*{name}" for name, count in counted)


@lru_cache(maxsize=4096)
def chunk_parts(layout: ParallelLayout, layers: int, chunk: int) -> tuple[tuple[str, int], ...]:
    """The parts of a chunk in the order of the forward pass: names and numbers of their layers."""
    first = [("embedding", -1)] if layout.is_first(chunk) else []
    last = [("head", layers)] if layout.is_last(chunk) else []
    return (*first, *(("layer", number) for number in layout.layers_of(chunk, layers)), *last)


def chunk_runs(layout: ParallelLayout, layers: int, chunk: int, fused: int) -> list[Run]:
    """The runs of a chunk in the order of the forward pass.

    ``fused``: at most that many layers in a run, evenly spread, the model's ends with the layer beside them;
    0: every part is a run of its own.
    """
    parts = chunk_parts(layout, layers, chunk)
    held = [number for name, number in parts if name == "layer"]
    if not fused or not held:
        return [Run((name,), (number,)) for name, number in parts]
    count = -(-len(held) // fused)
    bounds = [len(held) * n // count for n in range(count + 1)]
    groups = [[("layer", number) for number in held[begin:end]] for begin, end in pairwise(bounds)]
    groups[0] = [one for one in parts if one[0] == "embedding"] + groups[0]
    groups[-1] = groups[-1] + [one for one in parts if one[0] == "head"]
    return [Run(tuple(n for n, _ in group), tuple(i for _, i in group)) for group in groups]


def runs_in_use(layout: ParallelLayout, layers: int, fused: int) -> dict[str, tuple[str, ...]]:
    """Members of every run of a model, by name."""
    return {
        run.name: run.members
        for chunk in range(layout.chunks)
        for run in chunk_runs(layout, layers, chunk, fused)
    }


def fused_parts(
    parts: Mapping[str, Part], layout: ParallelLayout, layers: int, fused: int
) -> dict[str, Part]:
    """The graphs of all runs of a model, by name; without fusing, the parts themselves."""
    if not fused:
        return dict(parts)
    return {
        name: parts[name] if len(members) == 1 else fuse([parts[member] for member in members])
        for name, members in runs_in_use(layout, layers, fused).items()
    }


def placed(place: int, part: str, name: str) -> str:
    """The name of an operator, a module or a value of the part at a place of a run."""
    return f"{place}.{part}/{name}"


def measured_key(run: str, operator: str) -> str:
    """The name in a profile of an operator that is named in a schedule's text (`Operator.key`)."""
    place, slash, own = operator.partition("/")
    part, name = (place.partition(".")[2], own) if slash else (run, operator)
    return f"{part}/{name.removesuffix('.again')}"


def fuse(members: Sequence[Part]) -> Part:
    """One part made of several: each one's output is the next one's ``x``.

    A head does not run all of its backward pass at once (`Part.balanced`).
    """
    members = [part.balanced() for part in members]
    forward: list[Operator] = []
    backward: list[list[Operator]] = []
    values: dict[str, Value] = {}
    inputs: list[str] = []
    constants: list[str] = []
    handed_on = "x"
    for place, part in enumerate(members):
        names = _Names(place, part, handed_on if place else "x")
        forward += [names.operator(op) for op in part.forward.operators]
        backward.append([names.operator(op) for op in part.backward.operators])
        for value in part.values.values():
            alias = None if value.alias_of is None else names.value(value.alias_of)
            whole = None if value.chunk_of is None else names.value(value.chunk_of)
            keeps = None if value.keeps is None else names.value(value.keeps)
            name = names.value(value.name)
            values.setdefault(name, replace(value, name=name, alias_of=alias, chunk_of=whole, keeps=keeps))
        inputs += [name for name in part.inputs if name in part.constants or not place]
        constants += part.constants
        handed_on = names.value(part.output)
    return Part(
        name=run_name([part.name for part in members]),
        forward=Graph(operators=tuple(forward)),
        backward=Graph(operators=tuple(op for ops in reversed(backward) for op in ops)),
        values=values,
        inputs=_once(inputs),
        output=handed_on,
        constants=_once(constants),
    )


@dataclass(frozen=True)
class _Names:
    """How a member's names read in the run."""

    place: int
    part: Part
    x: str
    """What the member's input is called."""

    def operator(self, op: Operator) -> Operator:
        return replace(
            op,
            name=placed(self.place, self.part.name, op.name),
            place=self.place,
            reads=tuple(map(self.value, op.reads)),
            writes=tuple(map(self.value, op.writes)),
        )

    def value(self, name: str) -> str:
        if match := _GRADIENT.fullmatch(name):
            return f"d.{self.value(match[1])}{match[2]}"
        if name in self.part.constants:
            return name
        if name in self.part.inputs:
            return self.x
        return placed(self.place, self.part.name, name)


def _once(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
