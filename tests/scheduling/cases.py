"""Small models, layouts and schedules for the tests of planning."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import strategies as st

from braid.scheduling.layers import built_in_parts, part_sizes
from braid.scheduling.lowering.lower import Choices, training_schedule
from braid.scheduling.lowering.named import SCHEDULES, PairMethod
from braid.scheduling.lowering.programs import PairingDecision
from braid.scheduling.operators import Part
from braid.scheduling.schedule import (
    Block,
    Direction,
    Instruction,
    Pair,
    Receive,
    Schedule,
    Send,
    Strand,
    Twins,
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


UNPAIRED = tuple(name for name, kind in SCHEDULES.items() if kind.pairs is None)
PAIRED = tuple(name for name, kind in SCHEDULES.items() if kind.pairs is not None)
PAIRED_W = ("wavelet", "dhelix", "braid")
SPLIT = ("braid_v", "dualpipev", "zbv")
"""Schedules that put weight gradients off."""
STAGES = pytest.mark.parametrize("p", range(1, 7))
HOPS = pytest.mark.parametrize("hop", SCHEDULES["braid_eager"].hops)
SIZES = [(p, m) for p in range(1, 7) for m in range(1, 13)]
"""Stages and micro-batches."""


def exists(name: str, stages: int, micro_batches: int) -> bool:
    """Whether a named schedule is defined for so many stages and micro-batches."""
    match name:
        case "interleaved":
            return micro_batches % stages == 0
        case "dualpipev" | "braid_v":
            return micro_batches >= 2 * stages
        case _:
            return True


def sizes_of(name: str, stages: int, up_to: int = 12) -> list[int]:
    """Numbers of micro-batches that a schedule is defined for."""
    return [m for m in range(1, up_to + 1) if exists(name, stages, m)]


def in_turn(layer: Part, method: PairMethod) -> PairingDecision:
    """A pairing that needs no profile: operator after operator, forward and backward taking turns."""
    forward = [op.name for op in layer.forward.operators]
    backward = [op.name for op in layer.backward.operators]
    if method is PairMethod.TURNS:
        return PairingDecision(method=method)
    if method is PairMethod.BARRIERS:
        width = max(len(forward), len(backward))
        padded = [names + [""] * (width - len(names)) for names in (forward, backward)]
        return PairingDecision(method=method, steps=tuple(f"{f} | {b}" for f, b in zip(*padded, strict=True)))
    steps = [f"{side}:{name}" for side, names in (("F", forward), ("B", backward)) for name in names]
    return PairingDecision(method=method, steps=tuple(steps))


@cache
def named_schedule(
    name: str,
    stages: int,
    micro_batches: int,
    tp: int = 1,
    recompute: str = "none",
    early_reduction: bool = False,
    gathers: bool = False,
    hop: int = 0,
) -> Schedule:
    """A generated schedule with the programs of the Llama model; GPT's are the same."""
    parts = model_parts(LLAMA, tp, recompute)
    method = SCHEDULES[name].pairs
    choices = Choices(
        pairings={} if method is None else {"layer|layer": in_turn(parts["layer"], method)},
        early_reduction=early_reduction,
        gathers=gathers,
    )
    return training_schedule(name, layout_for(name, stages, tp), micro_batches, parts, choices, hop=hop)


def with_stage(schedule: Schedule, stage: int, instructions: list[Instruction]) -> Schedule:
    """The schedule with another list for one stage."""
    stages = [*schedule.stages]
    stages[stage] = tuple(instructions)
    return replace(schedule, stages=tuple(stages))


def on_strands(schedule: Schedule, beta: frozenset[int]) -> Schedule:
    """The schedule with these micro-batches on strand beta, the others on alpha."""

    def block(old: Block) -> Block:
        return replace(old, strand=Strand.BETA if old.micro_batch in beta else Strand.ALPHA)

    def moved(old: Instruction) -> Instruction:
        match old:
            case Block():
                return block(old)
            case Pair(forward, backward):
                return Pair(block(forward), block(backward))
            case Twins(first, second):
                return Twins(block(first), block(second))
            case Send() | Receive() | WaitSend() | WaitReceive():
                return replace(old, block=block(old.block))
            case _:
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
    draw: st.DrawFn, min_stages: int = 1, max_stages: int = 4, names: tuple[str, ...] = tuple(SCHEDULES)
) -> tuple[Schedule, ParallelLayout]:
    """Generated schedules of all kinds, varied in what does not make them invalid.

    Strands change places (micro-batches that nothing is paired with are on either), some receives are asked
    for early, gradients are reduced early, parameters are gathered.
    """
    name = draw(st.sampled_from(names))
    stages = draw(st.integers(min_stages, max_stages))
    micro_batches = draw(st.sampled_from([m for m in range(1, 2 * stages + 3) if exists(name, stages, m)]))
    schedule = named_schedule(
        name, stages, micro_batches, 2, early_reduction=draw(st.booleans()), gathers=draw(st.booleans())
    )
    if not any(isinstance(i, Pair) for stage in schedule.stages for i in stage):
        schedule = on_strands(schedule, draw(st.frozensets(st.integers(0, micro_batches - 1))))
    elif draw(st.booleans()):
        alpha = {b.micro_batch for s in range(stages) for b in schedule.blocks(s) if b.strand is Strand.ALPHA}
        schedule = on_strands(schedule, frozenset(alpha))
    for _ in range(draw(st.integers(0, 3))):
        stage = draw(st.integers(0, stages - 1))
        receives = [n for n, i in enumerate(schedule.stages[stage]) if isinstance(i, Receive)]
        if receives:
            schedule = _asked_earlier(
                schedule, stage, draw(st.sampled_from(receives)), draw(st.integers(1, 12))
            )
    return schedule, layout_for(name, stages, 2)
