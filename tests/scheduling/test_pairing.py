"""Pairing is exact, the list schedule is near the best order, and both price what the simulator runs."""

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from statistics import median
from typing import Final

import numpy as np
import pytest

from braid.scheduling.generate.fixed_orders import by_turns
from braid.scheduling.generate.lower import Choices
from braid.scheduling.generate.named import PairMethod
from braid.scheduling.model.presets.library import cluster_preset, model_preset
from braid.scheduling.plan.beam import beam_order
from braid.scheduling.plan.decide import modelled
from braid.scheduling.plan.list_schedule import (
    exact_order,
    improved,
    issue_ns,
    list_schedule,
)
from braid.scheduling.plan.orders import CostedSetting, decide_pairing, exact_pairing, layer_pair, order_steps
from braid.scheduling.plan.pairing import Pairing, may_join, pair, segment_ns
from braid.scheduling.plan.strands import STREAMS, PairProblem, StrandGraph, bits, joint_problem
from braid.scheduling.schedule.order import Issue, Order
from braid.scheduling.schedule.schedule import Sides
from braid.scheduling.schedule.text import parse_sides
from tests.scheduling.plans import cluster, fastest, lowered, paired_runs, setting

GRAPHS = 200
BEAM_SEEDS = [int(os.environ["BRAID_TEST_SEED"]) + number for number in range(10)]
ROUNDING = 1e-9


# -- made-up pairs, and pairing by brute force: every order, every cut, equation 2 on each -------------------

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


def fresh_seed() -> int:
    """A new one in every run; whoever fails prints it."""
    return random.SystemRandom().randrange(2**31)


def assert_valid(problem: PairProblem, pairing: Pairing) -> None:
    """Every operator once, after what it needs, in segments that can be in flight together."""
    done = [0, 0]
    graphs = (problem.forward, problem.backward)
    for masks in pairing.segments:
        assert any(masks)
        for side, (graph, mask) in enumerate(zip(graphs, masks, strict=True)):
            assert not mask & done[side]
            assert is_segment(graph, mask)
            for op in range(len(graph)):
                if mask >> op & 1:
                    assert graph.before[op] & ~(done[side] | mask) == 0
            done[side] |= mask
    assert done == [graph.all for graph in graphs]
    assert pairing.ns == pytest.approx(sum(segment_ns(problem, *masks) for masks in pairing.segments))


# -- exactness -----------------------------------------------------------------------------------------------


def test_pairing_equals_brute_force_on_random_graphs() -> None:
    seed = fresh_seed()
    draw = random.Random(seed)
    improved = 0
    for number in range(GRAPHS):
        problem = made_up_problem(draw, (1, 4))
        found = pair(problem)
        where = f"seed {seed}, graph {number}: {problem}"
        assert found.ns == pytest.approx(brute_force(problem), rel=ROUNDING), where
        assert found.ns <= problem.serial_ns * (1 + ROUNDING), where
        assert found.ns >= problem.lower_bound_ns * (1 - ROUNDING), where
        assert_valid(problem, found)
        improved += found.ns < problem.serial_ns * (1 - 1e-6)
    # Were everything serial, brute force and search could agree for a bad reason.
    assert improved > GRAPHS // 2, f"seed {seed}"


@cache
def bench_of(cluster: str = "a40") -> CostedSetting:
    """A layer of a preset on a modelled cluster, folded over two stages of one layer a chunk."""
    model = replace(model_preset("llama-25b"), layers=4)
    own = setting("braid:w", tp=8, pp=2, micro_batches=6, model=model)
    return modelled(cluster_preset(cluster, nodes=2))(own)


# -- orders without barriers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", BEAM_SEEDS)
def test_orders_of_beams_are_valid_and_priced_as_the_machine_prices_them(seed: int) -> None:
    problem = made_up_problem(random.Random(seed), (3, 9))
    found = beam_order(problem)
    assert sorted(found.operators) == list(range(len(problem.forward) + len(problem.backward)))
    assert issue_ns(problem, found.operators) == pytest.approx(found.ns)
    assert found.ns >= problem.lower_bound_ns * (1 - ROUNDING)
    assert improved(problem, found).ns <= found.ns


def test_beams_order_small_pairs_about_as_well_as_can_be() -> None:
    """Of 800 problems the median was optimal, 99.1 % were within 5 %; 2 of 10 beyond that are no accident."""
    ratios = []
    for seed in BEAM_SEEDS:
        problem = made_up_problem(random.Random(seed), (3, 5))
        found = beam_order(problem)
        ratios.append(improved(problem, found).ns / exact_order(problem).ns)
    assert sum(ratio <= 1.05 for ratio in ratios) > 0.8 * len(ratios), max(ratios)
    assert median(ratios) <= 1.001


@pytest.mark.parametrize("rate", [1e9, 4e9, 2e10])
def test_a_layer_is_paired_nearly_as_well_as_can_be(rate: float) -> None:
    """The search against branch and bound on a whole layer, weight gradients put off in both."""
    bench = modelled(cluster(nodes=2, gpus=1, inter=rate))(setting("braid:w", tp=2))
    problem = layer_pair(bench)
    *exact, best_ns = exact_pairing(problem)
    *found, note = decide_pairing(problem, PairMethod.ORDER)
    assert best_ns <= note.ns * (1 + 1e-6)
    assert note.ns <= best_ns * 1.03
    orders = {sides: order for sides, order in fastest(bench).choices.orders.items() if len(sides) == 1}
    steps = [
        lowered(bench, Choices(orders={**orders, sides: order})).step_ns for sides, order in (exact, found)
    ]
    assert steps[0] <= steps[1] * 1.01, "what is best for a pair serves the step"


@pytest.mark.parametrize("seed", [308023330, None], ids=["a start too soon", "fresh"])
def test_exact_order_equals_every_order_tried(seed: int | None) -> None:
    # The fixed seed holds a pair in which a link that is free sooner ends later.
    seed = fresh_seed() if seed is None else seed
    draw = random.Random(seed)
    for number in range(20):
        problem = made_up_problem(draw, (1, 3))
        least = min(issue_ns(problem, order) for order in _all_orders(problem))
        found = exact_order(problem)
        where = f"seed {seed}, graph {number}: {problem}"
        assert found.ns == pytest.approx(least, rel=1e-6), where
        assert issue_ns(problem, found.operators) == pytest.approx(found.ns, rel=1e-9), where


def _all_orders(problem: PairProblem) -> list[tuple[int, ...]]:
    """Topological orders of both graphs together, the backward pass's operators counted on."""
    both = StrandGraph(
        issues=problem.forward.issues + problem.backward.issues,
        streams=problem.streams,
        solo_ns=problem.solo_ns,
        before=problem.before,
    )
    return list(orders(both))


def test_passes_side_by_side_add_to_gradients_in_their_order() -> None:
    """Whatever computes stands behind the same operator of the first pass; collectives need not."""
    bench = modelled(cluster(gpus=2))(setting("megatron", tp=2))
    operators = bench.members["layer"].backward.operators
    both = joint_problem([bench.members["layer"].backward] * 2, bench.profile).backward
    for n, op in enumerate(operators):
        first, second = both.before[n], both.before[len(operators) + n]
        assert first >> n == 0
        assert (second >> n & 1) == (not op.kind.communicates)


# -- layers of presets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [PairMethod.ORDER, PairMethod.BARRIERS, PairMethod.TURNS])
def test_prices_are_those_of_the_simulator(method: PairMethod) -> None:
    """A paired block of one layer each takes as long as its pairing says."""
    bench = bench_of()
    problem = layer_pair(bench)
    sides = parse_sides("F:layer|B:layer")
    if method is PairMethod.ORDER:
        order = list_schedule(problem).operators
        expected = issue_ns(problem, order)
        steps = order_steps(problem, order)
    else:
        sides, steps, note = decide_pairing(problem, method)
        assert note.method is method
        expected = note.ns
        steps = steps or by_turns(sides, bench.parts)
    durations = _paired_blocks_ns(bench, sides, steps)
    assert durations
    for duration in durations:
        assert duration == pytest.approx(expected, rel=1e-6)


def _paired_blocks_ns(bench: CostedSetting, sides: Sides, steps: Order) -> list[float]:
    """Times of the last stage's paired blocks, whose chunks hold nothing but one layer."""
    outcome = lowered(bench, Choices(orders={sides: steps}))
    return [run.course.duration for run in paired_runs(outcome.simulation)[-1]]
