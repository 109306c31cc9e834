"""On the model of the machine: what goes around a ring, to experts and back; whose memory is read."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from braid.actors.stage.run.cuda_streams import CudaStreams
from braid.kernels.collectives.primitives import Extents, Launch
from braid.scheduling.mesh.cluster import Stream
from tests.cuda.checks import faults_of_logs
from tests.cuda.log import RankLog
from tests.cuda.machine import Machine, ModelGroups
from tests.cuda.replay import faults_of_orders

RANKS, WIDTH = 3, 2
RING = [list(range(RANKS))]
DEVICE = torch.device("cpu")


def counts(seed: int) -> list[list[int]]:
    """How many rows every rank has for every one: often none, of the first seed none at all."""
    draw = random.Random(seed)
    return [[draw.choice((0, 0, 1, 3)) if seed else 0 for _ in range(RANKS)] for _ in range(RANKS)]


def rows(count: int, at: int, kind: int) -> Tensor:
    """Whole numbers, so that no order of adding up matters."""
    generator = torch.Generator().manual_seed(10 * kind + at)
    return torch.randint(100, (count, WIDTH), generator=generator).float()


def wanted(numbers: list[list[int]], at: int) -> list[Tensor]:
    """What a rank has in the end: rows of all, its own back, gathered, added up, passed on and back."""
    sent = [rows(sum(own), n, 0).split(own) for n, own in enumerate(numbers)]
    shares = [sum(own) for own in numbers]
    whole = [rows(sum(shares), n, 1) for n in range(RANKS)]
    added = whole[0] + whole[1] + whole[2]
    return [
        torch.cat([parts[at] for parts in sent]),
        2 * rows(shares[at], at, 0),
        torch.cat([rows(share, n, 0) for n, share in enumerate(shares)]),
        added.split(shares)[at],
        rows(4, (at - 1) % RANKS, 2),
        rows(4, (at + 1) % RANKS, 2),
    ]


@pytest.mark.parametrize("seed", range(5))
def test_rows_in_any_numbers(seed: int) -> None:
    numbers = counts(seed)
    shares = [sum(own) for own in numbers]
    machine = Machine(RANKS)
    left: dict[int, list[Tensor]] = {}

    def run(log: RankLog) -> None:
        at, streams = log.rank, CudaStreams(log)
        line = ModelGroups(machine, log).line("ep", RING)
        assert line is not None
        x, whole, kv = rows(shares[at], at, 0), rows(sum(shares), at, 1), rows(4, at, 2)
        left[at] = [torch.empty_like(one) for one in wanted(numbers, at)]
        log.begin()

        def done(launch: Launch) -> Tensor:
            transfer = streams.start(Stream.INTRA, launch, awaited_next=False)
            streams.wait(transfer)
            result: Tensor = transfer.take()
            return result

        extents = Extents(tuple(numbers[at]), tuple(own[at] for own in numbers))
        there = done(line.all_to_all(x, extents))
        found = [
            there,
            done(line.all_to_all(there * 2, extents.back)),
            done(line.all_gather(x, shares=shares)),
            done(line.reduce_scatter(whole, shares=shares)),
            done(line.shift(kv, 1)),
            done(line.shift(kv, -1)),
        ]
        for place, one in zip(left[at], found, strict=True):
            place.copy_(one)

    machine.run(run)
    for at, found in left.items():
        for n, (one, expected) in enumerate(zip(found, wanted(numbers, at), strict=True)):
            assert torch.equal(one, expected), (at, n)
    assert faults_of_logs(machine) == []
    assert faults_of_orders(machine, range(20)) == []


# -- the host's memory and the device's, though both lie in a CPU's -----------------------------------------


def faults(reads: Callable[[Tensor], object]) -> list[str]:
    """Of a host that reads what a device has computed."""
    machine = Machine(1)

    def run(log: RankLog) -> None:
        log.begin()
        reads(torch.ones(4, device=DEVICE).mul(2))

    machine.run(run)
    return faults_of_logs(machine)


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
