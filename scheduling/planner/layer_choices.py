"""Degree and recomputation of every layer of a run: a program proposes, the simulator decides.

What all layers alike take is simulated for every degree and policy. The integer program of Oases (equations 3
to 6) gets the operators' costs from the same profile, what the simulator knows beyond them (sums of
gradients, ends of the model, slowdown) as what a layer adds once, and the memory in the same way, so that it
is right wherever all layers are alike. What it proposes is simulated too, and the best of all is taken.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Final

from braid.scheduling.lowering.recompute import policies_of
from braid.scheduling.operators import Graph
from braid.scheduling.pattern import counted, is_layer
from braid.scheduling.planner.decide import Outcome, Over, decide, rank
from braid.scheduling.planner.degree_problem import DegreeCosts, DegreeProblem, LayerChoice, PassCosts
from braid.scheduling.planner.orders import BenchOf
from braid.scheduling.planner.space import COARSE, with_schedule
from braid.scheduling.planner.tensor_degrees import plan_degrees, strategy_cost
from braid.scheduling.profile import Profile, UnknownCostError
from braid.scheduling.setting import Setting

ASKED: Final = 5
"""How often the program is asked, each time with another memory limit, until what it answers fits."""

_FULL_SCALE: Final = 2**34
"""What most memory is scaled to: the program counts in units that are large for small models."""

Schedules = Callable[[Setting], Iterable[Setting]]
"""A setting under every schedule that is compared."""


@dataclass(frozen=True, kw_only=True)
class LayerSearch:
    """What may be chosen for a layer, and how much memory a rank has."""

    degrees: tuple[int, ...]
    policies: tuple[str, ...]
    limit_bytes: float = float("inf")


def with_choices(setting: Setting, choices: Sequence[LayerChoice]) -> Setting:
    """The setting with a degree and a policy for every layer; `ValueError` where it cannot have them."""
    layout = replace(setting.layout, tensor_degrees=tuple(choice.degree for choice in choices))
    return replace(setting, layout=layout, recompute=policies_text([one.recompute for one in choices]))


def policies_text(policies: Sequence[str]) -> str:
    """As ``train.recompute`` has it: one word for all, or ``2*full none``."""
    return policies[0] if len({*policies}) == 1 else " ".join(counted(policies))


def choices_of(setting: Setting) -> tuple[LayerChoice, ...]:
    """What a setting has for every layer."""
    layers = setting.model.layers
    degrees = setting.layout.tensor_degrees or (setting.layout.tp,) * layers
    return tuple(map(LayerChoice, degrees, policies_of(setting.recompute, layers)))


def choose_layers(
    setting: Setting, search: LayerSearch, bench_of: BenchOf, over: Over, schedules: Schedules
) -> list[Outcome]:
    """All that was simulated, what to take first, the others by their steps.

    `ValueError` where nothing can be run, and for a cost of any degree that ``bench_of`` does not have.
    """
    alike: dict[LayerChoice, Outcome] = {}
    refused: ValueError | None = None
    for choice in (LayerChoice(*pair) for pair in product(sorted(search.degrees), search.policies)):
        try:
            one = with_choices(setting, (choice,) * setting.model.layers)
            alike[choice] = decide(schedules(one), bench_of, over, COARSE)[0]
        except UnknownCostError:
            raise
        except ValueError as error:
            refused = error
    if not alike:
        raise refused or ValueError("there is nothing to choose from")
    best = min(alike.values(), key=rank)
    found = [*alike.values()]
    for choices in _proposed(alike, best, search.limit_bytes, partial(_missing, found)):
        one = with_schedule(with_choices(setting, choices), best.setting.named)
        found.append(decide([one], bench_of, over, COARSE)[0])
    return sorted(found, key=rank)


def _missing(found: Sequence[Outcome], choices: Sequence[LayerChoice]) -> float:
    return next(one.missing_bytes for one in found if choices_of(one.setting) == tuple(choices))


def degrees_within(tp: int) -> tuple[int, ...]:
    """The degrees that layers may have side by side: each divides the next one, and the last is ``tp``."""
    found = [tp]
    while found[-1] > 1:
        found.append(next(n for n in range(found[-1] // 2, 0, -1) if found[-1] % n == 0))
    return tuple(reversed(found))


def _proposed(
    alike: Mapping[LayerChoice, Outcome],
    best: Outcome,
    limit: float,
    missing: Callable[[Sequence[LayerChoice]], float],
) -> Iterator[tuple[LayerChoice, ...]]:
    """What the program answers, in both directions, under limits that close in on the one that is meant.

    The program adds up what layers hold, and cannot see when they do: where its answer is over the limit, the
    next one is lower, and where it is not, between the two.
    """
    known = {(choice,) * best.setting.model.layers for choice in alike}
    fits, exceeds = 0.0, limit
    for _ in range(ASKED):
        try:
            choices = plan_degrees(_problem(alike, best, limit)).choices
        except ValueError:  # nothing fits: what needs least is among those that are alike
            return
        for one in dict.fromkeys((choices, choices[::-1])):
            if one not in known:
                known.add(one)
                yield one
        if over := missing(choices):
            exceeds = limit
            limit = max(limit - over, (fits + limit) / 2)
        elif limit == exceeds:
            return
        else:
            fits = limit
            limit = (limit + exceeds) / 2


def _problem(alike: Mapping[LayerChoice, Outcome], best: Outcome, limit: float) -> DegreeProblem:
    """Costs of a layer, such that those of equal layers are the simulator's.

    In nanoseconds of two micro-batches side by side, or of one where the schedule runs one after the other.
    """
    layers = best.setting.model.layers
    beside = any(len(sides) > 1 for sides in best.code.schedule.programs)
    turns = max(1, best.setting.micro_batches // (2 if beside else 1))
    scale = _FULL_SCALE / max(map(held_bytes, alike.values()))
    problem = DegreeProblem(
        layers=layers,
        options=tuple(_costs(choice, outcome, beside, scale) for choice, outcome in alike.items()),
        gather_ns=None,
        memory_limit_bytes=int(min(limit * scale, 2 * _FULL_SCALE)),
        left_out={},
    )
    options = []
    for option, outcome in zip(problem.options, alike.values(), strict=True):
        by_program = strategy_cost(problem, (option.choice,) * layers)
        once = (outcome.step_ns / turns - by_program) / layers
        options.append(replace(option, once_ns=round(once)))
    return replace(problem, options=tuple(options))


def held_bytes(outcome: Outcome) -> int:
    """Of the rank that holds most."""
    return max(held.total_bytes for held in outcome.simulation.memory)


def _costs(choice: LayerChoice, outcome: Outcome, beside: bool, scale: float) -> DegreeCosts:
    """Of the kind that most layers are of."""
    kinds, bench = Counter(outcome.setting.kinds), outcome.bench
    part = bench.members[max((kind for kind in kinds if is_layer(kind)), key=kinds.__getitem__)]
    return DegreeCosts(
        degree=choice.degree,
        recompute=choice.recompute,
        forward=_blocks(part.forward, bench.profile, beside),
        backward=_blocks(part.backward, bench.profile, beside)[::-1],
        state_bytes=int(held_bytes(outcome) * scale / outcome.setting.model.layers),
        saved_bytes=0,
        runtime_bytes=0,
    )


def _blocks(graph: Graph, profile: Profile, beside: bool) -> tuple[PassCosts, ...]:
    """What is computed up to each collective, and the collective."""
    blocks: list[PassCosts] = []
    compute = 0.0

    def close(collective: float) -> None:
        pairs = [(round(ns), round(ns) if beside else 0) for ns in (compute, collective)]
        blocks.append(PassCosts(compute_ns=pairs[0], collective_ns=pairs[1]))

    for op in graph.operators:
        if op.kind.communicates:
            close(profile.solo(op.key))
            compute = 0.0
        else:
            compute += profile.solo(op.key)
    if compute or not blocks:
        close(0.0)
    return tuple(blocks)
