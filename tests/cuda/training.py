"""Whole runs on the model of the machine: a user's configuration, real data, the worker's assembly of a rank.

Ranks are threads of this process, so that a run takes a second and needs no sockets; the log of what they
issued is checked for races. Losses and parameters are those of a run with as many processes.
"""

import json
import os
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from braid.actors.config import Config, TrainConfig, parse_config
from braid.actors.controller.planning import model_graphs, setting_of
from braid.actors.stage.data.samples import Batches, ReplicaSamples
from braid.actors.stage.measure.memory import held_bytes
from braid.actors.stage.measure.telemetry import Recorder
from braid.actors.stage.rank.assembly import Assembly, assemble, join
from braid.actors.stage.rank.messages import RunPlan
from braid.actors.stage.state.parameters import Place
from braid.jobs.bench.plain_torch import PlainModel, PlainTrainer
from braid.jobs.data.identity import DataRequest
from braid.jobs.data.prepare import prepare
from braid.scheduling.cost.analytic import analytic_profile
from braid.scheduling.generate.setting import Setting
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.plan.decide import (
    Outcome,
    anything,
    decide,
    measured,
    modelled,
    replay,
    simulate_setting,
)
from braid.scheduling.plan.orders import decisions
from braid.scheduling.plan.space import COARSE
from braid.scheduling.schedule import buckets
from braid.scheduling.schedule.memory import DTYPE_BYTES, held_during, rank_memory
from braid.scheduling.schedule.operations import (
    Compute,
    Operation,
    Reduce,
    Release,
    Start,
    Wait,
    name_of,
)
from braid.scheduling.schedule.schedule import Schedule
from braid.scheduling.schedule.sweep import Sweep
from braid.scheduling.schedule.text import write
from tests.cuda.checks import faults_of_logs
from tests.cuda.log import RankLog
from tests.cuda.machine import Machine, ModelGroups
from tests.end_to_end.runs import BYTES_VOCABULARY, PlainRun, run_plain, small_config
from tests.scheduling.plans import cluster

SEED = int(os.environ["BRAID_TEST_SEED"])
"""Of weights and text."""
STEPS = 2
LEAST = 1500
"""Parameters of a bucket: so few that a layer has several."""
CPU = torch.device("cpu")
Sections = Mapping[str, Mapping[str, Any]]
"""Of a configuration."""
TrainerOf = Callable[[PlainModel, TrainConfig], PlainTrainer]


Watched = list[tuple[Operation, int]]
"""What a rank ran in the last step, and the bytes that it then held, before it let go of anything."""


@dataclass
class Trained:
    """A run: mean loss and gradient norm of every step, and what is known of its ranks."""

    losses: list[float]
    gradient_norms: list[float]
    ranks: list[Assembly]
    watched: list[Watched]
    faults: list[str]
    """Races, uses after free, collectives that differ from member to member; empty for a correct run."""

    def parameters(self) -> dict[str, Tensor]:
        """Master weights of the whole model by global name."""
        found: dict[str, Tensor] = {}
        for rank in self.ranks:
            for shard, master in zip(rank.optimizer.shards, rank.optimizer.masters, strict=True):
                for piece in shard.slices:
                    name, shape = piece.source.name, piece.source.shape
                    whole = found.setdefault(name, torch.full(shape, torch.nan, dtype=master.dtype))
                    piece.of_global(whole).copy_(piece.of_local(master.detach()))
        return found


def train(
    config: Config,
    shape: ModelShape,
    schedule: Schedule,
    data: Path,
    *,
    hosts: Sequence[str] = (),
) -> Trained:
    """Train `STEPS` steps; the last one is watched, operation by operation. hosts: of ranks; empty: one."""
    plan = RunPlan(config=config, shape=shape, schedule=write(schedule), data=str(data))
    layout, batch = config.layout(), config.train.global_batch
    batches = [_batches(config, shape, data, rank) for rank in range(layout.ranks)]
    machine = Machine(layout.ranks)
    parts: dict[int, Assembly] = {}
    watched: dict[int, Watched] = {}
    told: dict[int, list[tuple[float, float]]] = {}

    def run(log: RankLog) -> None:
        mesh = join(plan, log.rank, hosts, ModelGroups(machine, log))
        rank = parts[log.rank] = assemble(plan, mesh, CPU, log)
        given = batches[log.rank]
        told[log.rank], watched[log.rank] = [], []

        def watch(operation: Operation) -> None:
            held = held_bytes(last.held(), rank.buckets.passing)
            watched[log.rank].append((operation, held))

        last = rank.bind(rank.code, recorder=Recorder(rank.streams, recording=False), watch=watch)
        log.begin()
        for step in range(STEPS):
            update = rank.optimizer.begin(step)
            executor = rank.executor if step < STEPS - 1 else last
            loss = executor.run(given[step], 1.0 / (batch * shape.sequence), update)
            told[log.rank].append((loss if rank.model.tells_loss else 0.0, update.gradient_norm))
        rank.buckets.settle()

    machine.run(run)
    ranks = sorted(parts)
    return Trained(
        losses=[sum(told[r][step][0] for r in ranks) / (batch * shape.sequence) for step in range(STEPS)],
        gradient_norms=[norm for _, norm in told[0]],
        ranks=[parts[rank] for rank in ranks],
        watched=[watched[rank] for rank in ranks],
        faults=faults_of_logs(machine),
    )


def _batches(config: Config, shape: ModelShape, data: Path, rank: int) -> list[Batches]:
    """A rank's micro-batches by step, as its worker would read them."""
    layout = config.layout()
    place = Place.of(layout.mesh, rank)
    chunks = layout.chunks_of(place.position["pp"])
    samples = ReplicaSamples(data, config, shape.sequence, layout, place, chunks, CPU)
    read = [samples.of_step(step) for step in range(STEPS)]
    samples.close()
    return read


def sections(
    schedule: str,
    parallel: Mapping[str, Any],
    model: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
    **more: Mapping[str, Any],
) -> Sections:
    """A small run in double precision with four micro-batches a replica."""
    schedule, _, pipeline = schedule.partition(":")
    usual = {"hidden": 32, "heads": 4, "kv_heads": 4, "sequence": 16, "layers": 4}
    given = {"dtype": "fp64", "micro_batch": 1, **(train or {})}
    batch = 4 * given["micro_batch"] * parallel.get("dp", 1)
    # With the usual eps AdamW blows up the rounding of gradients that are zero.
    steps = {"steps": STEPS, "warmup_steps": 0, "eps": 1e-6, "seed": SEED % 1000, "global_batch": batch}
    return {
        "model": {**usual, **(model or {})},
        "train": {**steps, **given},
        "parallel": parallel,
        "overlap": {"schedule": schedule, "pipeline": pipeline or None},
        "telemetry": {"spans": False},
        **more,
    }


class Runs:
    """Runs on one corpus of short documents, and those that they are compared with, which are kept."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._data = folder / "runs", short_documents(folder, SEED)
        self._plain: dict[str, PlainRun] = {}
        self._serial: dict[str, Trained] = {}

    def of(
        self, sections: Sections, *, hosts: int = 1, put_off: bool = False, **decided: Any
    ) -> tuple[Outcome, Trained]:
        """Decide a configuration on links on which communication is slow, and train.

        hosts: over which ranks are spread. put_off: backward passes leave all that they may to the next
        block. decided: fields of `Setting` that are given.
        """
        with patch.object(buckets, "LEAST_ELEMENTS", LEAST):
            return self._decided(small_config(self._folder, **sections), hosts, put_off, decided)

    def _decided(
        self, config: Config, hosts: int, put_off: bool, decided: Mapping[str, Any]
    ) -> tuple[Outcome, Trained]:
        shape = config.check(BYTES_VOCABULARY)
        ranks = config.layout().ranks
        spec = cluster(nodes=hosts, gpus=ranks // hosts, intra=4e8)
        setting = replace(setting_of(config, shape), **decided)
        if config.model.own_layers:
            graphs = model_graphs(config, shape)
            bench_of = measured(graphs, analytic_profile(spec, setting.layout, graphs, 8))
            outcome = decide([setting], bench_of, anything, COARSE)[0]
        else:
            outcome = simulate_setting(setting, spec)
        if put_off:
            choices, _ = decisions(modelled(spec)(outcome.setting))[-1]
            outcome = replay(outcome.setting, choices, spec)
        names = [str(rank * hosts // ranks) for rank in range(ranks)] if hosts > 1 else []
        return outcome, train(config, shape, outcome.code.schedule, self._data, hosts=names)

    def plain(
        self, run: Sections, *kept: str, trainer_of: TrainerOf = PlainTrainer, **train: Any
    ) -> PlainRun:
        """The same by plain PyTorch in this process, without parallelism.

        kept: degrees on which the numbers themselves depend. train: keys of this section that differ.
        """
        parallel = {axis: degree for axis, degree in run["parallel"].items() if axis in kept}
        train = {**run["train"], "recompute": "none", **train}
        alone = {**run, "train": train, "overlap": {}, "parallel": parallel}
        key = json.dumps([alone, str(trainer_of)])
        if key not in self._plain:
            self._plain[key] = run_plain(small_config(self._folder, **alone), self._data, trainer_of)
        return self._plain[key]

    def serial(self, run: Sections) -> Trained:
        """The same on the same layout with nothing beside anything, and nothing twice."""
        train = {**run["train"], "recompute": "none"}
        given = {**run, "train": train, "overlap": {"schedule": "megatron"}}
        key = json.dumps(given)
        if key not in self._serial:
            self._serial[key] = self.of(given)[1]
        return self._serial[key]


def state_bytes(rank: Assembly) -> tuple[int, int, int]:
    """What a rank holds between steps, in bytes: parameters, gradients, optimizer states."""
    optimizer = rank.optimizer
    shards = (*optimizer.shards, *rank.buckets.frozen)
    weights = [p.tensor for p in rank.model.parameters] + [shard.tensor for shard in shards]
    gradients = [bucket.gradients for bucket in rank.buckets.buckets]
    sums = [memory.shard if memory.whole is None else memory.whole for memory in gradients]
    states = [state for master in optimizer.masters for state in optimizer.states[master].values()]
    tensors = [state for state in states if isinstance(state, torch.Tensor)]
    moments = sum(state.nbytes for state in states if not isinstance(state, torch.Tensor))  # in 8 bits
    held = held_bytes(weights)
    return held, held_bytes(sums), held_bytes(weights, optimizer.masters, tensors) - held + moments


def assert_predicted(outcome: Outcome, run: Trained) -> None:
    """Memory after every operation, and every operation by name, on every rank."""
    setting = outcome.setting
    fullest: dict[int, tuple[int, int, int]] = {}
    predicted: dict[int, tuple[int, int, int]] = {}
    for rank, watched in zip(run.ranks, run.watched, strict=True):
        stage = rank.mesh.position["pp"]
        linked = [one for stretch in outcome.code.stages[stage] for one in stretch.operations]
        linked = [one for one in linked if isinstance(one, Compute | Start)]
        ran = Counter(name_of(one.what) for one, _ in watched if isinstance(one, Compute | Start))
        assert ran == Counter(name_of(one.what) for one in linked)
        simulated = outcome.simulation.ranks[stage]
        executed = [one.operation for one in simulated.executed]
        executed += [one.operation for block in simulated.blocks for one in block.course.executed]
        # What another rank sends, and sums of nothing, take no time of this rank.
        free = [one for one in linked if isinstance(one, Start) and simulated.prices.of(one).lane < 0]
        told = Counter(name_of(one.what) for one in executed if isinstance(one, Compute | Start))
        assert told == ran - Counter(name_of(one.what) for one in free)
        memory = rank_memory(
            outcome.code, setting.model, setting.dtype, stage, reduce_dtype=setting.reduce_dtype
        )
        fullest[stage] = max(fullest.get(stage, (0, 0, 0)), state_bytes(rank))
        predicted[stage] = memory.parameter_bytes, memory.gradient_bytes, memory.optimizer_bytes
        # How many rows come to an expert, routers decide; what layers of a user's own keep, autograd does.
        counted = not setting.model.experts or setting.model.capacity_factor
        if counted and "parallel" not in setting.model.kinds:
            assert assert_counted(setting, rank, watched) == memory.activation_bytes
    # A small bucket is updated by some ranks alone; the others hold less.
    assert fullest == predicted


def assert_counted(setting: Setting, rank: Assembly, watched: Watched) -> int:
    """A rank held to the byte what the sweep counts, at every operation; the most of it."""
    code, stage, rounded = rank.code, rank.mesh.position["pp"], setting.reduce_dtype
    width = DTYPE_BYTES[setting.dtype]
    sweep = Sweep(code, width, rounded_width=DTYPE_BYTES[rounded] if rounded else 0)
    during = held_during(code, stage, width, reduce_dtype=rounded)
    found, most = iter(watched), 0
    for stretch, said in zip(code.stages[stage], during, strict=True):
        counts = []
        for operation, count in sweep.step_by_step(stretch):
            ran, held = next(found)
            assert ran is operation
            gone = 0  # the update lets go at once of what the sweep still counts
            what = getattr(operation, "what", None)
            if isinstance(operation, Release) or (isinstance(operation, Wait) and isinstance(what, Reduce)):
                last = what.move is None or what.move.last
                gone = sweep.whole_bytes(what) + sweep.rounded_bytes(what) if last else 0
            assert held == count - gone, f"stage {stage}, {stretch.instruction}: {operation}"
            counts.append(count)
        assert said == max(counts, default=said)
        most = max([most, *counts])
    assert next(found, None) is None
    return most


def assert_near(run: Trained, plain: PlainRun, losses: float, norms: float | None) -> None:
    """How far losses and norms may be from those of plain PyTorch, relatively; norms None: anywhere.

    In double precision parameters, too, are as near as sums in another order are.
    """
    assert run.losses == pytest.approx(plain.losses, rel=losses, abs=0)
    if norms is not None:
        assert run.gradient_norms == pytest.approx(plain.gradient_norms, rel=norms, abs=0)
    trained = {name: tensor.detach() for name, tensor in plain.model.named_parameters()}
    if {tensor.dtype for tensor in trained.values()} == {torch.float64}:
        found = {name: tensor for name, tensor in run.parameters().items() if name in trained}
        torch.testing.assert_close(found, trained, rtol=1e-7, atol=1e-9)


def assert_same_bits(run: Trained, other: Trained) -> None:
    """Losses, norms and parameters."""
    assert run.losses == other.losses
    assert run.gradient_norms == other.gradient_norms
    ours, theirs = run.parameters(), other.parameters()
    assert not [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]


def short_documents(folder: Path, seed: int) -> Path:
    """Prepared text of which a sample has several documents; some go over borders of samples and ranks."""
    generator = random.Random(seed)
    lengths = [generator.choice((1, 3, 8, 15, 40)) for _ in range(1500)]
    texts = ("".join(generator.choices("abcdef \n", k=length)) for length in lengths)
    file = folder / "short.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    config = parse_config({"data": {"files": [str(file)], "validation_fraction": 0.1}})
    return prepare(DataRequest.of(config), folder / "data", map).output
