"""Every point of the partition space of a layer's collectives, executed on four ranks of two hosts.

A layer's passes run through the linker, bindings and real lines, with one collective cut in every way that
`braid.scheduling.planner.tiers.points` has, and with all of them cut. What comes out, and every gradient, is
compared with the layer that is not cut: bit for bit where nothing but rows travels otherwise, else to 1e-12.
"""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from braid.actors.stage.bindings import Binder, Bound
from braid.actors.stage.gloo_streams import HostStreams
from braid.actors.stage.mesh import build_mesh, make_world
from braid.actors.stage.model import StageModel
from braid.actors.stage.parameters import Place
from braid.actors.stage.telemetry import Recorder
from braid.scheduling.analytic import analytic_profile
from braid.scheduling.code import Compute, Frame, Operation, Start, Wait
from braid.scheduling.layers import built_in_parts
from braid.scheduling.link import link
from braid.scheduling.lowering.partitions import with_partitions
from braid.scheduling.lowering.programs import serial_program
from braid.scheduling.operators import Kind, Part
from braid.scheduling.partition import Partition
from braid.scheduling.planner.tiers import points as every_point
from braid.scheduling.schedule import Block, Pass, PassKind, Schedule, Side
from braid.scheduling.sizes import part_sizes
from braid.scheduling.spec import ModelShape, ParallelLayout
from tests.forking import run_forked
from tests.scheduling.cases import GPT, LLAMA
from tests.scheduling.plans import cluster

pytestmark = pytest.mark.slow

LAYOUT: Final = ParallelLayout(tp=4)
HOSTS: Final = ("a", "a", "b", "b")
LIMIT: Final = timedelta(seconds=60)
PASSES: Final = [Pass(kind, 0, 1) for kind in (PassKind.FORWARD, PassKind.BACKWARD)]
SHAPES: Final = {"llama": replace(LLAMA, layers=3), "gpt": replace(GPT, layers=3)}


def layer_of(shape: ModelShape, micro_batch: int, recompute: str = "none") -> Part:
    return built_in_parts(part_sizes(shape, LAYOUT, micro_batch, recompute=recompute))["layer"]


def points(layer: Part) -> Iterator[tuple[Kind, Partition]]:
    """Every scheme of every gather and scatter of both passes, that of the whole collective aside."""
    spec = cluster(nodes=2, gpus=2, inter=1e9)
    profile = analytic_profile(spec, LAYOUT, {"layer": layer}, 8)
    for graph in (layer.forward, layer.backward):
        for op in graph.operators:
            if op.kind not in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER):
                continue
            yield from ((op.kind, one) for one in every_point(layer, graph, op, profile))


class Bench:
    """One of four ranks, with a layer in the middle of a pipeline."""

    def __init__(self, shape: ModelShape, micro_batch: int, rank: int, streams: HostStreams) -> None:
        mesh = build_mesh(LAYOUT, rank, timeout=LIMIT, hosts=HOSTS)
        self._layout = replace(LAYOUT, pp=3)
        self._sizes = part_sizes(shape, LAYOUT, micro_batch)
        self._generator = torch.Generator().manual_seed(rank)
        model = StageModel(
            shape=shape,
            layout=self._layout,
            place=Place(self._layout.mesh, {"pp": 1, "dp": 0, "cp": 0, "tp": rank}),
            sizes=self._sizes,
            device=torch.device("cpu"),
            dtype=torch.float64,
        )
        self._binder = Binder(model, mesh, streams, Recorder(streams))
        ((layer,),) = model.chunks.values()
        self._modules = layer.modules
        for module in self._modules.values():
            for parameter in module.parameters():
                parameter.data = 0.1 * self._random(*parameter.shape)
        self._x, self._dy = (self._random(self._sizes.local_tokens, shape.hidden) for _ in range(2))

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)

    def _bound(self, part: Part) -> Iterator[tuple[Frame, list[Bound]]]:
        programs = {(Side(PassKind.FORWARD, "layer"),): serial_program(part.forward)}
        programs[(Side(PassKind.BACKWARD, "layer"),)] = serial_program(part.backward)
        blocks = tuple(Block((one,)) for one in PASSES)
        schedule = Schedule(name="cut", chunks=3, micro_batches=1, stages=((), blocks, ()), programs=programs)
        parts = {**built_in_parts(self._sizes), "layer": part}
        for stretch in link(schedule, self._layout, ("layer",) * 3, parts).stages[1]:
            (frame,) = stretch.frames
            yield frame, [self._bind(operation, frame) for operation in stretch.operations]

    def _bind(self, operation: Operation, frame: Frame) -> Bound:
        match operation:
            case Compute():
                return self._binder.compute(operation, frame, 1)
            case Start():
                return self._binder.start(operation, frame, 1)
            case Wait():
                return self._binder.wait(operation, frame)
        raise AssertionError(operation)

    @torch.no_grad()
    def run(self, part: Part) -> dict[str, Tensor]:
        """The output, and the gradients of the input and of all parameters."""
        for module in self._modules.values():
            module.gradients = {name: torch.zeros_like(one) for name, one in module.named_parameters()}
        (frame, forward), (_, backward) = self._bound(part)
        registers: list[Any] = [None] * len(frame.names)
        assert frame.input is not None
        assert frame.output_gradient is not None
        registers[frame.input] = self._x
        for operation in forward:
            operation([registers], PASSES)
        output = registers[frame.output]
        registers[frame.output], registers[frame.output_gradient] = None, self._dy
        for operation in backward:
            operation([registers], PASSES)
        left = {n: v for n, v in zip(frame.names, registers, strict=True) if v is not None}
        assert list(left) == ["d.x"], f"{list(left)} are not let go of"
        gradients = {
            f"{name}.{own}": total
            for name, module in self._modules.items()
            for own, total in module.gradients.items()
        }
        return {"y": output, **left, **gradients}


def run_rank(rank: int, port: int, name: str, micro_batch: int, recompute: str) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, timeout=LIMIT)
    make_world("gloo", dist.PrefixStore("one", store), rank, 4, LIMIT)
    streams = HostStreams()
    shape = SHAPES[name]
    bench = Bench(shape, micro_batch, rank, streams)
    layer = layer_of(shape, micro_batch, recompute)
    expected = bench.run(layer)
    assert all(tensor.abs().max() > 0 for tensor in expected.values())
    found = list(points(layer))
    for kind, partition in found:
        cut = with_partitions({"layer": layer}, (partition,), LAYOUT)["layer"]
        assert cut != layer, partition
        # A scatter in stages adds up in another order; products of fewer rows or columns may.
        same_order = not partition.dim and (kind is Kind.ALL_GATHER or not partition.mesh)
        for key, tensor in bench.run(cut).items():
            where = f"{partition}: {key}"
            if same_order:
                assert torch.equal(tensor, expected[key]), where
            scale = expected[key].abs().max().item()
            torch.testing.assert_close(
                tensor,
                expected[key],
                rtol=1e-12,
                atol=1e-12 * max(1, scale),
                msg=lambda text, w=where: w + text,
            )
    if rank == 0:
        print(f"{name}: {len(found)} points")
    streams.close()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(("name", "micro_batch", "recompute"), [("llama", 2, "none"), ("gpt", 3, "full")])
def test_every_point_computes_what_the_whole_does(name: str, micro_batch: int, recompute: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_forked(run_rank, (store.port, name, micro_batch, recompute), nprocs=4)
