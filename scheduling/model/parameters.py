"""The parameters that a rank holds of a module or part, and how ranks hold them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

HeldAs = Literal["cut", "whole", "tied", "experts"]


@dataclass(frozen=True)
class HeldTensor:
    """A parameter tensor on one rank: the rank of a tensor-parallel group that holds most of it."""

    elements: int
    held: HeldAs
    """``experts``: only the ranks along the axis ``edp`` hold it alike; all data- and context-parallel ranks
    hold the others alike. ``cut``: each tensor-parallel rank holds a slice; ``whole``: each holds all of it
    (norms, biases, router); ``tied``: it is the table that embedding and head share, which is cut too."""
    matrix: bool = False
    """Whether it holds matrices of hidden layers, which Muon updates."""
    apart: tuple[str, ...] = ()
    """Axes over which its gradient is summed if it belongs to a layer with a tensor-parallel degree of its
    own; empty: the usual axes."""


@dataclass(frozen=True)
class Parameters:
    """Parameter tensors on one rank, in the order in which buckets hold them."""

    tensors: tuple[HeldTensor, ...] = ()

    @cached_property
    def total(self) -> int:
        """Number of parameters, dense and of experts."""
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def dense(self) -> int:
        return self.total - self.experts

    @property
    def experts(self) -> int:
        return self._held("experts")

    @property
    def whole(self) -> int:
        return self._held("whole")

    @property
    def tied(self) -> int:
        return self._held("tied")

    def _held(self, held: HeldAs) -> int:
        return sum(tensor.elements for tensor in self.tensors if tensor.held == held)

    def __add__(self, other: "Parameters") -> "Parameters":
        return Parameters(self.tensors + other.tensors)
