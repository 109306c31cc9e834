"""Runs of several parts: the same operators and values as the parts one after the other."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.scheduling.fusion import carrying, chunk_runs, fuse, fused_parts, pair_up, run_name, runs_in_use
from braid.scheduling.lowering.programs import serial_program
from braid.scheduling.operators import Kind, Part, Pass
from braid.scheduling.profile import operator_key
from braid.scheduling.schedule import Block, Direction, Instruction, Pair, Reduce, Send, Step, Strand
from braid.scheduling.spec import ParallelLayout, Placement
from tests.scheduling.cases import GPT, LLAMA, model_parts

PARTS = model_parts(LLAMA, 2)
PLACEMENTS = st.sampled_from((Placement.LINEAR, Placement.FOLDED))


@given(st.integers(1, 4), PLACEMENTS, st.integers(0, 8), st.integers(0, 12))
def test_runs_hold_every_part_once_and_in_order(
    stages: int, placement: Placement, fused: int, more: int
) -> None:
    layout = ParallelLayout(pp=stages, placement=placement)
    layers = layout.chunks + more
    members = [
        (name, layer)
        for chunk in range(layout.chunks)
        for run in chunk_runs(layout, layers, chunk, fused)
        for name, layer in zip(run.members, run.layers, strict=True)
    ]
    assert members == [("embedding", -1), *(("layer", n) for n in range(layers)), ("head", layers)]
    for names in runs_in_use(layout, layers, fused).values():
        assert names.count("layer") <= max(1, fused)
        assert fused or len(names) == 1


@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "selective", "full", "fine"])
def test_a_run_is_its_parts_one_after_the_other(shape: object, tp: int, recompute: str) -> None:
    parts = {**model_parts(shape, tp, recompute)}  # type: ignore[arg-type]
    names = ("embedding", "layer", "layer", "layer", "head")
    run = fuse([parts[name] for name in names])
    assert run.name == run_name(names) == "embedding+3*layer+head"
    parts["head"] = parts["head"].balanced()
    for mine, graphs in (
        (run.forward, [parts[name].forward for name in names]),
        (run.backward, [parts[name].backward for name in reversed(names)]),
    ):
        theirs = [op for graph in graphs for op in graph.operators]
        assert [(op.kind, op.phase, op.flops, op.bytes) for op in mine.operators] == [
            (op.kind, op.phase, op.flops, op.bytes) for op in theirs
        ]
    keys = {operator_key(run.name, op) for op in (*run.forward.operators, *run.backward.operators)}
    assert keys == {
        operator_key(part.name, op)
        for part in parts.values()
        for op in (*part.forward.operators, *part.backward.operators)
    }
    _assert_every_value_is_written_before_it_is_read(run)
    saved = sum(parts[name].saved_bytes(2) for name in names)
    assert run.saved_bytes(2) <= saved, "what two parts share is counted once"


@pytest.mark.parametrize("tp", [1, 2])
def test_a_balanced_head_sends_its_gradients_in_its_backward_pass(tp: int) -> None:
    """All that is large is gone by then; where nothing is sent all of it runs at once."""
    parts = model_parts(LLAMA, tp)
    for name in ("embedding", "layer"):
        assert parts[name].balanced() == parts[name]
    head = parts["head"]
    balanced = head.balanced()
    assert balanced.forward.operators + balanced.backward.operators == head.forward.operators
    if tp == 1:
        assert balanced == head
        return
    assert balanced.backward.operators[0].kind is Kind.REDUCE_SCATTER
    assert all(op.phase is Pass.FORWARD for op in balanced.forward.operators if op.kind.communicates)
    logits = head.forward.named("head").writes[0]
    assert not {logits, f"d.{logits}"} & set(balanced.saved())


def _assert_every_value_is_written_before_it_is_read(run: Part) -> None:
    there = {*run.inputs, *run.constants}
    for op in run.forward.operators:
        assert set(op.reads) <= there, op
        there |= set(op.writes)
    there = {*run.constants, *run.saved(), f"d.{run.output}"}
    for op in run.backward.operators:
        assert set(op.reads) <= there, op
        there |= set(op.writes)
    assert all(name in run.values for name in there if name != f"d.{run.output}")


def test_parts_that_are_not_fused_stay_as_they_are() -> None:
    layout = ParallelLayout(pp=2)
    assert fused_parts(PARTS, layout, 4, 0) == PARTS
    fused = fused_parts(PARTS, layout, 4, 2)
    assert set(fused) == {"embedding+2*layer", "2*layer+head"}
    assert len(serial_program(fused["2*layer+head"].forward)) > len(serial_program(PARTS["layer"].forward))


NAMES = st.lists(st.sampled_from("abc"), min_size=1, max_size=5)


@given(NAMES, NAMES, st.sets(st.tuples(st.sampled_from("abc"), st.sampled_from("abc"))))
def test_pairing_up_runs_everything_once_and_in_order(
    ahead: list[str], behind: list[str], pairs: set[tuple[str, str]]
) -> None:
    order = pair_up(ahead, behind, pairs)
    assert [i for i, _ in order if i is not None] == list(range(len(ahead)))
    assert [j for _, j in order if j is not None] == list(range(len(behind)))
    for i, j in order:
        assert i is None or j is None or (ahead[i], behind[j]) in pairs


def _pair(forward: int, backward: int) -> Pair:
    return Pair(Block(Direction.FORWARD, forward, 0, Strand.BETA), Block(Direction.BACKWARD, backward, 0))


def test_weight_gradients_are_carried_between_paired_blocks_alone() -> None:
    runs: Mapping[int, list[str]] = {0: ["a"], 1: ["b"]}
    pairs = {("a", "a")}

    def names(block: Block) -> list[str]:
        return runs[block.chunk]

    message = Send(Block(Direction.FORWARD, 1, 1), 1)
    instructions: list[Instruction] = [_pair(1, 0), message, _pair(2, 1), Reduce(0), _pair(3, 2), _pair(4, 3)]
    instructions += [Block(Direction.BACKWARD, 4, 0), _pair(5, 4), Step()]
    assert carrying(instructions, names, pairs) == {0, 4}
    assert carrying(instructions, names, set()) == set()
    other = Pair(Block(Direction.FORWARD, 2, 1, Strand.BETA), Block(Direction.BACKWARD, 1, 0))
    assert carrying([_pair(1, 0), other], names, pairs) == set(), "another program does not take them up"
