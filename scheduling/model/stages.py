"""Stages of collectives that a partition divides over the dims of a mesh of their ranks."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from braid.scheduling.mesh.partition import DimRanks, Factor, Partition, chosen
from braid.scheduling.model.operators import Kind

ALL, OWN, OTHERS = DimRanks

# -- of layers -----------------------------------------------------------------------------------------------


class Stage(NamedTuple):
    """A sub-collective along a dim; ``source``: the stage whose result it moves, None: the input."""

    source: int | None
    dim: int
    spans: tuple[DimRanks, ...]
    """Whose rows its result has."""
    fresh: tuple[DimRanks, ...]
    """Of those, what no stage before it has brought."""


def gather_stages(mesh: tuple[int, ...], how: Partition) -> list[Stage]:
    """Of a gather by a partition, on a mesh of its ranks."""
    if how.about_own:
        return [
            Stage(None, 1, (OWN, ALL), (OWN, ALL)),
            Stage(None, 0, (ALL, OWN), (OTHERS, OWN)),
            Stage(1, 1, (OTHERS, ALL), (OTHERS, OTHERS)),
        ]
    spans, stages = [OWN] * len(mesh), []
    for number, dim in enumerate(how.order or (0,)):
        fresh = list(spans)
        spans[dim] = ALL
        fresh[dim] = OTHERS if number else ALL
        stages.append(Stage(number - 1 if number else None, dim, tuple(spans), tuple(fresh)))
    return stages


def scatter_stages(mesh: tuple[int, ...], how: Partition) -> list[Stage]:
    """Of a reduce-scatter."""
    spans, stages = [ALL] * len(mesh), []
    for number, dim in enumerate(how.order or (0,)):
        spans[dim] = OWN
        stages.append(Stage(number - 1 if number else None, dim, tuple(spans), ()))
    return stages


# -- of what ranks share -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Move:
    """A stage: a collective along one dim of a mesh of the ranks of an axis."""

    kind: Kind
    factor: Factor
    number: int
    """From 0."""
    stages: int
    part: int = 1
    """It moves 1/part of the whole."""
    outer: int = 1
    """Ranks along dims of the mesh before its own whose parts it moves together."""

    @property
    def last(self) -> bool:
        """Whether nothing follows."""
        return self.number == self.stages - 1


def moves_of(kind: Kind, partitions: Iterable[Partition], axis: str) -> tuple[Move, ...]:
    """The stages of a collective over an axis; none where it is not divided.

    An all-reduce is scattered over all dims but the last of the order, summed up over that one, and gathered
    again (Centauri table 2).
    """
    how = chosen(partitions, f"{axis}/{kind.value}")
    if how is None:
        return ()
    mesh, order = how.mesh, how.order
    steps: list[tuple[Kind, int]] = [(kind, dim) for dim in order]
    if kind is Kind.ALL_REDUCE:
        steps = [(Kind.REDUCE_SCATTER, dim) for dim in order[:-1]]
        steps += [(kind, order[-1])]
        steps += [(Kind.ALL_GATHER, dim) for dim in reversed(order[:-1])]
    whole = set(range(len(mesh))) if kind is not Kind.ALL_GATHER else set()
    found = []
    for number, (step, dim) in enumerate(steps):
        if step is Kind.ALL_GATHER:
            whole.add(dim)
        part = prod(size for other, size in enumerate(mesh) if other not in whole)
        # What is summed up for all may lie in any order meanwhile.
        outer = 1 if kind is Kind.ALL_REDUCE else prod(mesh[other] for other in whole if other < dim)
        found.append(Move(step, Factor(axis, mesh, dim), number, len(steps), part, outer))
        if step is Kind.REDUCE_SCATTER:
            whole.discard(dim)
    return tuple(found)
