"""In which order the operators of programs are issued: searched with a profile's costs.

What `braid.scheduling.planner.decide` then compares by simulation are whole sets of orders (`Choices`).
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from braid.scheduling.lowering.lower import Choices
from braid.scheduling.lowering.named import PairMethod
from braid.scheduling.lowering.programs import Order
from braid.scheduling.operations import PassKind
from braid.scheduling.operators import Graph, Part
from braid.scheduling.pattern import UNIFORM
from braid.scheduling.plan import PairingNote
from braid.scheduling.planner.beam import beam_order
from braid.scheduling.planner.ends import gives_gradient, possible_ends, unit_order
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
from braid.scheduling.rounds import rounds_of_all
from braid.scheduling.schedule import Side, Sides
from braid.scheduling.schedule_text import write_sides, write_step
from braid.scheduling.setting import Setting
from braid.scheduling.units import has_layers, unit_parts

LONG = 40
"""Operators beyond which orders are searched for by beam."""

MANY = 64
"""Operators of two passes beyond which there is no time for the best segments between barriers: layers that
partitions have cut."""

FIXED = frozenset((PairMethod.EXCHANGES, PairMethod.WITHIN_PASSES, PairMethod.ACROSS_PASSES))
"""Ways of other systems, for which there is nothing to decide."""

Decision = tuple[Choices, PairingNote | None]

_F, _B, _L = PassKind.FORWARD, PassKind.BACKWARD, PassKind.END


@dataclass(frozen=True)
class Bench:
    """A setting with its operators and what they cost."""

    setting: Setting
    members: Mapping[str, Part]
    """Embedding, layers of every kind (in pieces, where the setting says so) and head."""
    profile: Profile
    peak_flops_per_s: float | None = None
    """Of a GPU, where it is known: for MFU."""

    @cached_property
    def parts(self) -> dict[str, Part]:
        """What is scheduled: the members, or the units that they are joined to."""
        setting = self.setting
        return unit_parts(self.members, setting.layout, setting.kinds, setting.unit_layers)


BenchOf = Callable[[Setting], Bench]
"""Graphs and costs of a setting."""


def decisions(bench: Bench) -> list[Decision]:
    """Decisions without and, where it can be, with ends of backward passes left to the next paired block.

    That fills blocks which follow each other better. What the last one leaves runs by itself, or (both are
    tried) in the backward pass by itself that follows.
    """
    found = [_decide(bench, whole_ends=False)]
    if bench.setting.pairs is PairMethod.ORDER and bench.setting.unit_layers:
        other = _decide(bench, whole_ends=True)
        if _several(other[0]) != _several(found[0][0]):
            found.append(other)
        found += [(ends, note) for choices, note in found if (ends := _with_ends(bench, choices)) != choices]
    return found


def _several(choices: Choices) -> dict[str, Order]:
    return {sides: order for sides, order in choices.orders.items() if "|" in sides}


def _decide(bench: Bench, *, whole_ends: bool) -> Decision:
    kind, pairs, orders = bench.setting.kind, bench.setting.pairs, dict[str, Order]()
    note = None
    if kind.reorders:
        for name, part in bench.parts.items():
            if has_layers(name):
                orders[write_sides([Side(_B, name)])] = _alone(bench, part)
    if bench.setting.order.twins and kind.searched:
        orders |= _twin_orders(bench)
    if pairs in FIXED:
        return Choices(orders=orders), note
    if pairs is not None and bench.setting.unit_layers:
        pairings, note = _decide_units(bench, whole_ends=whole_ends)
        orders |= pairings
    elif pairs is not None:
        pairings, note = _decide_layers(bench, pairs)
        orders |= pairings
    return Choices(orders=orders), note


def _alone(bench: Bench, part: Part) -> Order:
    """The order in which a backward pass overlaps best with itself: weight gradients beside collectives."""
    problem = pair_problem(Graph(operators=()), part.backward, bench.profile)
    return _order_alone(problem)


def _twin_orders(bench: Bench) -> dict[str, Order]:
    """How two micro-batches go through a unit side by side, in both passes."""
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


Pair = tuple[str, str]
"""Names of two units: of the forward pass and of the backward pass."""


def layer_pair(bench: Bench, names: Pair = (UNIFORM, UNIFORM)) -> PairProblem:
    """A layer's forward beside a layer's backward."""
    ahead, behind = (bench.members[kind] for kind in names)
    return pair_problem(ahead.forward, behind.backward, bench.profile)


def _decide_layers(bench: Bench, method: PairMethod) -> tuple[dict[str, Order], PairingNote | None]:
    """An order for every pair of kinds that blocks bring together; the note is of the longest pair.

    Where no block is paired, as if all kinds met.
    """
    kinds = tuple(dict.fromkeys(bench.setting.kinds))
    pairs: dict[Pair, bool] = {(kinds[0], kinds[0]): True}  # whatever comes next is like it
    if len(kinds) > 1:
        pairs = _meeting_units(bench) or {(a, b): False for a in kinds for b in kinds}
    orders, notes = {}, []
    for names, goes_on in pairs.items():
        problem = layer_pair(bench, names)
        if method is PairMethod.ORDER and len(problem.forward) + len(problem.backward) > MANY:
            sides, order, note = _decide_long(problem, names, goes_on=goes_on)
        else:
            sides, order, note = decide_pairing(problem, method, names, goes_on=goes_on)
        if order:  # else lowering has it
            orders[write_sides(sides)] = order
        notes.append(note)
    return orders, _longest(notes)


def _longest(notes: Sequence[PairingNote]) -> PairingNote | None:
    return max(notes, key=lambda note: note.serial_ns, default=None)


def _decide_units(bench: Bench, *, whole_ends: bool) -> tuple[dict[str, Order], PairingNote | None]:
    """An order for every pair of units that blocks bring together; the note is of the longest pair."""
    setting = bench.setting
    if setting.pairs is not PairMethod.ORDER:
        raise ValueError(
            f"unit_layers={setting.unit_layers}: schedule={setting.schedule} pairs layer by layer; "
            f"set it to 0"
        )
    orders, notes = {}, []
    for (first, second), goes_on in _meeting_units(bench).items():
        ahead, behind = bench.parts[first], bench.parts[second]
        problem = pair_problem(ahead.forward, behind.backward, bench.profile)
        whole = whole_ends and goes_on and not gives_gradient(behind)
        sides, order, note = _decide_long(problem, (first, second), goes_on=goes_on, whole=whole)
        orders[write_sides(sides)] = order
        notes.append(note)
    return orders, _longest(notes)


def _decide_long(
    problem: PairProblem, names: Pair, *, goes_on: bool, whole: bool = False
) -> tuple[Sides, Order, PairingNote]:
    """How two passes of many operators run together."""
    end, found = unit_order(problem, goes_on=goes_on, whole=whole)
    turns = issue_ns(problem, turns_order(problem))
    note = PairingNote(
        method=PairMethod.ORDER,
        ns=round(found.ns),
        serial_ns=round(problem.serial_ns),
        lower_bound_ns=round(problem.lower_bound_ns),
        runner_up=str(PairMethod.TURNS) if turns < problem.serial_ns else "serial",
        runner_up_ns=round(min(turns, problem.serial_ns)),
    )
    return _pair_sides(*names, end), order_steps(problem, found.operators, end), note


def _pair_sides(first: str, second: str, end: Collection[str]) -> Sides:
    sides = Side(_F, first), Side(_B, second)
    return (*sides, Side(_L, second)) if end else sides


def _meeting_units(bench: Bench) -> dict[Pair, bool]:
    """Pairs of units that meet in paired blocks, and whether most are followed by another one like them."""
    setting = bench.setting
    stages = setting.order.order(setting.layout, setting.micro_batches, setting.hop)
    units = [name for name in bench.parts if has_layers(name)]
    count: dict[Pair, int] = defaultdict(int)
    followed: dict[Pair, int] = defaultdict(int)
    of = rounds_of_all(units, setting.layout, setting.kinds, setting.unit_layers)
    for stage in stages:
        for block, after in zip(stage, [*stage[1:], None], strict=True):
            keys = of(block)
            following = of(after)[0] if after is not None else None
            for sides, then in zip(keys, [*keys[1:], following], strict=True):
                if [side.kind for side in sides] == [_F, _B]:
                    key = sides[0].unit, sides[1].unit
                    count[key] += 1
                    followed[key] += then == sides
    return {key: followed[key] > count[key] / 2 for key in count}


def decide_pairing(
    problem: PairProblem, method: PairMethod, names: Pair = (UNIFORM, UNIFORM), *, goes_on: bool = True
) -> tuple[Sides, Order, PairingNote]:
    """How two layers run together, and what the best other method costs.

    ``ORDER`` takes the better of the list schedule and the segments between barriers. Where another pair like
    it comes next (``goes_on``), an end may be left to that one.
    """
    segments, end, found = _searched(problem, goes_on=goes_on)
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
    sides = _pair_sides(*names, end if chosen is PairMethod.ORDER else ())
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
def _searched(problem: PairProblem, *, goes_on: bool) -> tuple[Pairing, tuple[str, ...], IssueOrder]:
    """Segments between barriers, the end that is left without them, and the order then.

    Kept: layouts and schedules of a search often have layers in common.
    """
    segments = pair(problem)
    start = pairing_order(problem, segments)
    ends = possible_ends(problem) if goes_on else [()]
    found = [(end, list_schedule(leaving(problem, end), [start])) for end in ends]
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
    return _pair_sides(UNIFORM, UNIFORM, end), order_steps(problem, best.operators, end), best.ns


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
