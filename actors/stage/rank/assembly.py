"""Assembles one rank from a run's plan, for workers, for tests on a simulated CUDA machine and for
measurements on one GPU."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch

from braid.actors.stage.measure.kernel_uses import KernelChoice
from braid.actors.stage.measure.telemetry import Recorder
from braid.actors.stage.measure.torch_profile import Around
from braid.actors.stage.model.layers import LayerDefinition, load_layers
from braid.actors.stage.model.model import StageModel
from braid.actors.stage.model.routing import Routing
from braid.actors.stage.rank.groups import Groups, Mesh, build_mesh
from braid.actors.stage.rank.messages import RunPlan
from braid.actors.stage.run.accelerator import Accelerator
from braid.actors.stage.run.cuda_streams import CudaStreams
from braid.actors.stage.run.executor import Executor
from braid.actors.stage.run.gloo_streams import HostStreams
from braid.actors.stage.run.step_graph import step_graph
from braid.actors.stage.run.streams import Streams
from braid.actors.stage.state.buckets import RankBuckets
from braid.actors.stage.state.optimizer import Optimizer, OptimizerSettings, optimizer_settings
from braid.scheduling.generate.lower import scheduled_parts
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.layers import model_parts
from braid.scheduling.model.operators import Part
from braid.scheduling.model.sizes import PartSizes
from braid.scheduling.schedule.code import Code
from braid.scheduling.schedule.schedule import Schedule
from braid.scheduling.schedule.text import parse
from braid.scheduling.schedule.validate import linked
from braid.scheduling.trace.arrays import IntArray

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


class Assembly:
    """The objects that one rank trains with."""

    def __init__(
        self,
        mesh: Mesh,
        device: torch.device,
        accelerator: Accelerator | None,
        *,
        sizes: PartSizes,
        parts: Mapping[str, Part],
        schedule: Schedule,
        settings: OptimizerSettings,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype | None = None,
        deterministic: bool = False,
        layers: Mapping[str, LayerDefinition] | None = None,
        kernels: str = "torch",
        choice: KernelChoice | None = None,
        seed: int = 0,
        captured: bool | Literal["auto"] = False,
        spans: bool = True,
        solo_ns: Mapping[str, int] | None = None,
        around: Around | None = None,
    ) -> None:
        """Assemble a rank; all ranks call this together, since they choose kernels together.

        ``accelerator`` has the streams of ``device``; None on a CPU. ``layers``: the user's own layers, by
        kind. ``choice`` stores the kernels that earlier calls chose. ``solo_ns``: times of operators run
        alone, for the recorder of spans. ``around``: runs operations inside of ranges with their names.
        """
        self.mesh, self.sizes, self.parts = mesh, sizes, parts
        self.model_of = partial(
            StageModel,
            shape=sizes.shape,
            layout=mesh.layout,
            sizes=sizes,
            dtype=dtype,
            layers=layers,
            operators=(choice or KernelChoice()).family(kernels, sizes, mesh, device, dtype),
        )
        """Makes this run's model for a ``place`` in the mesh and a ``device``."""
        self.model = self.model_of(place=mesh.place, device=device)
        self.model.initialise(seed)
        self.streams: Streams = HostStreams() if accelerator is None else CudaStreams(accelerator)
        self.recorder = Recorder(self.streams, solo_ns, recording=spans)
        self.buckets = RankBuckets(
            *(self.model.parameters, mesh, self.streams, self.recorder),
            deterministic=deterministic,
            reduce_dtype=reduce_dtype,
        )
        self.optimizer = Optimizer(self.buckets, settings, accelerator)
        self.code = code_of(schedule, sizes, parts, mesh.layout)
        """The training schedule, linked for this layout, which `executor` runs."""
        assert mesh.groups is not None
        self.executor = self.bind(
            self.code,
            recorder=self.recorder,
            graph=step_graph(self.streams, self.recorder, captured, mesh.layout.ranks, mesh.groups.gather),
            routing=Routing(self.model) if sizes.shape.experts else None,
            around=around,
        )

    def bind(self, code: Code, **how: Any) -> Executor:
        """Return an executor of the given code; ``how``: further keywords of `Executor`."""
        return Executor(
            code=code, model=self.model, mesh=self.mesh, streams=self.streams, buckets=self.buckets, **how
        )

    def told_along(self, axis: str, values: IntArray) -> IntArray:
        """Gather 64-bit integers (n, ...) of every rank along an axis; return an array (ranks,
        *values.shape).

        All ranks along the axis call this with arrays of one shape. Errors of the collective are raised.
        """
        sent = torch.from_numpy(values).to(self.model.context.device)
        stream, launch = self.mesh.stream(axis), self.mesh.line(axis).all_gather(sent)
        transfer = self.streams.start(stream, launch, awaited_next=True)
        told: IntArray = self.streams.result_of(transfer).view(-1, *values.shape).cpu().numpy()
        return told


def join(plan: RunPlan, rank: int, hosts: Sequence[str], groups: Groups) -> Mesh:
    """Make and connect a run's mesh, all ranks together. ``hosts``: of each rank; empty for one host."""
    layout = plan.config.layout()
    mesh = build_mesh(
        layout,
        rank,
        tied_ends=plan.shape.tied_head and layout.ends_apart,
        timeout=timedelta(seconds=plan.config.cluster.group_timeout_s),
        hosts=hosts,
        groups=groups,
    )
    mesh.warm_up()
    return mesh


def assemble(
    plan: RunPlan,
    mesh: Mesh,
    device: torch.device,
    accelerator: Accelerator | None,
    kernels: KernelChoice | None = None,
    around: Around | None = None,
) -> Assembly:
    """Assemble a rank from the plan of a run; all ranks call this together (see `Assembly`)."""
    config, train = plan.config, plan.config.train
    definitions = load_layers(config.model.own_layers)
    sizes = config.sizes(plan.shape)
    return Assembly(
        mesh,
        device,
        accelerator,
        sizes=sizes,
        parts=model_parts(sizes, {kind: definition.graph for kind, definition in definitions.items()}),
        schedule=parse(plan.schedule),
        settings=optimizer_settings(config),
        dtype=DTYPES[train.dtype],
        reduce_dtype=DTYPES[train.reduce_dtype] if train.reduce_dtype else None,
        deterministic=train.deterministic_reduction,
        layers=definitions,
        kernels=train.kernels,
        choice=kernels,
        seed=train.seed,
        # Documents change the operations; a drill must reach its instruction on one rank alone.
        captured=False if plan.shape.documents or plan.faults else config.overlap.cuda_graphs,
        spans=config.telemetry.spans,
        solo_ns=plan.solo_ns,
        around=around,
    )


def code_of(schedule: Schedule, sizes: PartSizes, parts: Mapping[str, Part], layout: ParallelLayout) -> Code:
    """Link a schedule over the model's parts and return the code of all stages."""
    units = scheduled_parts(
        parts, layout, sizes.kinds, unit_layers=schedule.unit_layers, partitions=schedule.partitions
    )
    return linked(schedule, layout, sizes.kinds, units)
