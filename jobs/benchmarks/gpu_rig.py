"""What the benchmark on one GPU measures with: layers as one of two tensor-parallel ranks holds them.

Graphs, modules, linked code and executor are training's own. The rank is taken from the middle of a pipeline,
where a chunk is layers and nothing else; its collectives are copies over the link to the host, and what would
arrive from its neighbours is there already.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, cast

import torch
from torch import Tensor

from braid.actors.stage.accelerator import CudaAccelerator, Event, accelerator_of
from braid.actors.stage.bindings import Bound, Registers
from braid.actors.stage.cuda_streams import CudaStreams
from braid.actors.stage.executor import Executor
from braid.actors.stage.gradients import main_gradient_dtype
from braid.actors.stage.host_link import RANKS, HostLink
from braid.actors.stage.mesh import Mesh
from braid.actors.stage.model import PartInstance, StageModel
from braid.actors.stage.parameters import INITIAL_DEVIATION, Place
from braid.actors.stage.streams import Streams, streams_on
from braid.actors.stage.telemetry import Recorder
from braid.kernels.collectives.primitives import Line
from braid.scheduling.layers import built_in_parts
from braid.scheduling.link import link
from braid.scheduling.lowering.lower import with_ends, with_transfers
from braid.scheduling.lowering.programs import Order, own_program, program_of
from braid.scheduling.operators import Part
from braid.scheduling.schedule import (
    Block,
    Direction,
    Pass,
    PassKind,
    Program,
    Receive,
    Schedule,
    Send,
    Side,
    Sides,
    Strand,
)
from braid.scheduling.schedule_text import parse_sides
from braid.scheduling.sizes import part_sizes
from braid.scheduling.spec import ModelShape, ParallelLayout
from braid.scheduling.topology import Topology

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

    def mark(self) -> Event:
        """An event that nobody asks after: of what is recorded there is no progress."""
        return self._record(self._compute)

    def barrier(self) -> None:
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

    @cached_property
    def whole(self) -> ModelShape:
        """A model of which every stage holds ``layers`` layers."""
        return replace(self.shape, layers=_STAGES * self.layers)

    @property
    def place(self) -> int:
        """The stage that the rig is, and the chunk that it holds."""
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
        model = StageModel(
            shape=self.whole,
            layout=self.layout,
            place=self.mesh.place,
            sizes=part_sizes(self.whole, self.layout, micro_batch=1),
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
            parameter.gradient = torch.zeros_like(tensor, dtype=main_gradient_dtype(self.dtype))
        return model

    @property
    def instance(self) -> PartInstance:
        """The first layer's modules."""
        return self.model.chunks[self.place][0]

    @cached_property
    def link(self) -> HostLink:
        """What stands for the tensor-parallel group."""
        return HostLink(self.device, self.seed)

    @property
    def line(self) -> Line:
        """The link, of which layers ask no more than collectives."""
        return cast(Line, self.link)

    @cached_property
    def mesh(self) -> Mesh:
        """Both strands share the link."""
        lines = {"tp": self.line}
        place = Place(self.layout.mesh, {"pp": _MIDDLE, "dp": 0, "cp": 0, "tp": 0})
        rank = self.layout.rank_at(place.position)
        return Mesh(self.layout, rank, place, Topology(self.layout.mesh), lines, channels={}, ends=None)

    @cached_property
    def compute(self) -> "torch.cuda.Stream | None":
        """The compute stream; None on a CPU."""
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    @cached_property
    def streams(self) -> Streams:
        """Streams of programs that run at once; made while `running`."""
        return streams_on(accelerator_of(self.device))

    @cached_property
    def captured(self) -> CapturedStreams:
        """Streams of programs that a graph records; made while `running`."""
        return CapturedStreams(CudaAccelerator(self.device))

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
        return [parameter.gradient for parameter in self.model.parameters]

    def chain(self, pairs: int, orders: Mapping[str, Order]) -> Schedule:
        """A forward pass, paired blocks (forward of the next, backward of the one before), a backward pass.

        On the rig's stage alone; micro-batches take strands by turns. ``orders``: as in a plan, of both
        passes of a layer; without any the passes of a block run one after the other.
        """

        def one(kind: PassKind, micro_batch: int) -> Pass:
            strand = (Strand.ALPHA, Strand.BETA)[micro_batch % 2]
            return Pass(kind, micro_batch, self.place, strand)

        forward, backward = PassKind.FORWARD, PassKind.BACKWARD
        blocks = (
            Block((one(forward, 0),)),
            *(Block((one(forward, n), one(backward, n - 1))) for n in range(1, pairs + 1)),
            Block((one(backward, pairs),)),
        )
        order = tuple(blocks if stage == _MIDDLE else () for stage in range(_STAGES))
        programs: dict[Sides, Program] = {
            (side,): own_program(side, self.parts, trains=True)
            for side in (Side(forward, "layer"), Side(backward, "layer"))
        }
        for text, steps in orders.items():
            sides = parse_sides(text)
            programs[sides] = program_of(sides, self.parts, steps)
        schedule = Schedule(
            name="bench",
            chunks=self.layout.chunks,
            micro_batches=pairs + 1,
            stages=with_transfers(order, self.layout),
            programs=programs,
        )
        return with_ends(schedule, self.layout, self.whole.kinds)

    def stage(self, schedule: Schedule, streams: Streams, recorder: Recorder) -> "LoneStage":
        """The executor of a schedule's middle stage, with copies for collectives."""
        return LoneStage(
            {Direction.FORWARD: self.tokens(), Direction.BACKWARD: self.tokens(seed=3)},
            code=link(schedule, self.layout, self.whole.kinds, self.parts),
            model=self.model,
            mesh=self.mesh,
            streams=streams,
            recorder=recorder,
        )


class LoneStage(Executor):
    """An executor without neighbours: what it receives is always there, what it sends is kept."""

    def __init__(self, arriving: Mapping[Direction, Tensor], **bound: Any) -> None:
        """``arriving``: what every message of a direction holds; the rest as for an `Executor`."""
        self._arriving = arriving
        self.sent: list[Tensor] = []
        """What forward and backward passes gave, in order."""
        super().__init__(**bound)

    def _send(self, sent: Send | Receive, register: int, name: str) -> Bound:
        return lambda frames, passes: self.sent.append(frames[0][register])

    def _sent(self, sent: object, frees: Sequence[int]) -> Bound:
        def run(frames: Sequence[Registers], passes: Sequence[Pass]) -> None:
            for register in frees:
                frames[0][register] = None

        return run

    def _receive(self, received: Send | Receive, register: int) -> Bound:
        x = self._arriving[received.moved.direction]

        def run(frames: Sequence[Registers], passes: Sequence[Pass]) -> None:
            frames[0][register] = x

        return run

    def _received(self, frame: Registers, register: int) -> None:
        """It was there from the begin."""


def first_line(error: BaseException) -> str:
    """An error in one line, for a note on what could not be measured."""
    return str(error).partition("\n")[0] or type(error).__name__
