"""The planner: from settings and costs to the outcome to run (docs/design.md, Planning).

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
"""Relative difference of step times below which the simulator cannot tell them apart (docs/log.md)."""

EQUAL = 0.005
"""Relative difference of step times below which memory decides between pipelines of one schedule.

It is less than `ALIKE`, since two pipelines of a schedule share most of the simulator's errors, and saving
memory that fits gains nothing.
"""

S = TypeVar("S")
R = TypeVar("R")

Over = Callable[[Simulation], float]
"""Function that returns the bytes by which a simulated step exceeds the memory limit, 0 if it does not."""


@dataclass(frozen=True)
class Outcome:
    """A fully decided setting: its orders of operators, its linked code, and its simulation."""

    bench: CostedSetting
    choices: Choices
    note: PairingNote | None
    code: Code
    simulation: Simulation
    missing_bytes: float
    """Bytes by which the step exceeds the memory limit; 0 if it fits."""

    @property
    def step_ns(self) -> float:
        """Simulated step time in ns. Raises `ValueError` if the profile lacks a cost."""
        return self.simulation.step_ns

    @property
    def setting(self) -> Setting:
        """The setting of this outcome, with every choice made (layout, schedule, pipeline, partitions)."""
        return self.bench.setting

    def held_bytes(self) -> int:
        """Return the bytes of memory that the rank with most memory needs in the step."""
        return max(rank.total_bytes for rank in self.simulation.memory)

    @cached_property
    def numbers(self) -> Numbers:
        """Metrics of the simulated step: seconds, tokens per second, MFU, exposed communication, bubble."""
        return self.simulation.numbers(self.setting.workload.micro_batch, self.bench.peak_flops_per_s)


# -- graphs and costs ----------------------------------------------------------------------------------------


def modelled(cluster: ClusterSpec, profile: Profile | None = None) -> BenchOf:
    """Return a function that gives a setting its built-in layers' graphs, and costs from ``profile``, or else
    from a model of the cluster. It raises `ValueError` if the layout needs another number of GPUs."""

    def bench_of(setting: Setting) -> CostedSetting:
        if (ranks := setting.layout.ranks) != cluster.gpus:
            dp, left = divmod(cluster.gpus * setting.layout.dp, ranks)
            raise ValueError(
                f"the layout {setting.layout.describe()} needs {ranks} GPUs, cluster {cluster.name} has "
                f"{cluster.nodes} x {cluster.gpus_per_node} = {cluster.gpus}; "
                f"{'change parallel' if left else f'set parallel.dp={dp}'}, or change the number of nodes"
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
    """Return a function that gives a setting a run's graphs, with the measured costs of the slowest rank."""
    costs = of_fullest_rank(profile, graphs)

    def bench_of(setting: Setting) -> CostedSetting:
        members = with_partitions(graphs, setting.partitions, setting.layout)
        return CostedSetting(
            setting, members, with_piece_costs(costs, members.values(), DTYPE_BYTES[setting.dtype])
        )

    return bench_of


def attempts(tried: Iterable[S], attempt: Callable[[S], R]) -> list[R]:
    """Call ``attempt`` with each of ``tried``; return the results of the calls that raise no `ValueError`.

    If all calls raise, the last error is raised. `UnknownCostError` (the profile lacks a cost) is raised at
    once.
    """
    results: list[R] = []
    refused = ValueError("no schedule suits this layout and number of micro-batches")
    for candidate in tried:
        try:
            results.append(attempt(candidate))
        except UnknownCostError:
            raise
        except ValueError as error:
            refused = error
    if not results:
        raise refused
    return results


def decide(
    settings: Iterable[Setting], bench_of: BenchOf, over: Over, space: Space = EVERYTHING
) -> list[Outcome]:
    """Return the best outcome of each setting; the first in the list is the one to run.

    The first outcome fits the memory, and needs the least of it among those within `ALIKE` of the fastest.
    The others follow by missing memory, then time. Raises `ValueError` if the profile lacks a cost, or if no
    setting can be lowered.
    """

    def decided(setting: Setting) -> Outcome:
        best = best_of(variants(setting, space), bench_of, over)
        return with_cuts(best, bench_of, over) if space.every_pipeline else best

    results = attempts(settings, decided)
    taken = _leanest(results, ALIKE)
    check(taken.code)
    return [taken, *(outcome for outcome in sorted(results, key=rank) if outcome is not taken)]


def _leanest(results: Sequence[Outcome], alike: float) -> Outcome:
    """Return, of the outcomes that fit and are at most the fraction ``alike`` slower than the quickest, the
    one that needs the least memory.

    If no outcome fits, only the outcomes that exceed the limit least are compared.
    """
    least = min(outcome.missing_bytes for outcome in results)
    fitting = [outcome for outcome in results if outcome.missing_bytes == least]
    if len(fitting) == 1:
        return fitting[0]  # no simulation: counting memory takes a tenth of its time
    quickest = min(outcome.step_ns for outcome in fitting)
    return min((r for r in fitting if r.step_ns <= quickest * (1 + alike)), key=Outcome.held_bytes)


def best_of(settings: Iterable[Setting], bench_of: BenchOf, over: Over) -> Outcome:
    """Decide the orders of operators in each setting and return the best outcome; its code is not validated.

    Raises `ValueError` like `decide`.
    """
    full: set[Setting] = set()

    def decided(setting: Setting) -> list[Outcome]:
        pipeline = replace(setting, hop=0)
        if pipeline in full:
            return []  # a longer time for messages holds more, and less did not fit
        results = outcomes(bench_of(setting), over)
        if all(outcome.missing_bytes for outcome in results):
            full.add(pipeline)
        return results

    return _leanest(list(chain.from_iterable(attempts(settings, decided))), EQUAL)


def with_cuts(best: Outcome, bench_of: BenchOf, over: Over) -> Outcome:
    """Return the best outcome of the setting with collectives cut into pieces or stages, or ``best`` itself
    if no such outcome is clearly faster.

    Collectives of layers stay whole if paired passes take hardly longer than their compute.
    """
    setting = best.setting
    if not setting.kind.partitions or setting.partitions:
        return best
    ways = cuts(best.bench, bench_of, layers=not _full_of_compute(best))
    benches = (_bounded(bench_of(replace(setting, partitions=way)), bench_of) for way in ways)
    shorter = [cut for bench in benches for cut in outcomes(bench, over) if _is_shorter(cut, best)]
    return min(shorter, key=rank, default=best)


def _is_shorter(cut: Outcome, whole: Outcome) -> bool:
    """Return whether the outcome ``cut`` misses no more memory than ``whole`` and is clearly faster, or
    misses less."""
    of_layers = any(partition.what.where != "dp" for partition in cut.setting.partitions)
    by_host = of_layers and any(whole.bench.profile.issue_ns.values())
    gain = ON_THE_HOST if by_host else ALIKE
    return cut.missing_bytes <= whole.missing_bytes and (
        cut.step_ns < whole.step_ns * (1 - gain) or cut.missing_bytes < whole.missing_bytes
    )


ON_THE_HOST = 0.2
"""Simulated gain that cutting layers' collectives must show where ranks move data themselves (CPUs), because
pieces cost more than their profiled times: 7 % simulated gain was 12 % measured loss, 1 % was 18 % loss
(docs/log.md)."""

MOST_OPERATORS = 160
"""Largest number of operators in a unit's two passes once collectives are cut; more take minutes to
search."""


def _bounded(bench: CostedSetting, bench_of: BenchOf) -> CostedSetting:
    """Return ``bench`` with few enough layers per unit that its orders are found in seconds."""
    sizes = [
        len(part.forward.operators) + len(part.backward.operators)
        for name, part in bench.members.items()
        if is_layer(name)
    ]
    most = min(bench.setting.unit_layers, MOST_OPERATORS // max(sizes))
    return bench if most == bench.setting.unit_layers else bench_of(replace(bench.setting, unit_layers=most))


FULL = 0.05
"""Fraction by which paired passes may take longer than their compute and still count as full of compute."""


def _full_of_compute(outcome: Outcome) -> bool:
    note = outcome.note
    blocks = (passes_in(i) for stage in outcome.code.schedule.stages for i in stage)
    if note is None or not any(len({p.direction for p in passes}) > 1 for passes in blocks):
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
    """Return the outcome of every set of operator orders that `decisions` proposes for the setting."""
    return [outcome_of(bench, choices, note, over) for choices, note in decisions(bench)]


def rank(outcome: Outcome) -> tuple[float, float]:
    """Return the key by which outcomes are sorted, best first: missing memory, then step time."""
    return outcome.missing_bytes, outcome.step_ns


def outcome_of(bench: CostedSetting, choices: Choices, note: PairingNote | None, over: Over) -> Outcome:
    """Lower a setting with the orders ``choices`` to linked code; its step is simulated when first read.

    The code is not validated (`validate.check`).
    """
    setting = bench.setting
    code = link(training_schedule(setting, bench.parts, choices), setting.layout, setting.kinds, bench.parts)
    return _outcome(bench, choices, note, code, over)


def outcome_of_schedule(schedule: Schedule, bench: CostedSetting, over: Over) -> Outcome:
    """Validate and link a given schedule and return its outcome; raises `ScheduleError` if it is invalid."""
    setting = bench.setting
    code = linked(schedule, setting.layout, setting.kinds, bench.parts)
    return _outcome(bench, Choices(), None, code, over)


def _outcome(
    bench: CostedSetting, choices: Choices, note: PairingNote | None, code: Code, over: Over
) -> Outcome:
    setting = bench.setting
    simulation = Simulation(
        code, setting.model, bench.profile, setting.dtype, setting.reduce_dtype, setting.states
    )
    return Outcome(bench, choices, note, code, simulation, over(simulation))


def simulate_setting(
    setting: Setting, cluster: ClusterSpec, profile: Profile | None = None, space: Space = PART_BY_PART
) -> Outcome:
    """Return the best outcome of one setting on a cluster, one that fits the GPUs' memory if there is any."""
    return decide([setting], modelled(cluster, profile), within(cluster.usable_bytes), space)[0]


def replay(
    setting: Setting, choices: Choices, cluster: ClusterSpec, profile: Profile | None = None
) -> Outcome:
    """Return the outcome of a plan's setting and orders; raises `ScheduleError` if its code is invalid."""
    bench = modelled(cluster, profile)(setting)
    outcome = outcome_of(bench, choices, None, within(cluster.usable_bytes))
    check(outcome.code)
    return outcome


def within(usable_bytes: float) -> Over:
    """Return a function that tells by how many bytes a simulation's fullest rank exceeds ``usable_bytes``."""
    return lambda simulation: max(0, max(rank.total_bytes for rank in simulation.memory) - usable_bytes)


def anything(simulation: Simulation) -> float:
    """Return 0 for any simulation: the check for runs without a memory limit."""
    return 0.0
