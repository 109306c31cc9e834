"""Degree and recomputation of every layer, by integer linear programming (Oases section V).

Exact: costs are functions of what is chosen for two neighbouring layers, so a strategy is a path through a
layered graph, equation 5 the length of the path, and equation 6 one knapsack constraint on it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

from braid.scheduling.planner.degree_problem import MEMORY_UNIT_BYTES, DegreeProblem, LayerChoice, PassCosts

Numbers = NDArray[np.float64] | float


@dataclass(frozen=True, kw_only=True)
class UniformStrategy:
    """One degree and policy for all layers."""

    degree: int
    recompute: str
    cost_ns: int
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class DegreePlan:
    """What is best for every layer, and the best that is the same for all."""

    choices: tuple[LayerChoice, ...]
    cost_ns: int
    memory_bytes: int
    uniform: UniformStrategy
    solver_seconds: float

    @property
    def degrees(self) -> tuple[int, ...]:
        """Of every layer."""
        return tuple(choice.degree for choice in self.choices)

    def describe(self) -> str:
        """The degrees as in the paper's table II, such as ``[2]x8+[4]x16``."""
        return describe_degrees(self.degrees)


def describe_degrees(degrees: Sequence[int]) -> str:
    """Equal degrees in a row, in the order of the layers: ``[2]x8+[4]x16``."""
    starts = [0, *(n for n, (a, b) in enumerate(pairwise(degrees), 1) if a != b), len(degrees)]
    return "+".join(f"[{degrees[start]}]x{end - start}" for start, end in pairwise(starts))


def strategy_cost(problem: DegreeProblem, choices: Sequence[LayerChoice]) -> int:
    """Equation 5 of one strategy, term by term: node costs of both passes, and edges, in nanoseconds.

    The paper writes both cases of equation 4 with the collective of the earlier layer and the computation
    of the later one. In the backward pass data flows the other way, so there it is the collective of the
    later layer that cannot hide behind the computation of the earlier one.
    """
    options = [problem.option(choice) for choice in choices]
    assert len(options) == problem.layers
    total = sum(option.once_ns for option in options)
    total += _pass_cost([block for option in options for block in option.forward])
    total += _pass_cost([block for option in reversed(options) for block in reversed(option.backward)])
    for earlier, later in pairwise(options):
        gather = problem.moved_ns(earlier, later)
        if gather is None:
            continue
        total += gather
        if earlier.degree < later.degree:
            total += min(earlier.forward[-1].collective_ns[1], later.forward[0].compute_ns[0])
        else:
            total += min(later.backward[0].collective_ns[1], earlier.backward[-1].compute_ns[0])
    return total


def _pass_cost(nodes: Sequence[PassCosts]) -> int:
    """Equation 3 over the blocks in the order of the pass."""
    total = nodes[0].compute_ns[0] + nodes[-1].collective_ns[1]
    total += sum(max(i.compute_ns[0], before.collective_ns[1]) for before, i in pairwise(nodes))
    return total + sum(max(i.compute_ns[1], i.collective_ns[0]) for i in nodes)


def strategy_memory_bytes(problem: DegreeProblem, choices: Sequence[LayerChoice]) -> int:
    """The left side of equation 6: all layers, and the largest buffers.

    The paper counts the buffers of the last layer. They are reused, so the peak is the largest of any layer;
    the two are the same where degrees are equal.
    """
    options = [problem.option(choice) for choice in choices]
    units = sum(o.resident_units for o in options) + max(o.runtime_units for o in options)
    return units * MEMORY_UNIT_BYTES


def uniform(problem: DegreeProblem) -> UniformStrategy:
    """The cheapest choice for all layers that fits the memory; `ValueError` if none fits."""
    strategies = [(choice, (choice,) * problem.layers) for choice in problem.choices]
    fitting = [
        UniformStrategy(
            degree=choice.degree,
            recompute=choice.recompute,
            cost_ns=strategy_cost(problem, strategy),
            memory_bytes=strategy_memory_bytes(problem, strategy),
        )
        for choice, strategy in strategies
        if strategy_memory_bytes(problem, strategy) <= problem.memory_limit_bytes
    ]
    if not fitting:
        raise _too_little_memory(problem)
    return min(fitting, key=lambda strategy: strategy.cost_ns)


def _too_little_memory(problem: DegreeProblem) -> ValueError:
    # No mixture needs less than its leanest degree alone: the buffers of that degree count in both.
    least = min(strategy_memory_bytes(problem, (choice,) * problem.layers) for choice in problem.choices)
    missing = least - problem.memory_limit_bytes
    return ValueError(
        f"memory_limit_bytes={problem.memory_limit_bytes} is too little for {problem.layers} layers at any "
        f"of the degrees {problem.degrees}: {missing} bytes are missing; raise it to {least}, or use fewer "
        f"layers, a smaller global batch or higher degrees"
    )


def plan_degrees(problem: DegreeProblem) -> DegreePlan:
    """The strategy of least cost (equation 5) within the memory (equation 6), proven to be the best.

    Raises `ValueError` where nothing fits, with the bytes that are missing.
    """
    start = time.perf_counter()
    best_uniform = uniform(problem)
    choices = _solve(problem)
    return DegreePlan(
        choices=choices,
        cost_ns=strategy_cost(problem, choices),
        memory_bytes=strategy_memory_bytes(problem, choices),
        uniform=best_uniform,
        solver_seconds=time.perf_counter() - start,
    )


def _solve(problem: DegreeProblem) -> tuple[LayerChoice, ...]:
    """The shortest path through the choices of the layers, as counts of its steps.

    Layers are equal, so the flows z[v,i,j] between the layers v and v + 1 may be added up over v: N[i,j]
    counts the steps from choice i to choice j. Counts are those of a path if flow in and out agree and all
    choices used hang together; the latter is a second flow, which leaves the first choice with a unit for
    every choice used and runs along steps that are taken. With one binary per layer and step instead, every
    order of the runs is another solution of the same cost, and 96 layers of 6 degrees took up to 38 s
    instead of 0.2 s.

    Columns: first, last and used (binary, per choice), steps N (integer) and the second flow (both per pair
    of choices), the largest buffers.
    """
    count = len(problem.options)
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

    resident = np.array([float(option.resident_units) for option in problem.options])
    runtime = np.array([float(option.runtime_units) for option in problem.options])
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
    cost[first], cost[steps], cost[last] = _path_costs(problem)
    whole[: steps.stop] = 1
    upper[: steps.start] = 1
    result = milp(
        cost / 1000,  # in microseconds: the solver's absolute gap, 1e-6, is then below a nanosecond
        constraints=constraints,
        integrality=whole,
        bounds=Bounds(0, upper),
        options={"mip_rel_gap": 0.0},
    )
    if result.x is None or result.status != 0:
        raise RuntimeError(f"the solver found no proven optimum for {problem.degrees}: {result.message}")
    counts = np.rint(result.x[steps]).astype(int).reshape(count, count)
    path = _walk(counts.tolist(), int(np.argmax(result.x[first])))
    assert len(path) == problem.layers
    return tuple(problem.choices[place] for place in path)


def _walk(steps: list[list[int]], first: int) -> list[int]:
    """A path from ``first`` that takes every step as often as counted (Hierholzer 1873)."""
    left = [list(row) for row in steps]
    open_path, path = [first], []
    while open_path:
        here = open_path[-1]
        # Staying comes first, so that layers of one degree stand together.
        onward = sorted(range(len(left)), key=lambda place: place != here)
        there = next((place for place in onward if left[here][place]), None)
        if there is None:
            path.append(open_path.pop())
        else:
            left[here][there] -= 1
            open_path.append(there)
    return path[::-1]


def _path_costs(problem: DegreeProblem) -> tuple[Numbers, Numbers, Numbers]:
    """Equation 5 split over a path: cost of the first choice, of each pair of neighbours, of the last one.

    What happens inside a layer goes with the step into it. Of two neighbours, the computation of one pass
    and the collective before it take the longer of both times, or their sum where activations are gathered.
    """
    inside = [o.once_ns + _inside(o.forward) + _inside(o.backward[::-1]) for o in problem.options]
    first = [
        inner + option.forward[0].compute_ns[0] + option.backward[0].collective_ns[1]
        for inner, option in zip(inside, problem.options, strict=True)
    ]
    last = [o.forward[-1].collective_ns[1] + o.backward[-1].compute_ns[0] for o in problem.options]
    between = []
    for earlier, later in product(problem.options, repeat=2):
        forward = (earlier.forward[-1].collective_ns[1], later.forward[0].compute_ns[0])
        backward = (later.backward[0].collective_ns[1], earlier.backward[-1].compute_ns[0])
        gather = problem.moved_ns(earlier, later)
        if gather is None:
            between.append(max(forward) + max(backward))
        elif earlier.degree < later.degree:
            between.append(gather + sum(forward) + max(backward))
        else:
            between.append(gather + max(forward) + sum(backward))
    entered = np.tile(np.array(inside, dtype=float), len(inside))
    return np.array(first, dtype=float), np.array(between, dtype=float) + entered, np.array(last, dtype=float)


def _inside(blocks: Sequence[PassCosts]) -> int:
    """The terms of equation 3 that a layer has to itself."""
    own = sum(max(block.compute_ns[1], block.collective_ns[0]) for block in blocks)
    return own + sum(max(b.compute_ns[0], a.collective_ns[1]) for a, b in pairwise(blocks))
