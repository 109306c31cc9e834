"""Steps of many ranks on the model of the machine: members of communicators agree, nothing stands still.

Communicators are made at set-up (`Mesh.warm_up`). A kernel waits on the device for all members, a stream for
kernels, a host for streams; `Machine.run` raises `DeadlockError` when nobody can go on.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from braid.actors.stage.measure.telemetry import Recorder
from braid.actors.stage.run.cuda_streams import CudaStreams
from braid.scheduling.generate.lower import validation_schedule
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.schedule.operations import Pass, PassKind, Strand
from braid.scheduling.schedule.schedule import Block, Schedule
from braid.scheduling.schedule.text import write
from braid.scheduling.schedule.validate import ScheduleError, linked
from tests.cuda.checks import faults_of_communicators
from tests.cuda.log import RankLog
from tests.cuda.machine import DeadlockError, Machine
from tests.cuda.replay import Replay
from tests.cuda.steps import Case, Ranked, made, recorded
from tests.scheduling.cases import LLAMA, ORDERS, code_of, exists, valid_schedules, with_stage

pytestmark = pytest.mark.alone

QUEUES = 32
"""Hardware queues of a device (``CUDA_DEVICE_MAX_CONNECTIONS``): a stream that waits holds up its queue."""


def assert_sound(machine: Machine) -> None:
    """Members agree, a device comes to the end, and every stream finds a hardware queue for itself."""
    assert faults_of_communicators(machine) == []
    Replay(machine).run(None)
    assert max(len(log.streams) for log in machine.ranks) <= QUEUES


@pytest.mark.parametrize("name", ORDERS)
def test_on_four_stages(name: str) -> None:
    machine, _ = recorded(Case(schedule=name, pp=4, micro_batches=5 if exists(name, 4, 5) else 8))
    assert_sound(machine)


# -- schedules that somebody has edited ----------------------------------------------------------------------

OTHER = {Strand.ALPHA: Strand.BETA, Strand.BETA: Strand.ALPHA}


def in_place_of(block: Block) -> list[list[Block]]:
    """Blocks instead of one: on other strands, in another order, apart, split, summed otherwise."""
    passes, sums, gathers = block.passes, block.sums, block.gathers
    first = passes[0]
    apart = [of_passes(block, one) for one in passes]
    split = [of_passes(block, first._replace(kind=kind)) for kind in (PassKind.INPUT, PassKind.WEIGHT)]
    return [
        [replace(block, passes=tuple(one._replace(strand=OTHER[one.strand]) for one in passes))],
        [replace(block, passes=passes[::-1])],
        apart,
        apart[::-1],
        apart[1:],
        apart + apart[:1],
        *([] if first.forward else [split, split[::-1], split[:1]]),
        *([replace(block, sums=other)] for other in (sums[1:], sums[::-1], sums + sums[:1])),
        *([replace(block, gathers=other)] for other in (gathers[1:], gathers[::-1], gathers + gathers[:1])),
    ]


def of_passes(block: Block, *passes: Pass) -> Block:
    """A block of these passes, with what the other one gathers and sums of their chunks."""
    reading = {one.chunk for one in passes if one.kind is not PassKind.WEIGHT}
    adding = {one.chunk for one in passes if not one.forward}
    return Block(
        passes,
        tuple(one for one in block.sums if one.chunk in adding),
        tuple(one for one in block.gathers if one.chunk in reading),
    )


def edited(schedule: Schedule, draw: Callable[[st.SearchStrategy[Any]], Any]) -> Schedule:
    """The schedule after a change of one stage's list."""
    stage = draw(st.integers(0, len(schedule.stages) - 1))
    instructions = [*schedule.stages[stage]]
    place = st.integers(0, len(instructions) - 1)
    n, near = draw(place), st.integers(-3, 3)
    match draw(st.sampled_from(["move", "move far", "delete", "repeat", "change", "join"])):
        case "move":
            instructions.insert(max(0, n + draw(near)), instructions.pop(n))
        case "move far":
            instructions.insert(draw(place), instructions.pop(n))
        case "delete":
            del instructions[n]
        case "repeat":
            instructions.insert(max(0, n + draw(near)), instructions[n])
        case "change" if isinstance(block := instructions[n], Block):
            instructions[n : n + 1] = draw(st.sampled_from(in_place_of(block)))
        case _:
            match instructions[n : n + 2]:
                case [Block() as one, Block() as two]:
                    sums = tuple(dict.fromkeys((*one.sums, *two.sums)))
                    gathers = tuple(dict.fromkeys((*one.gathers, *two.gathers)))
                    passes = draw(st.sampled_from([one.passes + two.passes, two.passes + one.passes]))
                    instructions[n : n + 2] = [Block(passes, sums, gathers)]
    return with_stage(schedule, stage, instructions)


def is_accepted(schedule: Schedule, layout: ParallelLayout) -> bool:
    """Whether validation lets it through."""
    try:
        code_of(schedule, layout)
    except ScheduleError:
        return False
    return True


def loss_and_norm(ranks: Sequence[Ranked]) -> tuple[float, float]:
    """Of a step."""
    losses = [rank.found["loss 0"] for rank in ranks if rank.parts.model.tells_loss]
    return sum(losses), ranks[0].found["norm 0"]


@cache
def in_one_go(dp: int, micro_batches: int) -> tuple[float, float]:
    """Loss and norm of the same step on replicas of one rank each."""
    case = Case(schedule="megatron", dp=dp, micro_batches=micro_batches, layers=LLAMA.layers)
    return loss_and_norm(recorded(case)[1])


@pytest.mark.slow
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(valid_schedules(max_stages=2), st.data())
def test_what_validation_lets_through(drawn: tuple[Schedule, ParallelLayout], data: st.DataObject) -> None:
    """Receives that are started far earlier, other strands, early sums, ends, and edits of any sort: if it is
    accepted, it trains as it should."""
    schedule, layout = drawn
    assert is_accepted(schedule, layout)
    for _ in range(data.draw(st.integers(0, 30))):
        other = edited(schedule, data.draw)
        schedule = other if is_accepted(other, layout) else schedule
    case = Case(
        schedule=schedule.name,
        tp=2,
        pp=layout.pp,
        dp=layout.dp,
        zero=layout.zero,
        micro_batches=schedule.micro_batches,
        layers=LLAMA.layers,
    )
    assume(case.layout.chunks == layout.chunks)  # a folded model on one stage, which no run has
    vars(case)["plan"] = replace(case.plan, schedule=write(schedule))
    machine, ranks = recorded(case)
    assert_sound(machine)
    wanted = in_one_go(layout.dp, schedule.micro_batches)
    assert loss_and_norm(ranks) == pytest.approx(wanted, rel=1e-4), write(schedule)


@pytest.mark.parametrize("name", ["megatron", "interleaved", "megatron:folded"])
def test_forward_passes_alone(name: str) -> None:
    """A schedule for each placement: forward passes alone follow from that. Also behind a step."""
    replicas = {"dp": 2, "zero": 3, "recompute": "full none fine none", "layers": 4}
    case = Case(schedule=name, pp=4, **(replicas if name == "megatron" else {}))
    machine = Machine(case.layout.ranks)

    def run(log: RankLog) -> None:
        rank = made(case, machine, log)
        parts, layout = rank.parts, case.layout
        schedule = validation_schedule(layout, parts.sizes.kinds, case.micro_batches, parts.parts)
        code = linked(schedule, layout, parts.sizes.kinds, parts.parts)
        validates = parts.bind(code, recorder=Recorder(parts.streams, recording=False))
        log.begin()
        rank.step(0)
        validates.run(rank.given[0], 0.0)

    machine.run(run)
    assert_sound(machine)


def test_a_barrier_that_waits_for_the_device_is_found() -> None:
    """Receives that were asked for early have not come by then."""
    waits = patch.object(CudaStreams, "barrier", lambda streams: streams._accelerator.synchronise())
    with waits, pytest.raises(DeadlockError):
        recorded(Case(schedule="dhelix", pp=2))
