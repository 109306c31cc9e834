"""A fault for every rule of schedules: validation finds it and says where and why.

Schedules are edited at random in `tests.cuda.test_standstills`.
"""

import re
from typing import Any

import pytest

from braid.scheduling.schedule.text import parse, write
from tests.scheduling.cases import layout_for, named_schedule
from tests.scheduling.test_validate import message_of

BASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "plain": ("megatron", 2, 4, {}),
    "folded": ("megatron:folded", 2, 2, {}),
    "split": ("zbv", 2, 4, {}),
    "turns": ("dualpipev", 2, 4, {}),
    "paired": ("braid", 2, 6, {}),
    "leaving": ("braid", 2, 6, {"ends": True}),
    "twins": ("braid:twins", 1, 4, {}),
    "zero1": ("megatron", 2, 2, {"zero": 1}),
    "zero2": ("ddp", 1, 3, {"zero": 2}),
    "zero3": ("megatron", 2, 2, {"zero": 3}),
    "early": ("ddp", 1, 3, {"dp": 2}),
}
"""Valid schedules of two tensor-parallel ranks: name, stages, micro-batches, what else."""

FAULTS = """
# Passes.
folded: F1.1>1) B1.0 -> F1.1>1) : stage 0, at the end: B1.0 never runs
folded: F0.1<0) F0.1 -> F0.1<0) F0.1 F0.1 : stage 1, at F0.1: F0.1 runs twice
folded: F0.0 SEND -> B0.0 SEND : stage 0, at the end: F0.0 never runs
folded: F0.1\\n -> F0.2\\n : stage 1, at the end: F0.1 never runs
folded: F0.3<1) F0.3 -> F0.3<1) B0.3 F0.3 : stage 0, at B0.3: final_norm.grad of its forward pass has not run
folded: F1.0 -> F1.1 : stage 0, at F1.1: F1.1 does not run on this stage: it has chunk 0 and 3
folded: F1.0 -> F2.0 : at F2.0: F2.0 does not run on this stage: it has chunk 0 and 3, micro-batches 0 to 1
folded: F1.0 -> F1.0b : stage 0, at F1.0b: micro-batch 1 is on strand alpha elsewhere
folded: STEP -> F0.0 STEP : stage 0, at F0.0: F0.0 runs twice (embedding has run)
split: W1.3 -> : of B1.3 never run
split: W1.3 -> W1.3 W1.3 : stage 0, at W1.3: W1.3 runs twice
split: I0.3 -> W0.3 I0.3 : needs mlp_scatter.grad, which is not done yet (does I0.3 come first?)
split: F0.1>1) I0.0 -> F0.1>1) B0.0 : stage 0, at B0.0: program B:layer is missing
# Messages.
folded: SEND(F0.1>1) -> SEND(F0.0>1) : stage 0, at SEND(F0.0>1): F0.0 takes nothing from this stage
folded: SEND(F0.1>1) -> SEND(F0.1>0) : stage 0, at SEND(F0.1>0): F0.1 runs on stage 1
folded: F0.2 -> F0.2 SEND(F0.2>0) : stage 1, at SEND(F0.2>0): F0.2 runs on this stage, there is nothing
folded: F0.0 SEND(F0.1>1) -> SEND(F0.1>1) F0.0 : stage 0, at SEND(F0.1>1): F0.0 has not run yet, its output
folded: SEND(F0.3>0) -> : stage 1, at WAIT(SEND F0.3>0): SEND(F0.3>0) is not started
folded: SEND(B1.2>1) -> SEND(B1.2>1) SEND(B1.2>1) : stage 0, at SEND(B1.2>1): SEND(B1.2>1) is started twice
folded: SEND(B1.2>1) -> & WAIT(SEND B1.2>1) -> : the output of B1.3 is never sent to the stage that needs it
folded: WAIT(SEND B1.2>1) -> : the send of the output of B1.3 is never waited for
folded: WAIT(SEND B1.2>1) -> WAIT(SEND B1.2>1) WAIT(SEND B1.2>1) : SEND(B1.2>1) is waited for twice
split: SEND(B1.2>1) -> SEND(I1.2>1) : stage 0, at SEND(I1.2>1): messages are of whole passes: B1.2
folded: RECV(F0.3<1) -> : stage 0, at WAIT(RECV F0.3<1): RECV(F0.3<1) is not started
folded: RECV(F1.3<1) -> RECV(F1.3<1) RECV(F1.3<1) : stage 0, at RECV(F1.3<1): RECV(F1.3<1) is started twice
folded: RECV(F0.1<0) -> RECV(F0.1<1) : stage 1, at RECV(F0.1<1): nothing for F0.1 comes from stage 1
folded: RECV(F0.1<0) -> RECV(F0.1<0) RECV(F0.2<0) : at RECV(F0.2<0): nothing for F0.2 comes from stage 0
folded: RECV(F0.1<0) -> RECV(F0.3<0) : stage 1, at RECV(F0.3<0): F0.3 does not run on this stage
folded: WAIT(RECV F0.1<0) -> : stage 1, at F0.1: its input from stage 0 has not arrived
folded: WAIT(RECV F1.3<1) -> WAIT(RECV F1.3<1) WAIT(RECV F1.3<1) : RECV(F1.3<1) is waited for twice
folded: WAIT(RECV F1.3<1) -> WAIT(RECV F1.3b<1) : micro-batch 1 is on strand alpha elsewhere
folded: F0.0 SEND(F0.1>1) -> F0.0 & SEND(F1.1>1) -> SEND(F1.1>1) SEND(F0.1>1) : the next message that stage 0
# The update.
folded: WAIT(RECV B1.0<1) -> WAIT(RECV B1.0<1) REDUCE(0 tp) : at REDUCE(0 tp): chunk 0 still has passes to run
folded: REDUCE(0 tp) -> : stage 0, at WAIT(REDUCE 0 tp): no REDUCE(0 tp) is under way
folded: REDUCE(0 tp) -> & WAIT(REDUCE 0 tp) -> : at NORM: the gradients of chunk 0 are not summed over tp
folded: REDUCE(3 tp) -> REDUCE(3 tp) REDUCE(3 tp) : stage 0, at REDUCE(3 tp): REDUCE(3 tp) stands twice
folded: NORM -> REDUCE(0 tp) NORM : stage 0, at REDUCE(0 tp): REDUCE(0 tp) stands twice
folded: REDUCE(0 tp) -> REDUCE(1 tp) : stage 0, at REDUCE(1 tp): chunk 1 is not on this stage
folded: REDUCE(0 tp) -> REDUCE(0 cp) : over cp there is nothing to do here (but over tp)
folded: WAIT(REDUCE 0 tp) -> : stage 0, at NORM: REDUCE(0 tp) is not waited for
zero1: WAIT(REDUCE 0 tp) -> : at REDUCE(0 dp): REDUCE(0 tp) is not waited for, and sums of the same come one
folded: NORM -> : stage 0, at REDUCE(norm tp): the squares are not there yet: NORM comes first
folded: NORM -> NORM NORM : stage 0, at NORM: a second NORM
folded: REDUCE(norm pp) -> & WAIT(REDUCE norm pp) -> : at STEP: the squares of the norm are not summed over pp
folded: WAIT(REDUCE norm pp) -> STEP & \\n  STEP -> : at STEP: the squares of the norm are not summed over pp
folded: REDUCE(norm pp) -> REDUCE(norm dp) : over dp there is nothing to do here (but over tp, pp)
folded: STEP -> : stage 0, at the end: the STEP is missing
folded: STEP -> STEP STEP : stage 0, at STEP: a second STEP
folded: NORM -> STEP NORM : stage 0, at STEP: there is no NORM before it
# Passes side by side, and what they leave.
leaving: [F2.0b|B0.3] -> [F2.0|B0.3] : stage 0, at [F2.0|B0.3]: micro-batch 2 is on strand beta elsewhere
leaving: [F3.0b|B1.3] -> [B1.3|F3.0b] : stage 0, at [B1.3|F3.0b]: no program is for B beside F
leaving: [F3.0b|B1.3] -> [F3.0b|I1.3] : stage 0, at [F3.0b|I1.3]: no program is for F beside I
leaving: [F3.0b|B1.3] -> [F3.0b|I1.3|W1.3] : a block has a pass twice
leaving: [F2.0b|B0.3] -> [F2.0b|B0.2] : B0.2 does not run on this stage
leaving: [F2.0b|B0.3] -> [F2.0b|B0.3] B0.3 : B0.3 runs twice
leaving: [F2.3b|B0.0|L1.3] -> [F2.3b|B0.0|L2.3b] : no block before it has left an end of B2.3b for L2.3b
leaving: [F3.3b|B1.0|L2.3b] -> [F3.3b|B1.0|L1.3] : no block before it has left an end of B1.3 for L1.3
leaving: [F2.3b|B0.0|L1.3] -> [F2.3b|B0.0|L0.0] : at [F2.3b|B0.0|L0.0]: a block has a pass twice
leaving: [F2.3b|B0.0|L1.3] -> L1.3 [F2.3b|B0.0] : stage 0, at L1.3: an end has nothing to run beside
leaving: [F2.3b|B0.0|L1.3] -> [F2.3b|B0.0|L1.3b] : micro-batch 1 is on strand alpha elsewhere
leaving: [F2.3b|B0.0|L1.3] -> [F2.3b|B0.0|L1.2] : L1.2 does not run on this stage
leaving: [F5.3|B3.0b] -> [F5.3|B3.0b|L5.3] : no block before it has left an end
twins: [B2.0b|B3.0] -> [B3.0|B2.0b] : gradients are added up in the order of micro-batches
twins: [F0.0|F1.0b] -> [F0.0|F0.0] : a block has a pass twice
# What is shared.
zero1: [F0.0|GATHER(0 dp)] -> F0.0 : stage 0, at F0.0: the parameters of chunk 0 are not gathered
zero1: F1.0 SEND -> [F1.0|GATHER(0 dp)] SEND : stage 0, at [F1.0|GATHER(0 dp)]: GATHER(0 dp) stands twice
zero1: GATHER(0 dp)] -> GATHER(0 dp)|GATHER(0 dp)] : GATHER(0 dp) stands twice
zero1: GATHER(0 dp)] -> GATHER(0 dp)|GATHER(1 dp)] : no pass of the block reads the parameters of chunk 1
zero1: GATHER(0 dp)] -> GATHER(0 tp)] : over tp there is nothing to gather (but over dp)
folded: F0.0 -> [F0.0|GATHER(0 dp)] : over dp there is nothing to gather (but over no axis)
zero3: [F1.0|GATHER(0 dp)] -> F1.0 : stage 0, at F1.0: the parameters of chunk 0 are not gathered
zero1: PREFETCH -> : stage 0, at [F0.0|GATHER(0 dp)]: the parameters of chunk 0 are not gathered
zero1: STEP -> STEP PREFETCH : PREFETCH is missing, or stands twice
zero1: PREFETCH -> & STEP -> PREFETCH STEP : it stands at the begin, or at the end
zero3: PREFETCH -> & STEP -> STEP PREFETCH : it stands at the begin, or at the end unless
folded: F0.0 -> PREFETCH F0.0 : it stands at the begin, or at the end unless parameters are in shares
# Sums in blocks.
zero2: |REDUCE(0 dp)] -> ] : stage 0, at [B0.0|REDUCE(0 tp)]: the gradients of chunk 0 are not summed over dp
zero2: |REDUCE(0 dp)] -> |REDUCE(0 dp)|REDUCE(0 dp)] : REDUCE(0 dp) stands twice
zero2: |REDUCE(0 dp)] -> |REDUCE(0 dp)|REDUCE(1 dp)] : chunk 1 is not on this stage
zero2: |REDUCE(0 dp)] -> |REDUCE(0 dp)|REDUCE(0 cp)] : over cp there is nothing to do here
zero2: [F0.0 -> REDUCE(0 dp) [F0.0 : sums over dp stand in blocks, behind what adds to the gradients
zero2: |REDUCE(0 tp)|REDUCE(0 dp)] -> |REDUCE(0 dp)|REDUCE(0 tp)] : sums of the same come one after the other
early: B1.0 -> [B1.0|REDUCE(0 tp)|REDUCE(0 dp)] : chunk 0 still has passes to run
early: |REDUCE(0 tp)|REDUCE(0 dp)] -> |REDUCE(0 dp)|REDUCE(0 tp)] : sums of the same come one after the other
early: |REDUCE(0 tp) -> : the gradients of chunk 0 are not summed over tp
early: |REDUCE(0 dp)] -> |REDUCE(0 dp)|REDUCE(3 dp)] : chunk 3 is not on this stage
early: WAIT(REDUCE 0 dp) -> REDUCE(0 dp) WAIT(REDUCE 0 dp) : REDUCE(0 dp) stands twice
early: WAIT(REDUCE 0 dp) -> : REDUCE(0 dp) is not waited for
early: WAIT(REDUCE 0 dp) -> WAIT(REDUCE 0 tp) WAIT(REDUCE 0 dp) : no REDUCE(0 tp) is under way
zero2: WAIT(REDUCE 0 dp) -> & F1.0 -> WAIT(REDUCE 0 dp) F1.0 : REDUCE(0 dp) is not waited for
# Programs.
plain F:layer: compute qkv -> : attention needs qkv, which is not done yet
plain F:layer: compute mlp_residual -> : attention_norm needs mlp_residual, which is not done yet
plain F:layer: compute qkv -> compute qkv / compute qkv : F0.0 runs twice (qkv has run)
plain F:layer: wait mlp_gather -> wait mlp_gather / start mlp_gather on intra : F0.0 runs twice
plain F:layer: wait mlp_gather -> wait mlp_gather / wait mlp_gather : F0.0 runs twice (mlp_gather has run)
plain F:layer: compute qkv -> compute nothing : the graph has no operator 'nothing'
plain F:layer: start mlp_gather on intra -> start mlp_gather on compute : no collective runs on
plain F:layer: start mlp_gather on intra -> : mlp_gather is not started
plain F:layer: wait mlp_gather -> : mlp_in needs mlp_gather, which is not done yet
plain F:layer: wait mlp_scatter -> : mlp_residual needs mlp_scatter, which is not done yet
plain F:layer: start mlp_gather on intra -> compute mlp_gather : mlp_gather is a collective
plain F:layer: compute qkv -> start qkv on intra / wait qkv : qkv is not a collective
plain F:layer: compute qkv -> compute qkv / wait qkv : qkv is not a collective
plain B:layer: compute qkv.wgrad -> : qkv.wgrad of B0.0 never runs
plain B:layer: compute qkv.dgrad -> : attention_gather.grad needs qkv.dgrad, which is not done yet
split I:layer: compute qkv.dgrad -> compute qkv.dgrad / compute qkv.wgrad : runs twice
split W:layer: compute qkv.wgrad -> compute qkv.wgrad / compute qkv.dgrad : runs twice
paired F:layer|B:layer: compute 0:qkv -> compute 1:qkv : the graph has no operator 'qkv'
paired F:layer|B:layer: compute 1:qkv.wgrad -> : never runs
leaving F:layer|B:layer|L:layer: compute 2:qkv.wgrad -> : never runs
leaving F:layer|B:layer|L:layer: compute 0:qkv -> compute 0:qkv / compute 2:qkv.dgrad : runs twice
leaving F:layer|B:layer|L:layer: compute 1:qkv.dgrad -> compute 1:qkv.dgrad / compute 1:qkv.wgrad : runs twice
leaving F:layer|B:layer|L:layer: compute 1:qkv.dgrad -> compute 2:qkv.dgrad : which is not done yet
twins F:layer|F:layer: compute 1:qkv -> compute 0:qkv : F0.0 runs twice (qkv has run)
twins B:layer|B:layer: compute 0:qkv.wgrad -> & \
compute 1:qkv.wgrad -> compute 1:qkv.wgrad / compute 0:qkv.wgrad \
: gradients are added up in the order of micro-batches
plain B:head: * -> : at B0.1: program B:head is missing
plain F:layer: * -> : at F0.0: program F:layer is missing
split I:layer: * -> : program I:layer is missing
split W:embedding: * -> : program W:embedding is missing
turns F:layer|B:layer: * -> : no program is for F beside B
leaving F:layer|B:layer|L:layer: * -> : no program is for F beside B
"""
"""Base: what stands there -> what is put in its place (& more of both) : the cause.

Or base and program: lines of it instead, and * for all of it.
"""


@pytest.mark.parametrize(
    "fault", [line for line in FAULTS.replace("\\\n", "").strip().splitlines() if line[0] != "#"]
)
def test_a_faulty_schedule_is_refused(fault: str) -> None:
    where, _, rest = fault.partition(": ")
    base, *sides = where.split()
    edits, _, cause = rest.rpartition(" : ")
    name, stages, micro_batches, more = BASES[base]
    zero = more.get("zero", 0)
    text = write(named_schedule(name, stages, micro_batches, 2, **more))
    before, header, text = text.partition(f"program {sides[0]}\n") if sides else ("", "", text)
    for edit in edits.split(" & "):
        old, _, new = edit.replace("\\n", "\n").partition(" ->")
        new = new.removeprefix(" ")
        if old == "*":
            header, text = "", text.partition("\n\n")[2]
            continue
        if sides:
            old, new = f"  {old}\n", "".join(f"  {line}\n" for line in new.split(" / ") if line)
        assert old in text
        text = text.replace(old, new, 1)
    layout = layout_for(name, stages, 2, more.get("dp", 1 + bool(zero)), zero)
    message = message_of(parse(before + header + text), layout).splitlines()[0]
    assert re.match(
        rf"schedule {name}(, stage .|: program {re.escape(sides[0] if sides else '')}: )", message
    )
    assert cause in message
