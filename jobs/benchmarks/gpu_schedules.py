"""Schedules on one GPU: forward passes of layers beside backward passes, in chains of paired blocks.

A chain begins with one forward block, then comes a number of paired blocks (forward of the next micro-batch
on one strand, backward of the one before on the other), then the last backward block. The paired blocks are
what is timed: at once as the executor issues them, and replayed from a CUDA graph.
"""

import math
import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor

from braid.actors.stage.step_records import StepRecorder
from braid.actors.stage.streams import Streams
from braid.jobs.benchmarks.gpu_operators import OperatorTable
from braid.jobs.benchmarks.gpu_rig import CapturedStreams, Rig, first_line
from braid.scheduling.lowering.fixed_orders import fixed_order
from braid.scheduling.lowering.named import PairMethod
from braid.scheduling.lowering.programs import Order
from braid.scheduling.schedule import Block
from braid.scheduling.schedule_text import parse_sides, write_sides
from braid.scheduling.trace import OverlapNumbers

SERIAL: Final = "serial"
_WORKSPACE: Final = "CUBLAS_WORKSPACE_CONFIG"
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
        """A paired block in which all communication is hidden, or all compute.

        The limit of docs/design.md, Numbers of overlap.
        """
        serial = self.serial()
        return max(serial.communication_ns, serial.eager_ns - serial.communication_ns)

    def recovered(self, ns: int) -> float | None:
        """Share of what could be won that a time wins over the serial one; None where nothing can be."""
        possible = self.serial().eager_ns - self.limit_ns
        return (self.serial().eager_ns - ns) / possible if possible > 0 else None


@dataclass(frozen=True)
class Decision:
    """How one schedule's blocks are paired; without an order their passes run one after the other."""

    schedule: str
    orders: Mapping[str, Order] = field(default_factory=dict)
    """Of both passes of a layer, as in a plan."""
    method: str = "one after the other"
    """In a word."""
    predicted_ns: int | None = None


def decisions(rig: Rig, operators: OperatorTable) -> tuple[list[Decision], dict[str, str]]:
    """Pairings from measured costs, and the schedules that cannot be made here, with the reason."""
    sides = "F:layer|B:layer"
    turns = fixed_order(PairMethod.TURNS, parse_sides(sides), {"layer": rig.layer})
    assert turns is not None
    made = [Decision(SERIAL), Decision("wavelet", {sides: turns}, PairMethod.TURNS)]
    try:
        from braid.scheduling.planner.orders import decide_pairing
        from braid.scheduling.planner.strands import pair_problem
    except ImportError as error:
        reason = f"its order has to be searched for, and the search cannot be loaded: {error}"
        return made, dict.fromkeys(SEARCHED, reason)
    layer, profile = rig.layer, operators.profile(rig)
    problem = pair_problem(layer.forward, layer.backward, profile)
    for name, method in SEARCHED.items():
        paired, order, note = decide_pairing(problem, method)
        made.append(Decision(name, {write_sides(paired): order}, note.method, note.ns * rig.layers))
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


def _nothing() -> None:
    pass


class Chain:
    """A chain of blocks bound to some streams, whose results stay.

    It has three phases: the first forward block, the paired blocks, the last backward block.
    """

    def __init__(self, rig: Rig, decision: Decision, pairs: int, streams: Streams) -> None:
        schedule = rig.chain(pairs, decision.orders)
        self._timed = not isinstance(streams, CapturedStreams)  # events of a graph have no times
        self._pairs, self._recorder = pairs, StepRecorder(streams)
        self._stage = rig.stage(schedule, streams, self._recorder)
        instructions = schedule.stages[rig.place]
        _, *self._later = (n for n, one in enumerate(instructions) if isinstance(one, Block))
        self.results: list[Tensor] = []
        """Outputs and input gradients of the paired blocks."""
        self.numbers: OverlapNumbers | None = None
        """Of the paired blocks of a chain that runs at once."""

    def run(self, between: Callable[[], None] = _nothing) -> None:
        """Run all blocks; ``between`` is called between two phases (of a chain without pairs: once)."""

        def before(position: int) -> None:
            if position not in (self._later[0], self._later[-1]):
                return
            between()
            if self._pairs and position == self._later[-1]:
                self.results = [*self._stage.sent]
                if self._timed:
                    self.numbers = self._recorder.numbers(self._recorder.records())
            self._stage.sent.clear()
            self._recorder.clear()

        self._stage.before = before
        self._stage.run([None] * (self._pairs + 1), 1.0, None)
        self._stage.sent.clear()
        self._recorder.clear()


class GraphChain:
    """A chain captured once, phase by phase, in one memory pool; replaying writes the same tensors again."""

    def __init__(self, rig: Rig, chain: Chain) -> None:
        self._chain = chain
        self._graphs: list[torch.cuda.CUDAGraph] = []
        pool = torch.cuda.graph_pool_handle()
        with ExitStack() as capture:

            def begin_next() -> None:
                capture.close()
                self._graphs.append(torch.cuda.CUDAGraph())
                capture.enter_context(torch.cuda.graph(self._graphs[-1], pool=pool, stream=rig.compute))

            begin_next()
            chain.run(begin_next)

    @property
    def results(self) -> list[Tensor]:
        """As `Chain.results`."""
        return self._chain.results

    def run(self, between: Callable[[], None] = _nothing) -> None:
        """As `Chain.run`."""
        first, *later = self._graphs
        first.replay()
        for graph in later:
            between()
            graph.replay()


def phases_ns(rig: Rig, chain: Chain | GraphChain) -> list[int]:
    """Nanoseconds of the device for every phase of a chain; the host issues ahead of it."""
    marks: list[Any] = []

    def mark() -> None:
        marks.append(rig.streams.mark())

    rig.synchronise()
    rig.lead()
    mark()
    chain.run(mark)
    mark()
    return [rig.between(begin, end) for begin, end in pairwise(marks)]


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
        eager = self._paired_ns(self._eager)
        communication = self._overlap()
        replayed = self._paired_ns(self._graph) if self._graph is not None else None
        if counts:
            self._times["eager"].append(eager)
            self._communication.append(communication)
            if replayed is not None:
                self._times["graph"].append(replayed)

    def _paired_ns(self, chain: Chain | GraphChain) -> int:
        """Nanoseconds of one paired block; the host issues the first while the forward block runs."""
        _, paired, _ = phases_ns(self._rig, chain)
        return paired // self._pairs

    def _overlap(self) -> tuple[int, int]:
        """Nanoseconds of communication in a paired block of the last chain run at once, all and hidden."""
        numbers = self._eager.numbers
        assert numbers is not None
        return numbers.communication_ns // self._pairs, numbers.hidden_ns // self._pairs

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
    chain.run()
    rig.synchronise()
    return [tensor.clone() for tensor in (*chain.results, *rig.gradients())]


def check_all(rig: Rig, made: Sequence[Decision], pairs: int) -> list[Check]:
    """Compare the results of all schedules, on kernels that give the same every time; the first is serial."""
    checks = []
    with repeatable_kernels():
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
def repeatable_kernels() -> Iterator[None]:
    """Torch takes deterministic kernels: the fast gradient of attention adds in the order of arrival.

    It does so unless others are an error; to be only warned of them changes nothing.
    """
    before = os.environ.get(_WORKSPACE)
    os.environ[_WORKSPACE] = ":4096:8"  # else products are errors, too
    torch.set_deterministic_debug_mode("error")  # the other way to say so loads torch's compiler
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode("default")
        del os.environ[_WORKSPACE]
        if before is not None:
            os.environ[_WORKSPACE] = before
