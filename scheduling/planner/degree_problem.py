"""What the choice for every layer is given: what it costs at each degree under each policy, and the memory.

A layer's blocks (attention, MLP) end in a collective each. Two sub-batches run through them by turns, so
that one computes while the other communicates; ``N / degree`` replicas share the global batch. In Oases the
activations are gathered between layers of different degrees, and nothing overlaps there; Braid's layers hand
on the same tokens whatever their degrees.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Final, NamedTuple

MEMORY_UNIT_BYTES: Final = 2**20
"""Memory is counted in whole units, rounded up, so that the solver's tolerance cannot exceed the limit."""


class LayerChoice(NamedTuple):
    """What is chosen for a layer: its tensor-parallel degree, and what of it is computed again."""

    degree: int
    recompute: str = "full"


@dataclass(frozen=True, kw_only=True)
class PassCosts:
    """One block in one pass: its computation, then its collective, of the first and second sub-batch.

    A replica with a single sample has a second sub-batch of nothing, which costs 0: nothing overlaps.
    """

    compute_ns: tuple[int, int]
    collective_ns: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class DegreeCosts:
    """What a layer costs at a degree. Blocks stand in the order of the forward pass, in ``backward`` too."""

    degree: int
    recompute: str = "full"
    forward: tuple[PassCosts, ...]
    backward: tuple[PassCosts, ...]
    """Recomputation is part of the computation."""
    state_bytes: int
    """Weights, gradients and optimizer states of a layer on one rank."""
    saved_bytes: int
    """The inputs of the blocks, which a layer keeps for recomputation."""
    runtime_bytes: int
    """Temporary buffers, which all layers of a rank use by turns."""
    once_ns: int = 0
    """What a layer adds whatever its micro-batches are: sums of gradients of replicas, the update."""

    @property
    def choice(self) -> LayerChoice:
        """What these are the costs of."""
        return LayerChoice(self.degree, self.recompute)

    @property
    def resident_units(self) -> int:
        """What each layer of this degree adds to a rank's memory, in `MEMORY_UNIT_BYTES`."""
        return -(-(self.state_bytes + self.saved_bytes) // MEMORY_UNIT_BYTES)

    @property
    def runtime_units(self) -> int:
        """The buffers, in `MEMORY_UNIT_BYTES`."""
        return -(-self.runtime_bytes // MEMORY_UNIT_BYTES)


@dataclass(frozen=True, kw_only=True)
class DegreeProblem:
    """Equal layers, what to choose from in rising order of degrees, and the memory of a rank."""

    layers: int
    options: tuple[DegreeCosts, ...]
    gather_ns: Mapping[tuple[int, int], int] | None
    """(smaller, larger degree) -> time of the all-gather of activations, or of their gradients, in eq. 4.
    None: nothing is gathered, and passes overlap between layers of any degrees."""
    memory_limit_bytes: int
    left_out: Mapping[int, str]
    """Degrees that cannot be chosen, with the reason."""

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ValueError(f"layers={self.layers} must be at least 1")
        choices = [option.choice for option in self.options]
        if not choices:
            reasons = "; ".join(f"degree {degree}: {why}" for degree, why in self.left_out.items())
            raise ValueError(f"no tensor-parallel degree is available ({reasons or 'none was given'})")
        if len(set(choices)) != len(choices) or list(self.degrees) != sorted(self.degrees):
            raise ValueError(f"options have the degrees {self.degrees}, which must be distinct and rising")
        for low, high in product(self.degrees, repeat=2):
            if low < high and self.gather_ns is not None and (low, high) not in self.gather_ns:
                raise ValueError(f"gather_ns has no cost between degrees {low} and {high}; add it")

    @property
    def choices(self) -> tuple[LayerChoice, ...]:
        """What to choose from."""
        return tuple(option.choice for option in self.options)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Their degrees."""
        return tuple(option.degree for option in self.options)

    def option(self, choice: LayerChoice) -> DegreeCosts:
        """What a layer costs; `ValueError` where that cannot be chosen."""
        for option in self.options:
            if option.choice == choice:
                return option
        why = self.left_out.get(choice.degree, "not among the options")
        raise ValueError(f"degree {choice.degree} is not available ({why}); choose from {self.degrees}")

    def moved_ns(self, one: DegreeCosts, other: DegreeCosts) -> int | None:
        """Time of gathering activations between neighbours; None where nothing is in the way of overlap."""
        if self.gather_ns is None or one.degree == other.degree:
            return None
        return self.gather_ns[min(one.degree, other.degree), max(one.degree, other.degree)]
