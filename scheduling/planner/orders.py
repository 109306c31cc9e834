"""In which order the operators of programs are issued: searched with a profile's costs.

What `braid.scheduling.planner.decide` then compares by simulation are whole sets of orders (`Choices`).
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from braid.scheduling.fusion import fused_parts
from braid.scheduling.lowering.lower import Choices
from braid.scheduling.lowering.named import PairMethod
from braid.scheduling.lowering.programs import Order
from braid.scheduling.operators import Graph, Part
from braid.scheduling.plan import PairingNote
from braid.scheduling.planner.beam import beam_order
from braid.scheduling.planner.ends import gives_gradient, possible_ends, run_order
from braid.scheduling.planner.list_schedule import (
    IssueOrder,
    exact_order,
    improved,
    issue_ns,
    list_schedule,
    pairing_order,
    turns_order,
)
from braid.scheduling.planner.pairing import Pairing, pair
from braid.scheduling.planner.strands import PairProblem, joint_problem, leaving, pair_problem
from braid.scheduling.profile import Profile
from braid.scheduling.rounds import rounds
from braid.scheduling.schedule import PassKind, Schedule, Side, Sides
from braid.scheduling.schedule_text import write_sides, write_step
from braid.scheduling.setting import Setting

LONG = 40
"""Operators beyond which orders are searched for by beam."""

Decision = tuple[Choices, PairingNote | None]

_F, _B, _L = PassKind.FORWARD, PassKind.BACKWARD, PassKind.END


@dataclass(frozen=True)
class Bench:
    """A setting with its operators and what they cost."""

    setting: Setting
    members: Mapping[str, Part]
    """Embedding, layer (split, where the setting says so) and head."""
    profile: Profile
    peak_flops_per_s: float | None = None
    """Of a GPU, where it is known: for MFU."""

    @cached_property
    def parts(self) -> dict[str, Part]:
        """What is scheduled: the members, or the runs that layers are fused to."""
        setting = self.setting
        return fused_parts(self.members, setting.layout, setting.model.layers, setting.fused)

    @property
    def layer(self) -> Part:
        """The transformer layer."""
        return self.members["layer"]


def decisions(bench: Bench) -> list[Decision]:
    """Decisions without and, where it can be, with ends of backward passes left to the next paired block.

    That fills blocks which follow each other better. What the last one leaves runs by itself, or (both are
    tried) in the backward pass by itself that follows.
    """
    found = [_decide(bench, whole_ends=False)]
    if bench.setting.kind.pairs is PairMethod.ORDER and bench.setting.fused:
        other = _decide(bench, whole_ends=True)
        if _several(other[0]) != _several(found[0][0]):
            found.append(other)
        found += [(ends, note) for choices, note in found if (ends := _with_ends(bench, choices)) != choices]
    return found


def _several(choices: Choices) -> dict[str, Order]:
    return {sides: order for sides, order in choices.orders.items() if "|" in sides}


def _decide(bench: Bench, *, whole_ends: bool) -> Decision:
    kind, orders = bench.setting.kind, dict[str, Order]()
    note = None
    if kind.searched:
        for name, part in bench.parts.items():
            if has_layers(name):
                orders[write_sides([Side(_B, name)])] = _alone(bench, part)
    if bench.setting.pipeline == "twins":
        orders |= _twin_orders(bench)
    if kind.pairs is not None and bench.setting.fused:
        pairings, note = _decide_runs(bench, whole_ends=whole_ends)
        orders |= pairings
    elif kind.pairs is not None:
        sides, order, note = decide_pairing(layer_pair(bench), kind.pairs)
        orders[write_sides(sides)] = order
    return Choices(orders=orders), note


def has_layers(run: str) -> bool:
    """Whether a run has layers: without one it is too short to be worth a search."""
    return any(member.rpartition("*")[2] == "layer" for member in run.split("+"))


def _alone(bench: Bench, part: Part) -> Order:
    """The order in which a backward pass overlaps best with itself: weight gradients beside collectives."""
    problem = pair_problem(Graph(operators=()), part.backward, bench.profile)
    return _order_alone(problem)


def _twin_orders(bench: Bench) -> dict[str, Order]:
    """How two micro-batches go through a run side by side, in both passes."""
    orders = {}
    for name, part in bench.parts.items():
        for kind, graph in ((_F, part.forward), (_B, part.backward)) if has_layers(name) else ():
            problem = joint_problem([graph, graph], bench.profile)
            orders[write_sides([Side(kind, name)] * 2)] = _order_alone(problem)
    return orders


@lru_cache(maxsize=1024)
def _order_alone(problem: PairProblem) -> Order:
    if len(problem.backward) <= LONG:
        found = list_schedule(problem)
    else:
        found = beam_order(problem)
        found = improved(problem, found.operators, found.ns)
    return tuple(problem.backward.names[op] for op in found.operators)


def _with_ends(bench: Bench, choices: Choices) -> Choices:
    """The same, with programs of backward passes by themselves that take up what is left."""
    orders = dict(choices.orders)
    left: dict[str, set[frozenset[str]]] = defaultdict(set)
    for text, order in choices.orders.items():
        sides = text.split("|")
        if len(sides) > 1 and sides[0].startswith("F:") and sides[1].startswith("B:"):
            names = frozenset(step.removeprefix("2:") for step in order if step.startswith("2:"))
            left[sides[1].removeprefix("B:")].add(names)
    for name, sets in left.items():
        if len(sets) == 1 and (names := next(iter(sets))):
            graph = bench.parts[name].backward
            end = Graph(operators=tuple(op for op in graph.operators if op.name in names))
            problem = joint_problem([graph, end], bench.profile, first=1)
            orders[write_sides([Side(_B, name), Side(_L, name)])] = _order_alone(problem)
    return replace(choices, orders=orders)


# -- a forward pass beside a backward pass -------------------------------------------------------------------


def layer_pair(bench: Bench) -> PairProblem:
    """A layer's forward beside a layer's backward."""
    layer = bench.layer
    return pair_problem(layer.forward, layer.backward, bench.profile)


def _decide_runs(bench: Bench, *, whole_ends: bool) -> tuple[dict[str, Order], PairingNote | None]:
    """An order for every pair of runs that blocks bring together; the note is of the longest pair."""
    setting = bench.setting
    if setting.kind.pairs is not PairMethod.ORDER:
        raise ValueError(
            f"fused={setting.fused}: schedule={setting.schedule} pairs layer by layer; set it to 0"
        )
    orders, notes = {}, []
    for (first, second), goes_on in _meeting_runs(bench).items():
        ahead, behind = bench.parts[first], bench.parts[second]
        problem = pair_problem(ahead.forward, behind.backward, bench.profile)
        whole = whole_ends and goes_on and not gives_gradient(behind)
        end, found = run_order(problem, goes_on=goes_on, whole=whole)
        sides = _pair_sides(first, second, end)
        orders[write_sides(sides)] = order_steps(problem, found.operators, end)
        turns = issue_ns(problem, turns_order(problem))
        notes.append(
            PairingNote(
                method=PairMethod.ORDER,
                ns=round(found.ns),
                serial_ns=round(problem.serial_ns),
                lower_bound_ns=round(problem.lower_bound_ns),
                runner_up=str(PairMethod.TURNS) if turns < problem.serial_ns else "serial",
                runner_up_ns=round(min(turns, problem.serial_ns)),
            )
        )
    return orders, max(notes, key=lambda note: note.serial_ns, default=None)


def _pair_sides(first: str, second: str, end: Collection[str]) -> Sides:
    sides = Side(_F, first), Side(_B, second)
    return (*sides, Side(_L, second)) if end else sides


def _meeting_runs(bench: Bench) -> dict[tuple[str, str], bool]:
    """Pairs of runs that meet in paired blocks, and whether most are followed by another one like them."""
    setting = bench.setting
    stages = setting.order.order(setting.layout, setting.micro_batches, setting.hop)
    runs = [name for name in bench.parts if has_layers(name)]
    # Rounds need to know which combinations have programs: those of runs with layers.
    schedule = Schedule(
        name=setting.schedule,
        chunks=setting.layout.chunks,
        micro_batches=setting.micro_batches,
        stages=stages,
        programs={(Side(_F, a), Side(_B, b)): () for a in runs for b in runs},
        fused=setting.fused,
    )
    count: dict[tuple[str, str], int] = defaultdict(int)
    followed: dict[tuple[str, str], int] = defaultdict(int)
    of = rounds(schedule, setting.layout, setting.model.layers)
    for stage in stages:
        for block, after in zip(stage, [*stage[1:], None], strict=True):
            keys = of(block)
            following = of(after)[0] if after is not None else None
            for sides, then in zip(keys, [*keys[1:], following], strict=True):
                if len(sides) == 2 and {side.kind for side in sides} == {_F, _B}:
                    key = sides[0].run, sides[1].run
                    count[key] += 1
                    followed[key] += then == sides
    return {key: followed[key] > count[key] / 2 for key in count}


def decide_pairing(problem: PairProblem, method: PairMethod) -> tuple[Sides, Order, PairingNote]:
    """How two layers run together, and what the best other method costs.

    ``ORDER`` takes the better of the list schedule and the segments between barriers.
    """
    segments, end, found = _searched(problem)
    in_turns = issue_ns(problem, turns_order(problem))
    prices = {
        PairMethod.ORDER: found.ns,
        PairMethod.BARRIERS: segments.ns,
        PairMethod.TURNS: in_turns,
    }
    chosen = method
    if method is PairMethod.ORDER and segments.ns < found.ns:
        chosen = PairMethod.BARRIERS
    order: Order = ()
    if chosen is PairMethod.ORDER:
        order = order_steps(problem, found.operators, end)
    elif chosen is PairMethod.BARRIERS:
        order = segment_steps(segments)
    sides = _pair_sides("layer", "layer", end if chosen is PairMethod.ORDER else ())
    others = {str(other): ns for other, ns in prices.items() if other is not chosen}
    others["serial"] = problem.serial_ns
    runner_up = min(others, key=others.__getitem__)
    note = PairingNote(
        method=chosen,
        ns=round(prices[chosen]),
        serial_ns=round(problem.serial_ns),
        lower_bound_ns=round(problem.lower_bound_ns),
        runner_up=runner_up,
        runner_up_ns=round(others[runner_up]),
    )
    return sides, order, note


@lru_cache(maxsize=1024)
def _searched(problem: PairProblem) -> tuple[Pairing, tuple[str, ...], IssueOrder]:
    """Segments between barriers, the end that is left without them, and the order then.

    Kept: layouts and schedules of a search often have layers in common.
    """
    segments = pair(problem)
    start = pairing_order(problem, segments)
    found = [(end, list_schedule(leaving(problem, end), [start])) for end in possible_ends(problem)]
    end, best = min(found, key=lambda one: round(one[1].ns))
    return segments, end, best


def exact_pairing(problem: PairProblem) -> tuple[Sides, Order, float]:
    """The best order there is for a layer's two passes, by branch and bound, and its ns; `decide` searches.

    `ValueError` for layers that it would take too long for.
    """
    end, best = min(
        ((end, exact_order(leaving(problem, end))) for end in possible_ends(problem)),
        key=lambda one: one[1].ns,
    )
    return _pair_sides("layer", "layer", end), order_steps(problem, best.operators, end), best.ns


def order_steps(problem: PairProblem, order: tuple[int, ...], end: tuple[str, ...] = ()) -> Order:
    """An order of issue as the steps of a decision."""
    forward, backward = problem.forward.names, problem.backward.names
    count = len(forward)
    return tuple(
        write_step(0, forward[op])
        if op < count
        else write_step(2 if backward[op - count] in end else 1, backward[op - count])
        for op in order
    )


def segment_steps(pairing: Pairing) -> Order:
    """A pairing as the steps of a decision."""
    return tuple(f"{' '.join(s.forward)} | {' '.join(s.backward)}".strip() for s in pairing.segments)
