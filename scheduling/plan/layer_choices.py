"""Degree and recomputation of every layer of a run: a program proposes, the simulator decides.

What all layers alike take is simulated for every degree and policy. The integer program of Oases (equations 3
to 6) gets the operators' costs from the same profile, what the simulator knows beyond them (sums of
gradients, ends of the model, slowdown) as what a layer adds once, and the memory in the same way, so that it
is right wherever all layers are alike. What it proposes is simulated too, and the best of all is taken.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from braid.scheduling.cost.profile import Profile
from braid.scheduling.generate.setting import Setting
from braid.scheduling.model.operators import Graph
from braid.scheduling.plan.decide import Outcome, Over, attempts, decide, rank
from braid.scheduling.plan.orders import BenchOf
from braid.scheduling.plan.space import COARSE, with_schedule
from braid.scheduling.plan.tensor_degrees import (
    DegreeCosts,
    DegreeProblem,
    LayerChoice,
    PassCosts,
    plan_degrees,
    strategy_cost,
)
from braid.scheduling.text.pattern import counted, is_layer

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
    policies = [choice.recompute for choice in choices]
    same = len({*policies}) == 1
    return replace(setting, layout=layout, recompute=policies[0] if same else " ".join(counted(policies)))


def degrees_within(tp: int) -> tuple[int, ...]:
    """The degrees that layers may have side by side: each divides the next one, and the last is ``tp``."""
    found = [tp]
    while found[-1] > 1:
        found.append(next(n for n in range(found[-1] // 2, 0, -1) if found[-1] % n == 0))
    return tuple(reversed(found))


def choose_layers(
    setting: Setting, search: LayerSearch, bench_of: BenchOf, over: Over, schedules: Schedules
) -> list[Outcome]:
    """All that was simulated, what to take first, the others by their steps.

    The program is asked under memory limits that close in on the limit that is meant: it adds up what layers
    hold, and cannot see when they do. Where its answer is over the limit, the next limit is lower, and where
    it is not, between the two. Its answers are tried in both directions of the layers.

    `ValueError` where nothing can be run, and for a cost of any degree that ``bench_of`` does not have.
    """
    layers = setting.model.layers

    def same(pair: tuple[int, str]) -> tuple[LayerChoice, Outcome]:
        choice = LayerChoice(*pair)
        everywhere = with_choices(setting, (choice,) * layers)
        return choice, decide(schedules(everywhere), bench_of, over, COARSE)[0]

    alike = dict(attempts(product(sorted(search.degrees), search.policies), same))
    best = min(alike.values(), key=rank)
    found = {(choice,) * layers: outcome for choice, outcome in alike.items()}
    fits, limit = 0.0, search.limit_bytes
    exceeds = limit
    for _ in range(ASKED):
        try:
            choices = plan_degrees(_problem(alike, best, limit))
        except ValueError:  # nothing fits: what needs least is among those that are alike
            break
        for answer in (choices, choices[::-1]):
            if answer not in found:
                mixed = with_schedule(with_choices(setting, answer), best.setting.named)
                found[answer] = decide([mixed], bench_of, over, COARSE)[0]
        if missing := found[choices].missing_bytes:
            exceeds = limit
            limit = max(limit - missing, (fits + limit) / 2)
        elif limit == exceeds:
            break
        else:
            fits = limit
            limit = (limit + exceeds) / 2
    return sorted(found.values(), key=rank)


def _problem(alike: Mapping[LayerChoice, Outcome], best: Outcome, limit: float) -> DegreeProblem:
    """Costs of a layer, such that those of equal layers are the simulator's.

    In nanoseconds of two micro-batches side by side, or of one where the schedule runs one after the other.
    """
    layers = best.setting.model.layers
    beside = any(len(sides) > 1 for sides in best.code.schedule.programs)
    turns = max(1, best.setting.micro_batches // (2 if beside else 1))
    scale = _FULL_SCALE / max(map(Outcome.held_bytes, alike.values()))
    options = []
    for choice, outcome in alike.items():
        profile, kinds = outcome.bench.profile, Counter(outcome.setting.kinds)
        part = outcome.bench.members[max(filter(is_layer, kinds), key=kinds.__getitem__)]
        option = DegreeCosts(
            degree=choice.degree,
            recompute=choice.recompute,
            forward=_blocks(part.forward, profile, beside),
            backward=_blocks(part.backward, profile, beside)[::-1],
            resident_bytes=int(outcome.held_bytes() * scale / layers),
        )
        alone = DegreeProblem(layers=layers, options=(option,), memory_limit_bytes=0)
        once = (outcome.step_ns / turns - strategy_cost(alone, (choice,) * layers)) / layers
        options.append(replace(option, once_ns=round(once)))
    return DegreeProblem(
        layers=layers,
        options=tuple(options),
        memory_limit_bytes=int(min(limit * scale, 2 * _FULL_SCALE)),
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
