"""Degree and recomputation of every layer of a run: an integer program proposes, the simulator decides.

Equal layers are simulated for every degree and policy. The integer program of Oases (equations 3 to 6) takes
the operators' costs from the same profile; other costs that the simulator knows (sums of gradients, ends of
the model, slowdown) enter as a layer's fixed cost, and so does its memory, so that the program is right
wherever all layers are equal. Its proposals are simulated too, and the best of all is taken.
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
"""Most runs of the integer program, each with another memory limit."""

_FULL_SCALE: Final = 2**34
"""Bytes to which a rank's largest memory is scaled: the integer program's units are coarse for small
models."""

Schedules = Callable[[Setting], Iterable[Setting]]
"""Function that returns the given setting under every schedule to compare."""


@dataclass(frozen=True, kw_only=True)
class LayerSearch:
    """Tensor-parallel degrees and recompute policies to try for layers, and a rank's memory limit in
    bytes."""

    degrees: tuple[int, ...]
    policies: tuple[str, ...]
    limit_bytes: float = float("inf")


def with_choices(setting: Setting, choices: Sequence[LayerChoice]) -> Setting:
    """Return the setting with one tensor-parallel degree and recompute policy per layer.

    Raises `ValueError` if its layout cannot have these degrees.
    """
    layout = replace(setting.layout, tensor_degrees=tuple(choice.degree for choice in choices))
    policies = [choice.recompute for choice in choices]
    same = len({*policies}) == 1
    return replace(setting, layout=layout, recompute=policies[0] if same else " ".join(counted(policies)))


def degrees_within(tp: int) -> tuple[int, ...]:
    """Return ascending tensor-parallel degrees that layers of one model may mix, from 1 to ``tp``: each
    divides the next."""
    degrees = [tp]
    while degrees[-1] > 1:
        degrees.append(next(n for n in range(degrees[-1] // 2, 0, -1) if degrees[-1] % n == 0))
    return tuple(reversed(degrees))


def choose_layers(
    setting: Setting, search: LayerSearch, bench_of: BenchOf, over: Over, schedules: Schedules
) -> list[Outcome]:
    """Choose a degree and a recompute policy for every layer; return all simulated outcomes, best first.

    The integer program adds up the layers' memory without knowing when they hold it, so it runs several
    times: with a lower memory limit if the last answer exceeded the real limit, otherwise with a higher
    limit. Each answer is also simulated with the layers in reverse order.

    Raises `ValueError` if no outcome can run, or if ``bench_of`` lacks a cost of some degree.
    """
    layers = setting.model.layers

    def same(pair: tuple[int, str]) -> tuple[LayerChoice, Outcome]:
        choice = LayerChoice(*pair)
        everywhere = with_choices(setting, (choice,) * layers)
        return choice, decide(schedules(everywhere), bench_of, over, COARSE)[0]

    alike = dict(attempts(product(sorted(search.degrees), search.policies), same))
    best = min(alike.values(), key=rank)
    outcomes = {(choice,) * layers: outcome for choice, outcome in alike.items()}
    fits, limit = 0.0, search.limit_bytes
    exceeds = limit
    for _ in range(ASKED):
        try:
            choices = plan_degrees(_problem(alike, best, limit))
        except ValueError:  # nothing fits: the leanest outcome has equal layers
            break
        for answer in (choices, choices[::-1]):
            if answer not in outcomes:
                mixed = with_schedule(with_choices(setting, answer), best.setting.named)
                outcomes[answer] = decide([mixed], bench_of, over, COARSE)[0]
        if missing := outcomes[choices].missing_bytes:
            exceeds = limit
            limit = max(limit - missing, (fits + limit) / 2)
        elif limit == exceeds:
            break
        else:
            fits = limit
            limit = (limit + exceeds) / 2
    return sorted(outcomes.values(), key=rank)


def _problem(alike: Mapping[LayerChoice, Outcome], best: Outcome, limit: float) -> DegreeProblem:
    """Build the integer program, with costs of a layer that make it agree with the simulator for equal
    layers.

    Costs are in ns, for two micro-batches side by side, or for one if the schedule pairs no passes.
    """
    layers = best.setting.model.layers
    paired = any(len(sides) > 1 for sides in best.code.schedule.programs)
    turns = max(1, best.setting.micro_batches // (2 if paired else 1))
    scale = _FULL_SCALE / max(map(Outcome.held_bytes, alike.values()))
    options = []
    for choice, outcome in alike.items():
        profile, kinds = outcome.bench.profile, Counter(outcome.setting.kinds)
        part = outcome.bench.members[max(filter(is_layer, kinds), key=kinds.__getitem__)]
        option = DegreeCosts(
            degree=choice.degree,
            recompute=choice.recompute,
            forward=_blocks(part.forward, profile, paired),
            backward=_blocks(part.backward, profile, paired)[::-1],
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


def _blocks(graph: Graph, profile: Profile, paired: bool) -> tuple[PassCosts, ...]:
    """Split a layer's pass behind every collective; return the ns of each piece's compute and collective."""
    blocks: list[PassCosts] = []
    compute = 0.0

    def close(collective: float) -> None:
        pairs = [(round(ns), round(ns) if paired else 0) for ns in (compute, collective)]
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
