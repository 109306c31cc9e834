"""Programs from orders: every operator once, waits exactly where they are needed, wrong steps refused."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.scheduling.generate.named import PairMethod
from braid.scheduling.generate.programs import program_of, serial_program
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.layers import layer_part
from braid.scheduling.model.operators import Graph, Kind, Part, Phase
from braid.scheduling.model.sizes import PartSizes
from braid.scheduling.schedule.operations import Barrier, Compute, Operation, Start, Wait
from braid.scheduling.schedule.order import Issue, OrderSegment, parse_orders
from braid.scheduling.schedule.text import parse, parse_sides, write
from tests.scheduling.cases import LLAMA, code_of, in_turn, layout_for, model_parts, named_schedule

LAYER = model_parts(tp=2)["layer"]
PARTS = {"layer": LAYER}
PAIR, LEAVING = "F:layer|B:layer", "F:layer|B:layer|L:layer"
Graphs = Mapping[int, Graph]
"""By the number of a pass in a program."""
Values = Mapping[int, set[str]]


def ring_layer() -> Part:
    """A layer with tensor parallelism inside the node and ring attention between nodes."""
    streams = {"cp": Stream.INTER}
    return layer_part(PartSizes(LLAMA, ParallelLayout(tp=2, cp=4), 2, streams, "ring"))


def acting(action: Operation) -> Compute | Start | Wait:
    """Not a barrier."""
    assert isinstance(action, Compute | Start | Wait)
    return action


def needless_waits(actions: Sequence[Operation], graphs: Graphs) -> list[Operation]:
    """Waits that neither the next operator nor the end asks for."""
    found: list[Operation] = []
    for n, action in enumerate(actions):
        after = next((a for a in actions[n + 1 :] if not isinstance(a, Wait)), None)
        if not isinstance(action, Wait) or after is None:
            continue
        written = set(graphs[action.turn].named(str(action.what)).writes)
        needed = not isinstance(after, Barrier) and after.turn == action.turn
        if not needed or not written & set(graphs[after.turn].named(str(after.what)).reads):
            found.append(action)
    return found


def given_values(part: Part, graph: Graph) -> set[str]:
    """What is there before a pass begins."""
    if graph is part.forward:
        return set(part.inputs)
    return {*part.saved(), *part.constants, f"d.{part.output}"}


@st.composite
def orders(draw: st.DrawFn, graphs: Graphs, given: Values) -> list[Issue]:
    """Any order of the operators of all graphs together that respects their data."""
    there = {turn: set(names) for turn, names in given.items()}
    left = {turn: list(graph.operators) for turn, graph in graphs.items()}
    order: list[Issue] = []
    while any(left.values()):
        ready = [
            (turn, op) for turn, operators in left.items() for op in operators if set(op.reads) <= there[turn]
        ]
        turn, op = ready[draw(st.integers(0, len(ready) - 1))]
        left[turn].remove(op)
        there[turn] |= set(op.writes)
        order.append(Issue(turn, op.name))
    return order


BOTH: Graphs = {0: LAYER.forward, 1: LAYER.backward}
BOTH_GIVEN: Values = {turn: given_values(LAYER, graph) for turn, graph in BOTH.items()}


# -- one pass ----------------------------------------------------------------------------------------------


def test_in_serial_programs_rings_alone_run_beside_attention() -> None:
    layer = ring_layer()
    program = serial_program(layer.forward)
    started = {a.what: n for n, a in enumerate(program) if isinstance(a, Start)}
    waited = {a.what: n for n, a in enumerate(program) if isinstance(a, Wait)}
    for name, start in started.items():
        ring = layer.forward.named(name).kind is Kind.SEND_RECEIVE
        between = program[start + 1 : waited[name]]
        assert [type(action) for action in between] == ([Compute] if ring else [])
    assert sum(name.startswith("kv_shift") for name in started) == 3


# -- two passes --------------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_orders_are_issued_as_they_are_and_weight_gradients_may_be_left(data: st.DataObject) -> None:
    """What is left to the next layer may stand anywhere: nothing is waited for on its account, and the text
    keeps it apart."""
    order = data.draw(orders(BOTH, BOTH_GIVEN))
    weights = sorted(op.name for op in LAYER.backward.operators if op.phase is Phase.WEIGHT_GRADIENT)
    late = data.draw(st.sets(st.sampled_from(weights)))
    steps = [Issue(turn, name) for turn, name in order if name not in late]
    for name in sorted(late):
        steps.insert(data.draw(st.integers(0, len(steps))), Issue(2, name))
    sides = parse_sides(LEAVING if late else PAIR)
    program = program_of(sides, PARTS, tuple(steps))
    if not late:
        assert not needless_waits(program, BOTH)
    assert Barrier() not in program
    issued = [Issue(acting(a).turn, str(acting(a).what)) for a in program if not isinstance(a, Wait)]
    assert issued == steps
    schedule = named_schedule("braid", 2, 4, 2, ends=bool(late))
    changed = replace(schedule, programs={**schedule.programs, sides: program})
    code_of(changed, layout_for("braid", 2, 2))
    assert parse(write(changed)) == changed


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_segments_end_with_their_collectives_and_pairs_with_a_barrier(data: st.DataObject) -> None:
    order = data.draw(orders(BOTH, BOTH_GIVEN))
    segments: list[tuple[list[str], list[str]]] = [([], [])]
    for turn, name in order:
        grown = [*map(list, segments[-1])]
        grown[turn].append(name)
        # In a segment collectives start first, so it holds nothing that they read.
        if not _independent(grown) or data.draw(st.integers(0, 5)) == 0:
            segments.append(([], []))
        segments[-1][turn].append(name)
    steps = tuple(OrderSegment((tuple(f), tuple(b))) for f, b in segments)
    program = program_of(parse_sides(PAIR), PARTS, steps)
    schedule = named_schedule("dhelix", 2, 4, 2)
    changed = replace(schedule, programs={**schedule.programs, parse_sides(PAIR): program})
    code_of(changed, layout_for("dhelix", 2, 2))
    assert program.count(Barrier()) == sum(bool(f and b) for f, b in segments)
    under_way: set[Issue] = set()
    for action in program:
        match action:
            case Barrier():
                assert not under_way, "a barrier with something under way"
            case Start():
                under_way.add(Issue(action.turn, str(action.what)))
            case Wait():
                under_way.remove(Issue(action.turn, str(action.what)))


def _independent(segment: Sequence[list[str]]) -> bool:
    """Whether no collective of a segment reads what the same segment writes."""
    for graph, names in zip(BOTH.values(), segment, strict=True):
        operators = [graph.named(name) for name in names]
        written = {value for op in operators for value in op.writes}
        if any(op.kind.communicates and written & set(op.reads) for op in operators):
            return False
    return True


# -- what is refused ---------------------------------------------------------------------------------------


ORDER = in_turn(LAYER, PairMethod.ORDER)[PAIR]
SEGMENTS = in_turn(LAYER, PairMethod.BARRIERS)[PAIR]
NAMES = tuple(op.name for op in LAYER.forward.operators)
MISSING = "of the unit are missing"
OTHERS = tuple(step for step in ORDER if step != "1:qkv.dgrad")
UNKNOWN = "is no operator of the unit; plan anew for this model and layout"
REFUSED: list[tuple[str, tuple[str, ...], str]] = [
    *(
        (PAIR, (step, *ORDER), f"{step!r}: operators of 2 passes are written 0:NAME to 1:NAME")
        for step in ("qkv", "X:qkv", ":qkv", "2:qkv", "00:qkv", "-1:qkv", "0:")
    ),
    *((PAIR, (step, *ORDER), f"{step} {UNKNOWN}") for step in ("0:nothing", "0:qkv.dgrad", "1:qkv")),
    (PAIR, (*ORDER, ORDER[3]), f"{ORDER[3]} stands twice"),
    (PAIR, ORDER[1:], f"{ORDER[0]} {MISSING}"),
    (PAIR, ORDER[:1], f"0:activation, 0:attention, 0:attention_gather, 0:attention_residual {MISSING}"),
    # Ends that do not fit.
    (LEAVING, (*OTHERS, "2:qkv.dgrad"), "qkv.dgrad is left to the end, but 1:attention_gather.grad needs it"),
    (LEAVING, OTHERS, f"1:qkv.dgrad {MISSING}"),
    (LEAVING, (*ORDER, "3:qkv.wgrad"), "'3:qkv.wgrad': operators of 3 passes are written 0:NAME to 2:NAME"),
    # Segments.
    (
        PAIR,
        (SEGMENTS[0], "qkv attention", *SEGMENTS[1:]),
        "segment 'qkv attention' must be written 'OPERATORS | OPERATORS', one per pass",
    ),
    (PAIR, ("qkv.dgrad | ", *SEGMENTS), f"0:qkv.dgrad {UNKNOWN}"),
    (PAIR, (*SEGMENTS, "qkv | "), "0:qkv stands twice"),
    (PAIR, SEGMENTS[1:], f"0:attention_norm, 1:mlp_residual.grad {MISSING}"),
    # One pass.
    ("F:layer", (*NAMES, "qkv.dgrad"), f"qkv.dgrad {UNKNOWN}"),
    ("F:layer", (*NAMES, "qkv"), "qkv stands twice"),
    ("F:layer", tuple(name for name in NAMES if name != "qkv"), f"qkv {MISSING}"),
]
"""For what an order is, its steps, and the cause."""


@pytest.mark.parametrize(("sides", "steps", "cause"), REFUSED)
def test_wrong_orders_are_refused(sides: str, steps: tuple[str, ...], cause: str) -> None:
    with pytest.raises(ValueError) as error:
        program_of(parse_sides(sides), PARTS, parse_orders({sides: steps}, "order of ")[parse_sides(sides)])
    assert str(error.value).replace("order of .", "order of ").removeprefix(f"order of {sides}: ") == cause


def test_an_end_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="'other' is no part of this model and layout; plan anew"):
        program_of(parse_sides(f"{PAIR}|L:other"), PARTS, parse_orders({PAIR: ORDER})[parse_sides(PAIR)])
