"""The runtime's streams, lifetimes and communicators on a model of the machine, and faults put into them."""

import os
import random
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from braid.actors.stage.run.step_graph import StepGraph
from tests.cuda.checks import faults_of_logs
from tests.cuda.entries import Kernel
from tests.cuda.log import RankLog
from tests.cuda.machine import Machine
from tests.cuda.mutants import MUTANTS, Mutant, faults_of_mutant
from tests.cuda.replay import Replay, differences
from tests.cuda.steps import IN_STAGES, OF_TOKENS, Case, made, recorded

SEED = int(os.environ.get("BRAID_TEST_SEED", "0"))
LEAST = 4096
"""Parameters of a bucket, so that parts have several."""
OF_WIDTH = (
    "tp/all_gather mesh 2x2 order 0,1 pieces 2 of width with 1",
    "tp/reduce_scatter pieces 2 of width with 1",
)
ROUNDED = [
    Case(schedule="braid:w", tp=2, dp=2, zero=2, least=LEAST, micro_batches=2, steps=2, rounded=True),
    Case(schedule="ddp", dp=4, zero=1, micro_batches=2, steps=2, partitions=IN_STAGES, rounded=True),
]
"""Ranks sum gradients in bf16."""
CASES = [
    Case(schedule="megatron", tp=2, micro_batches=2, steps=2, copies=True),
    Case(schedule="braid:w", tp=2, pp=2, micro_batches=4, ends=True),
    Case(schedule="wavelet", tp=2, degrees=(2, 1), recompute="none fine", micro_batches=2),
    Case(schedule="ddp", dp=2, zero=1, least=LEAST, micro_batches=2, steps=2),
    Case(schedule="braid:w", pp=2, dp=2, zero=2, least=LEAST, tied=True, micro_batches=4, steps=2),
    Case(schedule="braid:together_2", tp=2, dp=2, zero=3, least=LEAST, micro_batches=2, steps=2),
    Case(schedule="braid:w", dp=4, ep=2, zero=3, least=LEAST, micro_batches=2, steps=2),
    Case(schedule="megatron", tp=4, micro_batches=2, partitions=OF_TOKENS),
    Case(schedule="megatron", tp=4, micro_batches=2, partitions=OF_WIDTH),
    Case(schedule="ddp", dp=4, zero=3, least=LEAST, micro_batches=2, steps=2, partitions=IN_STAGES),
    Case(schedule="megatron", cp=4, ring=True, micro_batches=1),
    Case(schedule="expert_overlap", dp=2, ep=2, pp=2, micro_batches=4),
    Case(schedule="megatron", dp=2, ep=2, tp=2, micro_batches=1),
    ROUNDED[0],
    Case(schedule="braid:w", tp=2, dp=2, zero=3, least=LEAST, micro_batches=2, steps=2, muon=True),
    Case(schedule="ddp", dp=2, zero=1, least=LEAST, micro_batches=2, steps=2, muon=True),
]
"""What differs in the orders that a device may choose, and what `tests.cuda.test_combinations` has not: small
buckets, copies of the state, weight gradients that the next block does."""
ORDERS = 4
"""Of each recorded step; CI's `make races` runs 30, the whole one 300."""
SMOKE = ("compute does not wait for transfers", "one rank leaves a gather out")
"""Faults that `make test` looks for; `make races` draws others."""

pytestmark = pytest.mark.alone


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_order_leaves_the_same_bits(case: Case) -> None:
    """And those of the recording itself, whose memory nobody else used."""
    machine, ranks = recorded(case)
    assert faults_of_logs(machine) == []
    replay = Replay(machine)
    assert all(placement.reused for placement in replay.placements)
    first = replay.run(None)
    for log, rank, placement in zip(machine.ranks, ranks, replay.placements, strict=True):
        for name, tensor in rank.state().items():
            view = log.view(tensor)
            assert (log.rank, "memory", view.memory) in first
            torch.testing.assert_close(placement.tensor(view), tensor, rtol=1e-6, atol=1e-7, msg=name)
    for order in range(SEED, SEED + ORDERS):
        assert not differences(first, replay.run(order)), f"order {order}"


@pytest.mark.parametrize("case", ROUNDED, ids=lambda case: case.name)
def test_rounded_gradients_are_half_the_bytes(case: Case) -> None:
    """Of what communicators of ranks that share parameters are given to sum; squares of the norm stay."""
    whole, halved = Counter[tuple[str, torch.dtype]](), Counter[tuple[str, torch.dtype]]()
    for rounded, found in ((False, whole), (True, halved)):
        machine, ranks = recorded(replace(case, rounded=rounded))
        for entry in (one for log in machine.ranks for one in log.entries):
            if isinstance(entry, Kernel) and entry.call.kind in ("all_reduce", "reduce_scatter"):
                dtype, count = entry.call.shape
                found[entry.call.kind, dtype] += count
        assert all(rank.parts.buckets.passing == [] for rank in ranks)
    kept = {key: count for key, count in halved.items() if key[1] != torch.bfloat16}
    taken = {(kind, torch.float32): n for (kind, dtype), n in halved.items() if dtype == torch.bfloat16}
    assert taken
    assert Counter(kept) + Counter(taken) == whole


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(one, id=one.name, marks=() if one.name in SMOKE else pytest.mark.thorough)
        for one in MUTANTS
    ],
)
def test_every_fault_is_found(mutant: Mutant) -> None:
    assert faults_of_mutant(mutant)


# -- a rank is lost ------------------------------------------------------------------------------------------


class Survivors:
    """A run of two steps, or the case's, in which a rank is lost in the last, and what the others keep."""

    def __init__(
        self, case: Case, lost: int = -1, at: int = 0, checks: bool = True, flag_first: bool = True
    ) -> None:
        """``lost``: None by default."""
        self.copies: dict[int, dict[int, dict[Any, Any]]] = {}
        """By rank and step."""
        self.applied: dict[int, int] = {}
        self.referred_to: dict[int, list[str]] = {}
        """By rank, communicators that graphs still refer to when the rank is done: an abort never ends."""
        self._case = replace(case, steps=max(2, case.steps))
        self.lost, self._at, self._checks, self._flag_first = lost, at, checks, flag_first
        self.machine = Machine(case.layout.ranks)
        with case.cut():
            self.machine.run(self._run)
        self.kernels = [n for n, one in enumerate(self.machine.ranks[1].entries) if isinstance(one, Kernel)]
        """Where they are among the entries of rank 1."""

    def _run(self, log: RankLog) -> None:
        rank = made(self._case, self.machine, log)
        log.interrupt = rank.membership.break_off if self._flag_first else log.abort
        if not self._checks:
            rank.membership.intact = lambda: None
        self.applied[log.rank] = 0
        kept = self.copies[log.rank] = {}
        for step in range(self._case.steps):
            if step == self._case.steps - 1:
                log.begin()
                log.dies_at = self._at if log.rank == self.lost else None
            try:
                rank.step(step)
                rank.membership.intact()
            except (RuntimeError, ValueError):  # or what garbage leads to: numbers of rows that cannot be
                if not log.aborted:
                    raise
                self.referred_to[log.rank] = log.referred_to()
                return
            self.applied[log.rank] += 1
            kept[step + 1] = rank.left()

    def wrong_copies(self, whole: "Survivors") -> list[str]:
        """Copies of survivors that are missing, or not what a run without a loss has at that step."""
        found = []
        for rank in self.copies.keys() - {self.lost}:
            for step, wanted in whole.copies[rank].items():
                if step in self.copies[rank]:
                    wrong = differences(wanted, self.copies[rank][step])
                    found += [f"step {step}: {key}" for key in wrong]
                elif step < self._case.steps:
                    found.append(f"rank {rank} has no copy of step {step}")
        return found


LOSSES = [
    Case(schedule="megatron", tp=2, micro_batches=2),
    Case(schedule="braid:w", dp=2, micro_batches=2),
    Case(schedule="dhelix", pp=2, micro_batches=2),
    Case(schedule="braid:w", dp=2, zero=3, micro_batches=2),
    Case(schedule="megatron", cp=2, ring=True, micro_batches=1),
    Case(schedule="megatron", dp=2, ep=2, micro_batches=1),
    Case(schedule="braid:w", tp=2, micro_batches=2, steps=3, graph=True),  # in the step that captures
    Case(schedule="braid:w", dp=2, micro_batches=2, steps=4, graph=True),
]


@pytest.mark.parametrize("case", LOSSES, ids=lambda case: case.name)
def test_a_lost_rank_leaves_good_copies_only(case: Case) -> None:
    """At some operations, the last kernels among them: what others see of that is which kernels it was in."""
    whole = Survivors(case)
    assert {*whole.applied.values()} == {max(2, case.steps)}
    entries, kernels = len(whole.machine.ranks[1].entries), whole.kernels
    assert len(kernels) > 1
    draw = random.Random(SEED)
    places = {0, entries - 1, *kernels[-3:], *draw.sample(kernels, min(5, len(kernels)))}
    places |= {*draw.sample(range(entries), 2)}
    for at in draw.sample(sorted(places), 4) if case.graph else sorted(places):
        run = Survivors(case, lost=1, at=at)
        told = f"lost at entry {at} of {entries}"
        assert run.wrong_copies(whole) == [], told
        for rank in {*run.copies} - {1}:
            assert run.applied[rank] == max(run.copies[rank]), f"{told}: rank {rank} counts another step"
        assert not any(run.referred_to.values()), f"{told}: its abort waits for graphs"


@pytest.mark.parametrize("fault", [{"checks": False}, {"flag_first": False}], ids=["unchecked", "late flag"])
def test_an_abort_that_is_not_noticed_is_found(fault: dict[str, bool]) -> None:
    whole = Survivors(LOSSES[0])
    entries = len(whole.machine.ranks[1].entries)
    places = range(0, entries, entries // 10)
    assert any(Survivors(LOSSES[0], lost=1, at=at, **fault).wrong_copies(whole) for at in places)


def test_an_abort_that_waits_for_a_graph_is_found() -> None:
    case = Case(schedule="megatron", tp=2, micro_batches=2, steps=4, graph=True)
    at = Survivors(case).kernels[0]
    assert Survivors(case, lost=1, at=at).referred_to == {0: []}
    with patch.object(StepGraph, "drop", lambda self: None):
        assert Survivors(case, lost=1, at=at).referred_to[0]
