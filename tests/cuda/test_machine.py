"""The runtime's streams, lifetimes and communicators on a model of the machine, and faults put into them."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from braid.actors.stage.sharing import passing
from braid.actors.stage.step_graph import StepGraph
from tests.cuda import mutants_of_exchanges, mutants_of_stages  # noqa: F401 (they register theirs)
from tests.cuda.entries import Kernel
from tests.cuda.log import RankLog
from tests.cuda.machine import Machine
from tests.cuda.mutants import MUTANTS, Mutant
from tests.cuda.replay import Replay, same
from tests.cuda.steps import Case, made, recorded
from tests.cuda.verdict import faults, left
from tests.scheduling.cases import LOWERED, exists, kind_of

LAYOUTS: list[dict[str, int]] = [
    {"tp": 2},
    {"pp": 2},
    {"dp": 2},
    {"tp": 2, "pp": 2},
    {"tp": 2, "pp": 2, "dp": 2},
]
SHARDED: list[tuple[str, dict[str, int]]] = [
    ("megatron", {"dp": 2}),
    ("ddp", {"tp": 2, "dp": 2}),
    ("braid:together_4", {"dp": 2}),
    ("megatron:folded", {"pp": 2, "dp": 2}),
    ("braid:w", {"tp": 2, "pp": 2, "dp": 2}),
]
"""With optimizer states in shares; and with gradients, and parameters."""
CUT: list[tuple[str, dict[str, int]]] = [
    ("ddp", {"dp": 2}),
    ("braid:together_2", {"tp": 2, "dp": 2}),
    ("braid:w", {"dp": 2}),
    ("braid:w", {"pp": 2, "dp": 2, "tied": 1}),
    ("ddp", {"dp": 4, "shards": 2}),
]
"""The same, of parts that have several buckets."""
EXCHANGED: list[Case] = [
    Case(schedule="megatron", cp=2),
    Case(schedule="wavelet", cp=2, ring=True, tp=2),
    Case(schedule="braid:w", cp=4, ring=True, micro_batches=2),
    Case(schedule="expert_overlap", cp=2, ep=2),
    Case(schedule="expert_overlap", dp=2, ep=2, pp=2),
    Case(schedule="megatron", dp=2, ep=2, tp=2),
    Case(schedule="dhelix", dp=2, cp=2, ep=4, ring=True, micro_batches=2),
    Case(schedule="braid:w", dp=4, ep=2, zero=3, least=4096, micro_batches=2, steps=2),
    Case(schedule="wavelet", dp=2, ep=2, tp=2, capacity=True, micro_batches=2),
]
"""Over cp and ep: around a ring, to experts and back."""
OF_LAYERS: list[Case] = [
    Case(schedule="megatron", tp=2, degrees=(2, 1)),
    Case(schedule="oases", tp=2, degrees=(1, 2), recompute="fine full"),
    Case(schedule="merak", tp=2, layers=2, recompute="full none"),
    Case(schedule="wavelet", tp=4, degrees=(4, 2, 2, 4), micro_batches=2),
    Case(schedule="wavelet", tp=2, pp=2, degrees=(1, 2, 2, 1), recompute="none full full fine"),
    Case(schedule="ddp", tp=2, dp=2, zero=3, degrees=(2, 1), steps=2),
    Case(schedule="expert_overlap", tp=2, dp=2, ep=2, zero=1, degrees=(1, 2), micro_batches=2),
]
"""Layers with degrees and policies of their own."""
LEAST = 4096
STAGED = ("dp/reduce_scatter mesh 2x2 order 1,0", "dp/all_gather mesh 2x2 order 0,1")
ROUNDED: list[Case] = [
    Case(schedule="megatron", tp=2, dp=2, micro_batches=2, steps=2),
    Case(schedule="ddp", dp=2, least=LEAST, micro_batches=2, steps=2),
    Case(schedule="ddp", dp=2, zero=1, micro_batches=2, steps=2),
    Case(schedule="braid:w", tp=2, dp=2, zero=2, least=LEAST, micro_batches=2, steps=2),
    Case(schedule="ddp", dp=4, zero=3, shards=2, least=LEAST, micro_batches=2, steps=2),
    Case(schedule="megatron", pp=2, dp=2, zero=2, tied=True, micro_batches=2, steps=2),
    Case(schedule="ddp", dp=4, micro_batches=2, partitions=("dp/all_reduce mesh 2x2 order 1,0",)),
    Case(schedule="ddp", dp=4, zero=2, least=LEAST, micro_batches=2, steps=2, partitions=STAGED),
]
"""With gradients that are rounded for the way."""
SEVERAL_STAGES = ("interleaved", "megatron:eager_1f1b", "zbv", "dualpipev")
ORDERS = 60
"""Of each recorded step; `make races` runs 300."""
SEED = random.SystemRandom().randrange(2**31)

pytestmark = pytest.mark.alone


def cases() -> list[Case]:
    """Every schedule on the layout with all axes, and on one of the others by turns."""
    found = []
    for number, name in enumerate(LOWERED):
        for layout in (LAYOUTS[-1], LAYOUTS[number % (len(LAYOUTS) - 1)]):
            count, stages = 4, layout.get("pp", 1)
            if exists(name, stages, count) and (stages > 1 or name not in SEVERAL_STAGES):
                found.append(Case(schedule=name, micro_batches=count, **layout))
        if kind_of(name).searched:
            found.append(Case(schedule=name, tp=2, pp=2, micro_batches=4, ends=True))
    for zero in (1, 2, 3):
        for name, layout in SHARDED:
            found.append(Case(schedule=name, zero=zero, micro_batches=4, steps=2, **layout))
        for name, layout in CUT:
            found.append(Case(schedule=name, zero=zero, least=LEAST, micro_batches=4, steps=2, **layout))
    return [*found, *EXCHANGED, *OF_LAYERS, *(replace(case, rounded=True) for case in ROUNDED)]


PARTITIONED = (
    Case(
        schedule="megatron",
        tp=4,
        micro_batches=2,
        partitions=(
            "tp/all_gather mesh 2x2 order 1,0,1 delivered of tokens with 2",
            "tp/reduce_scatter mesh 2x2 order 1,0 pieces 3 of tokens with 1",
        ),
    ),
    Case(
        schedule="megatron",
        tp=4,
        micro_batches=2,
        partitions=(
            "tp/all_gather mesh 2x2 order 0,1 pieces 2 of width with 1",
            "tp/reduce_scatter pieces 2 of width with 1",
        ),
    ),
    Case(schedule="ddp", dp=4, micro_batches=2, partitions=("dp/all_reduce mesh 2x2 order 1,0",)),
    Case(schedule="ddp", dp=4, zero=1, least=LEAST, micro_batches=2, steps=2, partitions=STAGED),
    Case(schedule="braid:together_2", dp=4, zero=2, micro_batches=2, steps=2, partitions=STAGED),
    Case(schedule="ddp", dp=4, zero=3, least=LEAST, micro_batches=2, steps=2, partitions=STAGED),
)


ORDERED = [
    Case(schedule="megatron", tp=2, micro_batches=2),
    Case(schedule="braid:w", tp=2, micro_batches=2),
    Case(schedule="braid:w", dp=2, micro_batches=2, gpt=True),
    Case(schedule="dhelix", pp=2, micro_batches=4, gpt=True),
    Case(schedule="wavelet", tp=2, pp=2, micro_batches=2),
    Case(schedule="ddp", dp=2, zero=1, micro_batches=2, steps=2),
    Case(schedule="braid:w", dp=2, zero=2, least=LEAST, micro_batches=2, steps=2),
    Case(schedule="ddp", dp=2, zero=3, least=LEAST, micro_batches=2, steps=2),
    Case(schedule="braid:together_2", tp=2, dp=2, zero=3, micro_batches=2, steps=2),
    *PARTITIONED,
    Case(schedule="megatron", cp=4, ring=True, micro_batches=1),
    Case(schedule="expert_overlap", dp=2, ep=2, micro_batches=2),
    Case(schedule="megatron", dp=2, ep=2, tp=2, micro_batches=1),
    Case(schedule="oases", tp=2, degrees=(1, 2), recompute="fine full", micro_batches=2),
    *(replace(case, rounded=True) for case in ROUNDED),
]
"""Steps that run again in other orders."""


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_every_schedule_is_clean(case: Case) -> None:
    assert faults(replace(case, gpt=random.Random(f"{SEED} {case.name}").random() < 0.5)) == []


@pytest.mark.parametrize("case", ORDERED, ids=lambda case: case.name)
def test_every_order_leaves_the_same_bits(case: Case) -> None:
    """And those of the recording itself, whose memory nobody else used."""
    machine, ranks = recorded(case)
    replay = Replay(machine)
    assert all(placement.reused for placement in replay.placements)
    first = replay.run(None)
    for log, rank, placement in zip(machine.ranks, ranks, replay.placements, strict=True):
        for name, tensor in rank.state().items():
            memory = log.view(tensor).memory
            again = placement.tensor(log.view(tensor))
            assert (log.rank, "memory", memory) in first
            torch.testing.assert_close(again, tensor, rtol=1e-6, atol=1e-7, msg=name)
    for order in range(ORDERS):
        assert same(first, replay.run(SEED + order)), f"seed {SEED} order {order}"


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"least": LEAST}], ids=["dp", "tp", "buckets"])
@pytest.mark.parametrize("schedule", ["ddp", "braid:w"])
def test_what_is_in_shares_changes_rounding_at_most(schedule: str, layout: dict[str, int]) -> None:
    """Cutting parameters beside gradients changes no bit; cutting gradients, the order of their sums."""
    losses = []
    for zero in range(4):
        _, ranks = recorded(Case(schedule=schedule, dp=2, zero=zero, micro_batches=2, steps=3, **layout))
        losses.append([(rank.log.rank, *sorted(rank.found.items())) for rank in ranks])
        values = torch.tensor([list(rank.found.values()) for rank in ranks])
        if zero == 0:
            wanted = values
        torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-6)
    assert losses[2] == losses[3]


@pytest.mark.parametrize("case", ROUNDED, ids=lambda case: case.name)
def test_rounded_gradients_are_half_the_bytes(case: Case) -> None:
    """Of what communicators of ranks that share parameters are given to sum; squares of the norm stay."""
    moved = [Counter[tuple[str, torch.dtype]](), Counter[tuple[str, torch.dtype]]()]
    for rounded, found in zip((False, True), moved, strict=True):
        machine, ranks = recorded(replace(case, rounded=rounded))
        for entry in (one for log in machine.ranks for one in log.entries):
            if isinstance(entry, Kernel) and entry.call.kind in ("all_reduce", "reduce_scatter"):
                dtype, count = entry.call.shape
                found[entry.call.kind, dtype] += count
        assert all(passing(rank.parts.weights, rank.parts.gradients) == [] for rank in ranks)
    whole, halved = moved
    kept = {key: count for key, count in halved.items() if key[1] != torch.bfloat16}
    taken = {(kind, torch.float32): n for (kind, dtype), n in halved.items() if dtype == torch.bfloat16}
    assert taken
    assert Counter(kept) + Counter(taken) == whole


@pytest.mark.parametrize("least", [Case.least, LEAST])
@pytest.mark.parametrize("schedule", ["megatron", "ddp", "braid:w"])
@pytest.mark.parametrize("zero", [2, 3])
def test_a_step_leaves_shares_alone(zero: int, schedule: str, least: int) -> None:
    """Whole buckets are gone by its end: of gradients, and with ZeRO 3 of parameters."""
    _, ranks = recorded(Case(schedule=schedule, dp=2, zero=zero, least=least, micro_batches=2))
    for rank in ranks:
        assert passing(rank.parts.weights, rank.parts.gradients) == []
        held = {one.tensor.untyped_storage().nbytes() for one in rank.parts.model.parameters}
        assert (held == {0}) == (zero == 3)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["megatron", "ddp", "braid:w"])
def test_the_next_steps_gathers_are_under_way_at_the_end_of_a_step(zero: int, schedule: str) -> None:
    """Of every bucket, behind its update; unless parameters are in shares, or nothing overlaps."""
    _, ranks = recorded(Case(schedule=schedule, dp=2, zero=zero, least=LEAST, micro_batches=2))
    for rank in ranks:
        begun = {(gather.chunk, gather.bucket) for gather in rank.parts.weights._pending}
        early = schedule != "megatron" and zero < 3
        assert begun == (set(rank.parts.weights._buckets) if early else set())


@pytest.fixture(scope="module")
def expected() -> dict[Case, dict[Any, Any]]:
    """What steps without faults leave."""
    return {case: left(case) for case in {mutant.case for mutant in MUTANTS}}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_fault_is_found(mutant: Mutant, expected: dict[Case, dict[Any, Any]]) -> None:
    with mutant.apply():
        found = faults(mutant.case, 30, expected[mutant.case])
    assert found
    assert not any(fault.startswith("TypeError") for fault in found), "the mutant itself is broken"


def test_steps_without_faults_leave_what_they_should(expected: dict[Case, dict[Any, Any]]) -> None:
    for case, wanted in expected.items():
        assert faults(case, 0 if case.graph else 3, wanted) == []


# -- a rank is lost ------------------------------------------------------------------------------------------


class Survivors:
    """A run of two steps, or the case's, in which a rank is lost in the last, and what the others keep."""

    def __init__(self, case: Case, lost: int, at: int, checks: bool = True, flag_first: bool = True) -> None:
        self.copies: dict[int, dict[int, dict[str, torch.Tensor]]] = {}
        self.applied: dict[int, int] = {}
        self.referred_to: dict[int, list[str]] = {}
        """By rank, communicators that graphs still refer to when the rank is done: an abort never ends."""
        self._steps = max(2, case.steps)
        self._case, self._lost, self._at, self._checks, self._flag_first = case, lost, at, checks, flag_first
        self.machine = Machine(case.layout.ranks)
        with case.cut():
            self.machine.run(self._run)

    def _run(self, log: RankLog) -> None:
        rank = made(self._case, self.machine, log)
        rank.given = [rank.batches(step) for step in range(self._steps)]
        log.interrupt = rank.membership.break_off if self._flag_first else log.abort
        rank.checks = self._checks
        self.applied[log.rank] = 0
        kept = self.copies[log.rank] = {}
        for step in range(self._steps):
            if step == self._steps - 1:
                log.begin()
                log.dies_at = self._at if log.rank == self._lost else None
            try:
                rank.step(step)
                rank.intact()
            except (RuntimeError, ValueError):  # or what garbage leads to: numbers of rows that cannot be
                if not log.aborted:
                    raise
                self.referred_to[log.rank] = log.referred_to()
                return
            self.applied[log.rank] += 1
            kept[step + 1] = {key: tensor.detach().clone() for key, tensor in rank.state().items()}


def wrong_copies(wanted: dict[int, dict[int, dict[str, torch.Tensor]]], run: Survivors) -> list[str]:
    """Copies of survivors that are missing, or not what a run without a loss has at that step."""
    found = []
    for rank, kept in run.copies.items():
        if rank == run._lost:
            continue
        if run._steps - 1 not in kept:
            found.append(f"rank {rank} has no copy of step {run._steps - 1}")
        for step, state in kept.items():
            for key, tensor in state.items():
                if not torch.equal(tensor, wanted[rank][step][key]):
                    found.append(f"rank {rank}: {key} of step {step}")
    return found


LOSSES = [
    Case(schedule="megatron", tp=2, micro_batches=2),
    Case(schedule="braid:w", dp=2, micro_batches=2),
    Case(schedule="dhelix", pp=2, micro_batches=2),
    Case(schedule="ddp", dp=2, zero=1, micro_batches=2),
    Case(schedule="ddp", dp=2, zero=2, micro_batches=2),
    Case(schedule="braid:w", dp=2, zero=3, micro_batches=2),
    Case(schedule="megatron", cp=2, ring=True, micro_batches=1),
    Case(schedule="megatron", dp=2, ep=2, micro_batches=1),
    Case(schedule="oases", tp=2, degrees=(1, 2), recompute="fine full", micro_batches=2),
    Case(schedule="braid:w", tp=2, micro_batches=2, steps=3, graph=True),  # in the step that captures
    Case(schedule="braid:w", dp=2, micro_batches=2, steps=4, graph=True),
]


@pytest.mark.parametrize("case", LOSSES, ids=lambda case: case.name)
def test_a_lost_rank_leaves_good_copies_only(case: Case) -> None:
    """At whatever operation it is lost: what others see of that is which kernels it still took part in."""
    whole = Survivors(case, lost=-1, at=0)
    assert whole.applied == dict.fromkeys(whole.applied, whole._steps)
    entries = whole.machine.ranks[1].entries
    kernels = [at for at, entry in enumerate(entries) if isinstance(entry, Kernel)]
    assert len(kernels) > 1
    between = random.Random(SEED).sample(range(len(entries)), 10)
    places = [*kernels, *between, 0, len(entries) - 1]
    for at in random.Random(SEED).sample(places, 8) if case.graph else places:
        run = Survivors(case, lost=1, at=at)
        told = f"seed {SEED}: lost at entry {at} of {len(entries)}"
        assert wrong_copies(whole.copies, run) == [], told
        for rank in {*run.copies} - {1}:
            assert run.applied[rank] == max(run.copies[rank]), f"{told}: rank {rank} counts another step"
        assert not any(run.referred_to.values()), f"{told}: its abort waits for graphs"


@pytest.mark.parametrize("fault", [{"checks": False}, {"flag_first": False}], ids=["unchecked", "late flag"])
def test_an_abort_that_is_not_noticed_is_found(fault: dict[str, bool]) -> None:
    case = LOSSES[0]
    whole = Survivors(case, lost=-1, at=0)
    entries = len(whole.machine.ranks[1].entries)
    places = range(0, entries, entries // 10)
    assert any(wrong_copies(whole.copies, Survivors(case, lost=1, at=at, **fault)) for at in places)


def test_an_abort_that_waits_for_a_graph_is_found() -> None:
    case = Case(schedule="megatron", tp=2, micro_batches=2, steps=4, graph=True)
    places = Survivors(case, lost=-1, at=0).machine.ranks[1].entries
    at = next(n for n, entry in enumerate(places) if isinstance(entry, Kernel))
    assert Survivors(case, lost=1, at=at).referred_to == {0: []}
    with patch.object(StepGraph, "drop", lambda self: None):
        assert Survivors(case, lost=1, at=at).referred_to[0]
