"""What the benchmark on one GPU measures with: layers as one of two tensor-parallel ranks holds them.

The graphs, modules, binder and block runner are the executor's own. The rank is taken from the middle of a
pipeline, where a chunk is layers and nothing else, and its collectives are copies over the link to the host.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, cast

import torch
from torch import Tensor

from braid.actors.stage.bindings import Binder
from braid.actors.stage.blocks import BlockRunner
from braid.actors.stage.gradients import main_gradient_dtype
from braid.actors.stage.host_link import HOST_COLLECTIVES, RANKS, HostLink
from braid.actors.stage.layers import INITIAL_DEVIATION
from braid.actors.stage.mesh import Mesh
from braid.actors.stage.model import PartInstance, StageModel
from braid.actors.stage.streams import CudaStreams, Streams, device_streams
from braid.actors.stage.telemetry import Recorder
from braid.kernels.collectives.primitives import Line
from braid.scheduling.layers import built_in_parts, part_sizes
from braid.scheduling.lowering.lower import serial_programs
from braid.scheduling.lowering.programs import PairingDecision, pair_program
from braid.scheduling.operators import Part
from braid.scheduling.schedule import Schedule, Strand
from braid.scheduling.spec import ModelShape, ParallelLayout

LEAD_CYCLES: Final = 2_000_000
"""About a millisecond in which a GPU spins while the host issues what is to be timed."""

_MIDDLE, _STAGES = 1, 3


def llama_8b(sequence: int) -> ModelShape:
    """Llama-3-8B (Llama team, 2024, table 3), of whose layers the benchmark takes as many as it needs."""
    return ModelShape(
        family="llama",
        hidden=4096,
        ffn=14336,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocabulary=128256,
        sequence=sequence,
        rotary_base=500000.0,
    )


def tiny_layer(sequence: int) -> ModelShape:
    """A layer that any processor runs at once; its times mean nothing."""
    return ModelShape(
        family="llama",
        hidden=32,
        ffn=64,
        layers=32,
        heads=4,
        kv_heads=2,
        head_dim=8,
        vocabulary=64,
        sequence=sequence,
    )


class CapturedStreams(CudaStreams):
    """Streams for programs that a CUDA graph records: the host waits for nothing."""

    def synchronise(self) -> None:
        """Nothing: before a barrier compute has waited for all transfers, and later ones wait for compute."""


@dataclass(frozen=True)
class Rig:
    """A chunk of ``layers`` layers of a model on one device, micro-batches of one sample.

    Everything runs in `running`: autograd computes a gradient on the stream of its forward operator, so all
    compute, captured or not, has to be on one stream.
    """

    shape: ModelShape
    device: torch.device
    dtype: torch.dtype
    layers: int = 1
    tp: int = RANKS
    seed: int = 0

    @cached_property
    def layout(self) -> ParallelLayout:
        """Three stages, of which the rig is the middle one."""
        return ParallelLayout(tp=self.tp, pp=_STAGES)

    @property
    def chunk(self) -> int:
        """The chunk that the rig holds."""
        return _MIDDLE

    @cached_property
    def parts(self) -> Mapping[str, Part]:
        """The layer's graphs."""
        sizes = part_sizes(self.shape, self.layout, micro_batch=1)
        return {"layer": built_in_parts(sizes)["layer"]}

    @property
    def layer(self) -> Part:
        """The layer's graphs."""
        return self.parts["layer"]

    @cached_property
    def model(self) -> StageModel:
        """The layers with random weights and cleared gradients."""
        position = {"pp": _MIDDLE, "dp": 0, "cp": 0, "tp": 0}
        model = StageModel(
            shape=self.shape,
            layout=self.layout,
            position=position,
            sizes=part_sizes(self.shape, self.layout, micro_batch=1),
            device=self.device,
            dtype=self.dtype,
        )
        generator = torch.Generator(self.device).manual_seed(self.seed)
        for parameter in model.parameters:
            tensor = parameter.tensor
            with torch.no_grad():
                if parameter.decays:
                    tensor.normal_(0.0, INITIAL_DEVIATION, generator=generator)
                else:
                    tensor.fill_(1.0)
            gradient = torch.zeros_like(tensor, dtype=main_gradient_dtype(self.dtype))
            tensor.main_grad = gradient  # type: ignore[attr-defined]
        return model

    @property
    def instance(self) -> PartInstance:
        """The first layer's modules."""
        return self.model.chunks[self.chunk][0]

    @cached_property
    def link(self) -> HostLink:
        """What stands for the tensor-parallel group."""
        return HostLink(self.device, self.seed)

    @cached_property
    def mesh(self) -> Mesh:
        """Both strands share the link."""
        lines = {("tp", strand): cast(Line, self.link) for strand in Strand}
        position = {"pp": _MIDDLE, "dp": 0, "cp": 0, "tp": 0}
        rank = self.layout.rank_at(position)
        return Mesh(layout=self.layout, rank=rank, position=position, lines=lines, channels={}, ends=None)

    @cached_property
    def compute(self) -> "torch.cuda.Stream | None":
        """The compute stream; None on a CPU."""
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    @cached_property
    def streams(self) -> Streams:
        """Streams of programs that run at once; made while `running`."""
        return device_streams(self.device)

    @cached_property
    def captured(self) -> CapturedStreams:
        """Streams of programs that a graph records; made while `running`."""
        return CapturedStreams(self.device)

    @contextmanager
    def running(self) -> Iterator[None]:
        """The compute stream is the current one, and nothing is recorded by autograd."""
        with torch.no_grad(), torch.cuda.stream(self.compute) if self.compute else nullcontext():
            yield
            self.synchronise()

    def synchronise(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def hardware(self) -> str:
        """What computes, in words."""
        on_gpu = self.device.type == "cuda"
        return (
            torch.cuda.get_device_name(self.device) if on_gpu else f"CPU, {torch.get_num_threads()} thread(s)"
        )

    def lead(self) -> None:
        """Keep the device busy while the host issues what is timed: launches are no part of the time."""
        if self.device.type == "cuda":
            torch.cuda._sleep(LEAD_CYCLES)

    def between(self, begin: Any, end: Any) -> int:
        """Nanoseconds between two marks of `streams`."""
        return self.streams.nanoseconds(end) - self.streams.nanoseconds(begin)

    def timed(self, run: Callable[[], object]) -> int:
        """Nanoseconds of the device for what is issued on the compute stream; its results are dropped."""
        self.synchronise()
        self.lead()
        begin = self.streams.mark()
        run()
        return self.between(begin, self.streams.mark())

    def tokens(self, seed: int = 0) -> Tensor:
        """Random activations (or gradients) of one micro-batch, local tokens x hidden."""
        generator = torch.Generator(self.device).manual_seed(self.seed + seed)
        size = (self.model.context.sizes.local_tokens, self.shape.hidden)
        return torch.randn(size, generator=generator, device=self.device, dtype=self.dtype)

    def gradients(self) -> list[Tensor]:
        """The buffers of all weight gradients."""
        tensors = [parameter.tensor for parameter in self.model.parameters]
        return [tensor.main_grad for tensor in tensors]  # type: ignore[attr-defined]

    def schedule(self, decision: PairingDecision | None) -> Schedule:
        """Programs of the layer alone, and of two strands together if a decision says how."""
        layer, pairs = self.layer, {}
        if decision is not None:
            pairs["layer", "layer"] = pair_program(layer.forward, layer.backward, decision)
        return Schedule(
            name="bench",
            chunks=self.layout.chunks,
            micro_batches=1,
            stages=(),
            programs=serial_programs(self.parts, trains=True),
            pairs=pairs,
        )

    def runner(self, decision: PairingDecision | None, streams: Streams) -> tuple[BlockRunner, Recorder]:
        """The executor of such blocks, with copies for collectives."""
        recorder = Recorder(streams)
        itemsize = self.dtype.itemsize
        binder = Binder(self.mesh, streams, recorder, itemsize, HOST_COLLECTIVES)
        runner = BlockRunner(
            schedule=self.schedule(decision),
            parts=self.parts,
            model=self.model,
            binder=binder,
            streams=streams,
        )
        return runner, recorder


def first_line(error: BaseException) -> str:
    """An error in one line, for a note on what could not be measured."""
    return str(error).partition("\n")[0] or type(error).__name__
