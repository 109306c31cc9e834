"""What the choice for every layer is given: what it costs at each degree under each policy, and the memory.

A layer's blocks (attention, MLP) end in a collective each. Two sub-batches run through them by turns, so
that one computes while the other communicates; ``N / degree`` replicas share the global batch. In Oases the
activations are gathered between layers of different degrees, and nothing overlaps there; Braid's layers hand
on the same tokens whatever their degrees.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, NamedTuple

from braid.scheduling.block_profile import BlockProfile

MEMORY_UNIT_BYTES: Final = 2**20
"""Memory is counted in whole units, rounded up, so that the solver's tolerance cannot exceed the limit."""

PARAMETER_STATE_BYTES: Final = 16
"""Bytes of a parameter's states with Adam: weight, gradient and two moments in 32 bits, or 16-bit weight
and gradient beside a 32-bit weight and moments."""


class LayerChoice(NamedTuple):
    """What is chosen for a layer: its tensor-parallel degree, and what of it is computed again."""

    degree: int
    recompute: str = "full"


def fully_recomputed(degrees: Sequence[int]) -> tuple[LayerChoice, ...]:
    """Layers of these degrees, all of which recompute everything, as in Oases."""
    return tuple(map(LayerChoice, degrees))


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


def problem_from_profile(
    profile: BlockProfile,
    *,
    hidden: int,
    layers: int,
    devices: int,
    global_batch: int,
    memory_limit_bytes: int,
    degrees: Sequence[int] | None = None,
    parameter_state_bytes: int = PARAMETER_STATE_BYTES,
) -> DegreeProblem:
    """The problem of equal layers with 12 hidden^2 weights on ``devices`` ranks.

    Degree t leaves ``devices / t`` replicas of ``global_batch x t / devices`` samples. That number must be
    whole. Two or more samples are split in two sub-batches, the first the larger; one sample is one
    sub-batch. The buffers are those of the whole batch of a replica, an upper bound.

    ``degrees`` None takes every power of two up to ``devices`` that was measured at the batches needed, and
    keeps the reasons for the others; degrees that are named must be available, else `ValueError`.

    The all-gather between degrees i < j moves the samples of a replica of degree j that a rank has not got,
    ``1 - i/j`` of them, at the latency and half the rate fitted to the profile's all-reduces.
    """
    for name, value in (("hidden", hidden), ("devices", devices), ("global_batch", global_batch)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    wanted = [2**n for n in range(devices.bit_length())] if degrees is None else sorted(set(degrees))
    options, left_out = [], {}
    for degree in wanted:
        try:
            batch = replica_batch(degree, devices, global_batch)
            options.append(_degree_costs(profile, hidden, degree, batch, parameter_state_bytes))
        except ValueError as error:
            if degrees is not None:
                raise ValueError(f"degree {degree}: {error}") from None
            left_out[degree] = str(error)
    gathers = {}
    if len(options) > 1:
        fit = profile.fit_all_reduce()
        for low, high in product([option.degree for option in options], repeat=2):
            if low < high:
                batch = replica_batch(high, devices, global_batch)
                whole = profile.activation_size_bytes(hidden, batch)
                gathers[low, high] = fit.all_gather_ns(whole - whole * low // high)
    return DegreeProblem(
        layers=layers,
        options=tuple(options),
        gather_ns=gathers,
        memory_limit_bytes=memory_limit_bytes,
        left_out=left_out,
    )


def replica_batch(degree: int, devices: int, global_batch: int) -> int:
    """Samples of a replica at a degree; `ValueError` where degree or batch do not divide."""
    if degree < 1 or degree & (degree - 1) or devices % degree:
        raise ValueError(f"the degree must be a power of two that divides devices={devices}")
    batch, rest = divmod(global_batch * degree, devices)
    if rest:
        raise ValueError(
            f"global_batch={global_batch} does not divide over {devices // degree} replicas; "
            f"use a multiple of {devices // degree}"
        )
    return batch


def _degree_costs(
    profile: BlockProfile, hidden: int, degree: int, batch: int, parameter_state_bytes: int
) -> DegreeCosts:
    first, second = profile.split(hidden, degree, batch, parts=2)
    forward = tuple(zip(first.forward_ns, second.forward_ns, strict=True))
    backward = tuple(zip(first.backward_ns, second.backward_ns, strict=True))
    collective = (first.collective_ns, second.collective_ns)
    weights = 12 * hidden * hidden
    return DegreeCosts(
        degree=degree,
        forward=tuple(PassCosts(compute_ns=f, collective_ns=collective) for f in forward),
        backward=tuple(
            PassCosts(compute_ns=(f[0] + b[0], f[1] + b[1]), collective_ns=collective)
            for f, b in zip(forward, backward, strict=True)
        ),
        state_bytes=-(-weights * parameter_state_bytes // degree),
        saved_bytes=2 * profile.activation_size_bytes(hidden, batch),
        runtime_bytes=profile.costs(hidden, degree, batch).runtime_bytes,
    )
