"""The operation tier (Centauri section 3.2.1): how one collective and the computation around it are cut.

Two answers are computed. `algorithm_1` is the paper's rule. `schedule_operation` gives every scheme of the
partition space its scheduled time, piece by piece on the streams of a rank with launches and the lower
efficiency of small operators, and takes the best; its decision says what the rule would have cost.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from braid.scheduling import physics
from braid.scheduling.cluster import ClusterSpec, Gpu, Group
from braid.scheduling.operators import Kind, Stream
from braid.scheduling.planner.chain import ChainOperator, chain_ns, compute_ns
from braid.scheduling.planner.partition import (
    PIECE_COUNTS,
    Collective,
    Scheme,
    Stage,
    partition_space,
    stage_ns,
)
from braid.scheduling.records import require_positive
from braid.scheduling.topology import STREAM_OF
from braid.scheduling.trace import Interval


@dataclass(frozen=True, kw_only=True)
class Task:
    """Work on one stream; it starts when its stream is free and all of ``after`` have ended."""

    name: str
    stream: Stream
    ns: int
    after: tuple[str, ...] = ()


def run_in_order(tasks: Iterable[Task]) -> dict[str, Interval]:
    """When every task runs if each stream serves its tasks in the order given.

    Raises `ValueError` where the orders of the streams wait for each other, or for a task that is not there.
    """
    queues: dict[Stream, list[str]] = defaultdict(list)
    named: dict[str, Task] = {}
    for task in tasks:
        assert task.name not in named, f"two tasks are called {task.name}"
        named[task.name] = task
        queues[task.stream].append(task.name)
    times, stuck = physics.run_in_order(queues, lambda name: named[name].after, lambda name: named[name].ns)
    if stuck:
        heads = [named[queues[stream][place]] for stream, place in stuck.items()]
        waits = "; ".join(f"{h.name} for {', '.join(o for o in h.after if o not in times)}" for h in heads)
        raise ValueError(f"static order cannot run: {waits}; put what is waited for first")
    return times


def makespan_ns(times: Mapping[str, Interval]) -> int:
    """When the last task ends."""
    return max((end for _, end in times.values()), default=0)


def reversed_in_time(tasks: Sequence[Task]) -> tuple[Task, ...]:
    """The tasks with all dependencies and orders turned round; they take as long."""
    followers: dict[str, list[str]] = {task.name: [] for task in tasks}
    for task in tasks:
        for name in task.after:
            followers[name].append(task.name)
    return tuple(replace(task, after=tuple(followers[task.name])) for task in reversed(tasks))


def algorithm_1(
    *,
    comp_cost: float,
    comm_cost: float,
    cost_inter: float,
    inter_size: int,
    intra_size: int,
    in_cost: float,
    is_group_partitioned: bool,
    max_pieces: int = PIECE_COUNTS[-1],
) -> tuple[float, ...]:
    """The granularity by Centauri's algorithm 1: shares of the workload, in the order of their launch.

    Costs are in one unit, whichever. The printed quotient of costs is rounded up, so that independent work
    hides each piece; the printed input cost_intra is never read and left out.
    """
    world_size = inter_size * intra_size
    if in_cost >= comm_cost:
        return (1.0,)
    num_pieces = max_pieces
    if in_cost > 0:
        num_pieces = ceil(min(comm_cost / in_cost, max_pieces))
    if not is_group_partitioned:
        return (1 / num_pieces,) * num_pieces
    if in_cost > cost_inter:
        return (inter_size / world_size, 1 - inter_size / world_size)
    if comp_cost / inter_size > intra_size * cost_inter:
        return (intra_size / world_size, 1 - intra_size / world_size)
    return (
        intra_size / world_size,
        (inter_size - 1) / world_size,
        1 - (inter_size + intra_size - 1) / world_size,
    )


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """A collective with what may hide it.

    ``chain`` depends on it, nearest first: it follows, or, for a reduce-scatter, comes before.
    ``independent_ns`` is computation that may run at any time.
    """

    collective: Collective
    group: Group
    chain: tuple[ChainOperator, ...] = ()
    independent_ns: int = 0

    def __post_init__(self) -> None:
        require_positive(self, ("independent_ns",), zero=True)


@dataclass(frozen=True, kw_only=True)
class OperationDecision:
    """What the operation tier chose for one collective; all times include the computation around it."""

    scheme: Scheme
    ns: int
    runner_up: Scheme
    runner_up_ns: int
    """The cheapest scheme that differs from the chosen one."""
    unpartitioned_ns: int
    granularity: tuple[float, ...]
    """By algorithm 1."""
    algorithm_1: Scheme
    algorithm_1_ns: int
    searched: int
    """Schemes that were given a time."""
    note: str


def schedule_operation(overlap: Overlap, cluster: ClusterSpec) -> OperationDecision:
    """The best scheme of the partition space by scheduled time, beside algorithm 1's choice."""
    space = partition_space(overlap.collective, overlap.group, cluster, overlap.chain)
    granularity, ruled = rule_scheme(overlap, cluster, space.schemes)
    candidates = [*space.schemes] + ([] if ruled in space.schemes else [ruled])
    timed = [(scheduled_ns(overlap, scheme, cluster), n) for n, scheme in enumerate(candidates)]
    (ns, best), (second_ns, second) = sorted(timed)[:2]
    ruled_ns = timed[candidates.index(ruled)][0]
    note = "algorithm 1 chooses a scheme as good as the best of the space"
    if ruled_ns > ns:
        share = (ruled_ns - ns) / ns
        note = f"algorithm 1's {ruled.describe()} takes {ruled_ns - ns} ns ({share:.1%}) more than the best"
    return OperationDecision(
        scheme=candidates[best],
        ns=ns,
        runner_up=candidates[second],
        runner_up_ns=second_ns,
        unpartitioned_ns=timed[0][0],
        granularity=granularity,
        algorithm_1=ruled,
        algorithm_1_ns=ruled_ns,
        searched=len(candidates),
        note=note,
    )


def rule_scheme(
    overlap: Overlap, cluster: ClusterSpec, schemes: Sequence[Scheme]
) -> tuple[tuple[float, ...], Scheme]:
    """Algorithm 1's granularity for a collective and the scheme that it stands for.

    Group partition is for an all-gather over nodes x ranks of a node, as in the paper. Equal pieces are cut
    along the dim that takes the longest chain.
    """
    group, gpu = overlap.group, cluster.gpu
    direct = schemes[0]
    grouped = {
        tuple(stage.mesh_dim for stage in scheme.stages): scheme
        for scheme in sorted(schemes, key=lambda scheme: (scheme.uneven, scheme.operators))
        if scheme.mesh == (group.nodes, group.per_node) and (scheme.uneven or scheme.pieces == 1)
    }
    by_group = overlap.collective.kind is Kind.ALL_GATHER and bool(grouped)
    cost_inter = 0
    if by_group:
        cost_inter = stage_ns(cluster, grouped[0, 1].stages[0])
    granularity = algorithm_1(
        comp_cost=chain_ns(gpu, overlap.chain),
        comm_cost=stage_ns(cluster, direct.stages[0]),
        cost_inter=cost_inter,
        inter_size=group.nodes,
        intra_size=group.per_node,
        in_cost=overlap.independent_ns,
        is_group_partitioned=by_group,
    )
    if granularity == (1.0,):
        return granularity, direct
    if by_group:
        inter_first = overlap.independent_ns > cost_inter
        order = (1, 0, 1) if len(granularity) == 3 else (0, 1) if inter_first else (1, 0)
        return granularity, grouped[order]
    even = [s for s in schemes if s.stages == direct.stages and s.pieces > 1]
    longest = max(even, key=lambda scheme: scheme.operators)
    return granularity, replace(longest, pieces=len(granularity))


def scheduled_ns(overlap: Overlap, scheme: Scheme, cluster: ClusterSpec) -> int:
    """Time from the first start to the last end of a collective by a scheme and all computation around it."""
    return makespan_ns(run_in_order(scheme_tasks(overlap, scheme, cluster)))


def scheme_tasks(overlap: Overlap, scheme: Scheme, cluster: ClusterSpec) -> tuple[Task, ...]:
    """The tasks of a scheme, in an order that every stream may serve.

    Pieces follow each other through the stages; independent work goes first (for a reduce-scatter: last), and
    no computation waits for it. The chain before a reduce-scatter is that after a gather, turned in time.
    """
    before = overlap.collective.kind is Kind.REDUCE_SCATTER
    stages = _mirrored(scheme.stages) if before else scheme.stages
    launch = cluster.gpu.launch_ns
    tasks = []
    if overlap.independent_ns:
        tasks.append(Task(name="independent", stream=Stream.COMPUTE, ns=overlap.independent_ns))
    waves = [(piece + n, n, piece) for piece in range(scheme.pieces) for n in range(len(stages))]
    for _, n, piece in sorted(waves):
        stage = stages[n]
        tasks.append(
            Task(
                name=f"stage{n}.{piece}",
                stream=STREAM_OF[stage.group.level],
                ns=launch + stage_ns(cluster, stage, scheme.pieces),
                after=tuple(f"stage{other}.{piece}" for other in stage.after),
            )
        )
    tasks.extend(_chain_tasks(overlap, scheme, stages, cluster.gpu))
    return reversed_in_time(tasks) if before else tuple(tasks)


def _chain_tasks(overlap: Overlap, scheme: Scheme, stages: Sequence[Stage], gpu: Gpu) -> list[Task]:
    """The dependent chain: its cut operators piece by piece as the data comes, then the rest as a whole."""
    cut, rest = overlap.chain[: scheme.operators], overlap.chain[scheme.operators :]
    last = len(stages) - 1
    pieces: list[tuple[float, tuple[str, ...]]]
    if scheme.uneven:
        pieces = [(stage.share, (f"stage{n}.0",)) for n, stage in enumerate(stages)]
    elif cut:
        pieces = [(1 / scheme.pieces, (f"stage{last}.{piece}",)) for piece in range(scheme.pieces)]
    else:
        pieces = []
    tasks = []
    for number, (share, after) in enumerate(pieces):
        ns = chain_ns(gpu, cut, share)
        if scheme.reduces and number:
            # The partial result is read, and the sum read and written.
            ns += compute_ns(gpu, 0, 3 * cut[-1].output_bytes)
        if scheme.reduces:
            ns += round(_unshrunk_ns(gpu, cut[-1], share))
        tasks.append(Task(name=f"chain.{number}", stream=Stream.COMPUTE, ns=ns, after=after))
    if rest:
        everything = tuple(f"stage{n}.{piece}" for n in range(len(stages)) for piece in range(scheme.pieces))
        tasks.append(Task(name="rest", stream=Stream.COMPUTE, ns=chain_ns(gpu, rest), after=everything))
    return tasks


def _unshrunk_ns(gpu: Gpu, op: ChainOperator, share: float) -> float:
    """The part of a partial result's traffic that a cut along the contraction does not divide."""
    traffic = op.traffic_bytes * share + op.output_bytes * (1 - share)
    whole = compute_ns(gpu, op.flops * share, traffic)
    return whole - compute_ns(gpu, op.flops * share, op.traffic_bytes * share)


def _mirrored(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Stages last to first, each after the ones that it came before."""
    last = len(stages) - 1
    return tuple(
        replace(stage, after=tuple(last - m for m, other in enumerate(stages) if n in other.after))
        for n, stage in reversed(list(enumerate(stages)))
    )
