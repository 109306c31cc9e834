"""Memory and FLOPs as planned, against the real model and the real executor.

Tensor-parallel ranks have torch's ``fake`` process groups here: collectives return at once with results of
the right shape and any content, which is all that memory depends on.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from braid.actors.stage.bindings import Binder
from braid.actors.stage.blocks import MicroBatch
from braid.actors.stage.executor import Executor
from braid.actors.stage.gradients import GradientBuckets
from braid.actors.stage.held import MemoryMeter, held_bytes
from braid.actors.stage.mesh import Mesh, build_mesh
from braid.actors.stage.model import StageModel
from braid.actors.stage.optimizer import Optimizer, OptimizerSettings
from braid.actors.stage.slots import Values
from braid.actors.stage.streams import HostStreams
from braid.actors.stage.telemetry import Recorder
from braid.scheduling.layers import part_sizes
from braid.scheduling.lowering.named import SCHEDULES
from braid.scheduling.lowering.recompute import RECOMPUTE_POLICIES
from braid.scheduling.memory import (
    DTYPE_BYTES,
    model_flops,
    peak_position,
    peak_working_bytes,
    rank_memory,
    stage_parameters,
)
from braid.scheduling.schedule import Block, Direction, Reduce, Schedule, Step
from braid.scheduling.spec import ModelShape, ParallelLayout, Placement
from braid.scheduling.validate import ScheduleError, validate_memory
from tests.scheduling.cases import GPT, LLAMA, MICRO_BATCH, TOKENS, layout_for, model_parts, named_schedule

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
SHAPES = pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])


def stage_model(shape: ModelShape, layout: ParallelLayout, rank: int, dtype: str = "fp32") -> StageModel:
    """The modules of a rank, not initialised."""
    return StageModel(
        shape=shape,
        layout=layout,
        position=layout.coordinate(rank),
        sizes=part_sizes(shape, layout, MICRO_BATCH),
        device=torch.device("cpu"),
        dtype=DTYPES[dtype],
    )


# -- parameters --------------------------------------------------------------------------------------------


@SHAPES
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("tied_head", [False, True])
def test_parameters_are_those_of_the_model(
    shape: ModelShape, tp: int, pp: int, folded: bool, tied_head: bool
) -> None:
    shape = replace(shape, tied_head=tied_head, vocabulary=97)  # not divisible: ranks differ
    layout = ParallelLayout(tp=tp, pp=pp, placement=Placement.FOLDED if folded else Placement.LINEAR)
    models = [stage_model(shape, layout, rank) for rank in range(layout.ranks)]
    for stage in range(pp):
        ranks = [m for rank, m in enumerate(models) if layout.coordinate(rank)["pp"] == stage]
        held = [sum(parameter.tensor.numel() for parameter in model.parameters) for model in ranks]
        assert stage_parameters(shape, layout, stage) == held[0] == max(held)
    slices = {
        (piece.source.name, piece.offset): piece.of_local(parameter.tensor).numel()
        for model in models
        for parameter in model.parameters
        for piece in parameter.slices
    }
    assert sum(slices.values()) == shape.parameters()


# -- what a rank really holds --------------------------------------------------------------------------------


@contextmanager
def mesh_of(layout: ParallelLayout, rank: int = 0) -> Iterator[Mesh]:
    """The mesh of a rank whose peers are not there."""
    if layout.ranks > 1:
        dist.init_process_group("fake", rank=rank, world_size=layout.ranks, store=FakeStore())
    try:
        yield build_mesh(layout, rank, timeout=timedelta(seconds=1))
    finally:
        if layout.ranks > 1:
            dist.destroy_process_group()


@SHAPES
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("policy", RECOMPUTE_POLICIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["layer", "head"])
def test_saved_bytes_of_a_part_are_what_its_slot_holds(
    shape: ModelShape, tp: int, policy: str, dtype: str, name: str
) -> None:
    layout = ParallelLayout(tp=tp)
    part = model_parts(shape, tp, policy)[name]
    program = named_schedule("megatron", 1, 1, tp, policy).programs[name, Direction.FORWARD]
    block = Block(Direction.FORWARD, 0, 0)
    with mesh_of(layout) as mesh, torch.no_grad():
        model = stage_model(shape, layout, 0, dtype)
        model.initialise(0)
        streams = HostStreams()
        recorder = Recorder(streams)
        GradientBuckets(model.parameters, mesh, streams, recorder, 1 << 20)
        instance = next(i for i in model.chunks[0] if i.name == name)
        bound = Binder(mesh, streams, recorder, DTYPES[dtype].itemsize).bind(
            program, part, instance, Direction.FORWARD, trains=True
        )
        values: Values = {"x": torch.randn(TOKENS // tp, shape.hidden).to(DTYPES[dtype])}
        if name == "head":
            values |= {"targets": torch.zeros(TOKENS, dtype=torch.int64), "loss_scale": 1.0}
        for action in bound:
            action(values, block)
        output = values.pop(part.output)
    width = DTYPE_BYTES[dtype]
    assert output.nbytes == part.values[part.output].bytes(width)
    assert set(values) == set(part.saved())
    assert part.saved_bytes(width) == pytest.approx(held_bytes(values), rel=0.02)


class NoUpdate:
    """Ends a step without reducing or updating anything."""

    def start_reduce(self, chunk: int) -> None:
        """Nothing."""

    def wait_reduce(self, chunk: int) -> None:
        """Nothing."""

    def step(self) -> None:
        """Nothing."""


def measured_peak(
    shape: ModelShape, schedule: Schedule, layout: ParallelLayout, stage: int, policy: str
) -> int:
    """Run one rank of a schedule for real; the most bytes it held, but for tokens and parameters."""
    rank = layout.rank_at({"pp": stage, "dp": 0, "cp": 0, "tp": 0})
    with mesh_of(layout, rank) as mesh:
        model = stage_model(shape, layout, rank)
        model.initialise(0)
        streams = HostStreams()
        recorder = MemoryMeter(streams)
        GradientBuckets(model.parameters, mesh, streams, recorder, 1 << 20)
        recorder.executor = Executor(
            schedule=schedule,
            parts=model_parts(shape, layout.tp, policy),
            model=model,
            mesh=mesh,
            streams=streams,
            recorder=recorder,
        )
        tokens = torch.zeros(TOKENS, dtype=torch.int64)
        batches = [MicroBatch(tokens, tokens)] * schedule.micro_batches
        recorder.executor.run(batches, 1.0, NoUpdate())
        streams.close()
    return recorder.peak_bytes


@pytest.mark.parametrize("policy", RECOMPUTE_POLICIES)
@pytest.mark.parametrize(
    ("name", "p", "tp", "stage"),
    [
        ("megatron", 1, 1, 0),
        ("megatron", 2, 2, 0),
        ("megatron", 2, 2, 1),
        ("folded", 2, 2, 0),
        ("folded", 2, 2, 1),
    ],
)
@pytest.mark.parametrize("vocabulary", [96, 4096], ids=["small tables", "large tables"])
def test_activations_are_bounded_closely(
    name: str, p: int, tp: int, stage: int, policy: str, vocabulary: int
) -> None:
    """The estimate adds two maxima that need not fall together, so it is never below and not far above."""
    shape, layout = replace(LLAMA, layers=4, vocabulary=vocabulary), layout_for(name, p, tp)
    parts, schedule = model_parts(shape, tp, policy), named_schedule(name, p, 4, tp, policy)
    memory = rank_memory(schedule, layout, shape, parts, "fp32", stage)
    estimate = memory.activation_bytes + memory.working_bytes
    measured = measured_peak(shape, schedule, layout, stage, policy)
    assert measured <= estimate <= 1.35 * measured


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("stage", [0, 1])
def test_late_layers_hold_less_for_real(late: int, stage: int) -> None:
    """Of the first stage's chunks the first waits longer: p = 2 holds it 3 times beside the last, once."""
    schedule = named_schedule("folded", 2, 4, 2)
    layouts = [replace(layout_for("folded", 2, 2), late_layers=n) for n in (0, late)]
    parts = model_parts(tp=2)
    measured = [measured_peak(LLAMA, schedule, layout, stage, "none") for layout in layouts]
    memory = rank_memory(schedule, layouts[1], LLAMA, parts, "fp32", stage)
    estimate = memory.activation_bytes + memory.working_bytes
    assert measured[1] <= estimate <= 1.35 * measured[1]
    saved = parts["layer"].saved_bytes(4)
    freed = 2 * late * saved if stage == 0 else 0
    assert measured[0] - measured[1] == pytest.approx(freed, abs=saved / 4)


@SHAPES
@pytest.mark.parametrize("policy", RECOMPUTE_POLICIES)
@pytest.mark.parametrize("direction", Direction)
def test_working_bytes_hold_every_value_an_operator_touches(
    shape: ModelShape, policy: str, direction: Direction
) -> None:
    for part in model_parts(shape, 2, policy).values():
        graph = part.forward if direction is Direction.FORWARD else part.backward
        program = named_schedule("megatron", 1, 1, 2, policy).programs[part.name, direction]
        kept = {*part.saved(), *part.constants}
        least = 0
        for op in graph.operators:
            owners = {part.values[name].alias_of or name for name in (*op.reads, *op.writes)} - kept
            least = max(least, sum(part.values[name].bytes(2) for name in owners))
        everything = sum(value.bytes(2) for value in part.values.values())
        assert least <= peak_working_bytes(part, program, direction, 2) < everything


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied_head", [False, True])
def test_bytes_of_parameters_gradients_and_optimizer(dtype: str, tied_head: bool) -> None:
    shape, layout = replace(LLAMA, tied_head=tied_head), ParallelLayout()
    memory = rank_memory(named_schedule("megatron", 1, 2), layout, shape, model_parts(shape), dtype, 0)
    with mesh_of(layout) as mesh:
        parameters = stage_model(shape, layout, 0, dtype).parameters
        streams = HostStreams()
        gradients = GradientBuckets(parameters, mesh, streams, Recorder(streams), 1 << 20)
        settings = OptimizerSettings(
            lr=1.0,
            min_lr_fraction=0.0,
            warmup_steps=0,
            steps=1,
            betas=(0.9, 0.9),
            eps=1e-8,
            weight_decay=0.0,
            clip_norm=0.0,
        )
        optimizer = Optimizer(parameters, gradients, settings)
    weights = [parameter.tensor for parameter in parameters]
    assert memory.parameter_bytes == held_bytes(weights)
    assert memory.gradient_bytes == held_bytes([bucket.buffer for bucket in gradients.buckets])
    state = [optimizer.adamw.state[master] for master in optimizer.masters]
    moments = [entry[kind] for entry in state for kind in ("exp_avg", "exp_avg_sq")]
    assert memory.optimizer_bytes == held_bytes(weights, optimizer.masters, moments) - held_bytes(weights)
    parts = (
        memory.parameter_bytes,
        memory.gradient_bytes,
        memory.optimizer_bytes,
        memory.activation_bytes,
        memory.working_bytes,
    )
    assert memory.total_bytes == sum(parts)


# -- the limit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("zero", [0, 3])
def test_memory_over_the_limit_is_refused(name: str, zero: int) -> None:
    """A byte less than the fullest rank needs; the message names stage, instruction and what is missing."""
    layout, schedule, parts = layout_for(name, 2, 2), named_schedule(name, 2, 6, 2), model_parts(tp=2)
    needed = [
        rank_memory(schedule, layout, LLAMA, parts, "bf16", stage, zero).total_bytes for stage in range(2)
    ]
    most = max(needed)
    validate_memory(schedule, layout, LLAMA, parts, "bf16", most, zero)
    with pytest.raises(ScheduleError) as error:
        validate_memory(schedule, layout, LLAMA, parts, "bf16", most - 1, zero)
    message = str(error.value)
    found = re.match(rf"schedule {name}, stage (\d), at (.+?): memory: a rank of this stage needs ", message)
    assert found, message
    stage = int(found[1])
    assert needed[stage] == most
    assert f"{most / 2**30:.2f} GiB here" in message
    assert f"* stage {stage}" in message
    position = peak_position(schedule, layout, LLAMA, parts, "bf16", stage)
    assert found[2] == str(schedule.stages[stage][position])
    assert not isinstance(schedule.stages[stage][position], Step | Reduce)


def test_how_much_memory_is_missing_is_named() -> None:
    layout, schedule, parts = layout_for("megatron", 1), named_schedule("megatron", 1, 1), model_parts()
    needed = rank_memory(schedule, layout, LLAMA, parts, "bf16", 0).total_bytes
    with pytest.raises(ScheduleError, match=rf"{needed / 2**30:.2f} GiB over the limit of 0.00 GiB"):
        validate_memory(schedule, layout, LLAMA, parts, "bf16", 0)


# -- FLOPs ---------------------------------------------------------------------------------------------------


@SHAPES
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_model_flops_are_those_of_the_graphs(shape: ModelShape, tp: int) -> None:
    parts = model_parts(shape, tp)
    count = {"embedding": 1, "layer": shape.layers, "head": 1}
    total = sum(n * (parts[name].forward.flops + parts[name].backward.flops) for name, n in count.items())
    assert model_flops(shape, TOKENS) == total * tp


def test_model_flops_leave_recomputation_out() -> None:
    layer, again = model_parts()["layer"], model_parts(recompute="full")["layer"]
    assert again.backward.flops > layer.backward.flops
