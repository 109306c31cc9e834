"""Simulate a schedule with a profile: spans as the runtime would record them, and the numbers of design 7.

Exact for the symmetric case: one rank is simulated per pipeline stage and stands for all ranks of the stage,
which do the same at the same time on a homogeneous cluster. Routing of experts is taken as balanced.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from braid.scheduling.memory import RankMemory, model_flops, rank_memory
from braid.scheduling.operators import Part, Stream
from braid.scheduling.profile import Profile
from braid.scheduling.schedule import Block, Schedule
from braid.scheduling.simulator.compile import Compiler, Job, Task, strand_name
from braid.scheduling.simulator.engine import Executed, RankRun, run_ranks
from braid.scheduling.spec import ModelShape, ParallelLayout
from braid.scheduling.trace import Span, communication, length_ns, merge, overlap_ns

DATA_OPERATOR_CLASS = {Stream.INTRA: "intra", Stream.INTER: "inter"}


@dataclass(frozen=True, kw_only=True)
class LinkUse:
    """Communication over the links of one level: mean over the ranks."""

    bytes_per_gpu: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What a simulated step came to (design section 7); times and fractions are means over the ranks."""

    step_seconds: float
    tokens_per_second: float
    mfu: float | None
    """Model FLOPs per second over the peak of all GPUs; None without a cluster's peak rate."""
    hidden_fraction: float
    communication_seconds: float
    exposed_seconds: float
    bubble_fraction: float
    bubble_seconds: float
    slowdown_seconds: float
    launch_gap_seconds: float
    peak_bytes: int
    intra: LinkUse
    inter: LinkUse

    def as_json(self) -> dict[str, object]:
        """The object that ``braid simulate --json`` prints."""
        values = dict(vars(self))
        links = {name: dict(vars(values.pop(name))) for name in ("intra", "inter")}
        return {**values, "communication": links}


@dataclass(frozen=True)
class Simulation:
    """A simulated step."""

    job: Job
    ranks: tuple[RankRun, ...]

    @cached_property
    def step_ns(self) -> float:
        """From the first task's start to the last one's end, over all ranks."""
        return max(rank.clock for rank in self.ranks)

    def spans(self) -> Iterator[Span]:
        """Every task of every simulated rank; ``rank`` is the first rank of its stage."""
        for rank in self.ranks:
            number = self.job.layout.rank_at({"pp": rank.number, "dp": 0, "cp": 0, "tp": 0})
            for executed in rank.executed:
                yield _span(number, executed)

    def memory(self) -> list[RankMemory]:
        """What a rank of every stage needs."""
        job = self.job
        return [
            rank_memory(job.schedule, job.layout, job.shape, job.parts, job.dtype, stage, job.zero)
            for stage in range(job.layout.pp)
        ]

    def numbers(self, micro_batch: int, peak_flops_per_s: float | None = None) -> Numbers:
        """The step's numbers; ``micro_batch`` in samples, as the parts were built with."""
        job, step = self.job, self.step_ns / 1e9
        samples = job.schedule.micro_batches * micro_batch * job.layout.dp
        tokens = samples * job.shape.sequence
        per_rank = [_rank_numbers(rank) for rank in self.ranks]
        count = len(per_rank)
        blocks_end = max((end for rank in self.ranks for _, end in rank.blocks), default=0.0)
        bubble = sum(blocks_end - sum(e - b for b, e in rank.blocks) for rank in self.ranks) / count
        in_flight = sum(rank.communication for rank in per_rank) / count
        exposed = sum(rank.exposed for rank in per_rank) / count
        mfu = None
        if peak_flops_per_s is not None:
            mfu = model_flops(job.shape, tokens) / step / (peak_flops_per_s * job.layout.ranks)
        return Numbers(
            step_seconds=step,
            tokens_per_second=tokens / step,
            mfu=mfu,
            hidden_fraction=1.0 - exposed / in_flight if in_flight else 1.0,
            communication_seconds=in_flight / 1e9,
            exposed_seconds=exposed / 1e9,
            bubble_fraction=bubble / self.step_ns,
            bubble_seconds=bubble / 1e9,
            slowdown_seconds=sum(rank.slowdown for rank in per_rank) / count / 1e9,
            launch_gap_seconds=sum(rank.gap for rank in per_rank) / count / 1e9,
            peak_bytes=max(rank.total_bytes for rank in self.memory()),
            intra=_link_use(self.ranks, Stream.INTRA),
            inter=_link_use(self.ranks, Stream.INTER),
        )


def simulate(
    schedule: Schedule,
    layout: ParallelLayout,
    shape: ModelShape,
    parts: Mapping[str, Part],
    profile: Profile,
    *,
    dtype: str = "bf16",
    zero: int = 0,
) -> Simulation:
    """Run a validated schedule. `ValueError` for a cost that the profile does not have."""
    job = Job(schedule, layout, shape, parts, profile, dtype, zero)
    compiler = Compiler(job)
    commands = [compiler.stage(stage) for stage in range(layout.pp)]
    return Simulation(job, tuple(run_ranks(commands, _Contention(profile))))


class _Contention:
    """Slowdowns between tasks, looked up once per pair."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._known: dict[tuple[str, str], float] = {}

    def __call__(self, first: Task, second: Task) -> float:
        pair = (first.key, second.key)
        value = self._known.get(pair)
        if value is None:
            value = self._known[pair] = self._profile.slowdown(self._name(first), self._name(second))
        return value

    def _name(self, task: Task) -> str:
        """Transfers outside layers and the optimizer are no operators: their class stands for them."""
        if task.key in self._profile.solo_ns:
            return task.key
        return "optimizer" if task.stream is Stream.COMPUTE else DATA_OPERATOR_CLASS[task.stream]


@dataclass(frozen=True)
class _RankNumbers:
    communication: float
    exposed: float
    slowdown: float
    gap: float


def _rank_numbers(rank: RankRun) -> _RankNumbers:
    compute = [(round(e.start), round(e.end)) for e in rank.executed if e.task.stream is Stream.COMPUTE]
    moved = [(round(e.start), round(e.end)) for e in rank.executed if e.task.stream is not Stream.COMPUTE]
    result = communication(compute, moved)
    busy = merge([*compute, *moved])
    blocks = merge((round(begin), round(end)) for begin, end in rank.blocks)
    slowdown = sum(
        e.end - e.start - e.task.solo_ns
        for e in rank.executed
        if e.place.paired and e.task.stream is Stream.COMPUTE
    )
    return _RankNumbers(
        communication=result.communication_ns,
        exposed=result.exposed_ns,
        slowdown=slowdown,
        gap=length_ns(blocks) - overlap_ns(blocks, busy),
    )


def _link_use(ranks: Sequence[RankRun], stream: Stream) -> LinkUse:
    moved = [[e for e in rank.executed if e.task.stream is stream] for rank in ranks]
    sent = sum(e.task.bytes for tasks in moved for e in tasks)
    seconds = sum(length_ns(merge((round(e.start), round(e.end)) for e in tasks)) for tasks in moved)
    return LinkUse(bytes_per_gpu=sent // len(ranks), seconds=seconds / len(ranks) / 1e9)


def _span(rank: int, executed: Executed) -> Span:
    task, place = executed.task, executed.place
    block: Block | None = place.block
    return Span(
        rank=rank,
        step=0,
        strand=strand_name(place),
        micro_batch=block.micro_batch if block else -1,
        chunk=block.chunk if block else -1,
        layer=place.layer,
        operator=task.operator,
        stream=task.stream,
        start_ns=round(executed.start),
        end_ns=round(executed.end),
        bytes=task.bytes,
        flops=task.flops,
    )
