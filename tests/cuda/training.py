"""Whole runs on the model of the machine: a user's configuration, real data, the worker's assembly of a rank.

Ranks are threads of this process, so that a run takes a second and needs no sockets; the log of what they
issued is checked for races. Losses and parameters are those of a run with as many processes.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from braid.actors.config import Config
from braid.actors.stage.assembly import Assembly, assemble, join
from braid.actors.stage.memory_meter import MemoryMeter
from braid.actors.stage.messages import RunPlan
from braid.actors.stage.parameters import Place
from braid.actors.stage.samples import Batches, ReplicaSamples
from braid.actors.stage.sharing import passing
from braid.actors.stage.telemetry import Recorder
from braid.scheduling.code import Compute, Operation, Start, name_of
from braid.scheduling.schedule import Schedule
from braid.scheduling.schedule_text import write
from braid.scheduling.spec import ModelShape
from tests.cuda.checks import faults_of_communicators, faults_of_memory
from tests.cuda.log import RankLog
from tests.cuda.machine import Machine, ModelGroups

CPU = torch.device("cpu")


@dataclass
class Watch:
    """What a rank executed in the last step, and the most bytes that it held meanwhile."""

    meter: MemoryMeter
    ran: Counter[str] = field(default_factory=Counter)
    """Operators and transfers by name."""

    def __call__(self, operation: Operation) -> None:
        """An operation ran (`Executor` watch)."""
        self.meter(operation)
        if isinstance(operation, Compute | Start):
            self.ran[name_of(operation.what)] += 1


@dataclass
class Trained:
    """A run: mean loss and gradient norm of every step, and what is known of its ranks."""

    losses: list[float]
    gradient_norms: list[float]
    ranks: list[Assembly]
    watches: list[Watch]
    faults: list[str]
    """Races, uses after free, collectives that differ from member to member; empty for a correct run."""

    def parameters(self) -> dict[str, Tensor]:
        """Master weights of the whole model by global name."""
        found: dict[str, Tensor] = {}
        for rank in self.ranks:
            for share, master in zip(rank.optimizer.shares, rank.optimizer.masters, strict=True):
                for piece in share.slices:
                    name, shape = piece.source.name, piece.source.shape
                    whole = found.setdefault(name, torch.full(shape, torch.nan, dtype=master.dtype))
                    piece.of_global(whole).copy_(piece.of_local(master.detach()))
        return found


def train(config: Config, shape: ModelShape, schedule: Schedule, data: Path, *, steps: int = 2) -> Trained:
    """Train ``steps`` steps; the last one is watched, operation by operation."""
    plan = RunPlan(config=config, shape=shape, schedule=write(schedule), data=str(data))
    layout, batch = config.layout(), config.train.global_batch
    batches = [_batches(config, shape, data, rank, steps) for rank in range(layout.ranks)]
    machine = Machine(layout.ranks)
    parts: dict[int, Assembly] = {}
    watches: dict[int, Watch] = {}
    told: dict[int, list[tuple[float, float]]] = {}

    def run(log: RankLog) -> None:
        mesh = join(plan, log.rank, [], ModelGroups(machine, log))
        rank = parts[log.rank] = assemble(plan, mesh, CPU, log)
        given = batches[log.rank]
        watch = watches[log.rank] = Watch(MemoryMeter(lambda: passing(rank.weights, rank.gradients)))
        watched = rank.bind(rank.code, recorder=Recorder(rank.streams, recording=False), watch=watch)
        watch.meter.executor = watched
        told[log.rank] = []
        log.begin()
        for step in range(steps):
            update = rank.update(step, lambda: None)
            executor = rank.executor if step < steps - 1 else watched
            loss = executor.run(given[step], 1.0 / (batch * shape.sequence), update)
            told[log.rank].append((loss if rank.model.tells_loss else 0.0, update.gradient_norm))
        rank.weights.settle()

    machine.run(run)
    ranks = sorted(parts)
    faults = [fault for log in machine.ranks for fault in faults_of_memory(log)]
    return Trained(
        losses=[sum(told[r][step][0] for r in ranks) / (batch * shape.sequence) for step in range(steps)],
        gradient_norms=[told[0][step][1] for step in range(steps)],
        ranks=[parts[rank] for rank in ranks],
        watches=[watches[rank] for rank in ranks],
        faults=faults + faults_of_communicators(machine),
    )


def _batches(config: Config, shape: ModelShape, data: Path, rank: int, steps: int) -> list[Batches]:
    """A rank's micro-batches by step, as its worker would read them."""
    layout = config.layout()
    place = Place.of(layout.mesh, rank)
    chunks = layout.chunks_of(place.position["pp"])
    samples = ReplicaSamples(data, config, shape.sequence, layout, place, chunks, CPU)
    read = [samples.of_step(step) for step in range(steps)]
    samples.close()
    return read
