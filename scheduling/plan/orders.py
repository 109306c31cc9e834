"""Searches the orders in which programs issue their operators, with a profile's costs.

`braid.scheduling.plan.decide` compares whole sets of orders (`Choices`) by simulation.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from braid.scheduling.cost.profile import Profile
from braid.scheduling.generate.lower import Choices
from braid.scheduling.generate.named import PairMethod
from braid.scheduling.generate.setting import Setting
from braid.scheduling.model.operators import Graph, Part
from braid.scheduling.model.units import unit_parts
from braid.scheduling.plan.beam import beam_order, gives_gradient, possible_ends, unit_order
from braid.scheduling.plan.list_schedule import (
    IssueOrder,
    exact_order,
    improved,
    issue_ns,
    list_schedule,
    pairing_order,
    turns_order,
)
from braid.scheduling.plan.pairing import Pairing, pair
from braid.scheduling.plan.plan import PairingNote
from braid.scheduling.plan.strands import PairProblem, joint_problem, leaving, pair_problem
from braid.scheduling.schedule.operations import PassKind
from braid.scheduling.schedule.order import Issue, Order, OrderSegment
from braid.scheduling.schedule.rounds import rounds_of_all
from braid.scheduling.schedule.schedule import Side, Sides
from braid.scheduling.text.pattern import UNIFORM

LONG = 40
"""Number of a pass's operators above which beam search orders it, instead of the list schedule."""

MANY = 64
"""Number of operators of two passes above which segments between barriers are not searched, to save time;
only layers with cut collectives have so many."""

FIXED = frozenset((PairMethod.EXCHANGES, PairMethod.WITHIN_PASSES, PairMethod.ACROSS_PASSES))
"""Pairing methods of other systems, in which the order of operators is fixed."""

Decision = tuple[Choices, PairingNote | None]

Pair = tuple[str, str]
"""Names of the unit in the forward pass and of the unit in the backward pass."""

PairDecision = tuple[Sides, Order, PairingNote]

_F, _B, _L = PassKind.FORWARD, PassKind.BACKWARD, PassKind.END


@dataclass(frozen=True)
class CostedSetting:
    """A setting with the operator graphs of its model and the costs of all operators."""

    setting: Setting
    members: Mapping[str, Part]
    """Part name -> part: embedding, one layer of every kind (cut by the setting's partitions), head."""
    profile: Profile
    peak_flops_per_s: float | None = None
    """Peak rate of a GPU, for MFU; None if unknown."""

    @cached_property
    def parts(self) -> dict[str, Part]:
        """Graphs that programs run, by name: units of ``members`` joined, or the members themselves."""
        setting = self.setting
        return unit_parts(self.members, setting.layout, setting.kinds, setting.unit_layers)


BenchOf = Callable[[Setting], CostedSetting]
"""Function that returns the setting with its graphs and costs."""


def decisions(bench: CostedSetting) -> list[Decision]:
    """Return alternative sets of operator orders, to be compared by simulation.

    In some, a paired block leaves the end of its backward pass to the next paired block, which fills both
    better. The last block's end runs by itself, or (both are tried) within the unpaired backward pass that
    follows.
    """
    result = [_decide(bench, whole_ends=False)]
    if bench.setting.pairs is PairMethod.ORDER and bench.setting.unit_layers:
        with_whole_ends = _decide(bench, whole_ends=True)
        if _of_pairs(with_whole_ends[0]) != _of_pairs(result[0][0]):
            result.append(with_whole_ends)
        result += [
            (ends, note) for choices, note in result if (ends := _with_ends(bench, choices)) != choices
        ]
    return result


def _of_pairs(choices: Choices) -> dict[Sides, Order]:
    return {sides: order for sides, order in choices.orders.items() if len(sides) > 1}


def _decide(bench: CostedSetting, *, whole_ends: bool) -> Decision:
    setting, pairs, orders = bench.setting, bench.setting.pairs, dict[Sides, Order]()
    for name, part in bench.parts.items():
        if setting.kind.reorders and part.has_layers:
            # A backward pass overlaps best with itself: weight gradients beside collectives.
            orders[Side(_B, name),] = _order_alone(joint_problem([part.backward], bench.profile))
    for name, part in bench.parts.items():
        if setting.order.twins and setting.kind.searched and part.has_layers:
            for kind, graph in ((_F, part.forward), (_B, part.backward)):
                problem = joint_problem([graph, graph], bench.profile)
                orders[(Side(kind, name),) * 2] = _order_alone(problem)
    if pairs is None or pairs in FIXED:
        return Choices(orders=orders), None
    decided = list(_pairs(bench, pairs, whole_ends=whole_ends))
    orders |= {sides: order for sides, order, _ in decided if order}  # if empty, lowering has a fixed order
    longest = max((note for *_, note in decided), key=lambda note: note.serial_ns, default=None)
    return Choices(orders=orders), longest


@lru_cache(maxsize=1024)
def _order_alone(problem: PairProblem) -> Order:
    if len(problem.backward) <= LONG:
        order = list_schedule(problem)
    else:
        order = improved(problem, beam_order(problem))
    return tuple(problem.backward.issues[op] for op in order.operators)


def _with_ends(bench: CostedSetting, choices: Choices) -> Choices:
    """Return the choices plus orders of unpaired backward passes that also run the end a paired block
    left."""
    orders = dict(choices.orders)
    ends: dict[str, set[frozenset[str]]] = defaultdict(set)
    for sides, order in choices.orders.items():
        if [side.kind for side in sides[:2]] == [_F, _B]:
            issues = (step for step in order if isinstance(step, Issue))
            ends[sides[1].unit].add(frozenset(issue.operator for issue in issues if issue.turn == 2))
    for name, sets in ends.items():
        if len(sets) == 1 and (names := next(iter(sets))):
            graph = bench.parts[name].backward
            end = Graph(operators=tuple(op for op in graph.operators if op.name in names))
            problem = joint_problem([graph, end], bench.profile, first=1)
            orders[Side(_B, name), Side(_L, name)] = _order_alone(problem)
    return replace(choices, orders=orders)


# -- a forward pass beside a backward pass -------------------------------------------------------------------
def layer_pair(bench: CostedSetting) -> PairProblem:
    """Return the search problem of a standard layer's forward pass overlapped with its backward pass."""
    layer = bench.members[UNIFORM]
    return pair_problem(layer.forward, layer.backward, bench.profile)


def _pairs(bench: CostedSetting, method: PairMethod, *, whole_ends: bool) -> Iterator[PairDecision]:
    """Yield a decided order for each pair of units that paired blocks combine; for single layers without
    paired blocks, for each pair of their kinds.

    Raises `ValueError` if there are units of several layers and the method works layer by layer.
    """
    setting = bench.setting
    if setting.unit_layers and method is not PairMethod.ORDER:
        raise ValueError(
            f"unit_layers={setting.unit_layers}: schedule={setting.schedule} pairs layer by layer; "
            f"set it to 0"
        )
    kinds = tuple(dict.fromkeys(setting.kinds))
    pairs: dict[Pair, bool] = {(kinds[0], kinds[0]): True}  # every next pair is equal
    if setting.unit_layers:
        pairs = _meeting_units(bench)
    elif len(kinds) > 1:
        pairs = _meeting_units(bench) or {(a, b): False for a in kinds for b in kinds}
    for names, goes_on in pairs.items():
        ahead, behind = (bench.parts[name] for name in names)
        problem = pair_problem(ahead.forward, behind.backward, bench.profile)
        if setting.unit_layers or (method is PairMethod.ORDER and len(problem) > MANY):
            whole = whole_ends and goes_on and not gives_gradient(behind)
            yield _decide_long(problem, names, goes_on=goes_on, whole=whole)
        else:
            yield decide_pairing(problem, method, names, goes_on=goes_on)


def _meeting_units(bench: CostedSetting) -> dict[Pair, bool]:
    """Return each (forward unit, backward unit) that paired blocks run together, with a flag: whether an
    equal pair follows in most cases."""
    setting = bench.setting
    stages = setting.order.order(setting.layout, setting.micro_batches, setting.hop)
    units = [name for name, part in bench.parts.items() if part.has_layers]
    followed: dict[Pair, list[bool]] = defaultdict(list)
    rounds_of = rounds_of_all(units, setting.layout, setting.kinds, setting.unit_layers)
    for stage in stages:
        for block, after in zip(stage, [*stage[1:], None], strict=True):
            keys = rounds_of(block)
            following = rounds_of(after)[0] if after is not None else None
            for sides, then in zip(keys, [*keys[1:], following], strict=True):
                if [side.kind for side in sides] == [_F, _B]:
                    followed[sides[0].unit, sides[1].unit].append(then == sides)
    return {pair: sum(equal) > len(equal) / 2 for pair, equal in followed.items()}


def _decide_long(problem: PairProblem, names: Pair, *, goes_on: bool, whole: bool) -> PairDecision:
    """Decide the order of two passes with many operators by beam search (`unit_order`)."""
    end, order = unit_order(problem, goes_on=goes_on, whole=whole)
    others = {"serial": problem.serial_ns, str(PairMethod.TURNS): issue_ns(problem, turns_order(problem))}
    note = _note(problem, PairMethod.ORDER, order.ns, others)
    return _pair_sides(names, end), order_steps(problem, order.operators, end), note


def decide_pairing(
    problem: PairProblem, method: PairMethod, names: Pair = (UNIFORM, UNIFORM), *, goes_on: bool = True
) -> PairDecision:
    """Decide how a layer's forward and another layer's backward pass run together, by the given method.

    The returned note also has the cost of the best other method. ``ORDER`` takes the faster of the list
    schedule and segments between barriers. If an equal pair follows (``goes_on``), the order may leave the
    backward pass's end to that pair.
    """
    segments, end, searched = _searched(problem, goes_on=goes_on)
    prices = {
        str(PairMethod.ORDER): searched.ns,
        str(PairMethod.BARRIERS): segments.ns,
        str(PairMethod.TURNS): issue_ns(problem, turns_order(problem)),
        "serial": problem.serial_ns,
    }
    if method is PairMethod.ORDER and segments.ns < searched.ns:
        method = PairMethod.BARRIERS
    order: Order = ()
    if method is PairMethod.ORDER:
        order = order_steps(problem, searched.operators, end)
    elif method is PairMethod.BARRIERS:
        order = segment_steps(problem, segments)
    note = _note(problem, method, prices.pop(method), prices)
    return _pair_sides(names, end if method is PairMethod.ORDER else 0), order, note


def _note(problem: PairProblem, method: PairMethod, ns: float, others: Mapping[str, float]) -> PairingNote:
    runner_up = min(others, key=others.__getitem__)
    return PairingNote(
        method=method,
        ns=round(ns),
        serial_ns=round(problem.serial_ns),
        lower_bound_ns=round(problem.lower_bound_ns),
        runner_up=runner_up,
        runner_up_ns=round(others[runner_up]),
    )


def _pair_sides(names: Pair, end: int) -> Sides:
    sides = Side(_F, names[0]), Side(_B, names[1])
    return (*sides, Side(_L, names[1])) if end else sides


@lru_cache(maxsize=1024)
def _searched(problem: PairProblem, *, goes_on: bool) -> tuple[Pairing, int, IssueOrder]:
    """Return the best pairing with barriers; and without barriers the mask of the end left to the next block
    and the best order.

    Results are cached: layouts and schedules of a search often have layers in common.
    """
    segments = pair(problem)
    start = pairing_order(problem, segments)
    ends = possible_ends(problem) if goes_on else [0]
    orders = [(end, list_schedule(leaving(problem, end), [start])) for end in ends]
    end, best = min(orders, key=lambda choice: round(choice[1].ns))
    return segments, end, best


def exact_pairing(problem: PairProblem) -> tuple[Sides, Order, float]:
    """Return the passes of a program, the provably fastest order for a layer's two passes, and its ns.

    Raises `ValueError` for layers on which branch and bound would take too long.
    """
    orders = [(end, exact_order(leaving(problem, end))) for end in possible_ends(problem)]
    end, best = min(orders, key=lambda choice: choice[1].ns)
    return _pair_sides((UNIFORM, UNIFORM), end), order_steps(problem, best.operators, end), best.ns


def order_steps(problem: PairProblem, order: tuple[int, ...], end: int = 0) -> Order:
    """Return an order of operator numbers as steps that name the operators.

    Step's pass: 0 forward, 1 backward, 2 an earlier block's end (the operators in the mask ``end``).
    """
    backward = enumerate(problem.backward.issues)
    issues = [
        *problem.forward.issues,
        *(issue._replace(turn=2) if end >> n & 1 else issue for n, issue in backward),
    ]
    return tuple(issues[op] for op in order)


def segment_steps(problem: PairProblem, pairing: Pairing) -> Order:
    """Return a pairing's segments, given as masks, as steps that name their operators."""
    return tuple(
        OrderSegment((problem.forward.named(f), problem.backward.named(b))) for f, b in pairing.segments
    )
