"""Runs of a chunk: consecutive parts of the model that are scheduled as one.

A run's graph is its parts' graphs, one after the other, so an order of issue may reach from one layer into
the next and over the ends of the model: a collective at the end of a layer hides behind the next layer's
compute. Operators and values carry the place and the name of their part: ``1.layer/qkv``. A part that is
alone is a run with its own name and its own operators.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, pairwise

from braid.scheduling.operators import Graph, Operator, Part, Value
from braid.scheduling.schedule import (
    Block,
    Direction,
    Gradients,
    Instruction,
    Pair,
    Program,
    ProgramKey,
    Reduce,
    Step,
    Twins,
    is_late,
)
from braid.scheduling.spec import ParallelLayout

_PLACED = re.compile(r"(\d+)\.([a-z]+)/(.+)")
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


def chunk_runs(layout: ParallelLayout, layers: int, chunk: int, fused: int) -> list[Run]:
    """The runs of a chunk in the order of the forward pass.

    ``fused``: at most that many layers in a run, evenly spread, the model's ends with the layer beside them;
    0: every part is a run of its own.
    """
    held = list(layout.layers_of(chunk, layers))
    first = [("embedding", -1)] if layout.is_first(chunk) else []
    last = [("head", layers)] if layout.is_last(chunk) else []
    parts = [*first, *(("layer", number) for number in held), *last]
    if not fused or not held:
        return [Run((name,), (number,)) for name, number in parts]
    count = -(-len(held) // fused)
    bounds = [len(held) * n // count for n in range(count + 1)]
    groups = [[("layer", number) for number in held[begin:end]] for begin, end in pairwise(bounds)]
    groups[0] = first + groups[0]
    groups[-1] = groups[-1] + last
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


@lru_cache(maxsize=65536)
def split_place(name: str) -> tuple[int, str, str] | None:
    """Place, part and own name of what a run's graph names; None for the name of a part that is alone."""
    match = _PLACED.fullmatch(name)
    return (int(match[1]), match[2], match[3]) if match else None


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
            name = names.value(value.name)
            values.setdefault(name, replace(value, name=name, alias_of=alias))
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
            module=placed(self.place, self.part.name, op.module),
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


def pair_up(
    ahead: Sequence[str], behind: Sequence[str], pairs: Iterable[tuple[str, str]]
) -> list[tuple[int | None, int | None]]:
    """What of a paired block runs together: positions in both passes; None on the side that has no partner.

    ``ahead``: names of the runs of the forward pass in its order; ``behind``: of the backward pass in its.
    Runs that no program pairs go by themselves, those of the backward pass first, at both ends.
    """
    known = set(pairs)
    starts = {first for first, _ in known}, {second for _, second in known}
    i = j = 0
    order: list[tuple[int | None, int | None]] = []
    while j < len(behind) and behind[j] not in starts[1]:
        order.append((None, j))
        j += 1
    while i < len(ahead) and ahead[i] not in starts[0]:
        order.append((i, None))
        i += 1
    while i < len(ahead) and j < len(behind) and (ahead[i], behind[j]) in known:
        order.append((i, j))
        i, j = i + 1, j + 1
    order += [(None, place) for place in range(j, len(behind))]
    order += [(place, None) for place in range(i, len(ahead))]
    return order


def carrying(
    instructions: Sequence[Instruction],
    names: Callable[[Block], list[str]],
    pairs: Iterable[tuple[str, str]],
    ends: Collection[str] = (),
) -> frozenset[int]:
    """Positions of the paired blocks of a stage that leave late operators to the next block.

    One does if nothing but messages stands between them and the next one begins with the paired program that
    the first one ended with, or is a backward pass that begins with the same run and can take up what the
    other has left. ``names``: the runs of a block in the order of its pass; ``ends``: runs whose backward
    pass can do that (`takes_up`).
    """
    known = set(pairs)
    found = set()
    before: tuple[int, tuple[str, str]] | None = None
    for position, instruction in enumerate(instructions):
        if isinstance(instruction, Pair):
            ahead, behind = names(instruction.forward), names(instruction.backward)
            order = pair_up(ahead, behind, known)
            keys = [
                None if i is None or j is None else (ahead[i], behind[j]) for i, j in (order[0], order[-1])
            ]
            if before is not None and keys[0] == before[1]:
                found.add(before[0])
            before = None if keys[1] is None else (position, keys[1])
        elif isinstance(instruction, Block) and before is not None:
            whole = instruction.direction is Direction.BACKWARD and instruction.gradients is Gradients.BOTH
            if whole and before[1][1] in ends and names(instruction)[0] == before[1][1]:
                found.add(before[0])
            before = None
        elif isinstance(instruction, Block | Twins | Reduce | Step):
            before = None
    return frozenset(found)


def takes_up(programs: Mapping[ProgramKey, Program]) -> frozenset[str]:
    """The runs whose backward pass by itself has places for what the paired program before has left."""
    return frozenset(name for (name, _), program in programs.items() if any(map(is_late, program)))
