"""Units of several parts: the same operators and values as the parts one after the other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.scheduling.generate.lower import with_ends
from braid.scheduling.mesh.layout import ParallelLayout, Placement
from braid.scheduling.model.units import (
    chunk_units,
    joined,
    unit_name,
)
from braid.scheduling.schedule.operations import (
    Compute,
    Pass,
    PassKind,
    Reduce,
    Send,
    Start,
    Step,
    Strand,
    Wait,
)
from braid.scheduling.schedule.rounds import in_rounds
from braid.scheduling.schedule.schedule import Block, Instruction, Program, Schedule, Side, Sides
from braid.scheduling.schedule.text import operator_key
from tests.scheduling.cases import LLAMA, model_parts
from tests.scheduling.test_graphs import check_data_flow


@pytest.mark.parametrize(("tp", "recompute"), [(1, "none"), (2, "none"), (2, "full")])
def test_a_unit_is_its_parts_one_after_the_other(tp: int, recompute: str) -> None:
    parts = {**model_parts(LLAMA, tp, recompute)}
    names = ("embedding", "layer", "layer", "layer", "head")
    unit = joined([parts[name] for name in names])
    assert unit.name == unit_name(names) == "embedding+3*layer+head"
    parts["head"] = parts["head"].balanced()
    for mine, graphs in (
        (unit.forward, [parts[name].forward for name in names]),
        (unit.backward, [parts[name].backward for name in reversed(names)]),
    ):
        theirs = [op for graph in graphs for op in graph.operators]
        assert [(op.kind, op.phase, op.flops, op.bytes) for op in mine.operators] == [
            (op.kind, op.phase, op.flops, op.bytes) for op in theirs
        ]
    ours = (*unit.forward.operators, *unit.backward.operators)
    assert {op.key for op in ours} == {
        op.key for part in parts.values() for op in (*part.forward.operators, *part.backward.operators)
    }
    assert all(str(operator_key(unit.name, op.name)) == op.key for op in ours), "also where a text names it"
    assert [names[op.place] for op in ours] == [op.part for op in ours]
    check_data_flow(unit)
    saved = sum(parts[name].saved_bytes(2) for name in names)
    assert unit.saved_bytes(2) <= saved, "what two parts share is counted once"


def test_units_without_a_partner_run_first_or_last_and_those_of_backward_passes_before_others() -> None:
    units = (["embedding", "layer", "layer"], ["head", "layer"])
    kinds = (PassKind.FORWARD, PassKind.BACKWARD)
    assert [*in_rounds(units, kinds, {("layer", "layer")})] == [[None, 0], [0, None], [1, 1], [2, None]]
    assert [*in_rounds(units, kinds, set())] == [[None, 0], [None, 1], [0, None], [1, None], [2, None]]


def _pair(forward: int, backward: int, chunk: int = 1) -> Block:
    ahead = Pass(PassKind.FORWARD, forward, chunk, Strand.BETA)
    return Block((ahead, Pass(PassKind.BACKWARD, backward, 1)))


@pytest.mark.parametrize("alone", [False, True])
def test_ends_are_carried_between_blocks_of_the_same_units_alone(alone: bool) -> None:
    layout, layers = ParallelLayout(pp=3), ("layer",) * 3
    held = {chunk: [unit.name for unit in chunk_units(layout, layers, chunk, 0)] for chunk in range(3)}
    assert held == {0: ["embedding", "layer"], 1: ["layer"], 2: ["layer", "head"]}
    pair = (Side(PassKind.FORWARD, "layer"), Side(PassKind.BACKWARD, "layer"))
    back, end = Side(PassKind.BACKWARD, "layer"), Side(PassKind.END, "layer")
    programs: dict[Sides, Program] = {(*pair, end): ()}
    if alone:
        programs[back, end] = ()
    message = Send(Pass(PassKind.FORWARD, 1, 2), 2)
    last = Block((Pass(PassKind.BACKWARD, 4, 1),))
    instructions: list[Instruction] = [
        _pair(1, 0),
        Start(message),
        _pair(2, 1),
        Start(Reduce(0, "dp")),
        _pair(3, 2),
    ]
    instructions += [_pair(4, 3), Wait(message), last, _pair(5, 4), _pair(6, 5, chunk=0), Compute(Step())]

    def blocks(known: dict[Sides, Program]) -> list[str]:
        schedule = Schedule(
            name="any", chunks=3, micro_batches=9, stages=(tuple(instructions),), programs=known
        )
        return [str(i) for i in with_ends(schedule, layout, layers).stages[0] if isinstance(i, Block)]

    assert blocks(programs) == [
        "[F1.1b|B0.1]",
        "[F2.1b|B1.1|L0.1]",
        "[F3.1b|B2.1]",  # not over the sum of gradients, which the end would come too late for
        "[F4.1b|B3.1|L2.1]",
        "[B4.1|L3.1]" if alone else "B4.1",
        "[F5.1b|B4.1]",
        "[F6.0b|B5.1]",  # begins with the embedding: its first program does not take it up
    ]
    assert blocks({pair: ()}) == [str(i) for i in instructions if isinstance(i, Block)]


# -- layers of chunks ---------------------------------------------------------------------------------------


def counts(layout: ParallelLayout, layers: int) -> list[int]:
    """Layers of every chunk of the first copy."""
    return [len(layout.layers_of(chunk, layers)) for chunk in range(layout.chunks)]


@given(
    pp=st.integers(1, 8),
    layers=st.integers(40, 90),
    placement=st.sampled_from(Placement),
    head=st.integers(0, 1),
)
def test_every_layer_is_held_once_in_order(pp: int, layers: int, placement: Placement, head: int) -> None:
    layout = ParallelLayout(pp=pp, placement=placement, head_layers=head)
    held = [layer for chunk in range(layout.chunks) for layer in layout.layers_of(chunk, layers)]
    assert held == list(range(layers))
    found = counts(layout, layers)
    found[-1] += head
    assert max(found) - min(found) <= 1


def test_later_chunks_of_the_folded_model_hold_more_and_in_a_line_not_that_of_the_head() -> None:
    folded = ParallelLayout(pp=2, placement=Placement.FOLDED)
    held = [counts(folded, layers) for layers in (8, 9, 10, 11)]
    assert held == [[2, 2, 2, 2], [2, 2, 3, 2], [2, 3, 3, 2], [2, 3, 3, 3]]
    assert counts(ParallelLayout(pp=4), 11) == [3, 3, 3, 2]


def test_no_end_is_left_without_layers() -> None:
    layout = ParallelLayout(pp=2, placement=Placement.FOLDED, head_layers=3)
    with pytest.raises(ValueError, match=r"model.layers=8 .* last of 4 chunks without a layer; lower"):
        layout.layers_of(0, 8)
