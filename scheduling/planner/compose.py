"""From a setting and costs to decisions, from decisions to a schedule, from that to a simulated step."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from braid.scheduling.analytic import analytic_profile, axis_placements
from braid.scheduling.cluster import ClusterSpec
from braid.scheduling.fusion import carrying, chunk_runs, fused_parts
from braid.scheduling.layers import built_in_parts, part_sizes
from braid.scheduling.lowering.lower import Choices, training_schedule
from braid.scheduling.lowering.named import SCHEDULES, PairMethod, PipelineKind
from braid.scheduling.lowering.pipelines import twin_ended
from braid.scheduling.lowering.programs import PairingDecision
from braid.scheduling.lowering.split import with_split_layers
from braid.scheduling.memory import DTYPE_BYTES
from braid.scheduling.operators import Graph, Part
from braid.scheduling.plan import PairingNote, Setting
from braid.scheduling.planner.beam import beam_order
from braid.scheduling.planner.late import gives_gradient, late_sets, run_order
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
from braid.scheduling.planner.strands import PairProblem, end_problem, pair_problem, put_off, twin_problem
from braid.scheduling.profile import Profile, with_chunks
from braid.scheduling.schedule import Block, Direction, Late, Pair, Schedule
from braid.scheduling.simulate import Numbers, Simulation, simulate
from braid.scheduling.spec import Placement
from braid.scheduling.validate import validate

SPLITS = (2, 4, 8)
"""Chunk counts that ``intra_batch`` tries."""

LONG = 40
"""Operators beyond which orders are searched for by beam."""

OVERLAPPING = ("braid", "braid_eager", "braid_twins", "braid_v")
"""Our own schedules also reduce gradients early and overlap blocks that run alone with themselves."""


@dataclass(frozen=True)
class Bench:
    """A setting with its operators and what they cost."""

    setting: Setting
    members: Mapping[str, Part]
    """Embedding, layer (split, where the setting says so) and head."""
    profile: Profile

    @cached_property
    def parts(self) -> dict[str, Part]:
        """What is scheduled: the members, or the runs that layers are fused to."""
        setting = self.setting
        return fused_parts(self.members, setting.layout, setting.model.layers, setting.fused)

    @property
    def layer(self) -> Part:
        """The transformer layer."""
        return self.members["layer"]


def prepare(setting: Setting, cluster: ClusterSpec, profile: Profile | None = None) -> Bench:
    """The operators of a setting on a cluster, with modelled costs unless a profile is given.

    `ValueError` if the layout needs another number of GPUs than the cluster has.
    """
    if setting.layout.ranks != cluster.gpus:
        raise ValueError(
            f"the layout {setting.layout.describe()} needs {setting.layout.ranks} GPUs, cluster "
            f"{cluster.name} has {cluster.nodes} x {cluster.gpus_per_node} = {cluster.gpus}; "
            f"change parallel, or the number of nodes"
        )
    axes = axis_placements(setting.layout, cluster.gpus_per_node)
    sizes = part_sizes(setting.model, setting.layout, setting.workload.micro_batch, axes, setting.context)
    parts = with_split_layers(built_in_parts(sizes, setting.recompute), setting.split)
    if profile is None:
        costs = analytic_profile(cluster, setting.layout, parts, DTYPE_BYTES[setting.dtype])
    else:
        costs = with_chunks(profile, parts["layer"])
    return Bench(setting, parts, costs)


def with_hops(bench: Bench) -> list[Bench]:
    """The setting with every number of slots that its messages may be given, unless it says how many."""
    setting = bench.setting
    if setting.hop or setting.layout.pp == 1:
        return [bench]
    hops = SCHEDULES[setting.schedule].hops
    return [replace(bench, setting=replace(setting, hop=hop)) for hop in hops] or [bench]


def layer_pair(bench: Bench) -> PairProblem:
    """A layer's forward beside a layer's backward."""
    layer = bench.layer
    return pair_problem("layer", layer.forward, "layer", layer.backward, bench.profile)


def decide(bench: Bench) -> tuple[Choices, PairingNote | None]:
    """How layers are paired, in which order blocks that run alone issue, when gradients are reduced.

    Of several decisions (`decisions`) those with the fastest simulated step.
    """
    found = decisions(bench)
    if len(found) == 1:
        return found[0]
    return min(found, key=lambda one: run(bench, one[0]).step_ns)


def decisions(bench: Bench) -> list[tuple[Choices, PairingNote | None]]:
    """Decisions without and, where it can be, with ends of backward passes put off to the next paired block.

    That fills blocks which follow each other better. What the last one puts off runs by itself, or (both are
    tried) in the backward pass by itself that follows.
    """
    found = [_decide(bench, tails=False)]
    if SCHEDULES[bench.setting.schedule].pairs is PairMethod.ORDER and bench.setting.fused:
        other = _decide(bench, tails=True)
        if other[0].pairings != found[0][0].pairings:
            found.append(other)
        found += [(ends, note) for choices, note in found if (ends := _with_ends(bench, choices)) != choices]
    return found


def _with_ends(bench: Bench, choices: Choices) -> Choices:
    """The same, with places for what is put off in the orders of backward passes by themselves."""
    orders, mark = dict(choices.backward_orders), f"{Late.BACKWARD}:"
    put_off: dict[str, set[frozenset[str]]] = defaultdict(set)
    for key, decision in choices.pairings.items():
        late = frozenset(step.removeprefix(mark) for step in decision.steps if step.startswith(mark))
        put_off[key.partition("|")[2]].add(late)
    for name, sets in put_off.items():
        if len(sets) == 1 and (late := next(iter(sets))):
            graph = bench.parts[name].backward
            orders[name] = _order_alone(end_problem(name, graph, late, bench.profile))
    return replace(choices, backward_orders=orders)


def _decide(bench: Bench, *, tails: bool) -> tuple[Choices, PairingNote | None]:
    setting = bench.setting
    kind = SCHEDULES[setting.schedule]
    choices = Choices(gathers=setting.zero > 0, early_reduction=setting.schedule in OVERLAPPING)
    if setting.schedule in OVERLAPPING:
        orders = {name: _alone(bench, part) for name, part in bench.parts.items() if _has_layers(part)}
        choices = replace(choices, backward_orders=orders)
    if kind.generator is twin_ended:
        choices = replace(choices, twin_orders=_twin_orders(bench))
    note = None
    if kind.pairs is not None and setting.fused:
        pairings, note = _decide_runs(bench, kind, tails=tails)
        choices = replace(choices, pairings=pairings)
    elif kind.pairs is not None:
        decision, note = decide_pairing(layer_pair(bench), kind.pairs)
        choices = replace(choices, pairings={"layer|layer": decision})
    return choices, note


def _twin_orders(bench: Bench) -> dict[str, tuple[str, ...]]:
    """How two micro-batches go through a run side by side, in both passes."""
    orders = {}
    for name, part in bench.parts.items():
        if _has_layers(part):
            for direction, graph in (
                (Direction.FORWARD, part.forward),
                (Direction.BACKWARD, part.backward),
            ):
                problem = twin_problem(name, graph, bench.profile)
                orders[f"{name} {direction.value * 2}"] = _order_alone(problem)
    return orders


def _has_layers(part: Part) -> bool:
    return "layer" in part.name


def _decide_runs(
    bench: Bench, kind: PipelineKind, *, tails: bool
) -> tuple[dict[str, PairingDecision], PairingNote | None]:
    """An order for every pair of runs that paired blocks bring together; the note is of the longest pair."""
    setting = bench.setting
    if kind.pairs is not PairMethod.ORDER:
        raise ValueError(
            f"fused={setting.fused}: schedule={setting.schedule} pairs layer by layer; set it to 0"
        )
    lasting = _meeting_runs(bench, kind)
    pairings, notes = {}, []
    for (first, second), goes_on in lasting.items():
        ahead, behind = bench.parts[first], bench.parts[second]
        problem = pair_problem(first, ahead.forward, second, behind.backward, bench.profile)
        tail = tails and goes_on and not gives_gradient(behind)
        late, found = run_order(problem, goes_on=goes_on, tail=tail)
        decision = PairingDecision(method=PairMethod.ORDER, steps=order_steps(problem, found.operators, late))
        pairings[f"{first}|{second}"] = decision
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
    return pairings, max(notes, key=lambda note: note.serial_ns, default=None)


def _meeting_runs(bench: Bench, kind: PipelineKind) -> dict[tuple[str, str], bool]:
    """Pairs of runs that meet in paired blocks, and whether most are followed by another one like them."""
    setting, layout = bench.setting, bench.setting.layout

    def names(block: Block) -> list[str]:
        runs = chunk_runs(layout, setting.model.layers, block.chunk, setting.fused)
        found = [run.name for run in runs]
        return found if block.direction is Direction.FORWARD else found[::-1]

    count: dict[tuple[str, str], int] = defaultdict(int)
    followed: dict[tuple[str, str], int] = defaultdict(int)
    for stage in kind.order(layout, setting.micro_batches, setting.hop):
        pairs = [block for block in stage if isinstance(block, Pair)]
        keys = [
            [(a, b) for a, b in zip(names(pair.forward), names(pair.backward), strict=False) if _pairs(a, b)]
            for pair in pairs
        ]
        going_on = carrying(stage, names, {key for block in keys for key in block})
        places = [place for place, block in enumerate(stage) if isinstance(block, Pair)]
        for place, block in zip(places, keys, strict=True):
            for key, after in zip(block, [*block[1:], None], strict=True):
                count[key] += 1
                followed[key] += after == key or (after is None and place in going_on)
    return {key: followed[key] > count[key] / 2 for key in count}


def _pairs(first: str, second: str) -> bool:
    """Runs without a layer are too short to pair."""
    return "layer" in first and "layer" in second


def decide_pairing(problem: PairProblem, method: PairMethod) -> tuple[PairingDecision, PairingNote]:
    """The pairing of a method, and what the best other one costs.

    ``ORDER`` takes the better of the list schedule and the segments between barriers.
    """
    segments, late, found = _searched(problem)
    in_turns = issue_ns(problem, turns_order(problem))
    prices = {
        PairMethod.ORDER: found.ns,
        PairMethod.BARRIERS: segments.ns,
        PairMethod.TURNS: in_turns,
    }
    chosen = method
    if method is PairMethod.ORDER and segments.ns < found.ns:
        chosen = PairMethod.BARRIERS
    if chosen is PairMethod.ORDER:
        decision = PairingDecision(method=chosen, steps=order_steps(problem, found.operators, late))
    elif chosen is PairMethod.BARRIERS:
        decision = PairingDecision(method=chosen, steps=segment_steps(segments))
    else:
        decision = PairingDecision(method=chosen)
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
    return decision, note


@lru_cache(maxsize=1024)
def _searched(problem: PairProblem) -> tuple[Pairing, tuple[str, ...], IssueOrder]:
    """Segments between barriers, the weight gradients that are put off without them, and the order then.

    Kept: layouts and schedules of a search often have layers in common.
    """
    segments = pair(problem)
    return segments, *_issue_order(problem, segments)


def _issue_order(problem: PairProblem, segments: Pairing) -> tuple[tuple[str, ...], IssueOrder]:
    """The best order of issue that is found, and the weight gradients that it puts off to the next layer."""
    start = pairing_order(problem, segments)
    found = [(late, list_schedule(put_off(problem, late), [start])) for late in late_sets(problem)]
    return min(found, key=lambda one: round(one[1].ns))


def exact_pairing(problem: PairProblem) -> tuple[PairingDecision, float]:
    """The best order there is for a layer's two passes, by branch and bound, and its ns; `decide` searches.

    `ValueError` for layers that it would take too long for.
    """
    late, best = min(
        ((late, exact_order(put_off(problem, late))) for late in late_sets(problem)),
        key=lambda one: one[1].ns,
    )
    steps = order_steps(problem, best.operators, late)
    return PairingDecision(method=PairMethod.ORDER, steps=steps), best.ns


def order_steps(problem: PairProblem, order: tuple[int, ...], late: tuple[str, ...] = ()) -> tuple[str, ...]:
    """An order of issue as the steps of a decision."""
    forward, backward = problem.forward.names, problem.backward.names
    count = len(forward)
    return tuple(
        f"F:{forward[op]}"
        if op < count
        else f"{'P' if backward[op - count] in late else 'B'}:{backward[op - count]}"
        for op in order
    )


def segment_steps(pairing: Pairing) -> tuple[str, ...]:
    """A pairing as the steps of a decision."""
    return tuple(f"{' '.join(s.forward)} | {' '.join(s.backward)}".strip() for s in pairing.segments)


def _alone(bench: Bench, part: Part) -> tuple[str, ...]:
    """The order in which a backward pass overlaps best with itself: weight gradients beside collectives."""
    empty = Graph(operators=())
    return _order_alone(pair_problem(part.name, empty, part.name, part.backward, bench.profile))


@lru_cache(maxsize=1024)
def _order_alone(problem: PairProblem) -> tuple[str, ...]:
    if len(problem.backward) <= LONG:
        found = list_schedule(problem)
    else:
        found = beam_order(problem)
        found = improved(problem, found.operators, found.ns)
    return tuple(problem.backward.names[op] for op in found.operators)


def lower(bench: Bench, choices: Choices, *, check: bool = True) -> Schedule:
    """The schedule of a setting and its decisions, validated unless the caller does that later."""
    setting = bench.setting
    schedule = training_schedule(
        setting.schedule,
        setting.layout,
        setting.micro_batches,
        bench.parts,
        choices,
        setting.fused,
        setting.split,
        setting.hop,
    )
    if check:
        validate(schedule, setting.layout, bench.parts)
    return schedule


def run(bench: Bench, choices: Choices, *, check: bool = True) -> Simulation:
    """Lower and simulate."""
    setting = bench.setting
    return simulate(
        lower(bench, choices, check=check),
        setting.layout,
        setting.model,
        bench.parts,
        bench.profile,
        dtype=setting.dtype,
        zero=setting.zero,
    )


@dataclass(frozen=True)
class Outcome:
    """A setting that was decided and simulated."""

    bench: Bench
    choices: Choices
    note: PairingNote | None
    simulation: Simulation
    numbers: Numbers
    usable_bytes: int
    """Of a GPU's memory."""

    @property
    def missing_bytes(self) -> int:
        """How much more memory than a GPU has it would take; 0 if it fits."""
        return max(0, self.numbers.peak_bytes - self.usable_bytes)


def evaluate(
    setting: Setting, cluster: ClusterSpec, profile: Profile | None = None, *, check: bool = True
) -> Outcome:
    """Decide and simulate a setting; ``intra_batch`` takes its best number of chunks, ``braid_eager`` hop.

    A search over many settings leaves the validation of schedules (``check``) to the one it takes.
    """
    if SCHEDULES[setting.schedule].splits_collectives and setting.split == 1:
        even = [split for split in SPLITS if setting.local_tokens % split == 0]
        tried = [evaluate(replace(setting, split=split), cluster, profile, check=check) for split in even]
        if tried:
            return min(tried, key=lambda outcome: outcome.numbers.step_seconds)
    bench = prepare(setting, cluster, profile)
    tried = [
        _outcome(variant, choices, note, cluster, check=check)
        for choices, note in decisions(bench)
        for variant in with_hops(bench)
    ]
    fitting = [outcome for outcome in tried if not outcome.missing_bytes]
    return min(fitting or tried, key=lambda outcome: outcome.numbers.step_seconds)


def replay(
    setting: Setting, choices: Choices, cluster: ClusterSpec, profile: Profile | None = None
) -> Outcome:
    """Simulate decisions that stand in a plan."""
    return _outcome(prepare(setting, cluster, profile), choices, None, cluster)


def _outcome(
    bench: Bench, choices: Choices, note: PairingNote | None, cluster: ClusterSpec, *, check: bool = True
) -> Outcome:
    simulation = run(bench, choices, check=check)
    numbers = simulation.numbers(bench.setting.workload.micro_batch, cluster.gpu.peak_flops_per_s)
    return Outcome(bench, choices, note, simulation, numbers, cluster.usable_bytes)


def with_schedule(setting: Setting, schedule: str) -> Setting:
    """The same layout under another schedule, with the placement that it needs."""
    placement = SCHEDULES[schedule].placement_on(setting.layout.pp)
    late = setting.layout.late_layers if placement is Placement.FOLDED else 0
    layout = replace(setting.layout, placement=placement, late_layers=late)
    return replace(setting, schedule=schedule, layout=layout, split=1, hop=0)
