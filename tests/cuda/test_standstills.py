"""What brings steps to a standstill: first uses, barriers, few communicators, few slots, few queues."""

from dataclasses import replace

import pytest

from braid.scheduling.lowering.named import ScheduleName
from tests.cuda.actions import FirstUse, Synchronise, most_streams, unequal
from tests.cuda.kernels_in_flight import Machine, deadlock
from tests.cuda.orders import orders
from tests.cuda.profiled import profiled
from tests.cuda.programs import (
    EAGER,
    EVERY_CASE,
    EXPERTS,
    FORWARD,
    LAZY,
    WARM,
    forward_passes,
    programs,
)
from tests.scheduling.cases import SUB_BATCHES, exists

pytestmark = pytest.mark.alone


def test_profiling_with_communicators_made_on_first_use() -> None:
    """Finding A6: to swap, the lower of two stages first uses "up" and the upper one first uses "down"."""
    for stages in (1, 2, 3, 4, 8):
        ranks = profiled(stages)
        assert unequal(ranks, FirstUse.LAZY) is None
        assert deadlock(ranks, EAGER) is None
        assert deadlock(ranks, WARM) is None
        stands = deadlock(ranks, LAZY)
        assert (stands is not None) == (stages % 2 == 0)
        assert stands is None or stands == (
            "a circle (lazy):\n"
            "  rank 0: its host is blocked by the first use of F up 0:1 (at beside an operator, -1), "
            "until rank 1 uses it\n"
            "  rank 1: its host is blocked by the first use of F down 0:1 (at beside an operator, -1), "
            "until rank 0 uses it"
        )
    one_slot = deadlock(profiled(2), replace(EAGER, slots=1))
    assert one_slot is not None, "both ranks run what they receive first"
    assert deadlock(profiled(2), replace(EAGER, slots=2)) is None


@EVERY_CASE
def test_few_micro_batches_with_communicators_made_on_first_use(name: str) -> None:
    """A host that starts a receive early is blocked before it computes what the other one waits for."""
    ahead = max(1, ScheduleName.parse(name).hop - 1)  # blocks that a receive is started early
    if name in SUB_BATCHES:
        ahead *= 2  # micro-batches of these
    for p in (1, 2, 3, 8):
        for m in (m for m in {1, 2, 3, 4, 2 * p} if exists(name, p, m)):
            stands = deadlock(programs(name, p, m), LAZY)
            assert (stands is not None) == (p > 1 and m <= ahead), (p, m, stands)
            assert stands is None or stands.count("blocked by the first use of") == stands.count("\n")


def test_communicators_whose_making_waits_for_the_device() -> None:
    """Finding A7: receives that were started early run while communicators are made."""
    for name in ("megatron", "braid:w", "zbv"):
        for p in (2, 3, 4):
            stands = deadlock(programs(name, p, 2 * p), Machine(first=FirstUse.LAZY_IDLE))
            assert stands is not None
            assert "its host waits for the device, to make" in stands
            assert "runs until" in stands


@EVERY_CASE
def test_barriers_that_synchronise_the_device(name: str) -> None:
    """Two neighbours wait in barriers for receives that they started early, and send what the other one waits
    for only behind the barrier; so they do once both have a block of two passes."""
    first = {"dhelix": lambda p: p + 2}.get(name)
    for p in (1, 2, 4):
        for m in (m for m in (1, p, p + 1, p + 2, 2 * p, 2 * p + 1) if exists(name, p, m)):
            stands = deadlock(programs(name, p, m, barriers=True), WARM)
            assert (stands is not None) == (first is not None and p > 1 and m >= first(p)), (p, m, stands)
            assert stands is None or stands.count("its host waits for a barrier") == 2


def test_a_host_that_waits_for_its_device_to_know_how_many_rows_there_are() -> None:
    """And not for computation alone: for receives, too, that were asked for early."""
    for name in ("expert_overlap", "dhelix"):
        ranks = programs(name, 2, 4, dp=2, ep=2, model=EXPERTS)
        assert deadlock(ranks, WARM) is None
        for program in ranks:
            counts = [n for n, action in enumerate(program) if action.name == "how many rows go where"]
            assert counts
            for n in counts:
                program[n] = Synchronise("how many rows go where")  # type: ignore[index]
        stands = deadlock(ranks, WARM)
        assert stands is not None
        assert "its host waits for how many rows go where" in stands


def test_forward_passes_of_interleaved_stages_on_communicators_of_groups() -> None:
    """A last group of micro-batches that is too short: on the one communicator that a stage receives from the
    stage before with and sends to the next one with, a receive that is started early stands before a send."""
    for p in range(1, 9):
        for m in range(1, 2 * p + 1):
            stands = deadlock(forward_passes("interleaved", p, m), EAGER)
            assert (stands is not None) == (0 < m % p < p - 1), (p, m, stands)
    for name in FORWARD:
        if name != "interleaved":
            assert deadlock(forward_passes(name, 4, 5), EAGER) is None


SLOTS = {
    "megatron": 2,
    "megatron:eager_1f1b": 2,
    "megatron:folded": 4,
    "interleaved": 3,
    "intra_batch": 2,
    "ddp": 2,
    "braid:together_4": 2,
    "merak": 2,
    "oases": 2,
    "braid:sub_batches": 2,
    "oases:folded_sub_batches": 3,
    "braid:folded_sub_batches": 3,
    "zbv": 3,
}
"""Kernels of communicators that have to find room on a device at a time; for all others 4."""


@EVERY_CASE
def test_slots(name: str) -> None:
    """With one slot less an order stands still; with as many, none of those that are tried does."""
    need = SLOTS.get(name, 4)
    cases = [programs(name, p, m) for p in (2, 3) for m in (p, 2 * p, 2 * p + 1) if exists(name, p, m)]

    def stands(slots: int) -> bool:
        return any(
            deadlock(ranks, Machine(slots=slots, order=order)) is not None
            for ranks in cases
            for order in orders(len(ranks), 2)
        )

    assert not stands(need)
    assert stands(need - 1)


def test_sums_of_replicas_beside_collectives_of_layers_want_two_slots() -> None:
    """Of the stage's later chunk, beside the backward pass of its earlier one."""
    ranks = programs("braid:w", 1, 4, tp=2, dp=2)
    found = [deadlock(ranks, Machine(slots=1, order=order)) for order in orders(len(ranks), 3)]
    assert any(found)
    assert not any(deadlock(ranks, Machine(slots=2, order=order)) for order in orders(len(ranks), 3))


@EVERY_CASE
def test_hardware_queues(name: str) -> None:
    """Every stream finds one of its own among 32. In a single one (``CUDA_DEVICE_MAX_CONNECTIONS=1``) the
    wait for a receive that is started early holds up what is to be computed meanwhile."""
    p = 4
    ranks = programs(name, p, 2 * p, tp=2)
    for first in (FirstUse.EAGER, FirstUse.WARM):
        assert most_streams(ranks, first) <= 32
    stands = deadlock(programs(name, p, 1 if exists(name, p, 1) else 2 * p), Machine(queues=1))
    assert stands is not None
    assert "in one hardware queue" in stands


def test_hardware_queues_with_every_axis() -> None:
    """Communicators of tp, cp, ep, the ranks that share experts, and all replicas."""
    ranks = programs("braid:w", 4, 8, tp=2, cp=2, dp=4, ep=4, model=EXPERTS, hosts=8)
    for first in (FirstUse.EAGER, FirstUse.WARM):
        assert most_streams(ranks, first) <= 32


def test_eight_hardware_queues() -> None:
    """As many as there are where nothing is said: too few for the streams of passes side by side."""
    ranks = programs("braid:w", 4, 8, tp=2)
    for first in (FirstUse.EAGER, FirstUse.WARM):
        stands = deadlock(ranks, Machine(first=first, queues=8))
        assert stands is not None
        assert "in one hardware queue" in stands
        assert deadlock(ranks, Machine(first=first, queues=most_streams(ranks, first))) is None
