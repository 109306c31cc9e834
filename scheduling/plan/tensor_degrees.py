"""Tensor-parallel degree and recomputation of every layer, by integer linear programming (Oases section V).

A layer's blocks (attention, MLP) end in a collective each. Two sub-batches take turns, so that one computes
while the other communicates. In Oases the activations are gathered between layers of different degrees, and
nothing overlaps there; Braid's layers pass on the same tokens whatever their degrees.

The answer is exact: costs depend on the choices of two neighbouring layers, so a strategy is a path through a
layered graph, equation 5 is the length of the path, and equation 6 is a knapsack constraint on it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

MEMORY_UNIT_BYTES: Final = 2**20
"""Unit of memory in the integer program; memory is rounded up to whole units, so that the solver's tolerance
cannot exceed the limit."""

Numbers = NDArray[np.float64] | float


class LayerChoice(NamedTuple):
    """A layer's tensor-parallel degree and recompute policy."""

    degree: int
    recompute: str = "full"


@dataclass(frozen=True, kw_only=True)
class PassCosts:
    """Times in ns of one block of a layer in one pass: its computation and the collective at its end.

    Each time is a pair, for the first and for the second sub-batch.

    A replica with a single sample has an empty second sub-batch, which costs 0: nothing overlaps.
    """

    compute_ns: tuple[int, int]
    collective_ns: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class DegreeCosts:
    """Costs of a layer with one tensor-parallel degree and recompute policy.

    Blocks are in the order of the forward pass, in ``backward`` too.

    Recomputation is part of the backward pass's computation.
    """

    degree: int
    recompute: str = "full"
    forward: tuple[PassCosts, ...]
    backward: tuple[PassCosts, ...]
    resident_bytes: int
    """Bytes that each such layer adds to a rank: weights, gradients, optimizer states, saved inputs."""
    runtime_bytes: int = 0
    """Bytes of temporary buffers, which all layers of a rank use by turns."""
    once_ns: int = 0
    """Ns of a layer that do not depend on its passes: gradient sums of replicas, the optimizer's update."""

    @property
    def choice(self) -> LayerChoice:
        return LayerChoice(self.degree, self.recompute)

    @property
    def resident_units(self) -> int:
        return -(-self.resident_bytes // MEMORY_UNIT_BYTES)

    @property
    def runtime_units(self) -> int:
        return -(-self.runtime_bytes // MEMORY_UNIT_BYTES)

    @property
    def inside_ns(self) -> int:
        """Sum of the terms of equation 3 that depend on this layer alone, over both passes, in ns."""
        total = self.once_ns
        for blocks in (self.forward, self.backward[::-1]):
            total += sum(max(block.compute_ns[1], block.collective_ns[0]) for block in blocks)
            total += sum(max(b.compute_ns[0], a.collective_ns[1]) for a, b in pairwise(blocks))
        return total

    @property
    def first_ns(self) -> int:
        """Total cost in ns of this layer as the model's first layer."""
        return self.inside_ns + self.forward[0].compute_ns[0] + self.backward[0].collective_ns[1]

    @property
    def last_ns(self) -> int:
        """Cost in ns that is added if this layer is the model's last layer."""
        return self.forward[-1].collective_ns[1] + self.backward[-1].compute_ns[0]


@dataclass(frozen=True, kw_only=True)
class DegreeProblem:
    """Integer program: a number of equal layers, the options for each, and a rank's memory limit in bytes."""

    layers: int
    options: tuple[DegreeCosts, ...]
    memory_limit_bytes: int
    gather_ns: Mapping[tuple[int, int], int] | None = None
    """(smaller, larger degree) -> ns of the all-gather of activations, or of their gradients, in equation 4.
    None: nothing is gathered, and passes overlap between layers of any degrees."""

    def option(self, choice: LayerChoice) -> DegreeCosts:
        return next(option for option in self.options if option.choice == choice)

    def step_ns(self, earlier: DegreeCosts, later: DegreeCosts) -> int:
        """Return the ns that layer ``later`` adds if it follows layer ``earlier`` (equations 3 and 4).

        For two neighbours, a pass's computation and the collective before it take the longer of both times,
        or their sum where activations are gathered. The paper writes both cases of equation 4 with the
        collective of the earlier layer and the computation of the later one. In the backward pass data flows
        the other way, so there the collective of the later layer cannot hide behind the computation of the
        earlier one.
        """
        forward = (earlier.forward[-1].collective_ns[1], later.forward[0].compute_ns[0])
        backward = (later.backward[0].collective_ns[1], earlier.backward[-1].compute_ns[0])
        low, high = sorted((earlier.degree, later.degree))
        if self.gather_ns is None or low == high:
            between = max(forward) + max(backward)
        elif earlier.degree == low:
            between = self.gather_ns[low, high] + sum(forward) + max(backward)
        else:
            between = self.gather_ns[low, high] + max(forward) + sum(backward)
        return between + later.inside_ns


def strategy_cost(problem: DegreeProblem, choices: Sequence[LayerChoice]) -> int:
    """Return the ns of both passes through layers with these choices, in order (equation 5)."""
    options = [problem.option(choice) for choice in choices]
    steps = sum(problem.step_ns(earlier, later) for earlier, later in pairwise(options))
    return options[0].first_ns + steps + options[-1].last_ns


def strategy_memory_bytes(problem: DegreeProblem, choices: Sequence[LayerChoice]) -> int:
    """Return the left side of equation 6: resident bytes of all layers plus the largest temporary buffers.

    The paper counts the buffers of the last layer. Buffers are reused, so the peak is the largest of any
    layer; both agree where degrees are equal.
    """
    options = [problem.option(choice) for choice in choices]
    units = sum(o.resident_units for o in options) + max(o.runtime_units for o in options)
    return units * MEMORY_UNIT_BYTES


def plan_degrees(problem: DegreeProblem) -> tuple[LayerChoice, ...]:
    """Return the strategy of least cost (equation 5) within the memory (equation 6), proven to be optimal.

    Raises `ValueError` where nothing fits, with the number of bytes that would suffice.

    The search is for the shortest path through the layers' choices, as counts of its steps. Layers are equal,
    so the flows z[v,i,j] between the layers v and v + 1 may be added up over v: N[i,j] counts the steps from
    choice i to choice j. Counts form a path if flow in and out agree and all used choices are connected; a
    second flow ensures the latter: it leaves the first choice with a unit for every used choice and runs
    along taken steps. With one binary per layer and step instead, every order of the runs is another solution
    of the same cost, and 96 layers of 6 degrees took up to 38 s instead of 0.2 s.

    Columns: first, last and used (binary, per choice), steps N (integer) and the second flow (both per pair
    of choices), the largest buffers.
    """
    options = problem.options
    # No mixture needs less than its leanest choice alone: the buffers of that choice count in both.
    least = min(strategy_memory_bytes(problem, (option.choice,) * problem.layers) for option in options)
    if least > problem.memory_limit_bytes:
        raise ValueError(
            f"memory_limit_bytes={problem.memory_limit_bytes} is too little for {problem.layers} layers; "
            f"raise it to {least}"
        )
    count = len(options)
    first, last, used = (slice(k * count, (k + 1) * count) for k in range(3))
    steps = slice(3 * count, 3 * count + count**2)
    flow = slice(steps.stop, steps.stop + count**2)
    buffers, width = flow.stop, flow.stop + 1
    each = np.eye(count)
    into = np.tile(each, count)
    out = np.repeat(each, count, axis=1)

    def rows(number: int, low: float, high: float, *parts: tuple[slice | int, Numbers]) -> LinearConstraint:
        matrix = np.zeros((number, width))
        for columns, values in parts:
            matrix[:, columns] = values
        return LinearConstraint(matrix, low, high)

    resident = np.array([float(option.resident_units) for option in options])
    runtime = np.array([float(option.runtime_units) for option in options])
    limit = problem.memory_limit_bytes // MEMORY_UNIT_BYTES
    constraints = [
        rows(1, 1, 1, (first, 1.0)),
        rows(1, problem.layers - 1, problem.layers - 1, (steps, 1.0)),
        rows(count, 0, 0, (first, each), (steps, into - out), (last, -each)),
        rows(count, -np.inf, 0, (first, each), (steps, into), (used, -problem.layers * each)),
        rows(count**2, -np.inf, 0, (flow, np.eye(count**2)), (steps, -count * np.eye(count**2))),
        rows(count, 0, np.inf, (flow, into - out), (used, -each), (first, count * each)),
        rows(count, -np.inf, 0, (used, np.diag(runtime)), (buffers, -1.0)),
        rows(1, -np.inf, limit, (first, resident), (steps, resident @ into), (buffers, 1.0)),
    ]
    cost, upper, whole = np.zeros(width), np.full(width, np.inf), np.zeros(width)
    cost[first] = [option.first_ns for option in options]
    cost[steps] = [problem.step_ns(earlier, later) for earlier in options for later in options]
    cost[last] = [option.last_ns for option in options]
    whole[: steps.stop] = 1
    upper[: steps.start] = 1
    result = milp(
        cost / 1000,  # microseconds: the solver's absolute gap of 1e-6 is then below a nanosecond
        constraints=constraints,
        integrality=whole,
        bounds=Bounds(0, upper),
        options={"mip_rel_gap": 0.0},
    )
    if result.x is None or result.status != 0:
        raise RuntimeError(f"the solver found no proven optimum: {result.message}")
    counts = np.rint(result.x[steps]).astype(int).reshape(count, count)
    path = _walk(counts.tolist(), int(np.argmax(result.x[first])))
    assert len(path) == problem.layers
    return tuple(options[index].choice for index in path)


def _walk(steps: list[list[int]], first: int) -> list[int]:
    """Return a path of choices from ``first`` that takes the step i -> j ``steps[i][j]`` times (Hierholzer
    1873)."""
    remaining = [list(row) for row in steps]
    open_path, path = [first], []
    while open_path:
        current = open_path[-1]
        # Staying at a choice comes first, so that layers of one degree are adjacent.
        onward = sorted(range(len(remaining)), key=lambda choice: choice != current)
        target = next((choice for choice in onward if remaining[current][choice]), None)
        if target is None:
            path.append(open_path.pop())
        else:
            remaining[current][target] -= 1
            open_path.append(target)
    return path[::-1]
