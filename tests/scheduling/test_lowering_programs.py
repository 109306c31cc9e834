"""Programs from orders: every operator once, waits exactly where they are needed, wrong steps refused."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.scheduling.graph_builder import AxisPlacement
from braid.scheduling.layers import PartSizes, transformer_layer
from braid.scheduling.lowering.named import PairMethod
from braid.scheduling.lowering.programs import (
    PairingDecision,
    ordered_program,
    pair_program,
    serial_program,
    split_programs,
)
from braid.scheduling.operators import Graph, Kind, Operator, Part, Pass, Stream
from braid.scheduling.schedule import (
    Barrier,
    Compute,
    Direction,
    Gradients,
    Late,
    PairAction,
    Start,
    Wait,
    is_late,
)
from braid.scheduling.schedule_parser import OF_PAIRS, parse, parse_action
from braid.scheduling.validate import validate
from tests.scheduling.cases import LLAMA, in_turn, layout_for, model_parts, named_schedule

LAYER = model_parts(tp=2)["layer"]
SIDES = {Direction.FORWARD: LAYER.forward, Direction.BACKWARD: LAYER.backward}


def ring_layer() -> Part:
    """A layer with tensor parallelism inside the node and ring attention between nodes."""
    axes = {"tp": AxisPlacement(degree=2), "cp": AxisPlacement(degree=4, stream=Stream.INTER)}
    return transformer_layer(
        PartSizes(shape=LLAMA, tp=2, micro_batch=2, cp=4, context="ring", axes=axes, ep=1)
    )


Side = Direction | Late | None


def replay(
    actions: Iterable[PairAction], graphs: dict[Side, Graph], given_values: dict[Side, set[str]]
) -> None:
    """Run a program on names: demands data, counts operators, and that no wait comes earlier than needed.

    A wait is needed by the next action of its side that reads what the collective wrote, or by the end.
    """
    operators = {(side, op.name): op for side, graph in graphs.items() for op in graph.operators}
    there = {side: set(names) for side, names in given_values.items()}
    begun: list[tuple[Side, str]] = []
    under_way: set[tuple[Side, str]] = set()
    # What is put off finds all that its own pass has left, so it comes last, in its order.
    for action in sorted((a for a in actions if not isinstance(a, Barrier)), key=is_late):
        side = Direction.BACKWARD if is_late(action) else action.side
        key = (side, action.operator)
        op = operators[key]
        if isinstance(action, Wait):
            assert key in under_way, f"{action}: not under way"
            under_way.remove(key)
            there[side] |= set(op.writes)
            continue
        begun.append(key)
        assert set(op.reads) <= there[side], f"{action} reads what is not there"
        if isinstance(action, Start):
            assert op.kind.communicates
            assert action.stream is op.stream
            under_way.add(key)
        else:
            assert not op.kind.communicates
            there[side] |= set(op.writes)
    assert not under_way
    assert sorted(begun, key=str) == sorted(operators, key=str)


def needless_waits(actions: Sequence[PairAction], graphs: dict[Side, Graph]) -> list[PairAction]:
    """Waits that neither the next operator nor the end asks for."""
    operators = {(side, op.name): op for side, graph in graphs.items() for op in graph.operators}
    found = []
    for n, action in enumerate(actions):
        if isinstance(action, Wait):
            after = next((a for a in actions[n + 1 :] if not isinstance(a, Wait)), None)
            if after is None:
                continue
            written = operators[action.side, action.operator].writes
            needed = not isinstance(after, Barrier) and after.side is action.side
            if not needed or not set(written) & set(operators[after.side, after.operator].reads):
                found.append(action)
    return found


def given_values(part: Part, graph: Graph) -> set[str]:
    """What is there before a pass begins."""
    if graph is part.forward:
        return set(part.inputs)
    return {*part.saved(), *part.constants, f"d.{part.output}"}


@st.composite
def orders(draw: st.DrawFn, graphs: dict[Side, Graph], given: dict[Side, set[str]]) -> list[tuple[Side, str]]:
    """Any order of the operators of all graphs together that respects their data."""
    there = {side: set(names) for side, names in given.items()}
    left = {side: list(graph.operators) for side, graph in graphs.items()}
    order: list[tuple[Side, str]] = []
    while any(left.values()):
        ready = [
            (side, op) for side, operators in left.items() for op in operators if set(op.reads) <= there[side]
        ]
        side, op = ready[draw(st.integers(0, len(ready) - 1))]
        left[side].remove(op)
        there[side] |= set(op.writes)
        order.append((side, op.name))
    return order


BOTH: dict[Side, Graph] = {**SIDES}
BOTH_GIVEN: dict[Side, set[str]] = {side: given_values(LAYER, graph) for side, graph in SIDES.items()}


# -- one pass ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "full", "fine"])
def test_serial_programs_wait_at_once(tp: int, recompute: str) -> None:
    for part in model_parts(LLAMA, tp, recompute).values():
        for graph in (part.forward, part.backward):
            program = serial_program(graph)
            replay(program, {None: graph}, {None: given_values(part, graph)})
            for action, after in pairwise([*program, None]):
                if isinstance(action, Start):
                    assert after == Wait(action.operator)
            issued = [a.operator for a in program if not isinstance(a, Wait)]
            assert issued == [op.name for op in graph.operators]


def test_in_serial_programs_rings_alone_run_beside_attention() -> None:
    layer = ring_layer()
    program = serial_program(layer.forward)
    replay(program, {None: layer.forward}, {None: {"x"}})
    started = {a.operator: n for n, a in enumerate(program) if isinstance(a, Start)}
    waited = {a.operator: n for n, a in enumerate(program) if isinstance(a, Wait)}
    for name, start in started.items():
        ring = layer.forward.named(name).kind is Kind.SEND_RECEIVE
        between = program[start + 1 : waited[name]]
        assert [type(action) for action in between] == ([Compute] if ring else [])
    assert sum(name.startswith("kv_shift") for name in started) == 3


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_ordered_programs_wait_where_they_must(data: st.DataObject) -> None:
    part = data.draw(st.sampled_from([LAYER, ring_layer()]))
    graph = data.draw(st.sampled_from([part.forward, part.backward]))
    given_here: dict[Side, set[str]] = {None: given_values(part, graph)}
    order = [name for _, name in data.draw(orders({None: graph}, given_here))]
    program = ordered_program(graph, order)
    replay(program, {None: graph}, given_here)
    assert not needless_waits(program, {None: graph})
    assert [a.operator for a in program if not isinstance(a, Wait)] == order


def test_the_default_order_is_the_graphs() -> None:
    assert ordered_program(LAYER.backward) == ordered_program(
        LAYER.backward, [op.name for op in LAYER.backward.operators]
    )


def test_split_programs_share_out_the_operators() -> None:
    for part in (*model_parts(tp=2).values(), ring_layer()):
        programs = split_programs(part)
        names = {
            gradients: [a.operator for a in programs[part.name, gradients] if not isinstance(a, Wait)]
            for gradients in (Gradients.INPUT, Gradients.WEIGHT)
        }
        weights = [op.name for op in part.backward.operators if op.phase is Pass.WEIGHT_GRADIENT]
        assert names[Gradients.WEIGHT] == weights
        assert names[Gradients.INPUT] == [
            op.name for op in part.backward.operators if op.name not in set(weights)
        ]
        assert not any(isinstance(a, Start) for a in programs[part.name, Gradients.WEIGHT])


# -- two passes --------------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_searched_orders_are_issued_as_they_are(data: st.DataObject) -> None:
    order = data.draw(orders(BOTH, BOTH_GIVEN))
    steps = tuple(f"{side.value}:{name}" for side, name in order if side)
    program = pair_program(
        LAYER.forward, LAYER.backward, PairingDecision(method=PairMethod.ORDER, steps=steps)
    )
    replay(program, BOTH, BOTH_GIVEN)
    assert not needless_waits(program, BOTH)
    issued = [(a.side, a.operator) for a in program if isinstance(a, Compute | Start)]
    assert issued == order
    assert Barrier() not in program


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_weight_gradients_may_be_left_to_the_next_layer(data: st.DataObject) -> None:
    """Wherever they stand, nothing is waited for on their account; and the text keeps them apart."""
    order = [(side, name) for side, name in data.draw(orders(BOTH, BOTH_GIVEN)) if side]
    weights = sorted(op.name for op in LAYER.backward.operators if op.phase is Pass.WEIGHT_GRADIENT)
    late = data.draw(st.sets(st.sampled_from(weights), min_size=1))
    steps = [f"{side.value}:{name}" for side, name in order if name not in late]
    for name in sorted(late):
        steps.insert(data.draw(st.integers(0, len(steps))), f"P:{name}")
    decision = PairingDecision(method=PairMethod.ORDER, steps=tuple(steps))
    program = pair_program(LAYER.forward, LAYER.backward, decision)
    replay(program, BOTH, BOTH_GIVEN)
    assert {a.operator for a in program if not isinstance(a, Barrier) and is_late(a)} == late
    issued = [str(a).split()[1] for a in program if not isinstance(a, Wait)]
    assert issued == steps
    assert tuple(parse_action(str(a), OF_PAIRS) for a in program) == program
    schedule = named_schedule("braid", 2, 4, 2)
    changed = replace(schedule, pairs={("layer", "layer"): program})
    validate(changed, layout_for("braid", 2, 2), model_parts(tp=2))
    assert parse(changed.to_text()) == changed


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_segments_end_with_their_collectives_and_pairs_with_a_barrier(data: st.DataObject) -> None:
    order = data.draw(orders(BOTH, BOTH_GIVEN))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(order) - 1), max_size=12)))
    segments = []
    for begin, end in pairwise([0, *cuts, len(order)]):
        names = {side: [n for s, n in order[begin:end] if s is side] for side in Direction}
        segments.append((names[Direction.FORWARD], names[Direction.BACKWARD]))
    # Within a segment collectives start first, so it may not hold what they read: one operator a side does.
    if any(not _independent(segment) for segment in segments):
        segments = [([n], []) if s is Direction.FORWARD else ([], [n]) for s, n in order]
    steps = tuple(f"{' '.join(f)} | {' '.join(b)}" for f, b in segments)
    decision = PairingDecision(method=PairMethod.BARRIERS, steps=steps)
    program = pair_program(LAYER.forward, LAYER.backward, decision)
    replay(program, BOTH, BOTH_GIVEN)
    assert program.count(Barrier()) == sum(bool(f and b) for f, b in segments)
    under_way: set[tuple[Side, str]] = set()
    for action in program:
        match action:
            case Barrier():
                assert not under_way, "a barrier with something under way"
            case Start():
                under_way.add((action.side, action.operator))
            case Wait():
                under_way.remove((action.side, action.operator))


def _independent(segment: tuple[list[str], list[str]]) -> bool:
    """Whether no collective of a segment reads what the same segment writes."""
    for graph, names in zip(SIDES.values(), segment, strict=True):
        written = {value for name in names for value in graph.named(name).writes}
        reads = {value for name in names for value in _reads_of_collective(graph.named(name))}
        if written & reads:
            return False
    return True


def _reads_of_collective(op: Operator) -> tuple[str, ...]:
    return op.reads if op.kind.communicates else ()


def test_paired_segments_overlap() -> None:
    """A collective of one strand is under way while the other one computes."""
    steps = (
        "attention_norm | mlp_residual.grad",
        "attention_gather | ",
        "qkv attention projection | mlp_scatter.grad",
    )
    rest = PairingDecision(
        method=PairMethod.BARRIERS,
        steps=(
            *steps,
            *(f"{op.name} | " for op in LAYER.forward.operators[5:]),
            *(f" | {op.name}" for op in LAYER.backward.operators[2:]),
        ),
    )
    texts = [str(action) for action in pair_program(LAYER.forward, LAYER.backward, rest)]
    begin = texts.index("start B:mlp_scatter.grad on intra")
    assert texts[begin : begin + 6] == [
        "start B:mlp_scatter.grad on intra",
        "compute F:qkv",
        "compute F:attention",
        "compute F:projection",
        "wait B:mlp_scatter.grad",
        "barrier",
    ]
    assert texts[:3] == ["compute B:mlp_residual.grad", "compute F:attention_norm", "barrier"]
    assert texts[3:5] == ["start F:attention_gather on intra", "wait F:attention_gather"]


@pytest.mark.parametrize("tp", [1, 2])
def test_strands_in_turns(tp: int) -> None:
    """Wavelet's round robin: one operator of each until one has no more; the backward strand begins."""
    layer = model_parts(tp=tp)["layer"]
    graphs: dict[Side, Graph] = {Direction.FORWARD: layer.forward, Direction.BACKWARD: layer.backward}
    program = pair_program(layer.forward, layer.backward, in_turn(layer, PairMethod.TURNS))
    replay(program, graphs, {side: given_values(layer, graph) for side, graph in graphs.items()})
    sides = [a.side for a in program if isinstance(a, Compute | Start)]
    shared = 2 * min(len(layer.forward.operators), len(layer.backward.operators))
    assert sides[:shared] == [Direction.BACKWARD, Direction.FORWARD] * (shared // 2)
    assert set(sides[shared:]) <= {Direction.BACKWARD}


# -- what is refused ---------------------------------------------------------------------------------------


def refused(method: PairMethod, *steps: str) -> str:
    """The message with which a pairing is refused."""
    with pytest.raises(ValueError) as error:
        pair_program(LAYER.forward, LAYER.backward, PairingDecision(method=method, steps=steps))
    return str(error.value)


ORDER = in_turn(LAYER, PairMethod.ORDER).steps
SEGMENTS = in_turn(LAYER, PairMethod.BARRIERS).steps


def test_wrong_steps_of_an_order_are_refused() -> None:
    for step in ("qkv", "X:qkv", ":qkv", "f:qkv"):
        assert refused(PairMethod.ORDER, step, *ORDER) == (
            f"pairing step {step!r} must be written F:OPERATOR, B:OPERATOR or P:OPERATOR"
        )
    for step in ("F:nothing", "F:qkv.dgrad", "B:qkv", "F:"):
        message = refused(PairMethod.ORDER, step, *ORDER)
        assert message == f"pairing: {step} is no operator of the layer; plan anew for this model and layout"
    assert refused(PairMethod.ORDER, *ORDER, "P:qkv.wgrad") == "pairing: P:qkv.wgrad stands twice"
    others = [step for step in ORDER if step != "B:qkv.dgrad"]
    assert refused(PairMethod.ORDER, *others, "P:qkv.dgrad") == (
        "pairing: P:qkv.dgrad is put off, but B:attention_gather.grad needs it"
    )
    assert refused(PairMethod.ORDER, *ORDER, ORDER[3]) == f"pairing: {ORDER[3]} stands twice"
    assert refused(PairMethod.ORDER, *ORDER[1:]) == f"pairing: {ORDER[0]} of the layer are missing"
    assert refused(PairMethod.ORDER) == (
        "pairing: B:activation.grad, B:attention.grad, B:attention_gather.grad, B:attention_norm.grad "
        "of the layer are missing"
    )


def test_wrong_segments_are_refused() -> None:
    assert refused(PairMethod.BARRIERS, "qkv attention", *SEGMENTS) == (
        "pairing step 'qkv attention' must be written 'FORWARD OPERATORS | BACKWARD OPERATORS'"
    )
    assert "F:qkv.dgrad is no operator of the layer" in refused(
        PairMethod.BARRIERS, "qkv.dgrad | ", *SEGMENTS
    )
    assert refused(PairMethod.BARRIERS, *SEGMENTS, "qkv | ") == "pairing: F:qkv stands twice"
    assert "of the layer are missing" in refused(PairMethod.BARRIERS, *SEGMENTS[:-1])


def test_wrong_orders_of_one_pass_are_refused() -> None:
    names = [op.name for op in LAYER.forward.operators]
    with pytest.raises(ValueError, match=r"^order: qkv.dgrad is no operator of the layer; plan anew"):
        ordered_program(LAYER.forward, [*names, "qkv.dgrad"])
    with pytest.raises(ValueError, match=r"^order: qkv stands twice$"):
        ordered_program(LAYER.forward, [*names, "qkv"])
    with pytest.raises(ValueError, match=r"^order: qkv of the layer are missing$"):
        ordered_program(LAYER.forward, [name for name in names if name != "qkv"])
