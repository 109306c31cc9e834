"""From a setting and costs to decisions, from decisions to a schedule, from that to a simulated step."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from braid.scheduling.analytic import analytic_profile, axis_placements
from braid.scheduling.cluster import ClusterSpec
from braid.scheduling.layers import built_in_parts, part_sizes
from braid.scheduling.lowering.lower import Choices, training_schedule
from braid.scheduling.lowering.named import SCHEDULES, PairMethod
from braid.scheduling.lowering.programs import PairingDecision
from braid.scheduling.lowering.split import gathers_of, split_collectives
from braid.scheduling.memory import DTYPE_BYTES
from braid.scheduling.operators import Graph, Part
from braid.scheduling.plan import PairingNote, Setting
from braid.scheduling.planner.list_schedule import (
    IssueOrder,
    issue_ns,
    list_schedule,
    pairing_order,
    turns_order,
)
from braid.scheduling.planner.pairing import Pairing, pair
from braid.scheduling.planner.strands import PairProblem, pair_problem, put_off
from braid.scheduling.profile import Profile
from braid.scheduling.schedule import Schedule
from braid.scheduling.simulate import Numbers, Simulation, simulate
from braid.scheduling.spec import Placement
from braid.scheduling.validate import validate

SPLITS = (2, 4, 8)
"""Chunk counts that ``intra_batch`` tries."""

OVERLAPPING = ("braid", "braid_v")
"""Our own schedules also reduce gradients early and overlap blocks that run alone with themselves."""


@dataclass(frozen=True)
class Bench:
    """A setting with its operators and what they cost."""

    setting: Setting
    parts: Mapping[str, Part]
    profile: Profile

    @property
    def layer(self) -> Part:
        """The transformer layer."""
        return self.parts["layer"]


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
    parts = built_in_parts(sizes, setting.recompute)
    if setting.split > 1:
        layer = parts["layer"]
        parts["layer"] = split_collectives(layer, setting.split, gathers_of(layer))
    costs = profile or analytic_profile(cluster, setting.layout, parts, DTYPE_BYTES[setting.dtype])
    return Bench(setting, parts, costs)


def layer_pair(bench: Bench) -> PairProblem:
    """A layer's forward beside a layer's backward."""
    layer = bench.layer
    return pair_problem("layer", layer.forward, "layer", layer.backward, bench.profile)


def decide(bench: Bench) -> tuple[Choices, PairingNote | None]:
    """How layers are paired, in which order blocks that run alone issue, when gradients are reduced."""
    setting = bench.setting
    kind = SCHEDULES[setting.schedule]
    choices = Choices(gathers=setting.zero > 0, early_reduction=setting.schedule in OVERLAPPING)
    if setting.schedule in OVERLAPPING:
        choices = replace(choices, backward_order=_alone(bench, backward=True))
    note = None
    if kind.pairs is not None:
        decision, note = decide_pairing(layer_pair(bench), kind.pairs)
        choices = replace(choices, pairing=decision)
    return choices, note


def decide_pairing(problem: PairProblem, method: PairMethod) -> tuple[PairingDecision, PairingNote]:
    """The pairing of a method, and what the best other one costs.

    ``ORDER`` takes the better of the list schedule and the segments between barriers.
    """
    segments = pair(problem)
    late, found = _issue_order(problem, segments)
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


def _issue_order(problem: PairProblem, segments: Pairing) -> tuple[tuple[str, ...], IssueOrder]:
    """The best order of issue, and the weight gradients that it puts off to the next layer.

    Tried: none, each weight gradient that takes a twentieth of its pass or more, and all of these together.
    """
    graph = problem.backward
    movable = [
        name
        for name, ns in zip(graph.names, graph.solo_ns, strict=True)
        if name.endswith(".wgrad") and ns >= graph.total_ns / 20
    ]
    start = pairing_order(problem, segments)
    best: tuple[tuple[str, ...], IssueOrder] = ((), list_schedule(problem, [start]))
    sets = [(name,) for name in movable] + ([tuple(movable)] if len(movable) > 1 else [])
    for names in sets:
        found = list_schedule(put_off(problem, names), [start])
        if found.ns < best[1].ns * (1 - 1e-6):
            best = names, found
    return best


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


def _alone(bench: Bench, *, backward: bool) -> tuple[str, ...]:
    """The order in which a pass of a layer overlaps best with itself: weight gradients beside collectives."""
    empty = Graph(operators=())
    graph = bench.layer.backward if backward else bench.layer.forward
    problem = pair_problem("layer", empty, "layer", graph, bench.profile)
    found = list_schedule(problem)
    return tuple(problem.backward.names[op] for op in found.operators)


def lower(bench: Bench, choices: Choices, *, check: bool = True) -> Schedule:
    """The schedule of a setting and its decisions, validated unless the caller does that later."""
    setting = bench.setting
    schedule = training_schedule(
        setting.schedule, setting.layout, setting.micro_batches, bench.parts, choices
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
    """Decide and simulate a setting; ``intra_batch`` takes its best number of chunks.

    A search over many settings leaves the validation of schedules (``check``) to the one it takes.
    """
    if SCHEDULES[setting.schedule].splits_collectives and setting.split == 1:
        tried = [evaluate(replace(setting, split=split), cluster, profile, check=check) for split in SPLITS]
        return min(tried, key=lambda outcome: outcome.numbers.step_seconds)
    bench = prepare(setting, cluster, profile)
    choices, note = decide(bench)
    return _outcome(bench, choices, note, cluster, check=check)


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
    placement = SCHEDULES[schedule].placement
    late = setting.layout.late_layers if placement is Placement.FOLDED else 0
    layout = replace(setting.layout, placement=placement, late_layers=late)
    return replace(setting, schedule=schedule, layout=layout, split=1)
