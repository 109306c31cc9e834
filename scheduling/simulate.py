"""Simulate a schedule with a profile: spans as the runtime would record them, and the numbers of design 7.

Exact for the symmetric case: one rank is simulated per pipeline stage and stands for all ranks of the stage,
which do the same at the same time on a homogeneous cluster. Routing of experts is taken as balanced.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from braid.scheduling.memory import RankMemory, model_flops, rank_memory
from braid.scheduling.operators import Part, Stream
from braid.scheduling.profile import Profile
from braid.scheduling.schedule import Block, Schedule, Strand
from braid.scheduling.simulator.compile import Compiler, Job, Task, layer_of
from braid.scheduling.simulator.engine import Executed, RankRun, run_ranks
from braid.scheduling.spec import ModelShape, ParallelLayout
from braid.scheduling.trace import Span

FloatArray = NDArray[np.float64]

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
                yield _span(number, executed, 0.0, None, -1, executed.task.operator)
            before: Block | None = None
            for run in rank.blocks:
                for executed in run.course.executed:
                    assert executed.place is not None
                    block = run.forward if executed.place.forward else run.backward
                    if executed.place.second:
                        block = run.second
                    if executed.place.before:
                        block = before
                    assert block is not None
                    layer, operator = layer_of(self.job, block, executed.place, executed.task.operator)
                    yield _span(number, executed, run.start, block, layer, operator)
                before = run.backward

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
        blocks_end = max(
            (r.start + r.course.duration for rank in self.ranks for r in rank.blocks), default=0.0
        )
        bubble = blocks_end - sum(rank.in_blocks for rank in per_rank) / count
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
            intra=_link_use(per_rank, Stream.INTRA),
            inter=_link_use(per_rank, Stream.INTER),
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
    in_blocks: float
    sent_bytes: Mapping[Stream, int]
    in_flight: Mapping[Stream, float]
    """Time in which some transfer of a link is in flight."""


_KINDS = (*Stream, "block")
"""What intervals are of: tasks of a stream, or blocks."""


def _rank_numbers(rank: RankRun) -> _RankNumbers:
    """A sweep over the begins and ends of everything that a rank did."""
    courses: dict[int, tuple[FloatArray, FloatArray]] = {}
    times: list[FloatArray] = []
    changes: list[FloatArray] = []
    sent = dict.fromkeys(Stream, 0)
    slowdown = in_blocks = 0.0
    for run in rank.blocks:
        key = id(run.course)
        if key not in courses:
            courses[key] = _events(run.course.executed, run.course.duration)
        course_times, course_changes = courses[key]
        times.append(course_times + run.start)
        changes.append(course_changes)
        in_blocks += run.course.duration
        paired = len(run.blocks) == 2
        for executed in run.course.executed:
            if executed.task.bytes:
                sent[executed.task.stream] += executed.task.bytes
            elif paired and executed.task.stream is Stream.COMPUTE:
                slowdown += executed.end - executed.start - executed.task.solo_ns
    outside, outside_changes = _events(rank.executed, None)
    for executed in rank.executed:
        sent[executed.task.stream] += executed.task.bytes
    all_times = np.concatenate([*times, outside])
    order = np.argsort(all_times, kind="stable")
    state = np.cumsum(np.concatenate([*changes, outside_changes])[order], axis=0)[:-1] > 0.5
    length = np.diff(all_times[order])
    compute, intra, inter, block = state.T
    moving = intra | inter
    return _RankNumbers(
        communication=float(length[moving].sum()),
        exposed=float(length[moving & ~compute].sum()),
        slowdown=slowdown,
        gap=float(length[block & ~moving & ~compute].sum()),
        in_blocks=in_blocks,
        sent_bytes=sent,
        in_flight={Stream.INTRA: float(length[intra].sum()), Stream.INTER: float(length[inter].sum())},
    )


def _events(executed: Sequence[Executed], block: float | None) -> tuple[FloatArray, FloatArray]:
    """When tasks and the block around them begin and end (events,), and which (events, kinds): 1 or -1."""
    rows = [(_KINDS.index(e.task.stream), e.start, e.end) for e in executed if e.end > e.start]
    if block is not None:
        rows.append((_KINDS.index("block"), 0.0, block))
    times = np.array([time for _, start, end in rows for time in (start, end)])
    changes = np.zeros((2 * len(rows), len(_KINDS)))
    for n, (kind, _, _) in enumerate(rows):
        changes[2 * n, kind] = 1.0
        changes[2 * n + 1, kind] = -1.0
    return times, changes


def _link_use(ranks: Sequence[_RankNumbers], stream: Stream) -> LinkUse:
    return LinkUse(
        bytes_per_gpu=sum(rank.sent_bytes[stream] for rank in ranks) // len(ranks),
        seconds=sum(rank.in_flight[stream] for rank in ranks) / len(ranks) / 1e9,
    )


def _span(
    rank: int, executed: Executed, offset: float, block: Block | None, layer: int, operator: str
) -> Span:
    task = executed.task
    return Span(
        rank=rank,
        step=0,
        strand=(block.strand if block else Strand.ALPHA).value,
        micro_batch=block.micro_batch if block else -1,
        chunk=block.chunk if block else -1,
        layer=layer,
        operator=operator,
        stream=task.stream,
        start_ns=round(offset + executed.start),
        end_ns=round(offset + executed.end),
        bytes=task.bytes,
        flops=task.flops,
    )
