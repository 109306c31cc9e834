"""Computes the stages into which a partition splits a collective over the dimensions of a mesh of its
ranks."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from braid.scheduling.mesh.partition import DimRanks, Factor, Partition, chosen
from braid.scheduling.model.operators import Kind

ALL, OWN, OTHERS = DimRanks

# -- collectives of layers -----------------------------------------------------------------------------


class Stage(NamedTuple):
    """A stage of a layer's collective: a collective along the dimension ``dim`` of the mesh.

    ``source``: number of the stage whose result it moves, None for the collective's input.
    """

    source: int | None
    dim: int
    spans: tuple[DimRanks, ...]
    """For every dimension of the mesh, the ranks whose rows the stage's result contains."""
    fresh: tuple[DimRanks, ...]
    """For every dimension, the ranks whose rows this stage brings and no earlier stage has brought."""


def gather_stages(mesh: tuple[int, ...], how: Partition) -> list[Stage]:
    """Return the stages into which the partition ``how`` splits a gather on a mesh of its ranks."""
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
    """Return the stages into which the partition ``how`` splits a reduce-scatter on a mesh of its ranks."""
    spans, stages = [ALL] * len(mesh), []
    for number, dim in enumerate(how.order or (0,)):
        spans[dim] = OWN
        stages.append(Stage(number - 1 if number else None, dim, tuple(spans), ()))
    return stages


# -- collectives of parameters and gradients -----------------------------------------------------------


@dataclass(frozen=True)
class Move:
    """A stage of a gradient sum or parameter gather: a collective along one dimension of a mesh of its
    ranks."""

    kind: Kind
    factor: Factor
    number: int
    """Number of the stage, from 0."""
    stages: int
    part: int = 1
    """Number of equal parts of the whole payload of which the stage moves one."""
    outer: int = 1
    """Number of ranks along outer dimensions of the mesh whose parts the stage moves together."""

    @property
    def last(self) -> bool:
        """Whether this is the last stage of its collective."""
        return self.number == self.stages - 1


def moves_of(kind: Kind, partitions: Iterable[Partition], axis: str) -> tuple[Move, ...]:
    """Return the stages of a collective of some kind over an axis; empty if no partition splits it.

    An all-reduce becomes reduce-scatters over all dimensions of the order but the last, an all-reduce over
    the last, and all-gathers (Centauri table 2).
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
    moves = []
    for number, (step, dim) in enumerate(steps):
        if step is Kind.ALL_GATHER:
            whole.add(dim)
        part = prod(size for index, size in enumerate(mesh) if index not in whole)
        # An all-reduce may order the parts freely between its stages.
        outer = 1 if kind is Kind.ALL_REDUCE else prod(mesh[index] for index in whole if index < dim)
        moves.append(Move(step, Factor(axis, mesh, dim), number, len(steps), part, outer))
        if step is Kind.REDUCE_SCATTER:
            whole.discard(dim)
    return tuple(moves)
