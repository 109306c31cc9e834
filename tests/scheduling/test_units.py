"""Units of several parts: the same operators and values as the parts one after the other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.scheduling.generate.lower import with_ends
from braid.scheduling.generate.programs import serial_program
from braid.scheduling.mesh.layout import ParallelLayout, Placement
from braid.scheduling.model.operators import Kind, Phase
from braid.scheduling.model.units import chunk_units, joined, unit_name, unit_parts, units_in_use
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
from braid.scheduling.schedule.rounds import rounds
from braid.scheduling.schedule.schedule import Block, Instruction, Program, Schedule, Side, Sides
from braid.scheduling.schedule.text import operator_key
from braid.scheduling.text.pattern import is_layer
from tests.scheduling.cases import GPT, LLAMA, model_parts
from tests.scheduling.test_graphs import check_data_flow

PARTS = model_parts(LLAMA, 2)
PLACEMENTS = st.sampled_from((Placement.LINEAR, Placement.FOLDED))


def of_kinds(layers: int) -> st.SearchStrategy[tuple[str, ...]]:
    """Kinds of so many layers."""
    return st.lists(st.sampled_from(["layer", "wide"]), min_size=layers, max_size=layers).map(tuple)


@given(st.integers(1, 4), PLACEMENTS, st.integers(0, 8), st.integers(0, 12), st.data())
def test_units_hold_every_part_once_and_in_order(
    stages: int, placement: Placement, unit_layers: int, more: int, data: st.DataObject
) -> None:
    layout = ParallelLayout(pp=stages, placement=placement)
    layers = layout.chunks + more
    kinds = data.draw(of_kinds(layers))
    members = [
        (name, layer)
        for chunk in range(layout.chunks)
        for unit in chunk_units(layout, kinds, chunk, unit_layers)
        for name, layer in zip(unit.members, unit.layers, strict=True)
    ]
    assert members == [("embedding", -1), *((kinds[n], n) for n in range(layers)), ("head", layers)]
    for names in units_in_use(layout, kinds, unit_layers).values():
        assert sum(map(is_layer, names)) <= max(1, unit_layers)
        assert unit_layers or len(names) == 1


@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "selective", "full", "fine"])
def test_a_unit_is_its_parts_one_after_the_other(shape: object, tp: int, recompute: str) -> None:
    parts = {**model_parts(shape, tp, recompute)}  # type: ignore[arg-type]
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


@pytest.mark.parametrize("tp", [1, 2])
def test_a_balanced_head_sends_its_gradients_in_its_backward_pass(tp: int) -> None:
    """All that is large is gone by then; where nothing is sent all of it units at once."""
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
    assert all(op.phase is Phase.FORWARD for op in balanced.forward.operators if op.kind.communicates)
    logits = head.forward.named("head").writes[0]
    assert not {logits, f"d.{logits}"} & set(balanced.saved())


def test_parts_that_are_not_joined_stay_as_they_are() -> None:
    layout = ParallelLayout(pp=2)
    assert unit_parts(PARTS, layout, ("layer",) * 4, 0) == PARTS
    units = unit_parts(PARTS, layout, ("layer",) * 4, 2)
    assert [name for name, part in PARTS.items() if part.has_layers] == ["layer"]
    assert all(unit.has_layers for unit in units.values())
    assert set(units) == {"embedding+2*layer", "2*layer+head"}
    assert len(serial_program(units["2*layer+head"].forward)) > len(serial_program(PARTS["layer"].forward))


@given(
    st.integers(1, 3),
    PLACEMENTS,
    st.integers(0, 3),
    st.integers(0, 9),
    st.sampled_from(["FB", "BF", "FF", "BB", "F", "B"]),
    st.data(),
)
def test_rounds_run_everything_once_and_in_order(
    stages: int, placement: Placement, unit_layers: int, more: int, letters: str, data: st.DataObject
) -> None:
    """Whatever combinations have programs; what has no partner goes first or last, backward passes first."""
    layout = ParallelLayout(pp=stages, placement=placement)
    layers = data.draw(of_kinds(layout.chunks + more))
    units = units_in_use(layout, layers, unit_layers)
    kinds = [PassKind(letter) for letter in letters]
    combination = st.tuples(*(st.sampled_from([*units]) for _ in kinds))
    known = data.draw(st.sets(combination, max_size=6))
    programs = {tuple(map(Side, kinds, names)): () for names in known}
    schedule = Schedule(
        name="any",
        chunks=layout.chunks,
        micro_batches=9,
        stages=((),),
        programs=programs,
        unit_layers=unit_layers,
    )
    passes = [Pass(kind, n, data.draw(st.integers(0, layout.chunks - 1))) for n, kind in enumerate(kinds)]
    found_rounds = rounds(schedule, layout, layers)(Block(tuple(passes)))
    if len(set(kinds)) == len(kinds):  # sides say of which pass they are
        for one in passes:
            names = [unit.name for unit in chunk_units(layout, layers, one.chunk, unit_layers)]
            found = [side.unit for sides in found_rounds for side in sides if side.kind is one.kind]
            assert found == (names if one.forward else names[::-1])
    else:
        count = sum(len(chunk_units(layout, layers, one.chunk, unit_layers)) for one in passes)
        assert sum(map(len, found_rounds)) == count
    together = [n for n, sides in enumerate(found_rounds) if len(sides) > 1]
    assert all(found_rounds[n] in programs for n in together)
    assert together == [*range(together[0], together[0] + len(together))] if together else True
    for rows in (
        (found_rounds[: together[0]], found_rounds[together[-1] + 1 :]) if together else (found_rounds,)
    ):
        alone = [side.kind is PassKind.FORWARD for (side,) in rows]
        assert together == [] or alone == sorted(alone), "backward passes first"


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
