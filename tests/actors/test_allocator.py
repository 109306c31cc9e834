"""Memory that a rank has freed is its next tensors'; what lasts is no concern of the garbage collector."""

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from braid.actors.stage.allocator import set_aside_what_lasts

pytestmark = pytest.mark.slow

FAULTS = """
import resource, sys
import torch
from braid.actors.stage.allocator import keep_freed_memory

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


def faults(how: str, **environment: str) -> tuple[bool, int]:
    """Whether memory is kept, and page faults."""
    result = subprocess.run(
        [sys.executable, "-c", FAULTS, how],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, result.stderr
    keeps, count = map(int, result.stdout.split())
    return bool(keeps), count


def test_freed_memory_is_used_again() -> None:
    (keeps, kept), (_, given_back) = faults("keep"), faults("as it is")
    if not keeps:
        pytest.skip("this C library is not glibc, or the environment has its parameters")
    assert kept < PAGES / 100
    assert given_back > 10 * kept, "else nobody needs this"


class Node:
    """Something that may refer to itself, so that only the garbage collector finds its end."""

    own: "Node | None" = None


def test_what_lasts_is_not_looked_at_until_the_next_model_comes() -> None:
    old, lasting = Node(), Node()
    old.own = old
    gone, left = weakref.ref(old), weakref.ref(lasting)
    try:
        del old
        set_aside_what_lasts()
        assert gone() is None, "garbage is not kept"
        lasting.own = lasting
        del lasting
        gc.collect()
        assert left() is not None, "it was not looked at"
        set_aside_what_lasts()
        assert left() is None
    finally:
        gc.unfreeze()


FRAYED = """
import torch
from braid.actors.stage.allocator import keep_freed_memory
from braid.actors.stage.peak_memory import PeakMemory

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
    result = subprocess.run(
        [sys.executable, "-c", FRAYED],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    keeps, soon, later = map(int, result.stdout.split())
    if not keeps:
        pytest.skip("this C library is not glibc, or the environment has its parameters")
    assert later < soon - (150 << 20)
