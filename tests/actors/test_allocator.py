"""Memory that a rank has freed is its next tensors', but not for ever; peaks are of a step."""

import gc
import subprocess
import sys
from unittest.mock import DEFAULT, MagicMock, call, patch

import pytest
import torch

from braid.actors.stage.measure.memory import PeakMemory
from braid.actors.stage.rank import worker
from braid.actors.stage.rank.allocator import set_aside_what_lasts
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


AGAIN = """
from resource import RUSAGE_SELF, getrusage
from braid.actors.stage.rank.allocator import keep_freed_memory

keeps = keep_freed_memory()
faults = []
for _ in range(5):
    b"x" * (160 << 20)  # as a tensor of every step
    faults.append(getrusage(RUSAGE_SELF).ru_minflt)
print(int(keeps), faults[0], faults[-1])
"""


def told_by(code: str) -> list[int]:
    """What a process of its own prints: whether it keeps freed memory, and two numbers."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    keeps, *numbers = map(int, done.stdout.split())
    if not keeps:
        pytest.skip("this C library is not glibc, or the environment has its parameters")
    return numbers


def test_a_heap_that_has_frayed_is_tidied() -> None:
    """200 MB that nobody uses stay for the next tensors, but not for ever."""
    soon, later = told_by(FRAYED)
    assert later < soon - (150 << 20)


def test_the_next_tensor_of_a_size_costs_no_page_faults() -> None:
    first, fifth = told_by(AGAIN)
    assert fifth < first + 20


def test_what_lasts_is_set_aside_until_the_rank_leaves() -> None:
    set_aside_what_lasts()
    try:
        assert gc.get_freeze_count() > 100 * len(gc.get_objects())
    finally:
        gc.unfreeze()
    with patch.object(worker, "keep_freed_memory"), patch.object(worker, "gc") as collector:
        rank = worker.Worker(0, "127.0.0.1")
        rank.leave()
        assert collector.mock_calls == [call.unfreeze(), call.collect()]
        rank.close()
    assert len(collector.mock_calls) == 2, "a process that ends looks at no objects"


def test_ranks_set_both_up() -> None:
    """Freed memory is kept from the begin on; what lasts is set aside when all of it is there."""
    names = ("TorchProfile", "assemble", "accelerator_of", "load_initial", "Saboteur")
    both = ("keep_freed_memory", "set_aside_what_lasts")
    with patch.multiple(worker, **dict.fromkeys((*names, *both), DEFAULT)) as calls:
        worker.Worker(0, "127.0.0.1")
        calls["keep_freed_memory"].assert_called_once_with()
        calls["set_aside_what_lasts"].side_effect = calls["Saboteur"].assert_called_once
        worker.Worker._build(MagicMock(_samples=None), MagicMock(), MagicMock())
        calls["set_aside_what_lasts"].assert_called_once_with()


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
