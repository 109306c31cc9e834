"""A layer whose gathers and GEMMs run in chunks, bound and executed, against the same layer in one piece.

Collectives are emulated: rank r holds r + 1 times what this rank holds, so rows in a wrong place show.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from braid.actors.stage.bindings import COLLECTIVES, Binder
from braid.actors.stage.layers import ModuleContext, TransformerLayer
from braid.actors.stage.mesh import Mesh
from braid.actors.stage.model import PartInstance
from braid.actors.stage.streams import HostStreams
from braid.actors.stage.telemetry import Recorder
from braid.kernels.collectives.primitives import Launch
from braid.scheduling.layers import part_sizes, transformer_layer
from braid.scheduling.lowering.programs import chunked_program
from braid.scheduling.lowering.recompute import with_recompute
from braid.scheduling.lowering.split import gathers_of, split_collectives
from braid.scheduling.operators import Graph, Kind, Part
from braid.scheduling.schedule import Block, Direction, Strand
from braid.scheduling.spec import ModelShape, ParallelLayout
from tests.scheduling.cases import GPT, LLAMA, MICRO_BATCH

TP = 4
BLOCK = Block(Direction.FORWARD, 0, 0)


class Done:
    """What has happened when it is issued."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


def gather(x: Tensor, group: Any) -> Launch:
    return Launch(torch.cat([(rank + 1) * x for rank in range(TP)]), Done)


def scatter(x: Tensor, group: Any) -> Launch:
    return Launch(torch.stack(x.chunk(TP)).sum(0), Done)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostStreams]:
    monkeypatch.setitem(COLLECTIVES, Kind.ALL_GATHER, gather)
    monkeypatch.setitem(COLLECTIVES, Kind.REDUCE_SCATTER, scatter)
    streams = HostStreams()
    yield streams
    streams.close()


class Bench:
    """One rank with one layer."""

    def __init__(self, shape: ModelShape, streams: HostStreams, seed: int) -> None:
        layout = ParallelLayout(tp=TP)
        self.sizes = part_sizes(shape, layout, MICRO_BATCH)
        self.shape = shape
        self._generator = torch.Generator().manual_seed(seed)
        lines: Any = {("tp", Strand.ALPHA): object()}
        mesh = Mesh(layout=layout, rank=0, position={"tp": 0}, lines=lines, channels={}, ends=None)
        self.binder = Binder(mesh, streams, Recorder(streams), 8)
        context = ModuleContext(sizes=self.sizes, tp_rank=0, device=torch.device("cpu"), dtype=torch.float64)
        entries = TransformerLayer().modules(context, 0)
        self.layer = PartInstance(
            name="layer", index=0, modules={name: entry.module for name, entry in entries.items()}
        )
        for module in self.layer.modules.values():
            for parameter in module.parameters():
                parameter.data = 0.1 * self.random(*parameter.shape)
        self.x, self.dy = (self.random(self.sizes.local_tokens, shape.hidden) for _ in range(2))

    def random(self, *shape: int) -> Tensor:
        """Double precision, normal."""
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)

    @torch.no_grad()
    def run(self, part: Part) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What is there after the forward pass, and after the backward pass: gradients by name."""
        parameters = {
            f"{name}.{own}": parameter
            for name, module in self.layer.modules.items()
            for own, parameter in module.named_parameters()
        }
        for parameter in parameters.values():
            parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
        values: dict[str, Any] = {"x": self.x}
        for direction, graph in ((Direction.FORWARD, part.forward), (Direction.BACKWARD, part.backward)):
            if direction is Direction.BACKWARD:
                saved = dict(values)
                del values[part.output]
                values[f"d.{part.output}"] = self.dy
            for action in self.binder.bind(chunked_program(graph), part, self.layer, direction, True):
                action(values, BLOCK)
        gradients = {name: parameter.main_grad.clone() for name, parameter in parameters.items()}  # type: ignore[attr-defined]
        assert list(values) == ["d.x"], "every value is let go of"
        return saved, {**gradients, "d.x": values["d.x"]}


def in_chunks(part: Part, ways: int) -> Part:
    return split_collectives(part, ways, gathers_of(part))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("ways", [2, 4, 8])
def test_chunks_compute_what_the_whole_does(
    ways: int, shape: ModelShape, recompute: str, streams: HostStreams
) -> None:
    """To rounding: a GEMM of few rows may add in another order than one of many."""
    bench = Bench(shape, streams, seed=ways)
    part = with_recompute(transformer_layer(bench.sizes), recompute)
    assert bench.sizes.local_tokens == 8
    whole, chunked = bench.run(part), bench.run(in_chunks(part, ways))
    for expected, found in zip(whole, chunked, strict=True):
        assert list(found) == list(expected)
        for name, tensor in expected.items():
            if isinstance(tensor, Tensor):
                torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12, msg=name)
                assert tensor.abs().max() > 0


def test_operators_that_need_more_than_what_was_gathered_are_refused(streams: HostStreams) -> None:
    bench = Bench(LLAMA, streams, seed=0)
    part = in_chunks(transformer_layer(bench.sizes), 2)
    for reads, writes in (((), ("qkv.out.2.1of2",)), (("x",), ())):
        operators = tuple(
            replace(op, reads=(*op.reads, *reads), writes=(*op.writes, *writes))
            if op.name == "qkv.1of2"
            else op
            for op in part.forward.operators
        )
        wrong = replace(part, forward=Graph(operators=operators))
        with pytest.raises(
            ValueError, match=r"^operator qkv\.1of2 of layer 0 reads .* can run in chunks: use"
        ):
            bench.binder.bind(
                chunked_program(wrong.forward), wrong, bench.layer, Direction.FORWARD, trains=True
            )
