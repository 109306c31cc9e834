"""Memory that a rank has freed is its next tensors'; what lasts is no concern of the garbage collector."""

import subprocess
import sys

import pytest
import torch

from braid.actors.stage.measure.memory import PeakMemory
from tests.end_to_end.command import ROOT

pytestmark = pytest.mark.slow

FAULTS = """
import resource, sys
import torch
from braid.actors.stage.rank.allocator import keep_freed_memory

keeps = sys.argv[1] == "keep" and keep_freed_memory()

def step():
    for megabytes in (1, 3, 40, 7):
        torch.ones(megabytes << 18)

for _ in range(20):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(int(keeps), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 20 * (51 << 20) // 4096


def numbers(*program: str) -> tuple[int, ...]:
    """What a program prints in a process of its own, whether memory is kept first."""
    command = [sys.executable, "-c", *program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return tuple(map(int, done.stdout.split()))


def test_freed_memory_is_used_again() -> None:
    (keeps, kept), (_, given_back) = numbers(FAULTS, "keep"), numbers(FAULTS, "as it is")
    if not keeps:
        pytest.skip("this C library is not glibc, or the environment has its parameters")
    assert kept < PAGES / 100
    assert given_back > 10 * kept, "else nobody needs this"


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
    keeps, soon, later = numbers(FRAYED)
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
