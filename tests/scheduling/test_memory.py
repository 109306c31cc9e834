"""Memory and FLOPs as planned, against the real model and the real executor.

Tensor-parallel ranks have torch's ``fake`` process groups here: collectives return at once with results of
the right shape and any content, which is all that memory depends on.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from braid.actors.stage.measure.memory_meter import held_bytes
from braid.actors.stage.measure.telemetry import Recorder
from braid.actors.stage.model.layers import LayerDefinition, load_layers
from braid.actors.stage.model.model import StageModel
from braid.actors.stage.rank.groups import Mesh, build_mesh
from braid.actors.stage.run.executor import Executor
from braid.actors.stage.run.gloo_streams import HostStreams
from braid.actors.stage.run.micro_batch import MicroBatch
from braid.actors.stage.state.buckets import RankBuckets
from braid.actors.stage.state.parameters import Place
from braid.scheduling.cost.analytic import analytic_profile
from braid.scheduling.generate.lower import training_schedule, validation_schedule
from braid.scheduling.generate.named import ScheduleName
from braid.scheduling.generate.partition_checks import operators_beside
from braid.scheduling.generate.partitions import mega_scale
from braid.scheduling.generate.setting import Setting
from braid.scheduling.mesh.layout import ParallelLayout, Placement
from braid.scheduling.mesh.partition import Partition, parse_partition
from braid.scheduling.model.layers import model_parts as every_part
from braid.scheduling.model.operators import Part
from braid.scheduling.model.recompute import RECOMPUTE_POLICIES
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.model.sizes import part_sizes
from braid.scheduling.model.units import members_of
from braid.scheduling.plan.decide import measured
from braid.scheduling.plan.orders import decisions
from braid.scheduling.schedule import buckets
from braid.scheduling.schedule.code import Code
from braid.scheduling.schedule.link import link
from braid.scheduling.schedule.memory import DTYPE_BYTES, held_during, least_bytes, model_flops, rank_memory
from braid.scheduling.schedule.operations import Operation, Reduce, Release, Wait
from braid.scheduling.schedule.sweep import Sweep
from braid.scheduling.schedule.validate import ScheduleError, check_memory, linked
from tests.end_to_end.command import ROOT
from tests.scheduling.cases import (
    GPT,
    LLAMA,
    MICRO_BATCH,
    ORDERS,
    QWEN,
    TOKENS,
    choices_for,
    layout_for,
    linked_schedule,
    model_parts,
    parts_for,
    setting_for,
)
from tests.scheduling.partition_cases import collectives_of, partition_of
from tests.scheduling.plans import cluster

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
SHAPES = pytest.mark.parametrize("shape", [LLAMA, QWEN, GPT], ids=["llama", "qwen", "gpt"])


EXAMPLE = f"{ROOT}/docs/examples/parallel_layer.py:ParallelLayer"
LAYERS: dict[str, LayerDefinition] = load_layers({"example": EXAMPLE})
"""The family's own layer, and another."""


def graphs(
    shape: ModelShape, layout: ParallelLayout, policy: str = "none", context: str = "all_gather"
) -> dict[str, Part]:
    """The parts of a model that may have all these layers."""
    layers = {kind: definition.graph for kind, definition in LAYERS.items()}
    return every_part(part_sizes(shape, layout, MICRO_BATCH, context=context, recompute=policy), layers)


def stage_model(
    shape: ModelShape, layout: ParallelLayout, rank: int, dtype: str = "fp32", context: str = "all_gather"
) -> StageModel:
    """The modules of a rank, not initialised."""
    return StageModel(
        layers=LAYERS,
        shape=shape,
        layout=layout,
        place=Place.of(layout.mesh, rank),
        sizes=part_sizes(shape, layout, MICRO_BATCH, context=context),
        device=torch.device("cpu"),
        dtype=DTYPES[dtype],
    )


# -- parameters --------------------------------------------------------------------------------------------


@SHAPES
@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("tied_head", [False, True])
@pytest.mark.parametrize("pattern", ["layer", "3*layer example"])
def test_parameters_are_those_of_the_model(
    shape: ModelShape, tp: int, pp: int, folded: bool, tied_head: bool, pattern: str
) -> None:
    # A vocabulary that is not divisible: ranks differ.
    shape = replace(shape, tied_head=tied_head, vocabulary=97, pattern=pattern)
    layout = ParallelLayout(tp=tp, pp=pp, placement=Placement.FOLDED if folded else Placement.LINEAR)
    models = [stage_model(shape, layout, rank) for rank in range(layout.ranks)]
    parts = graphs(shape, layout)
    code = link(validation_schedule(shape, layout, 1, parts), layout, shape.kinds, parts)
    for stage in range(pp):
        ranks = [m for rank, m in enumerate(models) if layout.coordinate(rank)["pp"] == stage]
        held = [sum(parameter.tensor.numel() for parameter in model.parameters) for model in ranks]
        count = sum(code.parameters(chunk).total for chunk in layout.chunks_of(stage))
        assert count == held[0] == max(held)
    slices = {
        (piece.source.name, piece.offsets): piece.of_local(parameter.tensor).numel()
        for model in models
        for parameter in model.parameters
        for piece in parameter.slices
    }
    if pattern == "layer":
        assert sum(slices.values()) == shape.parameters()


# -- what a rank really holds --------------------------------------------------------------------------------


@contextmanager
def mesh_of(layout: ParallelLayout, rank: int = 0) -> Iterator[Mesh]:
    """The mesh of a rank whose peers, two on every node, are not there."""
    if layout.ranks > 1:
        dist.init_process_group("fake", rank=rank, world_size=layout.ranks, store=FakeStore())
    try:
        hosts = [f"node {number // 2}" for number in range(layout.ranks)]
        yield build_mesh(layout, rank, timeout=timedelta(seconds=1), hosts=hosts)
    finally:
        if layout.ranks > 1:
            dist.destroy_process_group()


def held_for_real(
    shape: ModelShape, code: Code, stage: int, context: str, dtype: str, reduce_dtype: str | None
) -> list[tuple[Operation, int]]:
    """Run one rank of a stage for real: after every operation, before it frees, the bytes that are held.

    Tokens and what a rank keeps of parameters and gradients do not count; whole buckets of what it has shares
    of do, and copies of gradients that are rounded for the way.
    """
    layout = code.layout
    rank = layout.rank_at({**dict.fromkeys(layout.mesh.sizes, 0), "pp": stage})
    held: list[tuple[Operation, int]] = []
    with mesh_of(layout, rank) as mesh:
        model = stage_model(shape, layout, rank, dtype, context)
        model.initialise(0)
        streams = HostStreams()
        recorder = Recorder(streams)
        rounds = DTYPES[reduce_dtype] if reduce_dtype else None
        buckets = RankBuckets(model.parameters, mesh, streams, recorder, reduce_dtype=rounds)
        executor = Executor(
            code=code,
            model=model,
            mesh=mesh,
            streams=streams,
            recorder=recorder,
            buckets=buckets,
            watch=lambda operation: held.append((operation, held_bytes(executor.held(), buckets.passing))),
        )
        tokens = torch.zeros(TOKENS // layout.cp, dtype=torch.int64)
        batch = MicroBatch(tokens, tokens)
        executor.run([batch] * code.schedule.micro_batches, 1.0)
        streams.close()
    return held


def assert_exact(shape: ModelShape, code: Code, context: str = "all_gather", **dtypes: str) -> None:
    """The executor holds to the byte what the sweep counts, at every operation of every stage."""
    dtype, reduce_dtype = dtypes.get("dtype", "fp32"), dtypes.get("reduce_dtype")
    width, rounded = DTYPE_BYTES[dtype], DTYPE_BYTES[reduce_dtype] if reduce_dtype else 0
    for stage, stretches in enumerate(code.stages):
        found = iter(held_for_real(shape, code, stage, context, dtype, reduce_dtype))
        sweep = Sweep(code, width, rounded_width=rounded)
        during = held_during(code, stage, width, reduce_dtype=reduce_dtype)
        most = 0
        for stretch, said in zip(stretches, during, strict=True):
            counts = []
            for operation, count in sweep.step_by_step(stretch):
                ran, held = next(found)
                assert ran is operation
                gone = 0  # the update lets go at once of what the sweep still counts
                what = getattr(operation, "what", None)
                if isinstance(operation, Release) or (
                    isinstance(operation, Wait) and isinstance(what, Reduce)
                ):
                    last = what.move is None or what.move.last
                    gone = sweep.whole_bytes(what) + sweep.rounded_bytes(what) if last else 0
                assert held == count - gone, f"stage {stage}, {stretch.instruction}: {operation}"
                counts.append(count)
            assert said == max(counts, default=said)
            most = max([most, *counts])
        assert next(found, None) is None
        assert most > 0
        memory = rank_memory(code, shape, dtype, stage, reduce_dtype=reduce_dtype)
        assert memory.activation_bytes == most


STAGED = (
    parse_partition("tp/all_gather mesh 2x2 order 0,1 pieces 2 of width with 1"),
    parse_partition("tp/reduce_scatter mesh 2x2 order 1,0 pieces 4 of tokens with 2"),
)
SCHEDULES: list[tuple[str, int, int, dict[str, Any]]] = [
    ("megatron:eager_1f1b", 2, 1, {"unit_layers": 2}),
    ("intra_batch", 2, 2, {"partitions": mega_scale(4)}),
    ("zbv", 2, 4, {"partitions": STAGED}),
    ("dhelix", 2, 2, {}),
    ("dualpipev", 2, 1, {}),
    ("braid:w", 1, 2, {"unit_layers": 2}),
    ("braid:w", 2, 1, {}),
    ("braid:twins", 1, 2, {}),
    ("braid:eager_w", 2, 2, {}),
    ("braid:v", 2, 2, {}),
]
"""Stages, tensor-parallel ranks, and what else a setting says.

Whole runs of all schedules are in `tests.cuda.test_combinations`.
"""


def setting_of(
    shape: ModelShape, name: str, micro_batches: int, degrees: Mapping[str, Any], **more: Any
) -> Setting:
    """Of a model of four layers on a layout of these degrees."""
    placement = ScheduleName.parse(name).placement_on(degrees.get("pp", 1))
    layout = ParallelLayout(**degrees, placement=placement)
    return setting_for(name, layout, micro_batches, model=replace(shape, layers=4), **more)


MIXTURE = replace(
    LLAMA, family="moe", experts=4, top_k=2, ffn=48, capacity_factor=1.0, balance_loss=0.1, shared_experts=1
)
SPREAD: list[tuple[ModelShape, dict[str, Any], dict[str, str], str]] = [
    (QWEN, {"cp": 2, "tp": 2, "pp": 2}, {"context": "ring"}, "bf16"),
    (GPT, {"cp": 2, "tp": 2, "pp": 2}, {"recompute": "selective"}, "fp32"),
    (GPT, {"cp": 2}, {"recompute": "full", "context": "ring"}, "bf16"),
    (replace(MIXTURE, pattern="dense layer"), {"dp": 2, "ep": 2}, {"recompute": "full"}, "fp64"),
    (MIXTURE, {"dp": 2, "ep": 4, "cp": 2, "tp": 2}, {"recompute": "fine", "context": "ring"}, "bf16"),
    (LLAMA, {"tp": 4, "tensor_degrees": (4, 2, 2, 4)}, {"recompute": "fine"}, "fp64"),
    (MIXTURE, {"dp": 2, "ep": 2, "tp": 2, "tensor_degrees": (2, 1, 1, 2)}, {}, "fp32"),
]


@given(st.data(), st.sampled_from(["megatron", "wavelet", "zbv", "braid:w"]), st.sampled_from([LLAMA, GPT]))
@settings(max_examples=20)
@pytest.mark.slow
def test_activations_of_any_cut_are_counted_to_the_byte(
    data: st.DataObject, name: str, shape: ModelShape
) -> None:
    """Whatever way every collective of a layer is cut, of four ranks on two nodes."""
    layout, recompute = layout_for(name, 1, 4), data.draw(st.sampled_from(RECOMPUTE_POLICIES))
    partitions = []
    for graph, op in collectives_of(model_parts(shape, 4, recompute)["layer"]):
        if data.draw(st.booleans()):
            most = len(operators_beside(graph, op, 2))
            partitions.append(data.draw(partition_of(f"layer/{op.name}", op.kind, [(2, 2)], most)))
    shape = replace(shape, layers=2)
    setting = setting_for(name, layout, 2, model=shape, recompute=recompute, partitions=tuple(partitions))
    schedule = training_schedule(setting, parts_for(setting), choices_for(setting))
    assert_exact(setting.model, linked(schedule, *described(setting)))


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize(("recompute", "zero"), [("none", 0), ("selective", 1), ("full", 3)])
def test_what_a_rank_holds_at_least_is_no_more_than_it_holds(name: str, recompute: str, zero: int) -> None:
    layout = layout_for(name, 4, tp=2, dp=2, zero=zero)
    setting = setting_for(name, layout, 8, recompute=recompute, dtype="bf16")
    code = link(training_schedule(setting, parts_for(setting), choices_for(setting)), *described(setting))
    held = max(rank_memory(code, setting.model, "bf16", stage).total_bytes for stage in range(4))
    parts = model_parts(recompute=recompute, tp=2)
    members = {c: members_of(parts, layout, setting.kinds, c) for c in range(layout.chunks)}
    least = least_bytes(setting.order.order(layout, 8, setting.hop), members, layout, "bf16")
    assert held / 4 < least <= held


def described(setting: Setting) -> tuple[ParallelLayout, tuple[str, ...], dict[str, Part]]:
    """What a schedule is linked with."""
    return setting.layout, setting.kinds, parts_for(setting)


def shared_codes(setting: Setting) -> Iterator[Code]:
    """With what is shared gathered late and early, let go of at once and kept."""
    zero = setting.layout.zero
    schedule = training_schedule(setting, parts_for(setting), choices_for(setting))
    for ahead, keep in ((0, 0), (3, 7)):
        schedule = replace(schedule, prefetch=ahead if zero > 1 else 0, keep=keep if zero > 2 else 0)
        yield linked(schedule, *described(setting))


ROUNDED: list[tuple[str, ModelShape, dict[str, Any]]] = [
    ("megatron", LLAMA, {"tp": 2, "dp": 2}),
    ("ddp", GPT, {"dp": 4, "shards": 2}),
    ("ddp", MIXTURE, {"dp": 4, "ep": 2}),
    ("ddp", LLAMA, {"dp": 2, "cp": 2}),
    ("megatron:folded", GPT, {"pp": 2, "dp": 2}),
    ("megatron", LLAMA, {"tp": 4, "tensor_degrees": (4, 2, 2, 4)}),
]


def codes(setting: Setting, intra: float = 1e8) -> list[Code]:
    """Of every decision for a setting, on links so slow that much is overlapped."""
    layout, shape = setting.layout, setting.model
    nodes = layout.ranks // 2 if any(one.mesh for one in setting.partitions) else 1
    spec = cluster(nodes=nodes, gpus=layout.ranks // nodes, intra=intra, inter=1e8)
    parts = graphs(shape, layout, setting.recompute, setting.context)
    bench = measured(parts, analytic_profile(spec, layout, parts))(setting)
    found = [
        linked(training_schedule(setting, bench.parts, choices), layout, setting.kinds, bench.parts)
        for choices, _ in decisions(bench)
    ]
    assert found
    return found


def settings_to_count() -> Iterator[tuple[Callable[[Setting], Iterable[Code]], Setting, dict[str, str]]]:
    """Every schedule under one of the policies, by turns; tokens of a sample over ranks that have some of
    them, or some experts of one capacity, or layers in degrees of their own; parameters and gradients in
    shares; buckets that travel in stages; copies of gradients that are rounded for the way."""
    for number, (name, pp, tp, more) in enumerate(SCHEDULES):
        more = {**more, "recompute": RECOMPUTE_POLICIES[(number + number // 4) % 4]}
        yield codes, setting_of((LLAMA, GPT)[number % 2], name, 6, {"pp": pp, "tp": tp}, **more), {}
    for name, (shape, degrees, more, dtype) in product(("wavelet", "dhelix"), SPREAD):
        yield codes, setting_of(shape, name, 4, degrees, **more), {"dtype": dtype}
    shared = [("ddp", {}), ("zbv", {"pp": 2}), ("braid:w", {"pp": 2, "tp": 2})]
    for (name, degrees), zero, tied in product(shared, (1, 2, 3), (False, True)):
        shape = replace(LLAMA, tied_head=tied)
        setting = setting_of(shape, name, 4, {**degrees, "dp": 2, "zero": zero})
        yield shared_codes, setting, {"dtype": "bf16" if tied else "fp32"}
    for (name, degrees), zero, order in product(shared[:2], range(4), ((0, 1), (1, 0))):
        kinds = ("reduce_scatter", "all_gather") if zero else ("all_reduce",)
        cut = {"partitions": tuple(Partition(what=f"dp/{kind}", mesh=(2, 2), order=order) for kind in kinds)}
        setting = setting_of(LLAMA, name, 4, {**degrees, "dp": 4, "zero": zero}, **cut)
        yield from ((shared_codes, setting, how) for how in ({}, {"reduce_dtype": "bf16"}))
    for (name, shape, degrees), zero in product(ROUNDED, range(4)):
        known = {axis: degree for axis, degree in degrees.items() if zero or axis != "shards"}
        setting = setting_of(shape, name, 4, {**known, "zero": zero})
        yield partial(codes, intra=2e10), setting, {"reduce_dtype": "bf16"}


def in_words(value: Any) -> str:
    """By which words `make test` chooses."""
    if not isinstance(value, Setting):
        return "-".join(map("_".join, value.items())) if isinstance(value, dict) else ""
    layout = value.layout.describe().replace(" ", "")
    return f"{value.schedule}-{value.pipeline}-{layout}-{value.recompute}"


@pytest.mark.parametrize(("lowered", "setting", "dtypes"), [*settings_to_count()], ids=in_words)
@pytest.mark.slow
def test_what_ranks_hold_is_counted_to_the_byte(
    lowered: Callable[[Setting], Iterable[Code]], setting: Setting, dtypes: dict[str, str]
) -> None:
    with patch.object(buckets, "LEAST_ELEMENTS", 5000):
        for code in lowered(setting):
            assert_exact(setting.model, code, context=setting.context, **dtypes)


# -- the limit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("zero", [0, 3])
def test_memory_over_the_limit_is_refused(name: str, zero: int) -> None:
    """A byte less than the fullest rank needs; the message names stage, instruction and what is missing."""
    code = linked_schedule(name, 2, 6, 2, zero=zero)
    needed = [rank_memory(code, LLAMA, "bf16", stage).total_bytes for stage in range(2)]
    most = max(needed)
    check_memory(code, LLAMA, "bf16", most)
    with pytest.raises(ScheduleError, match=rf"{most / 2**30:.2f} GiB over the limit of 0.00 GiB"):
        check_memory(code, LLAMA, "bf16", 0)
    with pytest.raises(ScheduleError) as error:
        check_memory(code, LLAMA, "bf16", most - 1)
    message = str(error.value)
    found = re.match(rf"schedule {name}, stage (\d), at (.+?): memory: a rank of this stage needs ", message)
    assert found, message
    stage = int(found[1])
    assert needed[stage] == most
    assert f"{most / 2**30:.2f} GiB here" in message
    assert f"* stage {stage}" in message
    during = held_during(code, stage, DTYPE_BYTES["bf16"])
    assert found[2] == str(code.schedule.stages[stage][during.index(max(during))])


# -- FLOPs ---------------------------------------------------------------------------------------------------


@SHAPES
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_model_flops_are_those_of_the_graphs(shape: ModelShape, tp: int) -> None:
    parts = model_parts(shape, tp)
    count = {"embedding": 1, "layer": shape.layers, "head": 1}
    total = sum(n * (parts[name].forward.flops + parts[name].backward.flops) for name, n in count.items())
    assert model_flops(shape, TOKENS) == total * tp
