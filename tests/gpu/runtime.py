"""Braid's own runtime, put together as a rank's worker does, but without Ray and without a configuration."""

import gc
import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from statistics import median
from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor

from braid.actors.controller.combining import combine
from braid.actors.stage.measure.kernel_uses import KernelChoice
from braid.actors.stage.measure.profiling import Profiler
from braid.actors.stage.rank.assembly import Assembly, code_of
from braid.actors.stage.rank.groups import Mesh, build_mesh
from braid.actors.stage.rank.messages import Samples
from braid.actors.stage.run.accelerator import accelerator_of
from braid.actors.stage.run.executor import Executor
from braid.actors.stage.run.micro_batch import MicroBatch
from braid.actors.stage.run.step_graph import step_graph
from braid.actors.stage.state.optimizer import OptimizerSettings
from braid.scheduling.generate.lower import Choices, training_schedule
from braid.scheduling.generate.setting import Setting
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.layers import built_in_parts
from braid.scheduling.model.operators import Part
from braid.scheduling.model.shape import ModelShape, Workload
from braid.scheduling.model.sizes import PartSizes
from braid.scheduling.plan.decide import anything, decide, measured
from braid.scheduling.plan.space import PART_BY_PART
from braid.scheduling.schedule.schedule import Schedule
from braid.scheduling.trace.spans import OverlapNumbers
from tests.gpu.host_link import HostGroups

SERIAL: Final = "megatron"
"""The schedule without overlap."""
SCHEDULES: Final = (SERIAL, "wavelet", "dhelix", "braid")
PATIENCE: Final = timedelta(seconds=120)


def llama(layers: int, sequence: int, vocabulary: int, **widths: int) -> ModelShape:
    """A Llama; by default with the layers of Llama-3-8B (Llama team, 2024, table 3)."""
    sizes = {"hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128, **widths}
    return ModelShape(family="llama", layers=layers, vocabulary=vocabulary, sequence=sequence, **sizes)


TINY: Final = llama(2, 16, 64, hidden=32, ffn=64, heads=4, kv_heads=2, head_dim=8)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained."""

    shape: ModelShape
    micro_batch: int = 1
    micro_batches: int = 4
    dtype: torch.dtype = torch.bfloat16
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    kernels: str = "torch"
    spans: bool = True
    lr: float = 3e-3
    """Large models need a small learning rate, or losses grow, and small differences with them."""

    @property
    def settings(self) -> OptimizerSettings:
        adam = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0}
        return OptimizerSettings(lr=self.lr, min_lr_fraction=1.0, warmup_steps=2, steps=1000, **adam)

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.micro_batches * self.shape.sequence

    def setting(self, schedule: str) -> Setting:
        """What a planner is told."""
        work = Workload(global_batch=self.micro_batch * self.micro_batches, micro_batch=self.micro_batch)
        dtype = "bf16" if self.dtype is torch.bfloat16 else "fp32"
        return Setting(model=self.shape, layout=self.layout, workload=work, schedule=schedule, dtype=dtype)

    @property
    def sizes(self) -> PartSizes:
        return PartSizes(self.shape, self.layout, self.micro_batch)

    @cached_property
    def graphs(self) -> Mapping[str, Part]:
        """Operators of embedding, layer and head."""
        return built_in_parts(self.sizes)

    @property
    def serial(self) -> Schedule:
        """The schedule without overlap, which needs no profile."""
        return training_schedule(self.setting(SERIAL), self.graphs, Choices())

    def decided(self, samples: Sequence[Samples], *, free: bool) -> dict[str, tuple[Schedule, int]]:
        """Every schedule, and what the planner expects of a step in ns, from measurements of all ranks.

        ``free``: as if operators and transfers cost each other nothing, so that all comes together that can.
        """
        profile = combine(samples, self.graphs)
        if free:
            effects = dict.fromkeys(profile.oef, 1.0)
            profile = replace(profile, oef=effects, slowdowns={}, issue_ns={}, take_ns={})
        found, bench_of = {}, measured(self.graphs, profile)
        for name in SCHEDULES:
            taken = decide([self.setting(name)], bench_of, anything, PART_BY_PART)[0]
            found[name] = taken.code.schedule, round(taken.step_ns)
        return found

    def windows(self, step: int, device: torch.device) -> tuple[Tensor, ...]:
        """Micro-batches of a step, samples x (sequence + 1) token ids each; some are rare, as in text."""
        size = self.micro_batch * self.micro_batches, self.shape.sequence + 1
        uniform = torch.rand(size, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        return (uniform**3 * self.shape.vocabulary).long().to(device).split(self.micro_batch)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one rank saw of a step: mean loss in nats, and the host's time until the device was done."""

    loss: float
    norm: float
    seconds: float
    overlap: OverlapNumbers


class LocalRank:
    """One rank: model, gradients, AdamW; it runs whatever schedule of its job it is given."""

    def __init__(self, job: Job, mesh: Mesh, device: torch.device) -> None:
        self.job, self.mesh, self.device, choice = job, mesh, device, KernelChoice()
        self.parts = Assembly(
            *(mesh, device, accelerator_of(device)),
            **{name: getattr(job, name) for name in ("sizes", "settings", "dtype", "kernels", "spans")},
            parts=job.graphs,
            schedule=job.serial,
            choice=choice,
        )
        self.streams, self.recorder = self.parts.streams, self.parts.recorder
        self.optimizer = self.parts.optimizer
        self.kernels = choice.told
        """Which were chosen, for people; empty where nothing was to choose."""

    def executor(self, schedule: Schedule, *, captured: bool = False) -> Executor:
        """Ready to run a schedule; ``captured``: as a CUDA graph, after the first two steps."""
        groups, ranks = self.mesh.groups, self.job.layout.ranks
        assert groups is not None
        graph = step_graph(self.streams, self.recorder, captured, ranks, groups.gather)
        code = code_of(schedule, self.parts.sizes, self.job.graphs, self.job.layout)
        return self.parts.bind(code, recorder=self.recorder, graph=graph)

    def step(self, executor: Executor, step: int) -> Step:
        """One optimizer step, on the samples of step ``step``."""
        at_end = self.mesh.position["pp"] in (0, self.job.layout.pp - 1)
        windows = ((window[:, :-1], window[:, 1:]) for window in self.job.windows(step, self.device))
        batches = [MicroBatch(x.reshape(-1), y.reshape(-1)) if at_end else None for x, y in windows]
        update = self.parts.optimizer.begin(step)
        synchronise(self.device)
        begin = perf_counter()
        loss = executor.run(batches, 1.0 / self.job.tokens, update) / self.job.tokens
        synchronise(self.device)
        seconds = perf_counter() - begin
        overlap = self.recorder.numbers(self.recorder.records())
        return Step(loss=loss, norm=update.gradient_norm, seconds=seconds, overlap=overlap)

    def in_place_us(self) -> dict[str, float]:
        """The median time of every operator and transfer in the newest step, in microseconds."""
        times: dict[str, list[float]] = defaultdict(list)
        labels = self.recorder.labels.all
        for row in self.recorder.records():
            times[labels[row["label"]].key].append((row["end_ns"] - row["start_ns"]) / 1e3)
        return {key: float(median(values)) for key, values in times.items()}

    @torch.no_grad()
    def reset(self) -> None:
        """Begin training anew."""
        self.parts.model.initialise(0)
        for master, shard in zip(self.optimizer.masters, self.optimizer.shards, strict=True):
            master.copy_(shard.tensor)
        for kind, _, tensor in self.optimizer.entries():
            if kind != "parameter":
                tensor.zero_()
        self.optimizer.restored(0)
        self.parts.buckets.zero()

    def profile(self, rounds: int) -> Samples:
        """Time operators alone and together, as all ranks do at once; training begins anew afterwards."""
        profiler = Profiler(self.job.graphs, self.parts.model, self.mesh, self.streams)
        samples = profiler.run(rounds, self.parts.buckets.square, self.optimizer.step)
        self.reset()
        return samples

    def trained(self, executor: Executor, steps: int) -> dict[str, Any]:
        """Losses, gradient norms and a digest of this rank's weights after so many steps from the begin."""
        self.reset()
        done = [self.step(executor, number) for number in range(steps)]
        weights = b"".join(master.detach().cpu().numpy().tobytes() for master in self.optimizer.masters)
        found = {"losses": [one.loss for one in done], "norms": [one.norm for one in done]}
        return {**found, "weights": hashlib.sha256(weights).hexdigest()[:16]}

    def named(self) -> dict[str, Tensor]:
        """A copy of every parameter that this rank updates, on the host, by global name."""
        pieces = [(one, shard.tensor) for shard in self.optimizer.shards for one in shard.slices]
        return {one.source.name: one.of_local(tensor).detach().cpu().clone() for one, tensor in pieces}


def host_rank(job: Job, device: torch.device, rank: int = 0, *, free: bool = False) -> LocalRank:
    """One rank of a job, alone on this machine: what the others give comes over `HostGroups`' link."""
    groups = HostGroups(device, rank, free)
    return LocalRank(job, build_mesh(job.layout, rank, timeout=PATIENCE, groups=groups), device)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget(device: torch.device) -> None:
    """Give back the memory of what is no longer used."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """Most memory in use since `forget`; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
