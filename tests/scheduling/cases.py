"""Small models, layouts and schedules for the tests of planning."""

from dataclasses import replace
from functools import cache

from hypothesis import strategies as st

from braid.scheduling.layers import built_in_parts, part_sizes
from braid.scheduling.lowering.lower import training_schedule
from braid.scheduling.lowering.named import SCHEDULES
from braid.scheduling.operators import Part
from braid.scheduling.schedule import (
    Block,
    Direction,
    Instruction,
    Receive,
    Schedule,
    Send,
    Strand,
    WaitReceive,
    WaitSend,
)
from braid.scheduling.spec import ModelShape, ParallelLayout

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
MICRO_BATCH = 2
TOKENS = MICRO_BATCH * LLAMA.sequence


@cache
def model_parts(shape: ModelShape = LLAMA, tp: int = 1, recompute: str = "none") -> dict[str, Part]:
    """Embedding, layer and head; they do not depend on the pipeline."""
    return built_in_parts(part_sizes(shape, ParallelLayout(tp=tp), MICRO_BATCH), recompute)


def layout_for(name: str, stages: int, tp: int = 1) -> ParallelLayout:
    """The layout that a named schedule runs on."""
    return ParallelLayout(pp=stages, tp=tp, placement=SCHEDULES[name].placement)


@cache
def named_schedule(
    name: str, stages: int, micro_batches: int, tp: int = 1, recompute: str = "none"
) -> Schedule:
    """A generated schedule with the programs of the Llama model; GPT's are the same."""
    parts = model_parts(LLAMA, tp, recompute)
    return training_schedule(name, layout_for(name, stages, tp), micro_batches, parts)


def with_stage(schedule: Schedule, stage: int, instructions: list[Instruction]) -> Schedule:
    """The schedule with another list for one stage."""
    stages = [*schedule.stages]
    stages[stage] = tuple(instructions)
    return replace(schedule, stages=tuple(stages))


def _on_strands(schedule: Schedule, beta: frozenset[int]) -> Schedule:
    """The schedule with some of its micro-batches on strand beta."""

    def block(old: Block) -> Block:
        return replace(old, strand=Strand.BETA if old.micro_batch in beta else Strand.ALPHA)

    def moved(old: Instruction) -> Instruction:
        if isinstance(old, Block):
            return block(old)
        if isinstance(old, Send | Receive | WaitSend | WaitReceive):
            return replace(old, block=block(old.block))
        return old

    return replace(schedule, stages=tuple(tuple(map(moved, stage)) for stage in schedule.stages))


def _asked_earlier(schedule: Schedule, stage: int, position: int, by: int) -> Schedule:
    """Move a RECV up its stage's list, but not past another of its channel."""
    instructions = [*schedule.stages[stage]]
    receive = instructions.pop(position)
    assert isinstance(receive, Receive)
    for _ in range(by):
        above = instructions[position - 1] if position else None
        if above is None or (isinstance(above, Receive) and _channel(above) == _channel(receive)):
            break
        position -= 1
    instructions.insert(position, receive)
    return with_stage(schedule, stage, instructions)


def _channel(receive: Receive) -> tuple[int, Direction]:
    return receive.stage, receive.block.direction


@st.composite
def valid_schedules(
    draw: st.DrawFn, min_stages: int = 1, min_micro_batches: int = 1
) -> tuple[Schedule, ParallelLayout]:
    """Generated schedules with micro-batches on either strand and some receives asked for early."""
    name = draw(st.sampled_from(["megatron", "folded"]))
    stages = draw(st.integers(min_stages, 4))
    micro_batches = draw(st.integers(min_micro_batches, 6))
    schedule = named_schedule(name, stages, micro_batches, 2)
    schedule = _on_strands(schedule, draw(st.frozensets(st.integers(0, micro_batches - 1))))
    for _ in range(draw(st.integers(0, 3))):
        stage = draw(st.integers(0, stages - 1))
        receives = [n for n, i in enumerate(schedule.stages[stage]) if isinstance(i, Receive)]
        if receives:
            schedule = _asked_earlier(
                schedule, stage, draw(st.sampled_from(receives)), draw(st.integers(1, 12))
            )
    return schedule, layout_for(name, stages, 2)
