"""A layer whose gathers and GEMMs run in pieces, bound and executed, against the same layer as a whole.

Collectives are emulated: rank r holds r + 1 times what this rank holds, so rows in a wrong place show.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from braid.actors.stage.bindings import Binder, Bound
from braid.actors.stage.gloo_streams import HostStreams
from braid.actors.stage.mesh import Mesh
from braid.actors.stage.model import StageModel
from braid.actors.stage.parameters import Place
from braid.actors.stage.telemetry import Recorder
from braid.kernels.collectives.primitives import Launch
from braid.scheduling.code import Compute, Frame, Operation, Start, Wait
from braid.scheduling.layers import built_in_parts, layer_part
from braid.scheduling.link import link
from braid.scheduling.lowering.pieces import gathers_of, in_pieces
from braid.scheduling.lowering.programs import program_in_pieces
from braid.scheduling.lowering.recompute import with_recompute
from braid.scheduling.operators import Graph, Part
from braid.scheduling.schedule import Block, Pass, PassKind, Schedule, Side
from braid.scheduling.sizes import part_sizes
from braid.scheduling.spec import ModelShape, ParallelLayout
from braid.scheduling.topology import Topology
from tests.scheduling.cases import GPT, LLAMA, MICRO_BATCH

TP = 4
STAGES, MIDDLE = 3, 1
PASSES = [Pass(PassKind.FORWARD, 0, MIDDLE)]
"""What spans are labelled with."""


class Done:
    """What has happened when it is issued."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


class Emulated:
    """The line of all ranks."""

    def all_gather(self, x: Tensor) -> Launch:
        return Launch(torch.cat([(rank + 1) * x for rank in range(TP)]), Done)

    def reduce_scatter(self, x: Tensor) -> Launch:
        return Launch(torch.stack(x.chunk(TP)).sum(0), Done)


@pytest.fixture
def streams() -> Iterator[HostStreams]:
    streams = HostStreams()
    yield streams
    streams.close()


class Bench:
    """One rank in the middle of a pipeline, with one layer."""

    def __init__(self, shape: ModelShape, streams: HostStreams, seed: int) -> None:
        self._layout = ParallelLayout(tp=TP, pp=STAGES)
        self.sizes = part_sizes(shape, self._layout, MICRO_BATCH)
        self.shape = replace(shape, layers=STAGES)
        self._generator = torch.Generator().manual_seed(seed)
        place = Place(self._layout.mesh, {"pp": MIDDLE, "dp": 0, "cp": 0, "tp": 0})
        lines: Any = {"tp": Emulated()}
        rank = self._layout.rank_at(place.position)
        mesh = Mesh(self._layout, rank, place, Topology(self._layout.mesh), lines, channels={}, ends=None)
        model = StageModel(
            shape=self.shape,
            layout=self._layout,
            place=place,
            sizes=self.sizes,
            device=torch.device("cpu"),
            dtype=torch.float64,
        )
        self._binder = Binder(model, mesh, streams, Recorder(streams))
        ((layer,),) = model.chunks.values()
        self._modules = layer.modules
        for module in self._modules.values():
            for parameter in module.parameters():
                parameter.data = 0.1 * self.random(*parameter.shape)
        self.x, self.dy = (self.random(self.sizes.local_tokens, shape.hidden) for _ in range(2))

    def random(self, *shape: int) -> Tensor:
        """Double precision, normal."""
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)

    def bound(self, part: Part) -> Iterator[tuple[Frame, list[Bound]]]:
        """The operations of the forward and of the backward pass."""
        passes = [Pass(kind, 0, MIDDLE) for kind in (PassKind.FORWARD, PassKind.BACKWARD)]
        graphs = (part.forward, part.backward)
        blocks = tuple(Block((one,)) for one in passes)
        schedule = Schedule(
            name="pieces",
            chunks=STAGES,
            micro_batches=1,
            stages=tuple(blocks if stage == MIDDLE else () for stage in range(STAGES)),
            programs={
                (Side(one.kind, "layer"),): program_in_pieces(graph)
                for one, graph in zip(passes, graphs, strict=True)
            },
        )
        parts = {**built_in_parts(self.sizes), "layer": part}
        code = link(schedule, self._layout, self.shape.kinds, parts)
        for stretch in code.stages[MIDDLE]:
            (frame,) = stretch.frames
            yield frame, [self._bind(operation, frame) for operation in stretch.operations]

    def _bind(self, operation: Operation, frame: Frame) -> Bound:
        match operation:
            case Compute():
                return self._binder.compute(operation, MIDDLE)
            case Start():
                return self._binder.start(operation, frame, MIDDLE)
            case Wait():
                return self._binder.wait(operation)
        raise AssertionError(operation)

    @torch.no_grad()
    def run(self, part: Part) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What is there after the forward pass, and after the backward pass: gradients by name."""
        for module in self._modules.values():
            module.gradients = {name: torch.zeros_like(one) for name, one in module.named_parameters()}
        (frame, forward), (_, backward) = self.bound(part)
        registers: list[Any] = [None] * len(frame.names)
        assert frame.input is not None
        assert frame.output_gradient is not None
        registers[frame.input] = self.x
        for operation in forward:
            operation([registers], PASSES)
        saved = _held(frame, registers)
        registers[frame.output], registers[frame.output_gradient] = None, self.dy
        for operation in backward:
            operation([registers], PASSES)
        gradients = {
            f"{name}.{own}": total
            for name, module in self._modules.items()
            for own, total in module.gradients.items()
        }
        left = _held(frame, registers)
        assert list(left) == ["d.x"], "every value is let go of"
        return saved, {**gradients, **left}


def _held(frame: Frame, registers: list[Any]) -> dict[str, Any]:
    """Values by name, in the order of names."""
    held = zip(frame.names, registers, strict=True)
    return dict(sorted((name, value) for name, value in held if value is not None))


def cut(part: Part, ways: int) -> Part:
    return in_pieces(part, ways, gathers_of(part))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("ways", [2, 4, 8])
def test_pieces_compute_what_the_whole_does(
    ways: int, shape: ModelShape, recompute: str, streams: HostStreams
) -> None:
    """To rounding: a GEMM of few rows may add in another order than one of many."""
    bench = Bench(shape, streams, seed=ways)
    part = with_recompute(layer_part(bench.sizes), recompute)
    assert bench.sizes.local_tokens == 8
    whole, in_turn = bench.run(part), bench.run(cut(part, ways))
    for expected, found in zip(whole, in_turn, strict=True):
        assert list(found) == list(expected)
        for name, tensor in expected.items():
            if isinstance(tensor, Tensor):
                torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12, msg=name)
                assert tensor.abs().max() > 0


def test_operators_that_need_more_than_what_was_gathered_are_refused(streams: HostStreams) -> None:
    bench = Bench(LLAMA, streams, seed=0)
    part = cut(layer_part(bench.sizes), 2)
    for reads, writes in (((), ("x",)), (("x",), ())):
        operators = tuple(
            replace(op, reads=(*op.reads, *reads), writes=(*op.writes, *writes))
            if op.name == "qkv.1of2"
            else op
            for op in part.forward.operators
        )
        wrong = replace(part, forward=Graph(operators=operators))
        with pytest.raises(
            ValueError, match=r"^operator qkv\.1of2 of layer 1 reads .* can run in pieces: use"
        ):
            next(bench.bound(wrong))
