"""Simulate linked code with a profile: spans as the runtime would record them, and numbers made of them.

The numbers: docs/design.md, Numbers of overlap.

Exact for the symmetric case: one rank is simulated per pipeline stage and stands for all ranks of the stage,
which do the same at the same time on a homogeneous cluster. Where experts have unequal numbers of rows, that
rank is the fullest one (`braid.scheduling.cost.uneven`); modelled costs have equal ones.
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
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.model.units import chunk_parts
from braid.scheduling.schedule.code import Code, Stretch
from braid.scheduling.schedule.memory import RankMemory, model_flops, rank_memory
from braid.scheduling.schedule.operations import Compute, Node, Start, Strand, name_of
from braid.scheduling.trace.arrays import FloatArray, overlap_numbers, union
from braid.scheduling.trace.spans import OverlapNumbers, Span


@dataclass(frozen=True, kw_only=True)
class LinkUse:
    """Communication over the links of one level: mean over the ranks."""

    bytes_per_gpu: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What a simulated step came to (docs/design.md, Numbers of overlap); means over the ranks."""

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
    """A simulated step of linked code that was validated; run when its times are asked for, memory is not."""

    code: Code
    shape: ModelShape
    profile: Profile
    dtype: str = "bf16"
    reduce_dtype: str | None = None
    """To which gradients are rounded where ranks sum them."""

    @cached_property
    def ranks(self) -> tuple[RankRun, ...]:
        """One rank of every stage. `ValueError` for a cost that the profile does not have."""
        prices = Prices(self.code, self.profile, self.dtype, self.reduce_dtype)
        return tuple(run_ranks(self.code.stages, prices))

    @cached_property
    def step_ns(self) -> float:
        """From the first operation's start to the last one's end, over all ranks."""
        return max(rank.clock for rank in self.ranks)

    def spans(self) -> Iterator[Span]:
        """Everything that takes time on every simulated rank; ``rank`` is the first rank of its stage."""
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
        what, of, layer = operation.what, None, -1
        if isinstance(what, Node):
            assert block is not None
            of = block.passes[operation.turn]
            layer = chunk_parts(self.code.layout, self.code.kinds, of.chunk)[what.part][1]
        return Span(
            rank=rank,
            step=0,
            strand=(of.strand if of else Strand.ALPHA).value,
            micro_batch=of.micro_batch if of else -1,
            chunk=of.chunk if of else -1,
            layer=layer,
            operator=name_of(what),
            stream=price.stream,
            start_ns=round(offset + executed.start),
            end_ns=round(offset + executed.end),
            direction="" if of is None else "forward" if of.forward else "backward",
            bytes=price.bytes,
            flops=price.flops,
        )

    @cached_property
    def memory(self) -> list[RankMemory]:
        """What a rank of every stage needs."""
        stages = range(self.code.layout.pp)
        return [
            rank_memory(self.code, self.shape, self.dtype, stage, reduce_dtype=self.reduce_dtype)
            for stage in stages
        ]

    def numbers(self, micro_batch: int, peak_flops_per_s: float | None = None) -> Numbers:
        """The step's numbers; ``micro_batch`` in samples, as the parts were built with."""
        code, step = self.code, self.step_ns / 1e9
        samples = code.schedule.micro_batches * micro_batch * code.layout.sample_ranks
        tokens = samples * self.shape.sequence
        intervals = [_Intervals.of(rank) for rank in self.ranks]
        found = [own.numbers() for own in intervals]
        count = len(found)
        blocks_end = max(
            (r.start + r.course.duration for rank in self.ranks for r in rank.blocks), default=0.0
        )
        blocks_begin = min((r.start for rank in self.ranks for r in rank.blocks), default=0.0)
        in_blocks = sum(own.in_blocks for own in intervals) / count
        bubble = max(0.0, blocks_end - blocks_begin - in_blocks)  # below 0 by rounding, without bubbles
        in_flight = sum(own.communication_ns for own in found) / count
        exposed = sum(own.exposed_ns for own in found) / count
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
            slowdown_seconds=sum(own.slowdown_ns or 0 for own in found) / count / 1e9,
            launch_gap_seconds=sum(own.launch_gap_ns for own in found) / count / 1e9,
            peak_bytes=max(rank.total_bytes for rank in self.memory),
            intra=_link_use(intervals, Stream.INTRA),
            inter=_link_use(intervals, Stream.INTER),
        )


def simulate(
    code: Code,
    shape: ModelShape,
    profile: Profile,
    *,
    dtype: str = "bf16",
    reduce_dtype: str | None = None,
) -> Simulation:
    """Run linked code that was validated. `ValueError` for a cost that the profile does not have."""
    simulation = Simulation(code, shape, profile, dtype, reduce_dtype)
    _ = simulation.ranks
    return simulation


@dataclass(frozen=True)
class _Intervals:
    """What a rank did when, as arrays (n, 2) of begins and ends."""

    compute: FloatArray
    solo_ns: FloatArray
    transfers: Mapping[Stream, FloatArray]
    blocks: FloatArray
    paired: NDArray[np.bool_]
    sent_bytes: Mapping[Stream, int]

    @classmethod
    def of(cls, rank: RankRun) -> "_Intervals":
        """Those of a rank; equal courses are taken apart once."""
        known: dict[int, tuple[dict[Stream, FloatArray], FloatArray, dict[Stream, int]]] = {}
        rows: dict[Stream, list[FloatArray]] = {stream: [] for stream in Stream}
        solo: list[FloatArray] = []
        sent = dict.fromkeys(Stream, 0)
        for start, executed, key in (
            (0.0, rank.executed, -1),
            *((run.start, run.course.executed, id(run.course)) for run in rank.blocks),
        ):
            if key not in known:
                known[key] = _apart(executed)
            times, alone, moved = known[key]
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
        """Time inside blocks."""
        return float((self.blocks[:, 1] - self.blocks[:, 0]).sum())

    def numbers(self) -> OverlapNumbers:
        """The numbers of overlap."""
        links = [*self.transfers.values()]
        return overlap_numbers(self.compute, self.solo_ns, links, self.blocks, self.paired)

    def in_flight_ns(self, stream: Stream) -> float:
        """Time in which some transfer of a link is in flight."""
        busy = union(self.transfers[stream])
        return float((busy[:, 1] - busy[:, 0]).sum())


def _apart(executed: Sequence[Executed]) -> tuple[dict[Stream, FloatArray], FloatArray, dict[Stream, int]]:
    times: dict[Stream, list[tuple[float, float]]] = {stream: [] for stream in Stream}
    sent = dict.fromkeys(Stream, 0)
    solo = []
    for one in executed:
        times[one.price.stream].append((one.start, one.end))
        sent[one.price.stream] += one.price.bytes
        if one.price.stream is Stream.COMPUTE:
            solo.append(one.price.ns)
    arrays = {stream: np.array(rows, float).reshape(-1, 2) for stream, rows in times.items()}
    return arrays, np.array(solo, float), sent


def _link_use(ranks: Sequence[_Intervals], stream: Stream) -> LinkUse:
    return LinkUse(
        bytes_per_gpu=sum(rank.sent_bytes[stream] for rank in ranks) // len(ranks),
        seconds=sum(rank.in_flight_ns(stream) for rank in ranks) / len(ranks) / 1e9,
    )
