"""Steps as graphs, on the model of the machine: the bits of steps that are issued one operator at a time."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from braid.actors.stage.measure.telemetry import Recorder
from braid.actors.stage.run import step_graph as step_graphs
from braid.actors.stage.run.cuda_streams import Captured, CudaStreams
from braid.actors.stage.run.step_graph import StepGraph, step_graph
from braid.actors.stage.run.streams import Transfer
from braid.kernels.operators.norm import RMSNorm
from tests.cuda.altered import Altered, altered
from tests.cuda.clock import Event, TimedDevice
from tests.cuda.log import RankLog
from tests.cuda.machine import Machine, here
from tests.cuda.replay import differences
from tests.cuda.steps import MICRO_BATCH, OWN, Case, Ranked, counting_calls, faults, left, made, recorded

pytestmark = pytest.mark.alone

SEED = int(os.environ["BRAID_TEST_SEED"])
STEPS = 4
"""Two that are not captured, one that is, and its first repetition with other tokens."""
CASES = [
    Case(schedule="zbv", pp=2, micro_batches=2),
    Case(schedule="expert_overlap", dp=2, ep=2, capacity=True, micro_batches=2),
    Case(schedule="braid:w", cp=2, ring=True, micro_batches=2),
    Case(schedule="ddp", dp=2, zero=2, micro_batches=2, rounded=True),
    Case(schedule="braid:w", tp=2, dp=2, zero=3, least=4096, micro_batches=2),
]


REORDERED = [
    Case(schedule="braid:w", tp=2, micro_batches=2),
    Case(schedule="braid:w", dp=2, zero=3, least=4096, micro_batches=2),
]


@pytest.mark.parametrize("case", [*CASES, *REORDERED], ids=lambda case: case.name)
def test_a_graph_changes_no_bit(case: Case) -> None:
    """Nor does any order of what is in it, on memory that is given away, inside the graph as outside."""
    orders, case = range(SEED, SEED + 20 * (case in REORDERED)), replace(case, steps=STEPS)
    assert faults(replace(case, graph=True), orders, left(case)) == []


def test_what_routers_do_in_a_graph_is_added_up_once_a_step() -> None:
    """Also in steps of before the graph, and in the one that captures it."""
    case = Case(schedule="braid:w", dp=2, experts=True, capacity=True, steps=STEPS)
    expected = left(case)
    samples = case.micro_batches * case.layout.dp * MICRO_BATCH
    visits = samples * case.shape.sequence * case.shape.top_k
    for step in range(STEPS):
        sums = [expected[rank, f"routing {step}"] for rank in range(case.layout.ranks)]
        assert sum(sum(rank[0][0]) for rank in sums) == visits
        assert sum(sum(rank[1]) for rank in sums) > 0, "nothing was dropped: too easy"
    assert faults(replace(case, graph=True), expected=expected) == []


def counted(captures: list[CudaStreams]) -> Altered:
    """Streams that begin to capture, kept in a list."""

    def capture(whole: Any, streams: CudaStreams) -> Any:
        captures.append(streams)
        return whole(streams)

    return altered(CudaStreams, "capture", capture)


def one_rank(
    case: Case, scales: tuple[float, ...], recording: tuple[bool, ...], always: bool = True
) -> tuple[dict[str, torch.Tensor], list[tuple[float, int]], int]:
    """Steps, each with a scale of its losses, with or without spans.

    Returns the state, the loss and the number of spans of every step, and how many graphs were captured.
    """
    machine, ready, told, captures = Machine(1), [], [], list[CudaStreams]()

    def run(log: RankLog) -> None:
        rank = made(case, machine, log)
        ready.append(rank)
        log.begin()
        executor, recorder = rank.parts.executor, rank.parts.executor._recorder
        if case.graph:
            executor.graph = StepGraph(rank.parts.streams, recorder, always=always)
        for step, (scale, recorder.recording) in enumerate(zip(scales, recording, strict=True)):
            loss = executor.run(
                rank.given[step], scale, rank.parts.optimizer.begin(step, rank.membership.intact)
            )
            told.append((loss, recorder.count))

    with counted(captures):
        machine.run(run)
    return ready[0].state(), told, len(captures)


SINGLE = Case(schedule="megatron", micro_batches=2, steps=8)


def test_a_graph_is_captured_again_when_what_it_was_captured_for_changes() -> None:
    scales, recording = (0.5,) * 4 + (0.25,) * 2 + (0.5,) * 2, (False,) * 6 + (True,) * 2
    eager, wanted, none = one_rank(SINGLE, scales, recording)
    state, found, captures = one_rank(replace(SINGLE, graph=True), scales, recording)
    assert (none, captures) == (0, 3)
    assert found == wanted
    assert found[-1][1] > 20, "spans of a graph are those of the operators in it"
    assert differences(eager, state) == []


def _host_reads() -> Altered:
    """An operator whose result the host looks at."""

    def looking(whole: Any, *given: Any) -> Any:
        results = whole(*given)
        assert float(results[0].sum()) is not None
        return results

    return altered(RMSNorm, "forward", looking)


@pytest.mark.parametrize(
    ("case", "within", "why"),
    [
        (SINGLE, _host_reads, "the host reads"),
        (replace(SINGLE, experts=True), nullcontext, "the host waits"),  # until it knows how many rows come
    ],
    ids=["an operator that reads", "experts that take what comes"],
)
def test_what_cannot_be_captured_is_issued_as_before(
    case: Case, within: Callable[[], AbstractContextManager[None]], why: str
) -> None:
    """Unless graphs were asked for by name."""
    scales, recording = (0.5,) * 5, (True,) * 5
    with within():
        _, wanted, _ = one_rank(case, scales, recording)
        with pytest.warns(UserWarning, match=f"not captured .* rank 0: {why}"):
            _, found, captures = one_rank(replace(case, graph=True), scales, recording, always=False)
        with pytest.raises(
            RuntimeError, match=rf"overlap\.cuda_graphs=true: rank 0: {why} .*; set it to false"
        ):
            one_rank(replace(case, graph=True), scales, recording)
    assert captures == 1, "it is not tried again"
    assert found == wanted


def test_marks_and_transfers_are_passed_once_the_device_has() -> None:
    """Until a replay has passed them, marks of a graph have the times of the replay before: a sign of life
    that tells nothing. Nobody asks for a transfer that is being captured: that would end the capture."""
    graph, device = None, TimedDevice()
    streams, device.now = CudaStreams(device), 100.0
    marks = [Event(device, time) for time in (0.0, 1.0, 2.0)]
    streams._replaying = Captured(graph=graph, marks=marks, began=Event(device, 10.0))
    before = streams.progress()
    marks[0].time = 11.0
    assert streams.progress() == before + 1
    marks[1].time = marks[2].time = 12.0
    assert streams.progress() == before + 3
    assert streams.progress() == before + 3
    transfer = Transfer(launch=None, work=None, begin=Event(device, 1.0), end=Event(device, 200.0))
    assert not streams.complete(transfer)
    device.now = 200.0
    assert streams.complete(transfer)
    streams._capturing = Captured(graph=graph)
    assert not streams.complete(transfer)


def test_a_layer_more_costs_the_host_nothing() -> None:
    """A step's passes are one launch, whatever there is in them."""

    def calls(layers: int) -> tuple[int, int]:
        case = replace(SINGLE, schedule="braid:w", tp=2, layers=layers, steps=STEPS, graph=True)
        found = Counter[str]()

        def last(rank: Ranked) -> AbstractContextManager[object]:
            counts = rank.log.rank == 0 and f"loss {STEPS - 2}" in rank.found
            return counting_calls(found, f"{OWN}actors/stage/") if counts else nullcontext()

        recorded(case, last)
        return found["replay"], found.total() - found["_capture"]

    (few, few_calls), (many, many_calls) = calls(2), calls(4)
    assert few == many == 1
    assert few_calls == many_calls


PAIR = Case(schedule="braid:w", tp=2, micro_batches=2, steps=STEPS, graph=True)


@pytest.mark.parametrize("always", [False, True], ids=["auto", "true"])
def test_a_graph_that_one_rank_cannot_capture_no_rank_has(always: bool) -> None:
    """Captured or not is uniform: the others drop theirs, and all are told of whom and why."""

    @contextmanager
    def captures(whole: Any, streams: CudaStreams) -> Iterator[Captured]:
        with whole(streams) as captured:
            yield captured
            if here.log.rank == 1:
                raise RuntimeError("rank 1 is out of memory")

    eager = left(replace(PAIR, graph=False))
    with (
        altered(StepGraph, "_wants", lambda *_: True),
        altered(step_graphs, "StepGraph", lambda whole, *of, **how: whole(*of, **{**how, "always": always})),
        altered(CudaStreams, "capture", captures),
    ):
        if always:
            with pytest.raises(RuntimeError, match=r"cuda_graphs=true: rank 1: .* out of memory; set it to"):
                recorded(PAIR)
            return
        with pytest.warns(UserWarning, match="on all ranks: rank 1: rank 1 is out of memory") as told:
            assert faults(PAIR, expected=eager) == []
    assert len(told) == PAIR.layout.ranks


def test_ranks_agree_whether_they_capture() -> None:
    """One whose host is ahead of its device keeps the others from it."""
    eager, captures = left(replace(PAIR, graph=False)), list[CudaStreams]()
    with altered(StepGraph, "_wants", lambda *_: here.log.rank == 0), counted(captures):
        assert faults(PAIR, expected=eager) == []
    assert captures == []


@pytest.mark.parametrize(
    ("wanted", "ranks", "there"), [("auto", 1, True), ("auto", 2, False), (True, 2, True)]
)
def test_of_several_ranks_only_those_that_were_asked_capture(wanted: Any, ranks: int, there: bool) -> None:
    machine, found = Machine(1), []

    def run(log: RankLog) -> None:
        streams = CudaStreams(log)
        found.append(step_graph(streams, Recorder(streams, recording=False), wanted, ranks))

    machine.run(run)
    assert [one is not None for one in found] == [there]
