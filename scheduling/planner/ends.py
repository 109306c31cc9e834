"""Ends of backward passes that paired programs leave to the next one, and the orders that come of it.

When a paired block is nearly over, nothing is there to hide its last collectives behind. An end that it
leaves is hidden in the next block, and hides what is there: blocks overlap like the iterations of a software
pipeline. Weight gradients are needed by nothing in their pass, so they can always be left; so can all that
comes last in a backward pass that gives its gradient to nobody: one that stops at the embedding.
"""

from collections.abc import Sequence
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
def unit_order(
    problem: PairProblem, *, goes_on: bool, whole: bool = False
) -> tuple[tuple[str, ...], IssueOrder]:
    """The best order for two units, and what it leaves to the next paired block, where they go on.

    whole: it leaves all that comes last in the backward pass, whose input must need no gradient; else it may
    leave weight gradients of the last layer.
    """
    if goes_on and whole:
        end = _whole_end(problem.backward)
        ring = leaving(problem, end)
        beams = BEAMS[:1] if len(ring.forward) + len(ring.backward) > MANY else BEAMS
        starts = [beam_order(ring, width, (share,)) for width, share in beams]
        return end, min((improved(ring, one.operators, one.ns) for one in starts), key=lambda one: one.ns)
    count = len(problem.forward) + len(problem.backward)
    shares = SHARES[1:2] if count > MOST else SHARES
    best: tuple[tuple[str, ...], IssueOrder] = ((), beam_order(problem, shares=shares))
    if goes_on:
        movable = _gradients(problem.backward, _last_layer(problem.backward))
        found = beam_order(leaving(problem, movable), shares=shares)
        if found.ns < best[1].ns * (1 - 1e-6):
            best = movable, found
    end, found = best
    return end, improved(leaving(problem, end), found.operators, found.ns)


def _last_layer(graph: StrandGraph) -> tuple[str, ...]:
    """Names of the operators of the layer that a unit's backward pass comes to last."""
    place = [place for place, layer in zip(graph.places, graph.layers, strict=True) if layer][-1]
    return tuple(name for name, own in zip(graph.names, graph.places, strict=True) if own == place)


def _gradients(graph: StrandGraph, names: Sequence[str]) -> tuple[str, ...]:
    """The weight gradients among some operators."""
    weights = {graph.names[n] for n in bits(graph.weights)}
    return tuple(name for name in names if name in weights)


def _whole_end(graph: StrandGraph) -> tuple[str, ...]:
    """The last layer's last collective, what comes after it, and the weight gradients of that layer."""
    layer = _last_layer(graph)
    streams = dict(zip(graph.names, graph.streams, strict=True))
    first = next((name for name in reversed(layer) if streams[name]), layer[-1])
    last, gradients = graph.names[graph.names.index(first) :], _gradients(graph, layer)
    return tuple(name for name in graph.names if name in last or name in gradients)


def possible_ends(problem: PairProblem) -> list[tuple[str, ...]]:
    """What may be left to the next layer: nothing, each long weight gradient, and all of these together.

    Long: a twentieth of its pass or more.
    """
    graph = problem.backward
    movable = [graph.names[n] for n in bits(graph.weights) if graph.solo_ns[n] >= graph.total_ns / 20]
    return [(), *((name,) for name in movable), *([tuple(movable)] if len(movable) > 1 else [])]
