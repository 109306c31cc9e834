"""What Braid costs where it cannot win: one rank against plain PyTorch, Ray actors against plain processes.

Both sides of every comparison run in turn, in random order, within one run, so that ratios hold on machines
that others use as well. CPU seconds stand beside wall seconds: other people's load reaches them far less.
"""

import multiprocessing
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.table import Table

from braid.actors.config import Config, parse_config
from braid.actors.controller.group import WorkerGroup
from braid.actors.controller.planning import build_schedule
from braid.actors.controller.processes import LOOPBACK, ProcessLauncher
from braid.actors.stage.data import TokenShards, sample_ids
from braid.actors.stage.worker import DTYPES, Rendezvous, RunPlan, Worker
from braid.jobs.benchmarks.plain_torch import (
    PlainModel,
    PlainSettings,
    PlainSizes,
    PlainTrainer,
    load_named,
)
from braid.jobs.corpus import Corpus
from braid.jobs.prepare import prepare
from braid.jobs.session import ray_session
from braid.jobs.tokenizer import load_tokenizer

BRAID, PLAIN = "braid", "plain PyTorch"
RAY, PROCESSES = "Ray actors", "processes"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and batch to be measured; sections of a configuration."""

    name: str
    model: Mapping[str, Any]
    train: Mapping[str, Any]


CASES = (
    Case(
        name="llama 256 x 4",
        model={"hidden": 256, "layers": 4, "heads": 8, "kv_heads": 4, "sequence": 256},
        train={"global_batch": 8, "micro_batch": 4},
    ),
    Case(
        name="llama 512 x 4",
        model={
            "hidden": 512,
            "layers": 4,
            "heads": 8,
            "kv_heads": 4,
            "sequence": 512,
            "vocabulary": 8192,
        },
        train={"global_batch": 4, "micro_batch": 2},
    ),
    Case(
        name="gpt 256 x 4",
        model={"family": "gpt", "hidden": 256, "layers": 4, "heads": 8, "sequence": 256},
        train={"global_batch": 8, "micro_batch": 4},
    ),
)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median, quartiles and number of some measurements."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median=median, low=low, high=high, count=len(values))


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One side's steps: seconds of wall clock and of this process's CPUs, by round."""

    step_seconds: Spread
    cpu_seconds: Spread
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class Memory:
    """One side's resident memory in a process of its own: after the imports, and at its highest."""

    imported_bytes: int
    peak_bytes: int

    @property
    def training_bytes(self) -> int:
        """What training takes on top of the imports."""
        return self.peak_bytes - self.imported_bytes


@dataclass(frozen=True, kw_only=True)
class LoopResult:
    """One rank of Braid against the plain loop. Ratios are Braid / plain."""

    case: str
    parameters: int
    tokens_per_step: int
    timing: Mapping[str, Timing]
    memory: Mapping[str, Memory]
    speed_ratio: float  # of tokens per second of wall clock
    cpu_speed_ratio: float  # of tokens per second of CPU
    memory_ratio: float  # of peaks above imports
    peak_ratio: float  # of whole peaks
    loss_difference: float  # relative, after the last step: both did the same work


@dataclass(frozen=True, kw_only=True)
class LauncherResult:
    """The same two ranks as Ray actors and as processes. Ratios are Ray / processes."""

    case: str
    wall_seconds: Mapping[str, Spread]  # of a step as the controller sees it
    step_seconds: Mapping[str, Spread]  # of a step as the slowest rank sees it
    call_seconds: Mapping[str, Spread]  # of a call that does nothing
    wall_ratio: float
    step_ratio: float


@dataclass(frozen=True, kw_only=True)
class TrainingBenchmark:
    """Everything that `run` measured, and where."""

    machine: Mapping[str, Any]
    loops: tuple[LoopResult, ...]
    launchers: LauncherResult | None

    def as_json(self) -> dict[str, Any]:
        """Plain containers, for ``--json``."""
        return asdict(self)


def run(
    *,
    cases: Sequence[Case] = CASES,
    launcher_case: Case | None = CASES[0],
    rounds: int = 9,
    steps: int = 2,
    threads: int = 1,
    seed: int | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> TrainingBenchmark:
    """Measure. ``rounds`` of ``steps`` steps per side; ``launcher_case`` None leaves Ray out.

    ``seed`` orders the rounds and starts the models; by default it is drawn anew.
    """
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    order = random.Random(seed)
    before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="braid-bench-") as folder:
        data = _data(Path(folder))
        loops = []
        for case in cases:
            progress(f"{case.name}: {rounds} rounds of {BRAID} and {PLAIN} by turns")
            plan = _plan(case, data, seed, threads=threads)
            loops.append(_compare_loops(case, plan, rounds, steps, order))
        launchers = None
        if launcher_case is not None:
            progress(f"{launcher_case.name}: {rounds} rounds of {RAY} and {PROCESSES} by turns")
            plan = _plan(launcher_case, data, seed, threads=threads, parallel={"tp": 2})
            launchers = _compare_launchers(launcher_case, plan, rounds, steps, order)
    machine = {
        "cpus": len(os.sched_getaffinity(0)),
        "threads": threads,
        "torch": torch.__version__,
        "platform": platform.platform(),
        "load_before": before,
        "load_after": os.getloadavg(),
        "seed": seed,
    }
    return TrainingBenchmark(machine=machine, loops=tuple(loops), launchers=launchers)


def _data(folder: Path) -> Path:
    """Real text, some 1.5 MB of it."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))[:60]
    corpus = Corpus(files=[str(path) for path in sources], validation_fraction=0.02)
    return prepare(corpus, output=folder / "data", executor=map).output


def _plan(
    case: Case, data: Path, seed: int, *, threads: int, parallel: Mapping[str, int] | None = None
) -> RunPlan:
    config = parse_config(
        {
            "model": dict(case.model),
            "train": {**case.train, "seed": seed, "steps": 10_000, "warmup_steps": 100},
            "parallel": dict(parallel or {}),
            "cluster": {"device": "cpu", "threads_per_rank": threads, "cpus_per_rank": 0.5},
        }
    )
    shape = config.check(load_tokenizer(config.data.tokenizer).vocabulary)
    schedule = build_schedule(config, shape).to_text()
    return RunPlan(config=config, shape=shape, schedule=schedule, data=str(data))


# One rank against the plain loop.


class Side(Protocol):
    """One side of the comparison."""

    def step(self, step: int) -> float:
        """Do step ``step`` of training; returns the mean loss."""


class BraidSide:
    """A `Worker` of ours in this process, alone in its process group."""

    def __init__(self, plan: RunPlan) -> None:
        self.worker = Worker(0, LOOPBACK)
        timeout_s = plan.config.cluster.group_timeout_s
        port = self.worker.open_store(timeout_s)
        self.worker.setup(plan, Rendezvous(address=LOOPBACK, port=port, generation=1))
        self._tokens = _tokens_per_step(plan)

    def step(self, step: int) -> float:
        """One call of the controller."""
        return self.worker.train_step(step).loss_sum / self._tokens


class PlainSide:
    """The plain loop on the same samples; its reader is three lines over NumPy."""

    def __init__(self, plan: RunPlan, initial: Mapping[str, torch.Tensor] | None) -> None:
        train = plan.config.train
        torch.set_num_threads(plan.config.cluster.threads_per_rank)
        model = PlainModel(PlainSizes(**asdict(plan.shape)), DTYPES[train.dtype])
        if initial is not None:
            load_named(model, initial)
        names = PlainSettings.__dataclass_fields__
        self._trainer = PlainTrainer(model, PlainSettings(**{name: getattr(train, name) for name in names}))
        self._train = train
        self._shards = TokenShards.open(plan.data, "train", plan.shape.sequence)

    def step(self, step: int) -> float:
        """One step."""
        batch = self._train.global_batch
        ids = sample_ids(self._train.seed, self._shards.samples, step * batch, batch)
        windows = torch.from_numpy(self._shards.tokens_at(ids)).split(self._train.micro_batch)
        return self._trainer.step(step, windows)[0]


def _compare_loops(case: Case, plan: RunPlan, rounds: int, steps: int, order: random.Random) -> LoopResult:
    memory = {name: _memory_of(name, plan) for name in (BRAID, PLAIN)}
    tokens = _tokens_per_step(plan)
    braid = BraidSide(plan)
    try:
        plain = PlainSide(plan, {name: value.detach() for name, value in braid.worker.parameters()})
        sides: dict[str, Side] = {BRAID: braid, PLAIN: plain}
        timing, losses = _time_by_turns(sides, rounds, steps, tokens, order)
    finally:
        braid.worker.close()
    medians = {name: entry.step_seconds.median for name, entry in timing.items()}
    cpu = {name: entry.cpu_seconds.median for name, entry in timing.items()}
    return LoopResult(
        case=case.name,
        parameters=plan.shape.parameters(),
        tokens_per_step=tokens,
        timing=timing,
        memory=memory,
        speed_ratio=medians[PLAIN] / medians[BRAID],
        cpu_speed_ratio=cpu[PLAIN] / cpu[BRAID],
        memory_ratio=memory[BRAID].training_bytes / memory[PLAIN].training_bytes,
        peak_ratio=memory[BRAID].peak_bytes / memory[PLAIN].peak_bytes,
        loss_difference=abs(losses[BRAID] / losses[PLAIN] - 1),
    )


def _time_by_turns(
    sides: Mapping[str, Side], rounds: int, steps: int, tokens: int, order: random.Random
) -> tuple[dict[str, Timing], dict[str, float]]:
    """Timing of every side and its last loss; a first round is not counted."""
    wall: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, float] = {}
    for turn in range(rounds + 1):
        for name in order.sample(sorted(sides), len(sides)):
            wall_begin, cpu_begin = time.perf_counter(), time.process_time()
            for step in range(turn * steps, (turn + 1) * steps):
                losses[name] = sides[name].step(step)
            if turn:
                wall[name].append((time.perf_counter() - wall_begin) / steps)
                cpu[name].append((time.process_time() - cpu_begin) / steps)
    timing = {}
    for name in sides:
        spread = Spread.of(wall[name])
        timing[name] = Timing(
            step_seconds=spread, cpu_seconds=Spread.of(cpu[name]), tokens_per_s=tokens / spread.median
        )
    return timing, losses


def _tokens_per_step(plan: RunPlan) -> int:
    return plan.config.train.global_batch * plan.shape.sequence


def _memory_of(name: str, plan: RunPlan) -> Memory:
    """Train some steps in a fresh process and ask it for its memory."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_report_memory, args=(name, plan, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        imported, peak = mine.recv()
    finally:
        process.join()
    return Memory(imported_bytes=imported, peak_bytes=peak)


def _report_memory(name: str, plan: RunPlan, result: Connection, steps: int = 3) -> None:
    imported = _memory_bytes("VmRSS")
    side: Side = BraidSide(plan) if name == BRAID else PlainSide(plan, None)
    for step in range(steps):
        side.step(step)
    result.send((imported, _memory_bytes("VmHWM")))


def _memory_bytes(field: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (highest so far) of this process.

    Not getrusage's ru_maxrss: a child inherits that from its parent, exec or not.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; memory is measured on Linux only")


# Ray actors against processes.


def _compare_launchers(
    case: Case, plan: RunPlan, rounds: int, steps: int, order: random.Random
) -> LauncherResult:
    wall: dict[str, list[float]] = {RAY: [], PROCESSES: []}
    inside: dict[str, list[float]] = {RAY: [], PROCESSES: []}
    calls: dict[str, list[float]] = {RAY: [], PROCESSES: []}
    with _both_groups(plan) as groups:
        for turn in range(rounds + 1):
            for name in order.sample(sorted(groups), len(groups)):
                group = groups[name]
                for step in range(turn * steps, (turn + 1) * steps):
                    begin = time.perf_counter()
                    results = group.call_all("train_step", step)
                    middle = time.perf_counter()
                    group.call_all("process_id")
                    end = time.perf_counter()
                    if turn:
                        wall[name].append(middle - begin)
                        inside[name].append(max(result.seconds for result in results))
                        calls[name].append(end - middle)
    walls, insides = _spreads(wall), _spreads(inside)
    return LauncherResult(
        case=case.name,
        wall_seconds=walls,
        step_seconds=insides,
        call_seconds=_spreads(calls),
        wall_ratio=walls[RAY].median / walls[PROCESSES].median,
        step_ratio=insides[RAY].median / insides[PROCESSES].median,
    )


def _spreads(values: Mapping[str, Sequence[float]]) -> dict[str, Spread]:
    return {name: Spread.of(list(entry)) for name, entry in values.items()}


@contextmanager
def _both_groups(plan: RunPlan) -> Iterator[dict[str, WorkerGroup]]:
    """The ranks of ``plan`` twice: as actors of a private local cluster, and as processes."""
    config = plan.config
    ranks = config.layout().ranks
    with ExitStack() as stack:
        stack.enter_context(ray_session(config))
        from braid.actors.controller.placement import RayLauncher

        groups: dict[str, WorkerGroup] = {}
        for name, launcher in ((RAY, RayLauncher(config)), (PROCESSES, ProcessLauncher(config))):
            group = groups[name] = launcher.start(ranks)
            stack.callback(group.shutdown)
            _set_up(group, plan, config)
        yield groups


def _set_up(group: WorkerGroup, plan: RunPlan, config: Config) -> None:
    """What the controller does before the first step."""
    port = group.call(0, "open_store", config.cluster.group_timeout_s)
    group.call_all("setup", plan, Rendezvous(address=group.addresses[0], port=port, generation=1))


# Tables.


def show(console: Console, result: TrainingBenchmark) -> None:
    """Print everything as tables."""
    load = " -> ".join(
        f"{value[0]:.1f}" for value in (result.machine["load_before"], result.machine["load_after"])
    )
    console.print(
        f"{result.machine['cpus']} CPUs, {result.machine['threads']} thread(s) per rank, "
        f"torch {result.machine['torch']}, load {load}, seed {result.machine['seed']}"
    )
    if result.loops:
        console.print(_speed_table(result.loops))
        console.print(_memory_table(result.loops))
    if result.launchers is not None:
        console.print(_launcher_table(result.launchers))


def _speed_table(loops: Sequence[LoopResult]) -> Table:
    table = Table(title=f"one rank: seconds per step, median [quartiles]; ratio: tokens/s, {BRAID} / plain")
    for column in (
        "model",
        "parameters",
        "",
        "wall",
        "CPU",
        "tokens/s",
        "ratio",
        "CPU ratio",
        "loss differs by",
    ):
        table.add_column(column, justify="left" if column in ("model", "") else "right")
    for loop in loops:
        for name, timing in loop.timing.items():
            first = name == BRAID
            table.add_row(
                loop.case if first else "",
                f"{loop.parameters / 1e6:.1f} M" if first else "",
                name,
                _shown(timing.step_seconds),
                _shown(timing.cpu_seconds),
                f"{timing.tokens_per_s:,.0f}",
                f"{loop.speed_ratio:.3f}" if first else "",
                f"{loop.cpu_speed_ratio:.3f}" if first else "",
                f"{loop.loss_difference:.0e}" if first else "",
            )
    return table


def _memory_table(loops: Sequence[LoopResult]) -> Table:
    table = Table(
        title=f"one rank: resident memory in MiB, each in a process of its own; ratio: {BRAID} / plain"
    )
    for column in ("model", "", "imports", "peak", "training", "training ratio", "peak ratio"):
        table.add_column(column, justify="left" if column in ("model", "") else "right")
    for loop in loops:
        for name, memory in loop.memory.items():
            first = name == BRAID
            table.add_row(
                loop.case if first else "",
                name,
                *(
                    f"{value / 2**20:.0f}"
                    for value in (memory.imported_bytes, memory.peak_bytes, memory.training_bytes)
                ),
                f"{loop.memory_ratio:.3f}" if first else "",
                f"{loop.peak_ratio:.3f}" if first else "",
            )
    return table


def _launcher_table(result: LauncherResult) -> Table:
    table = Table(title=f"{result.case}, tp 2: seconds, median [quartiles]; ratio: {RAY} / {PROCESSES}")
    for column in ("", "step, seen by the controller", "step, seen by the slowest rank", "empty call"):
        table.add_column(column, justify="left" if not column else "right")
    for name in (RAY, PROCESSES):
        columns = (result.wall_seconds, result.step_seconds, result.call_seconds)
        table.add_row(name, *(_shown(column[name]) for column in columns))
    table.add_row("ratio", f"{result.wall_ratio:.3f}", f"{result.step_ratio:.3f}", "")
    return table


def _shown(spread: Spread) -> str:
    return f"{spread.median:.4f} [{spread.low:.4f} {spread.high:.4f}]"
