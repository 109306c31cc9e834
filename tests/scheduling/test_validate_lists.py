"""Lists of stages with a fault for every rule: validation finds it and says where and why.

Faults at random places are drawn in `test_soundness`.
"""

from typing import Any

import pytest

from braid.scheduling.schedule_text import parse, write
from tests.scheduling.cases import layout_for, named_schedule
from tests.scheduling.test_validate import message_of

BASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "folded": ("megatron:folded", 2, 2, {}),
    "split": ("zbv", 2, 4, {}),
    "paired": ("braid", 2, 6, {"ends": True}),
    "twins": ("braid:twins", 1, 4, {}),
    "zero 1": ("megatron", 2, 2, {"zero": 1}),
    "zero 2": ("ddp", 1, 3, {"zero": 2}),
    "zero 3": ("megatron", 2, 2, {"zero": 3}),
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
zero 1: WAIT(REDUCE 0 tp) -> : at REDUCE(0 dp): REDUCE(0 tp) is not waited for, and sums of the same come one
folded: NORM -> : stage 0, at REDUCE(norm tp): the squares are not there yet: NORM comes first
folded: NORM -> NORM NORM : stage 0, at NORM: a second NORM
folded: REDUCE(norm pp) -> & WAIT(REDUCE norm pp) -> : at STEP: the squares of the norm are not summed over pp
folded: WAIT(REDUCE norm pp) -> STEP & \\n  STEP -> : at STEP: the squares of the norm are not summed over pp
folded: REDUCE(norm pp) -> REDUCE(norm dp) : over dp there is nothing to do here (but over tp, pp)
folded: STEP -> : stage 0, at the end: the STEP is missing
folded: STEP -> STEP STEP : stage 0, at STEP: a second STEP
folded: NORM -> STEP NORM : stage 0, at STEP: there is no NORM before it
# Passes side by side, and what they leave.
paired: [F2.0b|B0.3] -> [F2.0|B0.3] : stage 0, at [F2.0|B0.3]: micro-batch 2 is on strand beta elsewhere
paired: [F3.0b|B1.3] -> [B1.3|F3.0b] : stage 0, at [B1.3|F3.0b]: no program is for B beside F
paired: [F3.0b|B1.3] -> [F3.0b|I1.3] : stage 0, at [F3.0b|I1.3]: no program is for F beside I
paired: [F3.0b|B1.3] -> [F3.0b|I1.3|W1.3] : a block has a pass twice
paired: [F2.0b|B0.3] -> [F2.0b|B0.2] : B0.2 does not run on this stage
paired: [F2.0b|B0.3] -> [F2.0b|B0.3] B0.3 : B0.3 runs twice
paired: [F2.3b|B0.0|L1.3] -> [F2.3b|B0.0|L2.3b] : no block before it has left an end of B2.3b for L2.3b
paired: [F3.3b|B1.0|L2.3b] -> [F3.3b|B1.0|L1.3] : no block before it has left an end of B1.3 for L1.3
paired: [F2.3b|B0.0|L1.3] -> [F2.3b|B0.0|L0.0] : at [F2.3b|B0.0|L0.0]: a block has a pass twice
paired: [F2.3b|B0.0|L1.3] -> L1.3 [F2.3b|B0.0] : stage 0, at L1.3: an end has nothing to run beside
paired: [F2.3b|B0.0|L1.3] -> [F2.3b|B0.0|L1.3b] : micro-batch 1 is on strand alpha elsewhere
paired: [F2.3b|B0.0|L1.3] -> [F2.3b|B0.0|L1.2] : L1.2 does not run on this stage
paired: [F5.3|B3.0b] -> [F5.3|B3.0b|L5.3] : no block before it has left an end
twins: [B2.0b|B3.0] -> [B3.0|B2.0b] : gradients are added up in the order of micro-batches
twins: [F0.0|F1.0b] -> [F0.0|F0.0] : a block has a pass twice
# What is shared.
zero 1: [F0.0|GATHER(0 dp)] -> F0.0 : stage 0, at F0.0: the parameters of chunk 0 are not gathered
zero 1: F1.0 SEND -> [F1.0|GATHER(0 dp)] SEND : stage 0, at [F1.0|GATHER(0 dp)]: GATHER(0 dp) stands twice
zero 1: GATHER(0 dp)] -> GATHER(0 dp)|GATHER(0 dp)] : GATHER(0 dp) stands twice
zero 1: GATHER(0 dp)] -> GATHER(0 dp)|GATHER(1 dp)] : no pass of the block reads the parameters of chunk 1
zero 1: GATHER(0 dp)] -> GATHER(0 tp)] : over tp there is nothing to gather (but over dp)
folded: F0.0 -> [F0.0|GATHER(0 dp)] : over dp there is nothing to gather (but over no axis)
zero 3: [F1.0|GATHER(0 dp)] -> F1.0 : stage 0, at F1.0: the parameters of chunk 0 are not gathered
zero 1: PREFETCH -> : stage 0, at [F0.0|GATHER(0 dp)]: the parameters of chunk 0 are not gathered
zero 1: STEP -> STEP PREFETCH : PREFETCH is missing, or stands twice
zero 1: PREFETCH -> & STEP -> PREFETCH STEP : it stands at the begin, or at the end
zero 3: PREFETCH -> & STEP -> STEP PREFETCH : it stands at the begin, or at the end unless
folded: F0.0 -> PREFETCH F0.0 : it stands at the begin, or at the end unless parameters are in shares
# Sums in blocks.
zero 2: |REDUCE(0 dp)] -> ] : stage 0, at [B0.0|REDUCE(0 tp)]: the gradients of chunk 0 are not summed over dp
zero 2: |REDUCE(0 dp)] -> |REDUCE(0 dp)|REDUCE(0 dp)] : REDUCE(0 dp) stands twice
zero 2: |REDUCE(0 dp)] -> |REDUCE(0 dp)|REDUCE(1 dp)] : chunk 1 is not on this stage
zero 2: |REDUCE(0 dp)] -> |REDUCE(0 dp)|REDUCE(0 cp)] : over cp there is nothing to do here
zero 2: [F0.0 -> REDUCE(0 dp) [F0.0 : sums over dp stand in blocks, behind what adds to the gradients
zero 2: |REDUCE(0 tp)|REDUCE(0 dp)] -> |REDUCE(0 dp)|REDUCE(0 tp)] : sums of the same come one after the other
early: B1.0 -> [B1.0|REDUCE(0 tp)|REDUCE(0 dp)] : chunk 0 still has passes to run
early: |REDUCE(0 tp)|REDUCE(0 dp)] -> |REDUCE(0 dp)|REDUCE(0 tp)] : sums of the same come one after the other
early: |REDUCE(0 tp) -> : the gradients of chunk 0 are not summed over tp
early: |REDUCE(0 dp)] -> |REDUCE(0 dp)|REDUCE(3 dp)] : chunk 3 is not on this stage
early: WAIT(REDUCE 0 dp) -> REDUCE(0 dp) WAIT(REDUCE 0 dp) : REDUCE(0 dp) stands twice
early: WAIT(REDUCE 0 dp) -> : REDUCE(0 dp) is not waited for
early: WAIT(REDUCE 0 dp) -> WAIT(REDUCE 0 tp) WAIT(REDUCE 0 dp) : no REDUCE(0 tp) is under way
zero 2: WAIT(REDUCE 0 dp) -> & F1.0 -> WAIT(REDUCE 0 dp) F1.0 : REDUCE(0 dp) is not waited for
"""
"""Base: what stands there -> what is put in its place (& more of both) : the cause."""


@pytest.mark.parametrize("fault", [line for line in FAULTS.strip().splitlines() if line[0] != "#"])
def test_a_faulty_list_is_refused(fault: str) -> None:
    base, _, rest = fault.partition(": ")
    edits, _, cause = rest.partition(" : ")
    name, stages, micro_batches, more = BASES[base]
    zero = more.get("zero", 0)
    text = write(named_schedule(name, stages, micro_batches, 2, **more))
    for edit in edits.split(" & "):
        old, _, new = edit.replace("\\n", "\n").partition(" ->")
        assert old in text
        text = text.replace(old, new.removeprefix(" "), 1)
    message = message_of(parse(text), layout_for(name, stages, 2, more.get("dp", 1 + bool(zero)), zero))
    assert message.startswith(f"schedule {name}, stage ")
    assert cause in message.splitlines()[0]
