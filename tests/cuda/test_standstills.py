"""Steps of many ranks on the model of the machine: members of communicators agree, nothing stands still.

Communicators are made at set-up (`Mesh.warm_up`). A kernel waits on the device for all members, a stream for
kernels, a host for streams; `Machine.run` raises `DeadlockError` when nobody can go on.
"""

from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings

from braid.actors.stage.measure.telemetry import Recorder
from braid.actors.stage.run.cuda_streams import CudaStreams
from braid.scheduling.generate.lower import validation_schedule
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.schedule.schedule import Schedule
from braid.scheduling.schedule.text import write
from braid.scheduling.schedule.validate import linked
from tests.cuda.checks import faults_of_communicators
from tests.cuda.log import RankLog
from tests.cuda.machine import DeadlockError, Machine
from tests.cuda.replay import Replay
from tests.cuda.steps import Case, made, recorded
from tests.scheduling.cases import LOWERED, exists, valid_schedules

pytestmark = pytest.mark.alone

QUEUES = 32
"""Hardware queues of a device (``CUDA_DEVICE_MAX_CONNECTIONS``): a stream that waits holds up its queue."""


def assert_sound(machine: Machine) -> None:
    """Members agree, a device comes to the end, and every stream finds a hardware queue for itself."""
    assert faults_of_communicators(machine) == []
    Replay(machine).run(None)
    assert max(len(log.streams) for log in machine.ranks) <= QUEUES


@pytest.mark.parametrize("name", LOWERED)
def test_on_four_stages(name: str) -> None:
    machine, _ = recorded(Case(schedule=name, pp=4, micro_batches=5 if exists(name, 4, 5) else 8))
    assert_sound(machine)


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(valid_schedules(min_stages=2, max_stages=2))
def test_what_validation_lets_through(drawn: tuple[Schedule, ParallelLayout]) -> None:
    """Schedules with receives that are started far earlier, other strands, early sums, ends."""
    schedule, layout = drawn
    case = Case(
        schedule=schedule.name,
        tp=2,
        pp=layout.pp,
        dp=layout.dp,
        zero=layout.zero,
        micro_batches=schedule.micro_batches,
        layers=8,
    )
    vars(case)["plan"] = replace(case.plan, schedule=write(schedule))
    machine, _ = recorded(case)
    assert_sound(machine)


@pytest.mark.parametrize("name", ["megatron", "interleaved", "megatron:folded"])
def test_forward_passes_alone(name: str) -> None:
    """A schedule for each placement: forward passes alone follow from that. Also behind a step."""
    case = Case(schedule=name, pp=4, dp=1 + (name == "megatron"), zero=3 * (name == "megatron"))
    machine = Machine(case.layout.ranks)

    def run(log: RankLog) -> None:
        rank = made(case, machine, log)
        parts, layout = rank.parts, case.layout
        schedule = validation_schedule(case.shape, layout, case.micro_batches, parts.parts)
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
