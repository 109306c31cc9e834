"""Schedules of one of two tensor-parallel ranks: do they give the same, and what do they hide.

``host``: one rank on one GPU, whose other one is a link to the host (`tests.gpu.host_link`). ``two``: two
processes over NCCL (on a CPU over gloo). With one card they share it, which NCCL allows to processes that
seem to be on two hosts; their times then mean nothing.
"""

import json
import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from braid.actors.controller.ranks.rank_environment import default_environment
from braid.actors.stage.rank.groups import build_mesh, make_world
from braid.actors.stage.rank.membership import bind_gloo
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.schedule.schedule import Schedule
from braid.scheduling.schedule.text import parse, write
from tests.gpu.conftest import Finding, Lab
from tests.gpu.runtime import PATIENCE, SCHEDULES, SERIAL, TINY, Job, LocalRank, forget, host_rank, llama

RANKS: Final = 2
NOISE: Final = 0.02
"""Times that differ by less are the same: so far medians of a few rounds are apart."""
NEAR: Final = 0.10
"""A prediction may be off by so much."""
_LEAST_COPIES: Final = 0.03
"""With a smaller share of communication in the serial schedule there is nothing to hide."""
_STEPS: Final = 4
"""A graph is captured after two."""
_ONE_CARD: Final = "NCCL_SOCKET_IFNAME=lo NCCL_NET=Socket NCCL_MNNVL_ENABLE=0 NCCL_MAX_CTAS=2"
"""With another `NCCL_HOSTID` for each rank."""

Outcome = dict[str, dict[str, Any]]
"""By schedule: what rank 0 has found."""


def decided(rank: LocalRank, rounds: int, *, free: bool) -> tuple[dict[str, Schedule], Outcome]:
    """Every schedule, and what the planner expects of it: rank 0 decides, from measurements of all."""
    assert rank.mesh.groups is not None
    own = rank.profile(rounds)
    samples, told = rank.mesh.groups.gather(own), {}
    if rank.mesh.rank == 0:
        chosen = rank.job.decided(samples, free=free)
        told = {name: (write(schedule), ns) for name, (schedule, ns) in chosen.items()}
    told = rank.mesh.groups.gather(told)[0]
    alone = {key: median(times) / 1e3 for key, times in own.solo_ns.items()}
    found: Outcome = {name: {"told_ms": ns / 1e6, "alone_us": alone} for name, (_, ns) in told.items()}
    return {name: parse(text) for name, (text, _) in told.items()}, found


def bits(rank: LocalRank, runs: int) -> Outcome:
    """By kind, eager or graph: how many runs there were, and in how many what differed from the serial
    schedule's first one; on deterministic kernels."""
    # The fast gradient of attention adds in the order of arrival, unless this is an error; to be only warned
    # changes nothing. The other way to say so loads torch's compiler.
    torch.set_deterministic_debug_mode("error")
    schedules, found = decided(rank, 1, free=True)
    serial = rank.trained(rank.executor(schedules[SERIAL]), _STEPS)
    for name, schedule in schedules.items():
        found[name] = {"losses": serial["losses"]}
        for kind in ("eager", "graph") if rank.device.type == "cuda" else ("eager",):
            executor = rank.executor(schedule, captured=kind == "graph")
            left = [rank.trained(executor, _STEPS) for _ in range(runs)]
            odd = Counter(key for one in left for key in one if one[key] != serial[key])
            found[name][kind] = {"runs": runs, **odd}
    torch.set_deterministic_debug_mode("default")
    return found


def times(rank: LocalRank, rounds: int) -> Outcome:
    """Steps of all schedules by turns, eagerly and on a GPU as graphs; all ranks draw the same order."""
    schedules, found = decided(rank, rounds, free=False)
    executors = {name: rank.executor(schedule) for name, schedule in schedules.items()}
    if rank.device.type == "cuda":
        executors |= {f"{name} graph": rank.executor(one, captured=True) for name, one in schedules.items()}
    for executor in executors.values():
        for step in range(3):
            rank.step(executor, step)
    steps: dict[str, list[Any]] = {name: [] for name in executors}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(sorted(executors), len(executors)):
            rank.mesh.lines["tp"].meet()
            steps[name].append(rank.step(executors[name], 3))
            if name in found:
                found[name]["in_place_us"] = rank.in_place_us()
    for name, ones in steps.items():
        schedule, _, graph = name.partition(" ")
        found[schedule][f"{graph or 'step'}_ms"] = 1e3 * median(one.seconds for one in ones)
        for kind in () if graph else ("communication", "hidden"):
            ns = median(getattr(one.overlap, f"{kind}_ns") for one in ones)
            found[schedule][f"{kind}_ms"] = ns / 1e6
    return found


def look(link: str, job: Job, lab: Lab, folder: Path, *, runs: int = 0, rounds: int = 0) -> Outcome:
    """`bits` of so many runs, or `times` of so many rounds, over a link."""
    if link == "host":
        return _found(host_rank(job, lab.device), runs, rounds)
    mp.spawn(_rank, args=(str(folder), job, lab.on_gpu, runs, rounds), nprocs=RANKS)
    return dict(json.loads((folder / "found.json").read_text(encoding="utf-8")))


def _found(rank: LocalRank, runs: int, rounds: int) -> Outcome:
    outcome = bits(rank, runs) if runs else times(rank, rounds)
    rank.streams.close()
    return outcome


def _rank(number: int, folder: str, job: Job, on_gpu: bool, runs: int, rounds: int) -> None:
    """One of two processes."""
    torch.set_num_threads(1)
    os.environ |= default_environment(os.environ, deterministic=bool(runs))
    bind_gloo("127.0.0.1")
    device = torch.device("cpu")
    if on_gpu:
        if (cards := torch.cuda.device_count()) < RANKS:
            variables = f"{_ONE_CARD} NCCL_HOSTID={number}".split()
            os.environ.update(one.split("=") for one in variables)
        device = torch.device("cuda", number % cards)
        torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/{job.shape.sequence}", RANKS)
    make_world("cpu:gloo,cuda:nccl" if on_gpu else "gloo", store, number, RANKS, PATIENCE)
    try:
        mesh = build_mesh(job.layout, number, timeout=PATIENCE)
        mesh.warm_up()
        found = _found(LocalRank(job, mesh, device), runs, rounds)
        forget(device)  # NCCL destroys no communicator to which a graph refers
        if number == 0:
            (Path(folder) / "found.json").write_text(json.dumps(found), encoding="utf-8")
        dist.barrier()
    finally:
        dist.destroy_process_group()


# -- claims --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["host", "two"])
def link(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def exact(link: str, lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Job, Outcome]]:
    """Of several models: kernels that last long overtake others than kernels that are over at once."""
    shapes = [TINY]
    if not lab.tiny:
        widths = {"hidden": 1024, "ffn": 3584, "heads": 8, "kv_heads": 2}
        shapes += [llama(2, sequence, 1024, **widths) for sequence in (256, 2048)]
    jobs = [Job(shape=shape, dtype=lab.dtype, layout=ParallelLayout(tp=RANKS)) for shape in shapes]
    folder, runs = tmp_path_factory.mktemp("exact"), 2 if lab.tiny else 10
    return [(job, look(link, job, lab, folder, runs=runs)) for job in jobs]


@pytest.fixture(scope="module")
def timed(link: str, lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Layers of Llama-3-8B."""
    if link == "two" and lab.on_gpu and torch.cuda.device_count() < RANKS:
        pytest.skip("two ranks on one card take turns: their times mean nothing")
    shape = TINY if lab.tiny else llama(4, 4096, 16000)
    job = Job(shape=shape, micro_batches=8, dtype=lab.dtype, layout=ParallelLayout(tp=RANKS), lr=3e-5)
    return look(link, job, lab, tmp_path_factory.mktemp("timed"), rounds=1 if lab.tiny else 9)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", ["eager", "graph"])
def test_bits(schedule: str, kind: str, exact: list[tuple[Job, Outcome]], finding: Finding) -> None:
    """Every schedule gives the serial one's losses, norms and weights to the bit, also as a CUDA graph."""
    if kind not in exact[0][1][schedule]:
        pytest.skip("CUDA graphs need a CUDA device")
    for job, outcome in exact:
        finding.numbers[f"{job.shape.hidden} wide, {job.shape.sequence} long"] = outcome[schedule][kind]
    assert all(set(outcome[schedule][kind]) == {"runs"} for _, outcome in exact)


def test_losses_of_one_rank(link: str, exact: list[tuple[Job, Outcome]], lab: Lab, finding: Finding) -> None:
    """Two ranks give the losses of one rank within 1 %."""
    if link == "host":
        pytest.skip("a link to the host gives other numbers than a rank")
    job, outcome = exact[-1]
    alone = host_rank(replace(job, layout=ParallelLayout()), lab.device)
    losses = alone.trained(alone.executor(alone.job.serial), _STEPS)["losses"]
    alone.streams.close()
    pairs = zip(outcome[SERIAL]["losses"], losses, strict=True)
    finding.numbers["largest_difference"] = off = max(abs(a / b - 1) for a, b in pairs)
    assert off <= 0.01


@pytest.mark.parametrize("other", SCHEDULES[1:-1])
def test_no_slower(other: str, timed: Outcome, finding: Finding) -> None:
    """Braid is no slower than the other schedules."""
    ours, theirs = timed["braid"]["step_ms"], timed[other]["step_ms"]
    finding.timed(ours <= theirs * (1 + NOISE), braid_ms=ours, other_ms=theirs)


def test_gains(timed: Outcome, finding: Finding) -> None:
    """Braid is faster than the serial schedule where there is communication to hide."""
    step, communication = timed[SERIAL]["step_ms"], timed[SERIAL]["communication_ms"]
    limit = max(communication, step - communication)
    ours = timed["braid"]
    in_place = [[key, us, ours["in_place_us"].get(key)] for key, us in ours["alone_us"].items()]
    operators = [["operator or transfer", "alone us", "in a step of braid us"], *in_place]
    rows = [["schedule", "step ms", "as a graph ms", "told ms", "speed-up", "hidden", "of what can be won"]]
    for name, one in timed.items():
        own, hidden = one["step_ms"], one["hidden_ms"] / max(1e-9, one["communication_ms"])
        won = (step - own) / max(1e-9, step - limit)
        rows.append([name, own, one.get("graph_ms"), one["told_ms"], step / own, hidden, won])
    finding.tables += [rows, operators]
    if communication < _LEAST_COPIES * step and not finding.no_clock:
        pytest.skip(f"communication takes {communication / step:.1%} of a step")
    shares = {"share_of_communication": communication / step, "limit": step / limit}
    finding.timed(ours["step_ms"] < step, **shares)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_predicted(schedule: str, timed: Outcome, finding: Finding) -> None:
    """The planner predicts the time of a step within 10 %."""
    told, measured = timed[schedule]["told_ms"], timed[schedule]["step_ms"]
    finding.timed(abs(told / measured - 1) <= NEAR, told_ms=told, measured_ms=measured)
