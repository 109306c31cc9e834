"""Small models, layouts and schedules for the tests of planning."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import strategies as st

from braid.scheduling.generate.lower import Choices, scheduled_parts, training_schedule
from braid.scheduling.generate.named import (
    PIPELINES,
    SCHEDULES,
    PairMethod,
    Pipeline,
    ScheduleKind,
    ScheduleName,
)
from braid.scheduling.generate.programs import graph_of
from braid.scheduling.generate.setting import Setting
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.layers import built_in_parts
from braid.scheduling.model.operators import Part, Phase
from braid.scheduling.model.shape import ModelShape, Workload
from braid.scheduling.model.sizes import PartSizes
from braid.scheduling.model.units import unit_parts
from braid.scheduling.plan.orders import FIXED
from braid.scheduling.schedule.code import Code
from braid.scheduling.schedule.operations import (
    Pass,
    Receive,
    Send,
    Start,
    Strand,
    Wait,
)
from braid.scheduling.schedule.order import parse_orders
from braid.scheduling.schedule.schedule import Block, Instruction, Schedule
from braid.scheduling.schedule.text import parse_sides, write_step
from braid.scheduling.schedule.validate import linked

LLAMA = ModelShape(
    family="llama",
    hidden=64,
    ffn=176,
    layers=8,
    heads=8,
    kv_heads=4,
    head_dim=8,
    vocabulary=96,
    sequence=16,
)
GPT = replace(LLAMA, family="gpt", kv_heads=8, ffn=256)
QWEN = replace(LLAMA, qkv_bias=True, head_norm=True)
"""With what Qwen2.5 and Qwen3 have each."""
MOE = replace(LLAMA, family="moe", ffn=96, experts=8, top_k=2)
"""With a mixture of experts."""
MICRO_BATCH = 2
TOKENS = MICRO_BATCH * LLAMA.sequence

LOWERED = tuple(
    name if pipeline == kind.pipelines[0] else f"{name}:{pipeline}"
    for name, kind in SCHEDULES.items()
    for pipeline in kind.nameable
    if pipeline not in ("together_2", "together_8")
)
"""All schedules with every pipeline that they may have; the three numbers of layers together are one case."""


def kind_of(name: str) -> ScheduleKind:
    """Of a schedule, perhaps with a pipeline."""
    return SCHEDULES[ScheduleName.parse(name).schedule]


def pipeline_of(name: str) -> Pipeline:
    """That is named, else the schedule's first."""
    return PIPELINES[ScheduleName.parse(name).pipeline or kind_of(name).pipelines[0]]


def pairs_of(name: str) -> PairMethod | None:
    """`Setting.pairs`."""
    return kind_of(name).pairs if pipeline_of(name).pairs or not kind_of(name).searched else None


PAIRED_W = ("wavelet", "dhelix", "braid")
SEARCHED = tuple(name for name in LOWERED if kind_of(name).searched)
ORDERS = tuple({(pipeline_of(name), kind_of(name).early_sums): name for name in reversed(LOWERED)}.values())
"""A schedule for each order of blocks, messages and sums; others differ from it in programs alone."""
STAGES = pytest.mark.parametrize("p", [1, 2, 3, 5])
HOPS = pytest.mark.parametrize("hop", PIPELINES["eager_w"].hops)
SIZES = [(p, m) for p in (1, 2, 3, 5) for m in sorted({1, p, p + 1, 2 * p + 1})]
"""Stages, and micro-batches: one, as many as stages, one more, more than fill a pipeline twice."""


def exists(name: str, stages: int, micro_batches: int) -> bool:
    """Whether a named schedule is defined for so many stages and micro-batches."""
    match name:
        case "interleaved":
            return micro_batches % stages == 0
        case "dualpipev" | "braid:v":
            return micro_batches >= 2 * stages
        case _:
            return True


def sizes_of(name: str, stages: int, up_to: int = 12) -> list[int]:
    """Numbers of micro-batches that a schedule is defined for."""
    return [m for m in range(1, up_to + 1) if exists(name, stages, m)]


# -- models and layouts --------------------------------------------------------------------------------------


@cache
def model_parts(
    shape: ModelShape = LLAMA,
    tp: int = 1,
    recompute: str = "none",
    cp: int = 1,
    ep: int = 1,
    context: str = "all_gather",
) -> dict[str, Part]:
    """Embedding, layer and head; they do not depend on the pipeline."""
    layout = ParallelLayout(tp=tp, cp=cp, dp=ep, ep=ep)
    return built_in_parts(PartSizes(shape, layout, MICRO_BATCH, context=context, recompute=recompute))


def layout_for(name: str, stages: int, tp: int = 1, dp: int = 1, zero: int = 0) -> ParallelLayout:
    """The layout that a named schedule runs on.

    One stage is folded too, but for braid:twins, which differs from others only where nothing folds.
    """
    own = pipeline_of(name)
    placement = own.placement_on(stages) if name == "braid:twins" else own.placement
    return ParallelLayout(pp=stages, tp=tp, dp=dp, placement=placement, zero=zero)


def model_for(layout: ParallelLayout, shape: ModelShape = LLAMA) -> ModelShape:
    """The model, with a layer for every chunk at least."""
    return replace(shape, layers=max(shape.layers, layout.chunks))


def setting_for(name: str, layout: ParallelLayout, micro_batches: int, **more: object) -> Setting:
    """The setting of a named schedule of so many micro-batches a replica."""
    shape = more.pop("model", LLAMA)
    assert isinstance(shape, ModelShape)
    workload = Workload(global_batch=micro_batches * MICRO_BATCH * layout.dp, micro_batch=MICRO_BATCH)
    known = {"model": model_for(layout, shape), "layout": layout, "workload": workload}
    known |= ScheduleName.parse(name)._asdict()
    return Setting(**known, **more)  # type: ignore[arg-type]


def parts_for(setting: Setting) -> dict[str, Part]:
    """The graphs that the programs of a setting's schedule are of."""
    model, layout = replace(setting.model, layers=LLAMA.layers), setting.layout
    members = model_parts(model, layout.tp, setting.recompute, layout.cp, layout.ep, setting.context)
    return scheduled_parts(
        members,
        setting.layout,
        setting.model.kinds,
        unit_layers=setting.unit_layers,
        partitions=setting.partitions,
    )


# -- schedules -----------------------------------------------------------------------------------------------


def in_turn(layer: Part, method: PairMethod, *, ends: bool = False) -> dict[str, tuple[str, ...]]:
    """Orders as text that need no profile, of passes of single layers; of `PairMethod.ORDER` twins' too.

    One pass after the other, or segment by segment, or operator by operator. ``ends``: every paired backward
    pass leaves its weight gradients to the next one, beside whose first operators they run.
    """
    forward, backward = list(layer.forward.operators), list(layer.backward.operators)
    pair, name = f"F:{layer.name}|B:{layer.name}", layer.name
    if method in (*FIXED, PairMethod.TURNS):
        return {}  # lowering has their order
    if method is PairMethod.BARRIERS:
        width = max(len(forward), len(backward))
        padded = [[op.name for op in ops] + [""] * (width - len(ops)) for ops in (forward, backward)]
        return {pair: tuple(f"{f} | {b}" for f, b in zip(*padded, strict=True))}
    orders = {sides: _serial(layer, sides) for sides in (pair, f"F:{name}|F:{name}", f"B:{name}|B:{name}")}
    if ends:
        late = [op.name for op in backward if op.phase is Phase.WEIGHT_GRADIENT]
        ahead = [write_step(0, op.name) for op in forward]
        taken = [write_step(2, op) for op in late]
        left = [write_step(1, op.name) for op in backward if op.name not in late]
        del orders[pair]
        orders[f"{pair}|L:{name}"] = (*ahead[:2], *taken, *ahead[2:], *left)
    return orders


def _serial(layer: Part, sides: str) -> tuple[str, ...]:
    """One pass after the other."""
    return tuple(
        write_step(turn, op.name)
        for turn, side in enumerate(parse_sides(sides))
        for op in graph_of(layer, side.kind).operators
    )


def choices_for(setting: Setting, *, ends: bool = False) -> Choices:
    """Decisions of a setting that need no profile (`in_turn`), for single layers or for the longest unit."""
    method, parts = setting.pairs, parts_for(setting)
    if method is None:
        return Choices()
    units = [part for name, part in parts.items() if "layer" in name]
    texts = {key: o for unit in units for key, o in in_turn(unit, method, ends=ends).items()}
    return Choices(orders=parse_orders(texts))


@cache
def named_schedule(
    name: str,
    stages: int,
    micro_batches: int,
    tp: int = 1,
    recompute: str = "none",
    zero: int = 0,
    hop: int = 0,
    dp: int = 1,
    ends: bool = False,
) -> Schedule:
    """A generated schedule with the programs of the Llama model; GPT's are the same.

    ``zero``: over two replicas at least. ``ends``: see `in_turn`.
    """
    layout = layout_for(name, stages, tp, max(dp, 1 + bool(zero)), zero)
    setting = setting_for(f"{name}/{hop}" if hop else name, layout, micro_batches, recompute=recompute)
    return training_schedule(setting, parts_for(setting), choices_for(setting, ends=ends))


def linked_schedule(
    name: str, stages: int, micro_batches: int, tp: int = 1, recompute: str = "none", **more: object
) -> Code:
    """The validated code of a `named_schedule`."""
    schedule = named_schedule(name, stages, micro_batches, tp, recompute, **more)
    zero = int(str(more.get("zero", 0)))
    dp = max(int(str(more.get("dp", 1))), 1 + bool(zero))
    return code_of(schedule, layout_for(name, stages, tp, dp, zero), recompute=recompute)


def code_of(
    schedule: Schedule, layout: ParallelLayout, shape: ModelShape = LLAMA, recompute: str = "none"
) -> Code:
    """The validated code of a schedule."""
    kinds = model_for(layout, shape).kinds
    parts = unit_parts(model_parts(shape, layout.tp, recompute), layout, kinds, schedule.unit_layers)
    return linked(schedule, layout, kinds, parts)


def with_stage(schedule: Schedule, stage: int, instructions: Iterable[Instruction]) -> Schedule:
    """The schedule with another list for one stage."""
    stages = [*schedule.stages]
    stages[stage] = tuple(instructions)
    return replace(schedule, stages=tuple(stages))


def on_strands(schedule: Schedule, beta: frozenset[int]) -> Schedule:
    """The schedule with these micro-batches on strand beta, the others on alpha."""

    def placed(one: Pass) -> Pass:
        return one._replace(strand=Strand.BETA if one.micro_batch in beta else Strand.ALPHA)

    def moved(old: Instruction) -> Instruction:
        match old:
            case Block(passes):
                return replace(old, passes=tuple(map(placed, passes)))
            case Start(Send() | Receive() as message) | Wait(Send() | Receive() as message):
                return replace(old, what=replace(message, moved=placed(message.moved)))
            case _:
                return old

    return replace(schedule, stages=tuple(tuple(map(moved, stage)) for stage in schedule.stages))


def several(schedule: Schedule) -> bool:
    """Whether blocks of the schedule have several passes."""
    return any(isinstance(i, Block) and len(i.passes) > 1 for stage in schedule.stages for i in stage)


@st.composite
def valid_schedules(
    draw: st.DrawFn,
    min_stages: int = 1,
    max_stages: int = 4,
    names: tuple[str, ...] = LOWERED,
    zero: int | None = None,
    ends: bool | None = None,
) -> tuple[Schedule, ParallelLayout]:
    """Generated schedules of all kinds, varied in what does not make them invalid.

    Strands change places (micro-batches that nothing is paired with are on either), backward passes leave
    ends.
    """
    zero = draw(st.integers(0, 3)) if zero is None else zero
    name = draw(st.sampled_from(names))
    stages = draw(st.integers(min_stages, max_stages))
    micro_batches = draw(st.sampled_from([m for m in range(1, 2 * stages + 3) if exists(name, stages, m)]))
    ends = (draw(st.booleans()) if ends is None else ends) and pairs_of(name) is PairMethod.ORDER
    dp = 1 + (bool(zero) or draw(st.booleans()))
    schedule = named_schedule(name, stages, micro_batches, 2, zero=zero, dp=dp, ends=ends)
    layout = layout_for(name, stages, 2, dp, zero)
    if not several(schedule):
        schedule = on_strands(schedule, draw(st.frozensets(st.integers(0, micro_batches - 1))))
    elif draw(st.booleans()):
        passes = [one for stage in range(stages) for one in schedule.passes[stage]]
        schedule = on_strands(
            schedule, frozenset(one.micro_batch for one in passes if one.strand is Strand.ALPHA)
        )
    return schedule, layout
