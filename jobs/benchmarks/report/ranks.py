"""Two tensor-parallel ranks on two GPUs, over NCCL: do schedules give the same, and what do they hide.

Ranks are processes of this part. They run twice: small and deterministic for bits, large for times. On a CPU
they run once, over gloo, which shows that all of it works, and says something about bits only.
"""

import hashlib
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from braid.actors.controller.combining import combine
from braid.actors.controller.rank_environment import default_environment
from braid.actors.stage.accelerator import accelerator_of
from braid.actors.stage.mesh import Mesh, build_mesh, make_world
from braid.actors.stage.network import bind_gloo
from braid.actors.stage.streams import Streams, streams_on
from braid.jobs.benchmarks.gpu import table
from braid.jobs.benchmarks.gpu_rig import llama_8b
from braid.jobs.benchmarks.report.claims import RANK_BITS, RANK_LOSSES, RANK_PREDICTED, RANK_SPEED
from braid.jobs.benchmarks.report.findings import Finding, Number, Sheet, Task, found, not_measured, timed
from braid.jobs.benchmarks.report.layer import NEAR, no_slower
from braid.jobs.benchmarks.report.runtime import PATIENCE, SERIAL, Job, RuntimeRank, lone_mesh
from braid.jobs.benchmarks.report.training import SMALL, TINY
from braid.scheduling.planner.decide import anything, decide, measured
from braid.scheduling.planner.space import PART_BY_PART
from braid.scheduling.schedule_text import parse, write

RANKS: Final = 2
SCHEDULES: Final = (SERIAL, "wavelet", "dhelix", "braid")
SAME_LOSS: Final = 0.01
_EXACT_STEPS: Final = 4
_LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What both ranks are told."""

    job: Job
    device: str
    """``cuda`` or ``cpu``."""
    deterministic: bool
    """Whether kernels and collectives repeat themselves; schedules then bring together all that they can, as
    if operators and transfers cost each other nothing."""
    exact_steps: int
    """Of every schedule from the same beginning, and of one rank alone; 0: none."""
    rounds: int
    """In which every schedule takes one timed step, by turns; 0: none."""
    profile_rounds: int


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a schedule did on rank 0; times are medians."""

    predicted_ns: int
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    digest: str = ""
    """Of this rank's weights after the last of these steps."""
    step_ns: int = 0
    communication_ns: int = 0
    hidden_ns: int = 0


Outcome = Mapping[str, Trained]
"""By schedule."""


def measure(task: Task, sheet: Sheet) -> None:
    """Once for bits, once for times; on a CPU both at once."""
    count = torch.cuda.device_count() if task.on_gpu else RANKS
    if count < RANKS:
        claims = (RANK_BITS, RANK_LOSSES, RANK_SPEED, RANK_PREDICTED)
        sheet.find(*(not_measured(claim, "one GPU") for claim in claims))
        return
    backend = "nccl" if task.on_gpu else "gloo"
    sheet.data("backend", backend)
    outcome: Outcome = {}
    try:
        outcome, alone = spawn(exact_plan(task))
        sheet.data("exact", {name: asdict(one) for name, one in outcome.items()})
        sheet.find(*same_bits(outcome, backend), same_losses(outcome, alone, backend))
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:  # times may be had all the same
        why = str(error).strip().splitlines()[-1][:300]
        sheet.find(found(RANK_BITS, False, why=why), not_measured(RANK_LOSSES, why))
    if task.on_gpu:
        plan = timed_plan(task)
        outcome, _ = spawn(plan)
        sheet.data("timed", {name: asdict(one) for name, one in outcome.items()})
        sheet.data("job", {**asdict(plan.job.shape), "tokens": plan.job.tokens})
    if outcome:
        sheet.table(f"A step of two ranks over {backend}, ms", lines(outcome))
        sheet.find(*speeds(outcome, task.no_clock))


def exact_plan(task: Task) -> Plan:
    """Few steps on a small model, with everything that makes kernels and collectives repeat themselves."""
    job = Job(
        shape=TINY if task.quick else SMALL,
        micro_batch=2,
        micro_batches=4,
        dtype=torch.bfloat16 if task.on_gpu else torch.float32,
        tp=RANKS,
        seed=task.seed,
    )
    return Plan(
        job=job,
        device="cuda" if task.on_gpu else "cpu",
        deterministic=True,
        exact_steps=_EXACT_STEPS,
        rounds=0 if task.on_gpu else 1,
        profile_rounds=3,
    )


def timed_plan(task: Task) -> Plan:
    """Layers of Llama-3-8B, as many as the cards hold, under the planner's own costs of this machine."""
    shape = replace(llama_8b(4096), layers=8, vocabulary=32000)
    job = Job(shape=shape, micro_batch=1, micro_batches=8, dtype=torch.bfloat16, tp=RANKS, seed=task.seed)
    if task.quick:
        job = replace(job, shape=TINY, micro_batch=2)
    memory = min(torch.cuda.get_device_properties(n).total_memory for n in range(RANKS))
    return Plan(
        job=job.fitted(memory),
        device="cuda",
        deterministic=False,
        exact_steps=0,
        rounds=7,
        profile_rounds=9,
    )


def spawn(plan: Plan) -> tuple[Outcome, tuple[float, ...]]:
    """Run both ranks; what every schedule did, and the losses of one rank alone."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="braid-ranks-") as folder:
        os.environ.update(default_environment(os.environ, deterministic=plan.deterministic))
        try:
            mp.spawn(_rank, args=(folder, plan), nprocs=RANKS)
        finally:
            os.environ.clear()
            os.environ.update(before)
        content = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
    found_ones = {name: Trained(**_tuples(one)) for name, one in content["schedules"].items()}
    return found_ones, tuple(content["alone"])


def _tuples(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in record.items()}


# -- in a rank's process -----------------------------------------------------------------------------------


def _rank(rank: int, folder: str, plan: Plan) -> None:
    """Join the other one, measure costs, decide schedules, train with each of them."""
    torch.set_num_threads(1)
    bind_gloo(_LOOPBACK)
    device = torch.device("cpu")
    if plan.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    if plan.deterministic:
        torch.set_deterministic_debug_mode("error")  # the other way to say so loads torch's compiler
    store = dist.FileStore(f"{folder}/store", RANKS)
    backend = "cpu:gloo,cuda:nccl" if plan.device == "cuda" else "gloo"
    make_world(backend, store, rank, RANKS, PATIENCE)
    try:
        mesh = build_mesh(plan.job.layout, rank, timeout=PATIENCE)
        mesh.warm_up()
        content = _train(plan, mesh, device, streams_on(accelerator_of(device)))
        if rank == 0:
            (Path(folder) / "found.json").write_text(json.dumps(content), encoding="utf-8")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _train(plan: Plan, mesh: Mesh, device: torch.device, streams: Streams) -> dict[str, Any]:
    """All that this rank measures."""
    rank = RuntimeRank(plan.job, mesh, device, streams)
    decided = _decided(plan, rank)
    rank.reset()
    found_ones = {name: Trained(predicted_ns=ns) for name, (_, ns) in decided.items()}
    executors = {name: rank.executor(plan.job.code(parse(text))) for name, (text, _) in decided.items()}
    for name, executor in executors.items() if plan.exact_steps else ():
        rank.reset()
        steps = [rank.step(executor, number) for number in range(plan.exact_steps)]
        found_ones[name] = replace(
            found_ones[name],
            losses=tuple(step.loss for step in steps),
            norms=tuple(step.gradient_norm for step in steps),
            digest=_digest(rank),
        )
    if plan.rounds:
        found_ones = _timed(plan, rank, executors, found_ones)
    alone = _alone(plan, device) if plan.exact_steps and mesh.rank == 0 else []
    streams.close()
    return {"schedules": {name: asdict(one) for name, one in found_ones.items()}, "alone": alone}


def _decided(plan: Plan, rank: RuntimeRank) -> dict[str, tuple[str, int]]:
    """Every schedule's text, and what the planner expects of a step in ns: rank 0 decides for both."""
    groups, job = rank.mesh.groups, plan.job
    assert groups is not None
    samples = groups.gather(rank.profile(plan.profile_rounds))
    decided = {}
    if rank.mesh.rank == 0:
        profile = combine(samples, job.graphs)
        if plan.deterministic:
            profile = replace(
                profile, oef=dict.fromkeys(profile.oef, 1.0), slowdowns={}, issue_ns={}, take_ns={}
            )
        bench_of = measured(job.graphs, profile)
        for name in SCHEDULES:
            taken = decide([job.setting(name)], bench_of, anything, PART_BY_PART)[0]
            decided[name] = write(taken.code.schedule), round(taken.step_ns)
    of_rank_0: dict[str, tuple[str, int]] = groups.gather(decided)[0]
    return of_rank_0


def _timed(plan: Plan, rank: RuntimeRank, executors: Mapping[str, Any], known: Outcome) -> dict[str, Trained]:
    """A step of every schedule in every round, in an order that both ranks draw alike."""
    order = random.Random(plan.job.seed)
    times: dict[str, list[tuple[int, int, int]]] = {name: [] for name in executors}
    for turn in range(plan.rounds + 1):
        for name in order.sample(sorted(executors), len(executors)):
            rank.mesh.lines["tp"].meet()
            begin = time.perf_counter_ns()
            overlap = rank.step(executors[name], turn).overlap
            ns = time.perf_counter_ns() - begin
            if turn:
                times[name].append((ns, overlap.communication_ns, overlap.hidden_ns))
    timed_ones = {}
    for name, rows in times.items():
        step_ns, communication_ns, hidden_ns = (round(median(column)) for column in zip(*rows, strict=True))
        timed_ones[name] = replace(
            known[name], step_ns=step_ns, communication_ns=communication_ns, hidden_ns=hidden_ns
        )
    return timed_ones


def _alone(plan: Plan, device: torch.device) -> list[float]:
    """Losses of one rank that trains the same by itself."""
    job = replace(plan.job, tp=1)
    streams = streams_on(accelerator_of(device))
    rank = RuntimeRank(job, lone_mesh(job), device, streams)
    executor = rank.executor(job.code(job.serial))
    losses = [rank.step(executor, number).loss for number in range(plan.exact_steps)]
    streams.close()
    return losses


def _digest(rank: RuntimeRank) -> str:
    """Tells this rank's weights from any others."""
    found_one = hashlib.sha256()
    for master in rank.optimizer.masters:
        found_one.update(master.detach().cpu().numpy().tobytes())
    return found_one.hexdigest()[:16]


# -- verdicts ----------------------------------------------------------------------------------------------


def same_bits(outcome: Outcome, backend: str) -> Iterator[Finding]:
    """Every schedule against the serial one."""
    serial = outcome[SERIAL]
    for name in SCHEDULES[1:]:
        one = outcome.get(name)
        if one is None:
            yield not_measured(RANK_BITS, "was not run", name)
            continue
        other = [
            what for what in ("losses", "norms", "digest") if getattr(one, what) != getattr(serial, what)
        ]
        numbers: dict[str, Number] = {"backend": backend, "steps": len(one.losses)}
        numbers |= {"last_loss": one.losses[-1], "serial_loss": serial.losses[-1]}
        why = f"other {', '.join(other)}" if other else ""
        yield found(RANK_BITS, not other, name, why, numbers=numbers)


def same_losses(outcome: Outcome, alone: Sequence[float], backend: str) -> Finding:
    """Two ranks against one."""
    losses = outcome[SERIAL].losses
    off = max(abs(a / b - 1) for a, b in zip(losses, alone, strict=True))
    numbers: dict[str, Number] = {"backend": backend, "largest_difference": off, "allowed": SAME_LOSS}
    return found(RANK_LOSSES, off <= SAME_LOSS, numbers=numbers)


def speeds(outcome: Outcome, no_clock: str) -> Iterator[Finding]:
    """Ours against the others, and the planner against the clock."""
    times = {name: one.step_ns for name, one in outcome.items()}
    yield from no_slower(RANK_SPEED, times, no_clock, others=tuple(n for n in times if n != "braid"))
    for name, one in outcome.items():
        off = one.predicted_ns / one.step_ns - 1
        numbers = {"predicted_ns": one.predicted_ns, "measured_ns": one.step_ns, "off": round(off, 4)}
        yield timed(RANK_PREDICTED, abs(off) <= NEAR, no_clock, name, numbers=numbers)


def lines(outcome: Outcome) -> list[str]:
    """A row for every schedule."""
    serial = outcome[SERIAL].step_ns
    rows = [
        (
            name,
            f"{one.step_ns / 1e6:.2f}",
            f"{serial / one.step_ns:.3f}",
            f"{one.predicted_ns / 1e6:.2f}",
            f"{one.communication_ns / 1e6:.2f}",
            f"{one.hidden_ns / one.communication_ns:.2f}" if one.communication_ns else "-",
        )
        for name, one in outcome.items()
    ]
    return table(("schedule", "step", "speed-up", "predicted", "communication", "hidden"), rows)
