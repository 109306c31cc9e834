"""Training steps of the real runtime on the model of the machine: model, executor, gradients, AdamW."""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import braid
from braid.actors.config import Config, parse_config
from braid.actors.stage.rank.assembly import Assembly, assemble, join
from braid.actors.stage.rank.membership import Membership
from braid.actors.stage.rank.messages import RunPlan
from braid.actors.stage.run.micro_batch import MicroBatch
from braid.actors.stage.state.copies import HostState, take
from braid.scheduling.generate.lower import Choices, training_schedule
from braid.scheduling.generate.partitions import with_partitions
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.mesh.partition import parse_partition
from braid.scheduling.model.layers import built_in_parts
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.model.sizes import PartSizes
from braid.scheduling.model.units import unit_parts
from braid.scheduling.schedule import buckets
from braid.scheduling.schedule.code import Code
from braid.scheduling.schedule.text import write
from braid.scheduling.schedule.validate import linked
from tests.cuda.checks import faults_of_logs
from tests.cuda.log import RankLog
from tests.cuda.machine import Machine, ModelGroups
from tests.cuda.replay import differences, faults_of_orders
from tests.scheduling.cases import GPT, LLAMA, MICRO_BATCH, choices_for, model_for, setting_for

CPU = torch.device("cpu")
IN_STAGES = ("dp/reduce_scatter mesh 2x2 order 1,0", "dp/all_gather mesh 2x2 order 0,1")
OF_TOKENS = (
    "tp/all_gather mesh 2x2 order 1,0,1 delivered of tokens with 2",
    "tp/reduce_scatter mesh 2x2 order 1,0 pieces 3 of tokens with 1",
)
"""How collectives are partitioned."""
OWN = os.path.join(os.path.dirname(braid.__file__), "")
"""Where modules of the project are. Not any path with braid in it: the checkout, too, may be called that."""
OPTIMIZER = {"lr": 0.01, "min_lr_fraction": 1.0, "warmup_steps": 0, "steps": 10, "clip_norm": 0.5}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step: schedule, layout, model."""

    schedule: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    ring: bool = False
    """Whether keys and values are passed around over cp, else they are gathered."""
    micro_batches: int = 4
    zero: int = 0
    shards: int = 0
    """Ranks of dp that states are cut over; 0: all."""
    least: int = buckets.LEAST_ELEMENTS
    """Parameters of a bucket: with few, parts have several buckets."""
    tied: bool = False
    """Whether embedding and head share a table."""
    gpt: bool = False
    ends: bool = False
    steps: int = 1
    copies: bool = False
    """Of the state after every step, to the host."""
    graph: bool = False
    """Whether passes are captured, after the first two steps."""
    layers: int = 1
    """At least; the layout may need more."""
    experts: bool = False
    """Whether layers are mixtures of experts, whose routing is added up; with ep they are."""
    capacity: bool = False
    """Whether an expert takes as many rows of every rank, and the host has nothing to wait for."""
    partitions: tuple[str, ...] = ()
    """As text; with some, ranks are on hosts of two."""
    degrees: tuple[int, ...] = ()
    """Tensor-parallel, of every layer; by default of all."""
    recompute: str = "none"
    """Of all layers, or of each."""
    rounded: bool = False
    """Whether ranks sum gradients in bf16."""
    muon: bool = False
    """Whether Muon updates matrices, which their owners get from other ranks."""

    @property
    def name(self) -> str:
        """For people: what is not usual."""
        given = {one.name: getattr(self, one.name) for one in fields(self)[1:]}
        unusual = {key: value for key, value in given.items() if value != getattr(Case, key)}
        said = (key if value is True else f"{key} {value}" for key, value in unusual.items())
        return ", ".join((self.schedule, *said))

    @property
    def layout(self) -> ParallelLayout:
        return self.config.layout()

    @property
    def shape(self) -> ModelShape:
        """The smallest that the layout takes."""
        family = replace(
            GPT if self.gpt else LLAMA, layers=len(self.degrees) or self.layers, tied_head=self.tied
        )
        if self.experts or self.ep > 1:
            most = 0.75 if self.capacity else 0.0
            family = replace(family, family="moe", experts=4, top_k=2, capacity_factor=most, balance_loss=0.1)
        return model_for(self.layout, family)

    @property
    def context(self) -> str:
        return "ring" if self.ring else "all_gather"

    @property
    def sizes(self) -> PartSizes:
        return PartSizes(self.shape, self.layout, MICRO_BATCH, context=self.context, recompute=self.recompute)

    def cut(self) -> AbstractContextManager[object]:
        """Within it, buckets are as small as the case wants them, in all threads: model, code and plans."""
        return patch.object(buckets, "LEAST_ELEMENTS", self.least)

    @cached_property
    def config(self) -> Config:
        """As a user would write it."""
        parallel: dict[str, Any] = {
            axis: getattr(self, axis) for axis in ("tp", "pp", "dp", "cp", "ep", "zero")
        }
        parallel |= {"shards": self.shards, "context": self.context}
        parallel |= {"tensor_degrees": list(self.degrees)} if self.degrees else {}
        train = {"micro_batch": MICRO_BATCH, "global_batch": self.micro_batches * MICRO_BATCH * self.dp}
        train |= {"recompute": self.recompute, "reduce_dtype": "bf16" if self.rounded else None, **OPTIMIZER}
        train |= {"optimizer": "muon"} if self.muon else {}
        schedule, _, pipeline = self.schedule.partition(":")
        overlap = {"schedule": schedule, "pipeline": pipeline or None, "cuda_graphs": self.graph}
        sections = {"parallel": parallel, "train": train, "overlap": overlap, "telemetry": {"spans": False}}
        return parse_config(sections)

    @property
    def code(self) -> Code:
        layout, shape = self.layout, self.shape
        setting = setting_for(self.schedule, layout, self.micro_batches, model=shape, context=self.context)
        partitions = tuple(map(parse_partition, self.partitions))
        setting = replace(setting, partitions=partitions, recompute=self.recompute)
        members = with_partitions(built_in_parts(self.sizes), setting.partitions, layout)
        parts = unit_parts(members, layout, setting.kinds, setting.unit_layers)
        own = bool(self.degrees) or " " in self.recompute  # in orders that need no decision
        choices = Choices() if own else choices_for(setting, ends=self.ends)
        schedule = training_schedule(setting, parts, choices)
        return linked(schedule, layout, setting.kinds, parts)

    @cached_property
    def plan(self) -> RunPlan:
        """What a controller tells the ranks."""
        return RunPlan(config=self.config, shape=self.shape, schedule=write(self.code.schedule), data="")


@dataclass(kw_only=True)
class Ranked:
    """One rank, ready to run its step."""

    case: Case
    log: RankLog
    parts: Assembly
    membership: Membership
    copies: list[HostState] = field(default_factory=list)
    device: torch.device = CPU
    found: dict[str, Any] = field(default_factory=dict)
    """Loss and norm of every step."""

    def __post_init__(self) -> None:
        self.given = [self.batches(step) for step in range(self.case.steps)]

    def batches(self, step: int) -> list[MicroBatch | None]:
        """Random tokens, the same for ranks that share them: those of a stage's tp, and other stages."""
        mesh = self.case.layout.mesh
        others = mesh.sizes.keys() - {"pp", *mesh.factors_of("tp")}
        place = mesh.index(mesh.position(self.log.rank), others)
        generator = torch.Generator().manual_seed(1000 * step + place)
        vocabulary, count = self.case.shape.vocabulary, self.case.sizes.tokens

        def tokens() -> Tensor:
            return torch.randint(vocabulary, (count,), generator=generator).to(self.device)

        return [MicroBatch(tokens(), tokens()) for _ in range(self.case.micro_batches)]

    def step(self, step: int) -> None:
        """One optimizer step."""
        update = self.parts.optimizer.begin(step, self.membership.intact)
        tokens = self.case.micro_batches * self.case.layout.dp * MICRO_BATCH * self.case.shape.sequence
        loss = self.parts.executor.run(self.given[step], 1.0 / tokens, update)
        self.found[f"loss {step}"], self.found[f"norm {step}"] = loss, update.gradient_norm
        if (routed := self.parts.executor.routed) is not None:
            sums = routed.visits.tolist(), routed.dropped.tolist(), routed.losses.tolist()
            self.found[f"routing {step}"] = sums
        if self.case.copies:
            self.copies.append(take(self.parts.optimizer, step + 1))
            if step:
                self.found[f"copy {step}"] = float(self.copies[step].flat.sum())

    def state(self) -> dict[str, Tensor]:
        """Everything that training leaves, by name."""
        numbers = {shard: n for n, shard in enumerate(self.parts.optimizer.shards)}
        return {
            f"{kind} {numbers[shard]} {shard.slices[0].source.name}": tensor
            for kind, shard, tensor in self.parts.optimizer.entries()
        }

    def left(self) -> dict[tuple[int, str], Any]:
        """Losses, norms and a copy of the state, by rank and name."""
        copies = {name: x.detach().cpu().clone() for name, x in self.state().items()}
        return {(self.log.rank, name): value for name, value in {**self.found, **copies}.items()}


def made(case: Case, machine: Machine, log: RankLog, device: torch.device = CPU) -> Ranked:
    """Set a rank up; ``device``: that of its tensors."""
    hosts = [str(rank // 2) for rank in range(case.layout.ranks)] if case.partitions else ()
    mesh = join(case.plan, log.rank, hosts, ModelGroups(machine, log))
    membership = Membership("")
    membership._abort, membership._destroy = lambda: log.abort(), lambda: log.destroy()
    parts = assemble(case.plan, mesh, device, log)
    membership.graph = parts.executor.graph
    return Ranked(case=case, log=log, parts=parts, membership=membership, device=device)


def recorded(
    case: Case, around: Callable[[Ranked], AbstractContextManager[object]] = lambda rank: nullcontext()
) -> tuple[Machine, list[Ranked]]:
    """Set all ranks up, unnoted, then note the case's steps; ``around``: what each runs within."""
    machine = Machine(case.layout.ranks)
    ready: dict[int, Ranked] = {}

    def run(log: RankLog) -> None:
        rank = ready[log.rank] = made(case, machine, log)
        log.begin()
        for step in range(case.steps):
            with around(rank):
                rank.step(step)
        rank.membership.leave()

    with case.cut():
        machine.run(run)
    return machine, [ready[rank] for rank in sorted(ready)]


def left(case: Case) -> dict[Any, Any]:
    """Losses, norms and states of all ranks, in the order in which the step is recorded."""
    return {key: value for rank in recorded(case)[1] for key, value in rank.left().items()}


def faults(case: Case, orders: Sequence[int] = (), expected: dict[Any, Any] | None = None) -> list[str]:
    """All that is wrong with a step: static checks, orders by their seeds, what it should have left."""
    try:
        machine, ranks = recorded(case)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    found = faults_of_logs(machine)
    if expected is not None and not found:
        left = {key: value for rank in ranks for key, value in rank.left().items()}
        found += [f"{key} is not what it should be" for key in differences(expected, left)]
    return found or (faults_of_orders(machine, orders) if orders else [])


@contextmanager
def counting_calls(found: Counter[str], folder: str = OWN) -> Iterator[None]:
    """Count this thread's calls of the project's own Python functions, by their names."""

    def count(frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            found[frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
