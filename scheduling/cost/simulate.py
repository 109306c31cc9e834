"""Simulates linked code with a profile: spans as the runtime would record them, and numbers from spans.

The numbers: docs/design.md, Numbers of overlap.

The simulation is exact for the symmetric case: one rank is simulated per pipeline stage and stands for all
ranks of the stage, which do the same at the same time on a homogeneous cluster. Where experts have unequal
numbers of rows, the rank is the fullest one (`braid.scheduling.cost.uneven`); modelled costs have equal rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from braid.scheduling.cost.engine import Executed, RankRun, run_ranks
from braid.scheduling.cost.prices import Prices
from braid.scheduling.cost.profile import Profile
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.model.flops import model_flops
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.model.units import chunk_parts
from braid.scheduling.schedule.code import Code, Stretch
from braid.scheduling.schedule.memory import RankMemory, rank_memory
from braid.scheduling.schedule.operations import Compute, Node, Start, Strand, name_of
from braid.scheduling.schedule.states import ADAMW, OptimizerStates
from braid.scheduling.trace.arrays import FloatArray, overlap_numbers, union
from braid.scheduling.trace.spans import OverlapNumbers, Span


@dataclass(frozen=True, kw_only=True)
class LinkUse:
    """Communication inside nodes, or between nodes, as a mean over ranks: bytes sent, seconds of activity."""

    bytes_per_gpu: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Metrics of a simulated step, as means over ranks (docs/design.md, Numbers of overlap)."""

    step_seconds: float
    tokens_per_second: float
    mfu: float | None
    """Model FLOPs per second divided by the peak rate of all GPUs; None if the peak rate is unknown."""
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
        """Return the object that ``braid simulate --json`` prints."""
        values = dict(vars(self))
        links = {name: dict(vars(values.pop(name))) for name in ("intra", "inter")}
        return {**values, "communication": links}


@dataclass(frozen=True)
class Simulation:
    """Simulation of a step of validated code, which runs when its times are first read; memory needs no
    run."""

    code: Code
    shape: ModelShape
    profile: Profile
    dtype: str = "bf16"
    reduce_dtype: str | None = None
    """Dtype to which gradients are rounded when ranks sum them; None if they are not."""
    states: OptimizerStates = ADAMW

    @cached_property
    def ranks(self) -> tuple[RankRun, ...]:
        """Simulated ranks, one for every stage. Raises `ValueError` if the profile lacks a cost."""
        prices = Prices(self.code, self.profile, self.dtype, self.reduce_dtype)
        return tuple(run_ranks(self.code.stages, prices))

    @cached_property
    def step_ns(self) -> float:
        """Time in ns from the begin of the first operation to the end of the last, over all ranks."""
        return max(rank.clock for rank in self.ranks)

    def spans(self) -> Iterator[Span]:
        """Yield a span for every simulated operation; its ``rank`` is the first rank of the stage."""
        first = dict.fromkeys(self.code.layout.mesh.sizes, 0)
        for rank in self.ranks:
            number = self.code.layout.rank_at({**first, "pp": rank.number})
            for executed in rank.executed:
                yield self._span(number, executed, 0.0, None)
            for run in rank.blocks:
                for executed in run.course.executed:
                    yield self._span(number, executed, run.start, run.stretch)

    def _span(self, rank: int, executed: Executed, offset: float, block: Stretch | None) -> Span:
        operation, price = executed.operation, executed.price
        assert isinstance(operation, Compute | Start)
        what, pass_, layer = operation.what, None, -1
        if isinstance(what, Node):
            assert block is not None
            pass_ = block.passes[operation.turn]
            layer = chunk_parts(self.code.layout, self.code.kinds, pass_.chunk)[what.part][1]
        return Span(
            rank=rank,
            step=0,
            strand=(pass_.strand if pass_ else Strand.ALPHA).value,
            micro_batch=pass_.micro_batch if pass_ else -1,
            chunk=pass_.chunk if pass_ else -1,
            layer=layer,
            operator=name_of(what),
            stream=price.stream,
            start_ns=round(offset + executed.start),
            end_ns=round(offset + executed.end),
            direction="" if pass_ is None else "forward" if pass_.forward else "backward",
            bytes=price.bytes,
            flops=price.flops,
        )

    @cached_property
    def memory(self) -> list[RankMemory]:
        """For every stage, the memory that one of its ranks needs."""
        stages = range(self.code.layout.pp)
        return [
            rank_memory(
                self.code, self.shape, self.dtype, stage, reduce_dtype=self.reduce_dtype, states=self.states
            )
            for stage in stages
        ]

    def numbers(self, micro_batch: int, peak_flops_per_s: float | None = None) -> Numbers:
        """Return the metrics of the step.

        ``micro_batch``: samples per micro-batch; ``peak_flops_per_s``: peak rate of a GPU, None for no MFU.
        """
        code, step = self.code, self.step_ns / 1e9
        samples = code.schedule.micro_batches * micro_batch * code.layout.sample_ranks
        tokens = samples * self.shape.sequence
        intervals = [_Intervals.of(rank) for rank in self.ranks]
        numbers = [rank.numbers() for rank in intervals]
        count = len(numbers)
        blocks_end = max(
            (r.start + r.course.duration for rank in self.ranks for r in rank.blocks), default=0.0
        )
        blocks_begin = min((r.start for rank in self.ranks for r in rank.blocks), default=0.0)
        in_blocks = sum(rank.in_blocks for rank in intervals) / count
        bubble = max(0.0, blocks_end - blocks_begin - in_blocks)  # below 0 by rounding, without bubbles
        in_flight = sum(rank.communication_ns for rank in numbers) / count
        exposed = sum(rank.exposed_ns for rank in numbers) / count
        mfu = None
        if peak_flops_per_s is not None:
            mfu = model_flops(self.shape, tokens) / step / (peak_flops_per_s * code.layout.ranks)
        return Numbers(
            step_seconds=step,
            tokens_per_second=tokens / step,
            mfu=mfu,
            hidden_fraction=1.0 - exposed / in_flight if in_flight else 1.0,
            communication_seconds=in_flight / 1e9,
            exposed_seconds=exposed / 1e9,
            bubble_fraction=bubble / self.step_ns,
            bubble_seconds=bubble / 1e9,
            slowdown_seconds=sum(rank.slowdown_ns or 0 for rank in numbers) / count / 1e9,
            launch_gap_seconds=sum(rank.launch_gap_ns for rank in numbers) / count / 1e9,
            peak_bytes=max(rank.total_bytes for rank in self.memory),
            intra=_link_use(intervals, Stream.INTRA),
            inter=_link_use(intervals, Stream.INTER),
        )


@dataclass(frozen=True)
class _Intervals:
    """Begins and ends of a rank's operations and blocks in nanoseconds, as arrays of shape (n, 2)."""

    compute: FloatArray
    solo_ns: FloatArray
    transfers: Mapping[Stream, FloatArray]
    blocks: FloatArray
    paired: NDArray[np.bool_]
    sent_bytes: Mapping[Stream, int]

    @classmethod
    def of(cls, rank: RankRun) -> "_Intervals":
        """Collect the intervals of a simulated rank; repeated executions of a block are unpacked only
        once."""
        unpacked: dict[int, tuple[dict[Stream, FloatArray], FloatArray, dict[Stream, int]]] = {}
        rows: dict[Stream, list[FloatArray]] = {stream: [] for stream in Stream}
        solo: list[FloatArray] = []
        sent = dict.fromkeys(Stream, 0)
        for start, executed, key in (
            (0.0, rank.executed, -1),
            *((run.start, run.course.executed, id(run.course)) for run in rank.blocks),
        ):
            if key not in unpacked:
                unpacked[key] = _unpacked(executed)
            times, alone, moved = unpacked[key]
            for stream in Stream:
                rows[stream].append(times[stream] + start)
                sent[stream] += moved[stream]
            solo.append(alone)
        blocks = [(run.start, run.start + run.course.duration) for run in rank.blocks]
        return cls(
            compute=np.concatenate(rows[Stream.COMPUTE]),
            solo_ns=np.concatenate(solo),
            transfers={s: np.concatenate(rows[s]) for s in (Stream.INTRA, Stream.INTER)},
            blocks=np.array(blocks, float).reshape(-1, 2),
            paired=np.array([run.stretch.paired for run in rank.blocks], bool),
            sent_bytes=sent,
        )

    @property
    def in_blocks(self) -> float:
        """Total time of the rank inside blocks, in nanoseconds."""
        return float((self.blocks[:, 1] - self.blocks[:, 0]).sum())

    def numbers(self) -> OverlapNumbers:
        """Return the rank's hidden and exposed communication, slowdown and launch gaps."""
        links = [*self.transfers.values()]
        return overlap_numbers(self.compute, self.solo_ns, links, self.blocks, self.paired)

    def in_flight_ns(self, stream: Stream) -> float:
        """Return the time in nanoseconds during which at least one transfer of a stream is in flight."""
        busy = union(self.transfers[stream])
        return float((busy[:, 1] - busy[:, 0]).sum())


def _unpacked(executed: Sequence[Executed]) -> tuple[dict[Stream, FloatArray], FloatArray, dict[Stream, int]]:
    times: dict[Stream, list[tuple[float, float]]] = {stream: [] for stream in Stream}
    sent = dict.fromkeys(Stream, 0)
    solo = []
    for operation in executed:
        times[operation.price.stream].append((operation.start, operation.end))
        sent[operation.price.stream] += operation.price.bytes
        if operation.price.stream is Stream.COMPUTE:
            solo.append(operation.price.ns)
    arrays = {stream: np.array(rows, float).reshape(-1, 2) for stream, rows in times.items()}
    return arrays, np.array(solo, float), sent


def _link_use(ranks: Sequence[_Intervals], stream: Stream) -> LinkUse:
    return LinkUse(
        bytes_per_gpu=sum(rank.sent_bytes[stream] for rank in ranks) // len(ranks),
        seconds=sum(rank.in_flight_ns(stream) for rank in ranks) / len(ranks) / 1e9,
    )
