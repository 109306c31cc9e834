"""The model tells the host's memory from the device's, though both lie in a CPU's."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.cuda.checks import faults_of_memory
from tests.cuda.log import RankLog
from tests.cuda.machine import Machine

DEVICE = torch.device("cpu")


def faults(reads: Callable[[Tensor], object]) -> list[str]:
    """Of a host that reads what a device has computed."""
    machine = Machine(1)

    def run(log: RankLog) -> None:
        log.begin()
        reads(torch.ones(4, device=DEVICE).mul(2))

    machine.run(run)
    return faults_of_memory(machine.ranks[0])


def test_a_host_waits_for_some_copies() -> None:
    assert faults(lambda x: x.cpu().tolist()) == []
    assert faults(lambda x: x.tolist()) == []
    assert faults(lambda x: float(torch.empty(4).sum() + x.cpu()[0])) == []


def test_a_host_that_does_not_wait_is_found() -> None:
    (fault,) = faults(lambda x: torch.empty(4).copy_(x, non_blocking=True).tolist())
    assert "touch the same memory in no order" in fault


def test_operators_take_tensors_of_one_device() -> None:
    with pytest.raises(RuntimeError, match="some tensors are the device's and some the host's"):
        faults(lambda x: x + torch.ones(4))
