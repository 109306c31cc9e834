"""Memory that a rank has freed is its next tensors', but not for ever; peaks are of a step."""

import subprocess
import sys

import pytest
import torch

from braid.actors.stage.measure.memory import PeakMemory
from tests.end_to_end.command import ROOT

pytestmark = pytest.mark.slow


FRAYED = """
import torch
from braid.actors.stage.rank.allocator import keep_freed_memory
from braid.actors.stage.measure.memory import PeakMemory

keeps = keep_freed_memory()
peak = PeakMemory(torch.device("cpu"))
large, between = [], []
for _ in range(100):
    large.append(torch.ones(2 << 18))
    between.append(torch.ones(600))  # stays, so that what is freed around it lies apart
large.clear()

def after(steps):
    for _ in range(steps):
        peak.begin()
    return peak.of_step()

print(int(keeps), after(4), after(60))
"""


def test_a_heap_that_has_frayed_is_tidied() -> None:
    """200 MB that nobody uses stay for the next tensors, but not for ever."""
    command = [sys.executable, "-c", FRAYED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    keeps, soon, later = map(int, done.stdout.split())
    if not keeps:
        pytest.skip("this C library is not glibc, or the environment has its parameters")
    assert later < soon - (150 << 20)


MB = 1 << 20


def touched(megabytes: int) -> torch.Tensor:
    return torch.ones(megabytes * MB // 4)


def test_a_large_step_does_not_count_in_the_next() -> None:
    """That of the process's life is kept beside that of the step."""
    peak = PeakMemory(torch.device("cpu"))
    peak.begin()
    before = peak.of_step()
    large = touched(400)
    at_most = peak.of_step()
    assert at_most > before + 350 * MB
    del large
    peak.begin()
    assert peak.of_step() < at_most - 300 * MB
    middle = touched(100)
    assert before + 50 * MB < peak.of_step() < at_most - 200 * MB
    assert peak.of_lifetime() > at_most - 4 * MB, "the kernel counts pages in batches"
    del middle
