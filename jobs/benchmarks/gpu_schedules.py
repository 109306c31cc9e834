"""Schedules on one GPU: forward passes of layers beside backward passes, in chains of paired blocks.

A chain begins with one forward block, then comes a number of paired blocks (forward of the next micro-batch
on one strand, backward of the one before on the other), then the last backward block. The paired blocks are
what is timed: at once as the executor issues them, and replayed from a CUDA graph.
"""

import math
import random
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Final

import torch
from torch import Tensor

from braid.actors.stage.streams import Streams
from braid.jobs.benchmarks.gpu_operators import OperatorTable
from braid.jobs.benchmarks.gpu_rig import CapturedStreams, Rig, first_line
from braid.scheduling.lowering.named import PairMethod
from braid.scheduling.lowering.programs import PairingDecision
from braid.scheduling.operators import Stream
from braid.scheduling.schedule import Block, Direction, Pair, Strand
from braid.scheduling.trace import Span, length_ns, merge, overlap_ns

SERIAL: Final = "serial"
SEARCHED: Final = {"dhelix": PairMethod.BARRIERS, "braid": PairMethod.ORDER}


@dataclass(frozen=True, kw_only=True)
class Check:
    """Outputs, input gradients and weight gradients of a schedule's paired blocks, compared bit for bit."""

    repeatable: bool
    """Whether the schedule gives the same when it runs again."""
    like_serial: bool
    graph_equal: bool | None
    """Whether the CUDA graph gives the same; None without a graph."""
    largest_difference: float
    """Of any element of any of these comparisons."""


@dataclass(frozen=True, kw_only=True)
class ScheduleTime:
    """One schedule; times are of one paired block, in ns, medians over rounds that took turns."""

    schedule: str
    method: str
    """How the blocks are paired; ``braid`` takes barriers where they are predicted to be better."""
    eager_ns: int
    predicted_ns: int | None
    """By the pairing search, of one layer's pair times layers; None where nothing was searched."""
    communication_ns: int
    hidden_fraction: float
    check: Check
    graph_ns: int | None = None
    graph_note: str = ""
    """Why there is no graph."""


@dataclass(frozen=True, kw_only=True)
class ScheduleTable:
    """All schedules that could be run, and why others could not."""

    layers: int
    pairs: int
    """Paired blocks in a chain."""
    schedules: tuple[ScheduleTime, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)

    def serial(self) -> ScheduleTime:
        """What the others are compared with."""
        return next(one for one in self.schedules if one.schedule == SERIAL)

    @property
    def limit_ns(self) -> int:
        """A paired block in which all communication is hidden, or all compute (design section 7)."""
        serial = self.serial()
        return max(serial.communication_ns, serial.eager_ns - serial.communication_ns)

    def recovered(self, ns: int) -> float | None:
        """Share of what could be won that a time wins over the serial one; None where nothing can be."""
        possible = self.serial().eager_ns - self.limit_ns
        return (self.serial().eager_ns - ns) / possible if possible > 0 else None


@dataclass(frozen=True)
class Decision:
    """How one schedule's blocks are paired; no pairing runs them one after the other."""

    schedule: str
    pairing: PairingDecision | None
    predicted_ns: int | None = None

    @property
    def method(self) -> str:
        """The pairing's method in a word."""
        return self.pairing.method.value if self.pairing else "one after the other"


def decisions(rig: Rig, operators: OperatorTable) -> tuple[list[Decision], dict[str, str]]:
    """Pairings from measured costs, and the schedules that cannot be made here, with the reason."""
    made = [
        Decision(SERIAL, None),
        Decision("wavelet", PairingDecision(method=PairMethod.TURNS)),
    ]
    try:
        from braid.scheduling.planner.compose import decide_pairing
        from braid.scheduling.planner.strands import pair_problem
    except ImportError as error:
        reason = f"its order has to be searched for, and the search cannot be loaded: {error}"
        return made, dict.fromkeys(SEARCHED, reason)
    layer, profile = rig.layer, operators.profile(rig)
    problem = pair_problem("layer", layer.forward, "layer", layer.backward, profile)
    for name, method in SEARCHED.items():
        pairing, note = decide_pairing(problem, method)
        made.append(Decision(name, pairing, note.ns * rig.layers))
    return made, {}


def measure_schedules(
    rig: Rig, operators: OperatorTable, *, pairs: int, rounds: int, seed: int = 0
) -> ScheduleTable:
    """Time all schedules by turns, in random order; to be called while the rig is running."""
    made, left_out = decisions(rig, operators)
    checks = check_all(rig, made, pairs)
    runs = [_Run(rig, decision, pairs) for decision in made]
    order = random.Random(seed)
    for turn in range(rounds + 1):
        for run in order.sample(runs, len(runs)):
            run.time(counts=turn > 0)
    return ScheduleTable(
        layers=rig.layers,
        pairs=pairs,
        schedules=tuple(run.result(check) for run, check in zip(runs, checks, strict=True)),
        left_out=left_out,
    )


class Chain:
    """A chain of blocks bound to some streams: three things to run in turn, with results that stay."""

    def __init__(self, rig: Rig, decision: Decision, pairs: int, streams: Streams) -> None:
        self._pairs, self._chunk = pairs, rig.chunk
        self._timed = not isinstance(streams, CapturedStreams)  # events of a graph have no times
        self._runner, self.recorder = rig.runner(decision.pairing, streams)
        self._x, self._dy = rig.tokens(), rig.tokens(seed=3)
        self.results: list[Tensor] = []
        """Outputs and input gradients of the paired blocks."""
        self.spans: list[Span] = []
        """What the paired blocks ran, after `end`; of chains that run at once."""

    def _block(self, direction: Direction, micro_batch: int) -> Block:
        strand = (Strand.ALPHA, Strand.BETA)[micro_batch % 2]
        return Block(direction, micro_batch, self._chunk, strand)

    def begin(self) -> None:
        """The first forward block."""
        self.recorder.clear()
        self._runner.run(self._block(Direction.FORWARD, 0), self._x, None, 1.0)
        self.recorder.clear()

    def paired(self) -> None:
        """All paired blocks; weight gradients that one puts off run in the next."""
        self.results.clear()
        for n in range(1, self._pairs + 1):
            pair = Pair(self._block(Direction.FORWARD, n), self._block(Direction.BACKWARD, n - 1))
            received, last = (self._x, self._dy), n == self._pairs
            results = self._runner.run_pair(pair, received, None, 1.0, keeps_late=not last)
            self.results += [result for result in results if result is not None]

    def end(self) -> None:
        """The last backward block."""
        self.spans = self.recorder.spans(0, 0) if self._timed else []
        self.recorder.clear()
        self._runner.run(self._block(Direction.BACKWARD, self._pairs), self._dy, None, 1.0)
        self._runner.assert_empty()

    @property
    def phases(self) -> tuple[Callable[[], None], ...]:
        """What has to run, in order."""
        return self.begin, self.paired, self.end


class GraphChain:
    """A chain captured once, phase by phase, in one memory pool; replaying writes the same tensors again."""

    def __init__(self, rig: Rig, chain: Chain) -> None:
        self._chain = chain
        self._graphs: list[torch.cuda.CUDAGraph] = []
        pool = torch.cuda.graph_pool_handle()
        for phase in chain.phases:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=rig.compute):
                phase()
            self._graphs.append(graph)
        chain.recorder.clear()

    @property
    def results(self) -> list[Tensor]:
        """As `Chain.results`."""
        return self._chain.results

    @property
    def phases(self) -> tuple[Callable[[], None], ...]:
        """As `Chain.phases`."""
        return tuple(graph.replay for graph in self._graphs)


def capture(rig: Rig, decision: Decision, pairs: int) -> tuple[GraphChain | None, str]:
    """A schedule's graph, or why there is none; it must have run at once before."""
    if rig.device.type != "cuda":
        return None, "CUDA graphs need a CUDA device"
    try:
        return GraphChain(rig, Chain(rig, decision, pairs, rig.captured)), ""
    except RuntimeError as error:
        return None, f"not captured: {first_line(error)}"


class _Run:
    """One schedule with its times."""

    def __init__(self, rig: Rig, decision: Decision, pairs: int) -> None:
        self._rig, self._decision, self._pairs = rig, decision, pairs
        self._eager = Chain(rig, decision, pairs, rig.streams)
        self._graph, self._graph_note = capture(rig, decision, pairs)
        self._times: dict[str, list[int]] = defaultdict(list)
        self._communication: list[tuple[int, int]] = []

    def time(self, counts: bool) -> None:
        """One chain at once, one replayed."""
        eager = self._timed(self._eager)
        communication = self._overlap()
        replayed = self._timed(self._graph) if self._graph is not None else None
        if counts:
            self._times["eager"].append(eager)
            self._communication.append(communication)
            if replayed is not None:
                self._times["graph"].append(replayed)

    def _timed(self, chain: Chain | GraphChain) -> int:
        """Nanoseconds of one paired block; the host issues the first while the forward block runs."""
        rig = self._rig
        begin, paired, end = chain.phases
        rig.synchronise()
        rig.lead()
        begin()
        start = rig.streams.mark()
        paired()
        stop = rig.streams.mark()
        end()
        return rig.between(start, stop) // self._pairs

    def _overlap(self) -> tuple[int, int]:
        """Nanoseconds of communication in a paired block of the last chain run at once, all and hidden."""
        spans = self._eager.spans
        by_kind = [
            merge((s.start_ns, s.end_ns) for s in spans if (s.stream is Stream.COMPUTE) == compute)
            for compute in (True, False)
        ]
        total, hidden = length_ns(by_kind[1]), overlap_ns(*by_kind)
        return total // self._pairs, hidden // self._pairs

    def result(self, check: Check) -> ScheduleTime:
        total = round(median(total for total, _ in self._communication))
        hidden = round(median(hidden for _, hidden in self._communication))
        graph = self._times.get("graph")
        return ScheduleTime(
            schedule=self._decision.schedule,
            method=self._decision.method,
            eager_ns=round(median(self._times["eager"])),
            predicted_ns=self._decision.predicted_ns,
            communication_ns=total,
            hidden_fraction=hidden / total if total else 1.0,
            graph_ns=round(median(graph)) if graph else None,
            graph_note=self._graph_note,
            check=check,
        )


def results_of(rig: Rig, chain: Chain | GraphChain) -> list[Tensor]:
    """Copies of all results of a chain that starts with cleared gradients."""
    for gradient in rig.gradients():
        gradient.zero_()
    for phase in chain.phases:
        phase()
    rig.synchronise()
    return [tensor.clone() for tensor in (*chain.results, *rig.gradients())]


def check_all(rig: Rig, made: Sequence[Decision], pairs: int) -> list[Check]:
    """Compare the results of all schedules, on kernels that give the same every time; the first is serial."""
    checks = []
    with _repeatable_kernels():
        reference = results_of(rig, Chain(rig, made[0], pairs, rig.streams))
        for decision in made:
            chain = Chain(rig, decision, pairs, rig.streams)
            first, again = results_of(rig, chain), results_of(rig, chain)
            graph, _ = capture(rig, decision, pairs)
            differences = [largest_difference(first, again), largest_difference(first, reference)]
            if graph is not None:
                differences.append(largest_difference(first, results_of(rig, graph)))
            checks.append(
                Check(
                    repeatable=differences[0] == 0.0,
                    like_serial=differences[1] == 0.0,
                    graph_equal=differences[2] == 0.0 if graph is not None else None,
                    largest_difference=max(differences),
                )
            )
    return checks


def largest_difference(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """The largest difference of any two elements; infinite where one is not a number."""
    worst = 0.0
    for a, b in zip(first, second, strict=True):
        difference = float((a.double() - b.double()).abs().max())
        worst = max(worst, float("inf") if math.isnan(difference) else difference)
    return worst


@contextmanager
def _repeatable_kernels() -> Iterator[None]:
    """Torch takes deterministic kernels: the fast gradient of attention adds in the order of arrival."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_deterministic_debug_mode("warn")  # the other way to say so loads torch's compiler
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode("default")
