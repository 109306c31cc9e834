"""The planner: from settings and costs to what is run (docs/design.md, Planning).

Every command decides here: `plan`, `simulate`, `explain`, `train`, `submit`, with given or searched layouts
and schedules, with modelled or measured costs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TypeVar

from braid.scheduling.cost.analytic import analytic_profile, axis_streams
from braid.scheduling.cost.profile import Profile, UnknownCostError, with_piece_costs
from braid.scheduling.cost.simulate import Numbers, Simulation
from braid.scheduling.cost.uneven import of_fullest_rank
from braid.scheduling.generate.lower import Choices, training_schedule
from braid.scheduling.generate.partitions import with_partitions
from braid.scheduling.generate.setting import Setting
from braid.scheduling.mesh.cluster import ClusterSpec
from braid.scheduling.mesh.partition import whole_axis
from braid.scheduling.model.layers import built_in_parts
from braid.scheduling.model.operators import Part
from braid.scheduling.plan.orders import BenchOf, CostedSetting, decisions
from braid.scheduling.plan.plan import PairingNote
from braid.scheduling.plan.space import EVERYTHING, PART_BY_PART, Space, variants
from braid.scheduling.plan.tiers import cuts
from braid.scheduling.schedule.code import Code
from braid.scheduling.schedule.link import link
from braid.scheduling.schedule.memory import DTYPE_BYTES
from braid.scheduling.schedule.schedule import Schedule, passes_in
from braid.scheduling.schedule.validate import check, linked
from braid.scheduling.text.pattern import is_layer

ALIKE = 0.02
"""Steps that differ by less the simulator cannot tell apart (docs/log.md)."""

EQUAL = 0.005
"""Pipelines of one schedule whose steps differ by less are taken by memory: what is held costs time too.

Less than `ALIKE`, as such a pair shares most of its errors, and what fits in memory costs nothing.
"""

S = TypeVar("S")
R = TypeVar("R")

Over = Callable[[Simulation], float]
"""Bytes by which a simulated step exceeds what is allowed; 0 within."""


@dataclass(frozen=True)
class Outcome:
    """A setting that was decided and simulated."""

    bench: CostedSetting
    choices: Choices
    note: PairingNote | None
    code: Code
    simulation: Simulation
    missing_bytes: float
    """How much more memory than is allowed it would take; 0 if it fits."""

    @property
    def step_ns(self) -> float:
        """The simulated step. `ValueError` for a cost that the profile does not have."""
        return self.simulation.step_ns

    @property
    def setting(self) -> Setting:
        """With everything decided."""
        return self.bench.setting

    def held_bytes(self) -> int:
        """Memory of the rank that holds most."""
        return max(held.total_bytes for held in self.simulation.memory)

    @cached_property
    def numbers(self) -> Numbers:
        """The step's numbers."""
        return self.simulation.numbers(self.setting.workload.micro_batch, self.bench.peak_flops_per_s)


# -- graphs and costs ----------------------------------------------------------------------------------------


def modelled(cluster: ClusterSpec, profile: Profile | None = None) -> BenchOf:
    """Built-in layers on a cluster, with modelled costs unless a profile is given.

    `ValueError` if the layout needs another number of GPUs than the cluster has.
    """

    def bench_of(setting: Setting) -> CostedSetting:
        if setting.layout.ranks != cluster.gpus:
            raise ValueError(
                f"the layout {setting.layout.describe()} needs {setting.layout.ranks} GPUs, cluster "
                f"{cluster.name} has {cluster.nodes} x {cluster.gpus_per_node} = {cluster.gpus}; "
                f"change parallel, or the number of nodes"
            )
        parts = built_in_parts(setting.sizes(axis_streams(setting.layout, cluster.gpus_per_node)))
        members = with_partitions(parts, setting.partitions, setting.layout)
        if profile is not None:
            costs = with_piece_costs(profile, members.values(), DTYPE_BYTES[setting.dtype])
        else:
            costs = analytic_profile(cluster, setting.layout, members, DTYPE_BYTES[setting.dtype])
        return CostedSetting(setting, members, costs, cluster.gpu.peak_flops_per_s)

    return bench_of


def measured(graphs: Mapping[str, Part], profile: Profile) -> BenchOf:
    """The graphs of a run, with its own costs: of the rank that the others wait for."""
    costs = of_fullest_rank(profile, graphs)

    def bench_of(setting: Setting) -> CostedSetting:
        members = with_partitions(graphs, setting.partitions, setting.layout)
        return CostedSetting(
            setting, members, with_piece_costs(costs, members.values(), DTYPE_BYTES[setting.dtype])
        )

    return bench_of


def attempts(tried: Iterable[S], attempt: Callable[[S], R]) -> list[R]:
    """What can be made of what is tried; where all is refused (`ValueError`), the last refusal.

    A cost that the profile does not have (`UnknownCostError`) is no refusal.
    """
    found: list[R] = []
    refused = ValueError("no schedule suits this layout and number of micro-batches")
    for one in tried:
        try:
            found.append(attempt(one))
        except UnknownCostError:
            raise
        except ValueError as error:
            refused = error
    if not found:
        raise refused
    return found


def decide(
    settings: Iterable[Setting], bench_of: BenchOf, over: Over, space: Space = EVERYTHING
) -> list[Outcome]:
    """The best outcome of each setting, the one to take first: of those that fit, the fastest.

    Of several schedules that are alike (`ALIKE`), the one that needs least memory comes first. `ValueError`
    for a cost that the profile does not have, or where no setting can be lowered.
    """

    def decided(setting: Setting) -> Outcome:
        best = best_of(variants(setting, space), bench_of, over)
        return with_cuts(best, bench_of, over) if space.every_pipeline else best

    found = attempts(settings, decided)
    taken = _leanest(found, ALIKE)
    check(taken.code)
    return [taken, *(outcome for outcome in sorted(found, key=rank) if outcome is not taken)]


def _leanest(found: Sequence[Outcome], alike: float) -> Outcome:
    """What needs least memory of the quickest that fits and of those that are slower by no more than a part.

    Where nothing fits, what misses least.
    """
    least = min(outcome.missing_bytes for outcome in found)
    fitting = [outcome for outcome in found if outcome.missing_bytes == least]
    if len(fitting) == 1:
        return fitting[0]  # not simulated: memory costs a tenth of what times do
    quickest = min(outcome.step_ns for outcome in fitting)
    return min((one for one in fitting if one.step_ns <= quickest * (1 + alike)), key=Outcome.held_bytes)


def best_of(settings: Iterable[Setting], bench_of: BenchOf, over: Over) -> Outcome:
    """The best outcome of settings that leave nothing but orders open; not checked yet.

    `ValueError` as for `decide`.
    """
    full: set[Setting] = set()

    def decided(setting: Setting) -> list[Outcome]:
        pipeline = replace(setting, hop=0)
        if pipeline in full:
            return []  # a message that takes longer leaves more to be held, and less did not fit
        found = outcomes(bench_of(setting), over)
        if all(outcome.missing_bytes for outcome in found):
            full.add(pipeline)
        return found

    return _leanest(list(chain.from_iterable(attempts(settings, decided))), EQUAL)


def with_cuts(best: Outcome, bench_of: BenchOf, over: Over) -> Outcome:
    """An outcome, or the same setting with collectives cut where that is told to be shorter (`ALIKE`).

    Collectives of layers are left whole where two passes together take hardly longer than their compute.
    """
    setting = best.setting
    if not setting.kind.partitions or setting.partitions:
        return best
    ways = cuts(best.bench, bench_of, layers=not _full_of_compute(best))
    benches = (_bounded(bench_of(replace(setting, partitions=way)), bench_of) for way in ways)
    found = [cut for bench in benches for cut in outcomes(bench, over) if _is_shorter(cut, best)]
    return min(found, key=rank, default=best)


def _is_shorter(cut: Outcome, whole: Outcome) -> bool:
    """Whether a step with collectives cut is told to be shorter."""
    of_layers = any(whole_axis(one.where) != "dp" for one in cut.setting.partitions)
    by_host = of_layers and any(whole.bench.profile.issue_ns.values())
    gain = ON_THE_HOST if by_host else ALIKE
    return cut.missing_bytes <= whole.missing_bytes and (
        cut.step_ns < whole.step_ns * (1 - gain) or cut.missing_bytes < whole.missing_bytes
    )


ON_THE_HOST = 0.2
"""What cuts of layers' collectives have to gain where ranks move data themselves (CPUs): there pieces cost
more than single transfers tell. 7 % simulated gain was 12 % measured loss, 1 % was 18 (docs/log.md)."""

MOST_OPERATORS = 160
"""Of both passes through a unit, where partitions have made many of few: more take minutes to search."""


def _bounded(bench: CostedSetting, bench_of: BenchOf) -> CostedSetting:
    """With so few layers in a unit that its orders are found in seconds."""
    sizes = [
        len(part.forward.operators) + len(part.backward.operators)
        for name, part in bench.members.items()
        if is_layer(name)
    ]
    most = min(bench.setting.unit_layers, MOST_OPERATORS // max(sizes))
    return bench if most == bench.setting.unit_layers else bench_of(replace(bench.setting, unit_layers=most))


FULL = 0.05
"""So little more than its compute does a pair of passes take that is full of it."""


def _full_of_compute(outcome: Outcome) -> bool:
    note = outcome.note
    blocks = (passes_in(one) for stage in outcome.code.schedule.stages for one in stage)
    if note is None or not any(len({one.direction for one in passes}) > 1 for passes in blocks):
        return False
    profile, layers = outcome.bench.profile, outcome.bench.members
    compute = max(
        sum(
            profile.solo(op.key)
            for graph in (part.forward, part.backward)
            for op in graph.operators
            if not op.kind.communicates
        )
        for name, part in layers.items()
        if is_layer(name)
    )
    return note.ns < compute * (1 + FULL)


def outcomes(bench: CostedSetting, over: Over) -> list[Outcome]:
    """Of all decisions about orders."""
    return [outcome_of(bench, choices, note, over) for choices, note in decisions(bench)]


def rank(outcome: Outcome) -> tuple[float, float]:
    """Less is better: what fits first, then what is faster."""
    return outcome.missing_bytes, outcome.step_ns


def outcome_of(bench: CostedSetting, choices: Choices, note: PairingNote | None, over: Over) -> Outcome:
    """Lower and link decisions; they are simulated when the step is asked for.

    What is taken is checked later (`validate.check`).
    """
    own = bench.setting
    code = link(training_schedule(own, bench.parts, choices), own.layout, own.kinds, bench.parts)
    return _outcome(bench, choices, note, code, over)


def outcome_of_schedule(schedule: Schedule, bench: CostedSetting, over: Over) -> Outcome:
    """Of a schedule that was not made here; `ScheduleError` if it must not run."""
    own = bench.setting
    return _outcome(bench, Choices(), None, linked(schedule, own.layout, own.kinds, bench.parts), over)


def _outcome(
    bench: CostedSetting, choices: Choices, note: PairingNote | None, code: Code, over: Over
) -> Outcome:
    own = bench.setting
    simulation = Simulation(code, own.model, bench.profile, own.dtype, own.reduce_dtype)
    return Outcome(bench, choices, note, code, simulation, over(simulation))


def evaluate(
    setting: Setting, cluster: ClusterSpec, profile: Profile | None = None, space: Space = PART_BY_PART
) -> Outcome:
    """Decide and simulate one setting on a cluster, within its memory where that can be."""
    return decide([setting], modelled(cluster, profile), within(cluster.usable_bytes), space)[0]


def replay(
    setting: Setting, choices: Choices, cluster: ClusterSpec, profile: Profile | None = None
) -> Outcome:
    """Simulate decisions that stand in a plan; `ScheduleError` if they must not run."""
    bench = modelled(cluster, profile)(setting)
    outcome = outcome_of(bench, choices, None, within(cluster.usable_bytes))
    check(outcome.code)
    return outcome


def within(usable_bytes: float) -> Over:
    """What exceeds the memory of a GPU."""
    return lambda simulation: max(0, max(rank.total_bytes for rank in simulation.memory) - usable_bytes)


def anything(simulation: Simulation) -> float:
    """Memory is not bounded."""
    return 0.0
