"""Most memory of a step is that of the step; that of the process's life is kept beside it."""

import torch

from braid.actors.stage.peak_memory import PeakMemory

MB = 1 << 20


def touched(megabytes: int) -> torch.Tensor:
    return torch.ones(megabytes * MB // 4)


def test_a_large_step_does_not_count_in_the_next() -> None:
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
