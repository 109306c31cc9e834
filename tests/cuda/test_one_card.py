"""The runtime's streams, memory and graphs of operators on a real GPU, which all ranks of a step share."""

import os
import random
from typing import Any, cast

import pytest
import torch

from braid.scheduling.generate.named import SCHEDULES
from tests.cuda.log import RankLog
from tests.cuda.machine import Machine
from tests.cuda.one_card import Card, CardRank
from tests.cuda.replay import differences
from tests.cuda.steps import Case, left, made
from tests.cuda.test_machine import CASES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SEED = random.SystemRandom().randrange(2**31)
RUNS = 3
"""Of every case, with other delays."""
MOST_RANKS = 4
QUEUES = 32
"""That a process has in hardware; in one, a stream that waits holds up all others."""
NEAR = 1e-4
"""Of CPU and GPU, whose sums have other orders."""
NEAR_ROUNDED = 2**-8
"""Where sums are sent in bfloat16: what lay beside a border there rounds the other way."""

State = dict[tuple[int, str], Any]
"""Losses, norms and tensors, by rank and name."""


@pytest.fixture(autouse=True)
def _repeatable(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Kernels that give the same bits every time.

    New memory is not filled, as torch does then: what one rank makes for a message, another one writes to,
    and the filling would come late, on the stream of the first.
    """
    monkeypatch.setitem(os.environ, "CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def trained(case: Case, seed: int) -> State:
    """What a case's steps leave on one card."""
    card = Card(case.layout.ranks, seed=seed)
    found: State = {}

    def run(own: CardRank) -> None:
        rank = made(case, cast(Machine, card), cast(RankLog, own), card.device)
        own.synchronise()
        card.abreast()
        for step in range(case.steps):
            rank.step(step)
        own.synchronise()
        found.update(rank.left())
        card.abreast()

    with case.cut():
        card.warm(run)
        if card.streams > QUEUES:
            pytest.skip(f"{card.streams} streams that may wait, and {QUEUES} hardware queues")
        card.run(run)
    return found


def on_one_card() -> list[Case]:
    """Every schedule on two ranks, and all of `tests.cuda.test_machine` that fits."""
    staged = ("interleaved", "zbv", "dualpipev")
    pairs = [Case(schedule=name, **{"pp" if name in staged else "tp": 2}) for name in SCHEDULES]
    return [*pairs, *(case for case in CASES if case.layout.ranks <= MOST_RANKS and not case.copies)]


@pytest.mark.parametrize("case", on_one_card(), ids=lambda case: case.name)
def test_every_schedule_leaves_the_same_bits_on_a_gpu(case: Case) -> None:
    """However late streams and ranks are; and losses and moments of a CPU, as far as sums allow."""
    first = trained(case, SEED)
    for run in range(1, RUNS):
        assert differences(first, trained(case, SEED + run)) == [], f"seed {SEED}, run {run}"
    near = NEAR_ROUNDED if case.rounded else NEAR
    for (rank, name), wanted in left(case).items():
        value = first[rank, name]
        if isinstance(wanted, float):
            assert value == pytest.approx(wanted, rel=near), f"rank {rank}: {name}"
        elif name.startswith("exp_avg "):
            largest = float(wanted.abs().max())
            assert float((value - wanted).abs().max()) <= 10 * near * largest, f"rank {rank}: {name}"
