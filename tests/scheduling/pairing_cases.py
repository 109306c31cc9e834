"""Made-up pairs of passes, and pairing by brute force: every order, every cut, equation 2 on each."""

import random
from collections.abc import Iterator
from typing import Final

import numpy as np

from braid.scheduling.plan.pairing import may_join, segment_ns
from braid.scheduling.plan.strands import STREAMS, PairProblem, StrandGraph, bits
from braid.scheduling.schedule.order import Issue

Segmentation = tuple[int, ...]
"""An order that was cut into segments: the mask of each."""

LARGEST_SLOWDOWN: Final = 1.3
"""Above 1 two operators take longer together than one after the other."""


def made_up_problem(draw: random.Random, operators: tuple[int, int]) -> PairProblem:
    """Two random graphs of at least and at most so many operators each, with random times and contention.

    Barriers cost nothing in half of the problems.
    """
    forward = _made_up_graph(draw, "f", draw.randint(*operators))
    backward = _made_up_graph(draw, "b", draw.randint(*operators))
    streams = (*forward.streams, *backward.streams)
    slowdown = np.zeros((len(streams), len(streams)))
    for i, first in enumerate(streams):
        for j, second in enumerate(streams):
            if first != second:
                slowdown[i, j] = draw.uniform(0.0, LARGEST_SLOWDOWN)
    barrier = draw.choice((0.0, draw.uniform(0.0, 2000.0)))
    return PairProblem(forward=forward, backward=backward, slowdown=slowdown, barrier_ns=barrier)


def _made_up_graph(draw: random.Random, side: str, count: int) -> StrandGraph:
    """From chains to independent operators, half of them computing."""
    density = draw.choice((0.2, 0.5, 0.8))
    return StrandGraph(
        issues=tuple(Issue(0, f"{side}{n}") for n in range(count)),
        streams=tuple(draw.choice((0, 0, *range(1, len(STREAMS)))) for _ in range(count)),
        solo_ns=tuple(draw.uniform(500.0, 10_000.0) for _ in range(count)),
        before=tuple(sum(1 << m for m in range(n) if draw.random() < density) for n in range(count)),
    )


def brute_force(problem: PairProblem) -> float:
    """The least time over all pairs of segmentations, in nanoseconds; for a handful of operators."""
    known: dict[tuple[int, int], float] = {}

    def price(forward: int, backward: int) -> float:
        if (forward, backward) not in known:
            known[forward, backward] = segment_ns(problem, forward, backward)
        return known[forward, backward]

    backwards = segmentations(problem.backward)
    best = float("inf")
    for f in segmentations(problem.forward):
        for b in backwards:
            # Equation 2: row[j] is the least time of the segments so far and j of the other strand.
            row = [0.0]
            for mask in b:
                row.append(row[-1] + price(0, mask))
            for segment in f:
                following = [row[0] + price(segment, 0)]
                for j, mask in enumerate(b):
                    following.append(
                        min(
                            row[j + 1] + price(segment, 0),
                            following[j] + price(0, mask),
                            row[j] + price(segment, mask),
                        )
                    )
                row = following
            best = min(best, row[-1])
    return best


def is_segment(graph: StrandGraph, mask: int) -> bool:
    """Whether the operators of a mask can be in flight together."""
    return all(may_join(graph, op, mask) for op in bits(mask))


def segmentations(graph: StrandGraph) -> set[Segmentation]:
    """Every cut of every topological order into segments."""
    found: set[Segmentation] = set()
    for order in orders(graph):
        for cuts in range(1 << max(0, len(order) - 1)):
            masks = [0]
            for place, op in enumerate(order):
                if place and cuts >> (place - 1) & 1:
                    masks.append(0)
                masks[-1] |= 1 << op
            if all(is_segment(graph, mask) for mask in masks):
                found.add(tuple(masks))
    return found


def orders(graph: StrandGraph) -> Iterator[tuple[int, ...]]:
    """Every topological order."""

    def extend(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(order) == len(graph):
            yield order
            return
        done = set(order)
        for op in range(len(graph)):
            needed = {other for other in range(len(graph)) if graph.before[op] >> other & 1}
            if op not in done and needed <= done:
                yield from extend((*order, op))

    yield from extend(())
