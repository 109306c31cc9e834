"""Two ranks on one device through gloo: collectives alone, and beside a matrix product.

gloo copies through the memory of the host and makes the host wait. So these times say whether two processes
can share a card, and what such a rehearsal costs; they say nothing about NCCL.
"""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Final

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from braid.actors.stage.bindings import collective_of
from braid.jobs.benchmarks.gpu_rig import first_line
from braid.kernels.collectives.communicator import Communicator, TorchGroup
from braid.kernels.collectives.messages import MessageLine
from braid.scheduling.operators import Kind

RANKS: Final = 2
LIMIT: Final = timedelta(seconds=60)


@dataclass(frozen=True, kw_only=True)
class SharedTime:
    """A collective of two ranks on one device; medians of rank 0 in ns, by the host's clock."""

    collective: str
    bytes: int
    """Of a rank's input."""
    alone_ns: int = 0
    product_ns: int = 0
    together_ns: int = 0
    """Collective issued, matrix product issued, both awaited."""
    note: str = ""
    """Why there are no times."""


def measure_ranks(
    device: torch.device, dtype: torch.dtype, tokens: int, hidden: int, rounds: int
) -> tuple[list[SharedTime], str]:
    """Start two processes, let them measure, end them; or none, and why. ``tokens``: of each rank."""
    with tempfile.TemporaryDirectory(prefix="braid-ranks-") as folder:
        arguments = (folder, str(device), str(dtype).removeprefix("torch."), tokens, hidden, rounds)
        try:
            mp.spawn(_rank, args=arguments, nprocs=RANKS)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            return [], f"two ranks do not run here: {str(error).strip().splitlines()[-1]}"
        found = json.loads((Path(folder) / "times.json").read_text(encoding="utf-8"))
    return [SharedTime(**one) for one in found], ""


def _rank(rank: int, folder: str, device: str, dtype: str, tokens: int, hidden: int, rounds: int) -> None:
    torch.set_num_threads(1)
    place = torch.device(device)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=LIMIT
    )
    try:
        kinds = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
        found = [_measure(kind, place, getattr(torch, dtype), tokens, hidden, rounds) for kind in kinds]
        if rank == 0:
            content = json.dumps([asdict(one) for one in found])
            (Path(folder) / "times.json").write_text(content, encoding="utf-8")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _measure(
    kind: Kind, device: torch.device, dtype: torch.dtype, tokens: int, hidden: int, rounds: int
) -> SharedTime:
    group = dist.group.WORLD
    assert group is not None
    line = MessageLine(group) if device.type == "cpu" else Communicator(TorchGroup(group))
    x = torch.ones(tokens * (1 if kind is Kind.ALL_GATHER else RANKS), hidden, device=device, dtype=dtype)
    weight = torch.ones(hidden, hidden, device=device, dtype=dtype)

    def collective() -> Callable[[], object]:
        launch = collective_of(kind)(line, x)
        work = launch.issue()

        def end() -> None:
            work.wait()
            if launch.finish is not None:
                launch.finish()

        return end

    def together() -> None:
        end = collective()
        product()
        end()

    def product() -> None:
        torch.mm(x, weight)

    runs = {"alone": lambda: collective()(), "product": product, "together": together}
    times: dict[str, list[int]] = {name: [] for name in runs}
    try:
        for turn in range(rounds + 1):
            for name, run in runs.items():
                dist.barrier(group)
                begin = time.perf_counter_ns()
                run()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                if turn > 0:
                    times[name].append(time.perf_counter_ns() - begin)
    except RuntimeError as error:
        return SharedTime(collective=kind.value, bytes=x.nbytes, note=first_line(error))
    return SharedTime(
        collective=kind.value,
        bytes=x.nbytes,
        alone_ns=round(median(times["alone"])),
        product_ns=round(median(times["product"])),
        together_ns=round(median(times["together"])),
    )
