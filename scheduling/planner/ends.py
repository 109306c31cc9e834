"""Ends of backward passes that paired programs leave to the next one, and the orders that come of it.

When a paired block is nearly over, nothing is there to hide its last collectives behind. An end that it
leaves is hidden in the next block, and hides what is there: blocks overlap like the iterations of a software
pipeline. Weight gradients are needed by nothing in their pass, so they can always be left; so can all that
comes last in a backward pass that gives its gradient to nobody: one that stops at the embedding.
"""

from functools import lru_cache

from braid.scheduling.operators import Part
from braid.scheduling.planner.beam import SHARES, beam_order
from braid.scheduling.planner.list_schedule import IssueOrder, improved
from braid.scheduling.planner.strands import PairProblem, StrandGraph, bits, leaving

BEAMS = ((96, 0.1), (192, 0.05), (64, 0.3))
"""Widths and shares of communication (`beam_order`) for orders in which blocks overlap. What each finds is
improved: moving operators seldom leads to the best order from where the best beam ends (docs/log.md)."""

MANY = 100
"""Operators beyond which there is time for the first beam alone."""
MOST = 160
"""Operators beyond which there is time for beams of one share of communication alone."""


def gives_gradient(part: Part) -> bool:
    """Whether something before a part needs the gradient of its input."""
    gradients = {f"d.{name}" for name in part.inputs if name not in part.constants}
    return any(gradients & set(op.writes) for op in part.backward.operators)


@lru_cache(maxsize=1024)
def unit_order(problem: PairProblem, *, goes_on: bool, whole: bool = False) -> tuple[int, IssueOrder]:
    """The best order for two units, and what it leaves to the next paired block (a mask), where they go on.

    whole: it leaves all that comes last in the backward pass, whose input must need no gradient; else it may
    leave weight gradients of the last layer.
    """
    graph = problem.backward
    movable = graph.weights & graph.last_layer
    if goes_on and whole:
        end = _last_collective_on(graph) | movable
        ring = leaving(problem, end)
        beams = BEAMS[:1] if len(ring) > MANY else BEAMS
        found = [improved(ring, beam_order(ring, width, (share,))) for width, share in beams]
        return end, min(found, key=lambda order: order.ns)
    shares = SHARES[1:2] if len(problem) > MOST else SHARES
    end, best = 0, beam_order(problem, shares=shares)
    if goes_on:
        later = beam_order(leaving(problem, movable), shares=shares)
        if later.ns < best.ns * (1 - 1e-6):
            end, best = movable, later
    return end, improved(leaving(problem, end), best)


def _last_collective_on(graph: StrandGraph) -> int:
    """The last layer's last collective and all that comes after it."""
    layer = list(bits(graph.last_layer))
    first = next((op for op in reversed(layer) if graph.streams[op]), layer[-1])
    return graph.all & ~((1 << first) - 1)


def possible_ends(problem: PairProblem) -> list[int]:
    """What may be left to the next layer: nothing, each long weight gradient, and all of these together.

    Long: a twentieth of its pass or more.
    """
    graph = problem.backward
    movable = [1 << n for n in bits(graph.weights) if graph.solo_ns[n] >= graph.total_ns / 20]
    return [0, *movable, *([sum(movable)] if len(movable) > 1 else [])]
