"""Counts of the parameters that a rank holds of a module or part, by how ranks hold them."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class HeldTensor:
    """A parameter tensor on one rank: the rank of a tensor-parallel group that holds most of it."""

    elements: int
    place: Literal["cut", "whole", "tied", "experts"]
    """The field of `Parameters` that counts it; ``cut``: a dense tensor that no other field counts."""
    matrix: bool = False
    """Whether it holds matrices of hidden layers, which Muon updates."""
    apart: tuple[str, ...] = ()
    """The axes in `Parameters.apart` over which its gradient is summed; empty: the usual ones."""


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Counts of parameters on one rank: the one of a tensor-parallel group that holds most."""

    dense: int = 0
    """Number of parameters that all data- and context-parallel ranks hold alike (not experts)."""
    experts: int = 0
    """Number of parameters of experts, which only the ranks along the axis ``edp`` hold alike."""
    whole: int = 0
    """Number of dense parameters that every tensor-parallel rank holds whole (norms, biases, router)."""
    tied: int = 0
    """Number of dense parameters in a table that embedding and head share."""
    apart: tuple[tuple[tuple[str, ...], int], ...] = ()
    """Pairs (axes, count): number of the above parameters whose gradients are summed over these axes instead
    of the usual ones. They are matrices of layers with a tensor-parallel degree of their own."""
    tensors: tuple[HeldTensor, ...] = ()
    """The tensors that are counted, in the order in which buckets hold them."""

    @property
    def total(self) -> int:
        """Number of parameters, dense and of experts."""
        return self.dense + self.experts

    def __add__(self, other: "Parameters") -> "Parameters":
        return Parameters(
            dense=self.dense + other.dense,
            experts=self.experts + other.experts,
            whole=self.whole + other.whole,
            tied=self.tied + other.tied,
            apart=_added(self.apart, other.apart),
            tensors=self.tensors + other.tensors,
        )

    def summed_apart(self, axis: str) -> int:
        """Return the number of parameters in `apart` whose gradients are summed over ``axis``, among
        others."""
        return sum(count for axes, count in self.apart if axis in axes)


def _added(*several: tuple[tuple[tuple[str, ...], int], ...]) -> tuple[tuple[tuple[str, ...], int], ...]:
    counts: dict[tuple[str, ...], int] = {}
    for axes, count in (pair for pairs in several for pair in pairs):
        counts[axes] = counts.get(axes, 0) + count
    return tuple(sorted(counts.items()))
