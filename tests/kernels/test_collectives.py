"""Collectives as messages between pairs (CPU): against sums and concatenations of the same random numbers."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from braid.kernels.collectives.messages import MessageLine
from braid.kernels.collectives.primitives import Launch
from tests.forking import run_forked

pytestmark = pytest.mark.slow

TOKENS, WIDTH, TURNS = 6, 5, 20


def inputs(seed: int, rank: int, turn: int, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 1000 * rank + turn)
    return torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64)


def finished(launch: Launch) -> torch.Tensor:
    launch.issue().wait()
    if launch.finish is not None:
        launch.finish()
    return launch.result


def run_rank(rank: int, ranks: int, port: int, seed: int, ways: int) -> None:
    limit = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    group, upward = dist.new_group(timeout=limit), dist.new_group(timeout=limit)
    line = MessageLine(group, upward if ways == 2 else None)
    assert (line.toward(0, 1) is line.toward(1, 0)) == (ways == 1)
    under_way = []
    for turn in range(TURNS):  # all are issued before the first is awaited
        whole = inputs(seed, rank, turn, TOKENS * ranks)
        for launch in (line.all_gather(whole[:TOKENS]), line.reduce_scatter(whole)):
            under_way.append((launch, launch.issue()))
    for turn in range(TURNS):
        everyone = [inputs(seed, other, turn, TOKENS * ranks) for other in range(ranks)]
        (gathered, first), (scattered, second) = under_way[2 * turn : 2 * turn + 2]
        for launch, work in ((gathered, first), (scattered, second)):
            work.wait()
            assert launch.finish is not None
            launch.finish()
            assert launch.sends == TOKENS * WIDTH * 8 * (ranks - 1)
        assert torch.equal(gathered.result, torch.cat([x[:TOKENS] for x in everyone]))
        total = everyone[0].clone()
        for x in everyone[1:]:
            total += x
        assert torch.equal(scattered.result, total.chunk(ranks)[rank])
    if ranks % 2 == 0:
        mine = inputs(seed, rank, 0, TOKENS)
        assert torch.equal(finished(line.swap(mine, rank ^ 1)), inputs(seed, rank ^ 1, 0, TOKENS))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("ways", [1, 2])
def test_ranks_get_what_all_have(ranks: int, ways: int) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    seed = int(torch.randint(1 << 30, ()))
    print(f"seed {seed}")
    run_forked(run_rank, (ranks, store.port, seed, ways), nprocs=ranks)
