"""Braid's own runtime, put together as a rank's worker does, but without Ray and without a configuration."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

from braid.actors.stage.accelerator import accelerator_of
from braid.actors.stage.executor import Executor, MicroBatch
from braid.actors.stage.gradients import GradientBuckets
from braid.actors.stage.kernel_choice import KernelChoice
from braid.actors.stage.mesh import Mesh, build_mesh
from braid.actors.stage.messages import Samples
from braid.actors.stage.model import StageModel
from braid.actors.stage.optimizer import Optimizer, OptimizerSettings, Update
from braid.actors.stage.profiling import Profiler
from braid.actors.stage.step_graph import step_graph
from braid.actors.stage.step_records import StepRecorder
from braid.actors.stage.streams import Streams
from braid.actors.stage.weights import ShardedWeights
from braid.kernels.collectives.primitives import Channel
from braid.scheduling.code import Code
from braid.scheduling.layers import built_in_parts
from braid.scheduling.lowering.lower import Choices, scheduled_parts, training_schedule
from braid.scheduling.operators import Part
from braid.scheduling.schedule import Schedule
from braid.scheduling.setting import Setting
from braid.scheduling.sizes import part_sizes
from braid.scheduling.spec import ModelShape, ParallelLayout, Workload
from braid.scheduling.trace import OverlapNumbers
from braid.scheduling.validate import linked

PATIENCE: Final = timedelta(seconds=120)
SERIAL: Final = "megatron"
"""The schedule without overlap."""
_BUCKET_BYTES: Final = 25 << 20
_BYTES_PER_PARAMETER: Final = 18
"""Weight in bf16, master, gradient and two moments in fp32."""
_ROOM: Final = 0.4
"""Share of a card's memory for those; activations and what else there is take the rest."""
_SKEW: Final = 3


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, on so many tensor-parallel ranks."""

    shape: ModelShape
    micro_batch: int
    """Samples."""
    micro_batches: int
    dtype: torch.dtype
    tp: int = 1
    kernels: str = "torch"
    """As ``train.kernels``."""
    lr: float = 3e-3
    """Learning rate: large models need small ones, or losses grow, and small differences with them."""
    seed: int = 0

    @property
    def settings(self) -> OptimizerSettings:
        """Of AdamW."""
        return OptimizerSettings(
            lr=self.lr,
            min_lr_fraction=1.0,
            warmup_steps=2,
            steps=1000,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.1,
            clip_norm=1.0,
        )

    @property
    def layout(self) -> ParallelLayout:
        """Of the ranks."""
        return ParallelLayout(tp=self.tp)

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.micro_batch * self.micro_batches * self.shape.sequence

    def setting(self, schedule: str) -> Setting:
        """What a planner is told."""
        return Setting(
            model=self.shape,
            layout=self.layout,
            workload=Workload(
                global_batch=self.micro_batch * self.micro_batches, micro_batch=self.micro_batch
            ),
            schedule=schedule,
            dtype={torch.float32: "fp32", torch.bfloat16: "bf16"}[self.dtype],
        )

    @cached_property
    def graphs(self) -> Mapping[str, Part]:
        """Operators of embedding, layer and head."""
        return built_in_parts(part_sizes(self.shape, self.layout, self.micro_batch))

    @property
    def serial(self) -> Schedule:
        """The schedule without overlap, which needs no profile."""
        return training_schedule(self.setting(SERIAL), self.graphs, Choices())

    def code(self, schedule: Schedule) -> Code:
        """What a schedule of this job is run as."""
        kinds = self.shape.kinds
        units = scheduled_parts(
            self.graphs, self.layout, kinds, unit_layers=schedule.unit_layers, partitions=schedule.partitions
        )
        return linked(schedule, self.layout, kinds, units)

    def windows(self, step: int, device: torch.device) -> tuple[Tensor, ...]:
        """Micro-batches of a step, samples x (sequence + 1) token ids each; some are rare, as in text."""
        shape = self.shape
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + step)
        size = self.micro_batch * self.micro_batches, shape.sequence + 1
        uniform = torch.rand(size, generator=generator, dtype=torch.float64)
        tokens = (uniform**_SKEW * shape.vocabulary).long().clamp_(max=shape.vocabulary - 1)
        return tokens.to(device).split(self.micro_batch)

    def fitted(self, memory_bytes: int) -> "Job":
        """With no more layers than a card's memory holds, at least one."""
        allowed = memory_bytes * _ROOM * self.tp / _BYTES_PER_PARAMETER
        layers = self.shape.layers
        while layers > 1 and replace(self.shape, layers=layers).parameters() > allowed:
            layers //= 2
        return replace(self, shape=replace(self.shape, layers=layers))


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one rank saw of a step."""

    loss: float
    """Mean over the tokens, in nats."""
    gradient_norm: float
    overlap: OverlapNumbers


class NoGroups:
    """What one rank asks of others (`braid.actors.stage.mesh.Groups`)."""

    def line(self, axis: str, lines: Sequence[Sequence[int]]) -> None:
        """There is nobody."""

    def channel(self, lines: Sequence[Sequence[int]]) -> Channel:
        """Nobody to send to."""
        raise ValueError("one rank has no neighbours")

    def gather(self, own: Any) -> list[Any]:
        """Its own."""
        return [own]


def lone_mesh(job: Job) -> Mesh:
    """A mesh of one rank, which needs no process group."""
    return build_mesh(job.layout, 0, timeout=PATIENCE, groups=NoGroups())


class RuntimeRank:
    """One rank: model, gradients, AdamW; it runs whatever code of its job it is given."""

    def __init__(self, job: Job, mesh: Mesh, device: torch.device, streams: Streams) -> None:
        self.job, self.mesh, self.device, self._streams = job, mesh, device, streams
        sizes, choice = part_sizes(job.shape, job.layout, job.micro_batch), KernelChoice()
        family = choice.family(job.kernels, sizes, mesh, device, job.dtype)
        self.kernels = choice.told
        """Which were chosen, for people; empty where nothing was to choose."""
        self.model = StageModel(
            shape=job.shape,
            layout=job.layout,
            place=mesh.place,
            sizes=sizes,
            device=device,
            dtype=job.dtype,
            operators=family,
        )
        self.model.initialise(job.seed)
        self._recorder = StepRecorder(streams)
        self._gradients = GradientBuckets(self.model.parameters, mesh, streams, self._recorder, _BUCKET_BYTES)
        self._weights = ShardedWeights(self._gradients.plans, mesh, streams, self._recorder)
        self.optimizer = Optimizer(self._gradients, job.settings, accelerator_of(device))

    def executor(self, code: Code, *, captured: bool = False) -> Executor:
        """Ready to run code; ``captured``: as a CUDA graph, after the first steps."""
        return Executor(
            code=code,
            model=self.model,
            mesh=self.mesh,
            streams=self._streams,
            recorder=self._recorder,
            graph=step_graph(self._streams, self._recorder, captured),
        )

    def step(self, executor: Executor, step: int) -> Step:
        """One optimizer step, on the samples of step ``step``."""
        windows = self.job.windows(step, self.device)
        batches = [MicroBatch(w[:, :-1].reshape(-1), w[:, 1:].reshape(-1)) for w in windows]
        update = Update(self._gradients, self._weights, self.optimizer, step)
        loss_sum = executor.run(batches, 1.0 / self.job.tokens, update)
        records = self._recorder.records()
        return Step(
            loss=loss_sum / self.job.tokens,
            gradient_norm=update.gradient_norm,
            overlap=self._recorder.numbers(records),
        )

    @torch.no_grad()
    def reset(self) -> None:
        """Begin training anew."""
        self.model.initialise(self.job.seed)
        for master, share in zip(self.optimizer.masters, self.optimizer.shares, strict=True):
            master.copy_(share.tensor)
        for kind, tensors in self.optimizer.named_tensors():
            for tensor in tensors if kind != "parameter" else ():
                tensor.zero_()
        self.optimizer.restored(0)
        self._gradients.zero()

    def profile(self, rounds: int) -> Samples:
        """Time operators alone and together, as all ranks do at once; `reset` has to follow."""
        profiler = Profiler(self.job.graphs, self.model, self.mesh, self._streams, self.job.seed)
        square: Callable[[], object] = self._gradients.square
        return profiler.run(rounds, square, lambda: self.optimizer.step(0))

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Global name and local slices of every parameter that this rank updates."""
        for share in self.optimizer.shares:
            for piece in share.slices:
                yield piece.source.name, piece.of_local(share.tensor)
