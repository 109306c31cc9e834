"""What paired blocks put off to the next one: any end of a backward pass, run once, after what it needs."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.scheduling.lowering.lower import Choices
from braid.scheduling.lowering.named import PairMethod
from braid.scheduling.lowering.programs import PairingDecision
from braid.scheduling.memory import pair_extra_bytes
from braid.scheduling.operators import Graph
from braid.scheduling.planner.compose import Bench, decide, decisions, lower, prepare, run, with_schedule
from braid.scheduling.schedule import Action, Barrier, Direction, Start, is_late
from braid.scheduling.schedule_parser import parse
from braid.scheduling.simulate import Simulation
from braid.scheduling.trace import Span
from tests.scheduling.plans import SMALL, cluster, setting

LAYERS = 2
RUN = f"embedding+{LAYERS}*layer+head"
MICRO_BATCHES = 4


def bench(
    micro_batches: int = MICRO_BATCHES, layers: int = LAYERS, pp: int = 1, rate: float = 8.4e9
) -> Bench:
    """A model that is fused, on links on which it communicates almost as long as it computes."""
    model = replace(SMALL, layers=layers, hidden=2048, ffn=5440, heads=32, kv_heads=32, sequence=256)
    own = with_schedule(setting(tp=2, pp=pp, micro_batches=micro_batches, model=model), "braid")
    return prepare(replace(own, fused=4), cluster(gpus=2 * pp, intra=rate))


BENCH = bench()
PART = BENCH.parts[RUN]


@cache
def choices() -> Choices:
    """What is decided first, of which tests change the pairing: the last pass takes up nothing."""
    return decisions(BENCH)[0][0]


def with_decision(decision: PairingDecision) -> Choices:
    return replace(choices(), pairings={f"{RUN}|{RUN}": decision})


def in_any_order(draw: st.DrawFn, graph: Graph) -> list[str]:
    """The operators of a graph in an order that respects their data."""
    made = {name for op in graph.operators for name in op.writes}
    left, there, order = list(graph.operators), set[str](), list[str]()
    while left:
        ready = [op for op in left if set(op.reads) & made <= there]
        op = draw(st.sampled_from(ready))
        left.remove(op)
        there |= set(op.writes)
        order.append(op.name)
    return order


@st.composite
def decided(draw: st.DrawFn) -> PairingDecision:
    """Any order of both passes that puts any operators off, with all that needs them."""
    forward, backward = in_any_order(draw, PART.forward), in_any_order(draw, PART.backward)
    late = set(draw(st.lists(st.sampled_from(backward), max_size=4)))
    for name in backward:  # each stands after what it needs
        reads = set(PART.backward.named(name).reads)
        if any(reads & set(PART.backward.named(other).writes) for other in late):
            late.add(name)
    strands = [
        [f"F:{name}" for name in forward],
        [f"B:{name}" for name in backward if name not in late],
        [f"P:{name}" for name in backward if name in late],
    ]
    turns = draw(st.permutations([n for n, strand in enumerate(strands) for _ in strand]))
    steps = tuple(strands[turn].pop(0) for turn in turns)
    return PairingDecision(method=PairMethod.ORDER, steps=steps)


@st.composite
def ended(draw: st.DrawFn) -> Choices:
    """The same, and any order of the last backward pass with what the one before has put off to it."""
    decision = draw(decided())
    late = [step.removeprefix("P:") for step in decision.steps if step.startswith("P:")]
    there, order = list(late), list[str]()
    for name in in_any_order(draw, PART.backward):
        while name in there or (there and draw(st.booleans())):
            order.append(f"P:{there.pop(0)}")
        order.append(name)
    order += [f"P:{name}" for name in there]
    return replace(with_decision(decision), backward_orders={RUN: tuple(order)})


def backward_spans(simulation: Simulation) -> dict[int, dict[str, Span]]:
    """By micro-batch and the operator's name in the run; every operator once."""
    names = {
        (int(name.partition(".")[0]) - 1, name.partition("/")[2]): name
        for name in (op.name for op in PART.backward.operators)
    }
    found: dict[int, dict[str, Span]] = {}
    for span in simulation.spans():
        if (name := names.get((span.layer, span.operator))) is not None and span.micro_batch >= 0:
            assert name not in found.setdefault(span.micro_batch, {}), f"{name} runs twice"
            found[span.micro_batch][name] = span
    return found


@given(decided().map(with_decision) | ended())
@settings(max_examples=24, deadline=None)
def test_what_is_put_off_runs_once_and_after_what_it_needs(drawn: Choices) -> None:
    schedule = lower(BENCH, drawn)
    assert parse(schedule.to_text()) == schedule
    simulation = run(BENCH, drawn)
    found = backward_spans(simulation)
    assert sorted(found) == list(range(MICRO_BATCHES))
    writer = {name: op.name for op in PART.backward.operators for name in op.writes}
    for spans in found.values():
        assert set(spans) == {op.name for op in PART.backward.operators}
        for name, span in spans.items():
            for value in PART.backward.named(name).reads:
                if value in writer:
                    assert span.start_ns >= spans[writer[value]].end_ns - 1
    for before, after in zip(range(MICRO_BATCHES - 1), range(1, MICRO_BATCHES), strict=True):
        for op in PART.backward.operators:
            assert found[before][op.name].start_ns <= found[after][op.name].start_ns, "gradients keep order"


@given(decided())
@settings(max_examples=60, deadline=None)
def test_memory_is_counted_as_values_live(decision: PairingDecision) -> None:
    """An independent count of a block between others like it: hold sets of values, step by step."""
    program = lower(BENCH, with_decision(decision)).pairs[RUN, RUN]
    actions = [action for action in program if not isinstance(action, Barrier)]

    def owners(names: Iterable[str]) -> set[str]:
        return {PART.values[n].alias_of or n for n in names} - set(PART.constants)

    def touched(action: Action) -> set[tuple[str, str]]:
        graph = PART.forward if action.side is Direction.FORWARD else PART.backward
        op = graph.named(action.operator)
        assert action.side is not None
        return {(action.side.value, name) for name in owners((*op.reads, *op.writes))}

    late = [PART.backward.named(action.operator) for action in actions if is_late(action)]
    made = {name for op in late for name in op.writes}
    kept = owners({name for op in late for name in op.reads} - made)
    saved = owners(PART.saved())
    held = {("F", name) for name in owners(PART.inputs) if any(("F", name) in touched(a) for a in actions)}
    held |= {
        ("B", name) for name in saved | kept & owners(n for n in [f"d.{PART.output}"] if n in PART.values)
    } | {("P", n) for n in kept}
    most = 0
    for position, action in enumerate(actions):
        held |= touched(action)
        most = max(most, sum(PART.values[name].bytes(2) for _, name in held))
        later = {value for following in actions[position + 1 :] for value in touched(following)}
        stays = {("F", name) for name in saved} | {("B", name) for name in kept}
        held = {value for value in held if value in later | stays}
    assert pair_extra_bytes(PART, PART, program, 2) == max(0, most - PART.saved_bytes(2))


def starts(one: Choices) -> set[str]:
    """Collectives that a decision puts off."""
    program = lower(BENCH, one).pairs[RUN, RUN]
    return {action.operator for action in program if isinstance(action, Start) and is_late(action)}


def taken_up(one: Choices) -> set[str]:
    """What a backward pass by itself does for the one before."""
    program = lower(BENCH, one).programs[RUN, Direction.BACKWARD]
    return {action.operator for action in program if is_late(action)}


def test_ends_of_backward_passes_are_tried_and_taken_where_they_help() -> None:
    short, far, *_ = (one for one, _ in decisions(BENCH))
    assert starts(short) == set()
    assert starts(far) == {"1.layer/attention_gather.grad", "0.embedding/embedding_scatter.grad"}
    many = bench(micro_batches=16)
    tried = [one for one, _ in decisions(many)]
    short, far = tried[:2]
    times = [run(many, one).numbers(1) for one in tried]
    assert times[1].step_seconds < times[0].step_seconds
    assert times[1].hidden_fraction > times[0].hidden_fraction
    assert times[-1].step_seconds < times[1].step_seconds
    assert times[-1].hidden_fraction > times[1].hidden_fraction
    assert taken_up(tried[-1]) >= starts(far) > taken_up(far) == set()
    assert decide(many)[0] == tried[-1]
    quick = bench(micro_batches=3, rate=3e10)
    found = [run(quick, one).step_ns for one, _ in decisions(quick)]
    assert run(quick, decide(quick)[0]).step_ns == min(found)


def test_nothing_is_put_off_without_a_block_that_takes_it_up() -> None:
    assert len(decisions(bench(micro_batches=2))) == 1


def test_a_pass_that_gives_its_gradient_on_keeps_its_end() -> None:
    """The stage before waits for it; what it may put off are weight gradients."""
    two = bench(micro_batches=6, layers=8, pp=2)
    for one, _ in decisions(two):
        for (_, behind), program in lower(two, one).pairs.items():
            late = [two.parts[behind].backward.named(a.operator) for a in program if is_late(a)]
            if "embedding" not in behind:
                assert all(op.name.endswith(".wgrad") for op in late)


ALONE = prepare(setting("braid", tp=2), cluster(gpus=2))


def refused(*steps: str) -> str:
    """The message with which an order of a layer is refused."""
    decision = PairingDecision(method=PairMethod.ORDER, steps=steps)
    with pytest.raises(ValueError) as error:
        lower(ALONE, replace(decide(ALONE)[0], pairings={"layer|layer": decision}))
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda order: [*order, "P:qkv"], "order: P:qkv is no operator of the layer"),
        (lambda order: [n for n in order if n != order[0]], "of those that the paired program before"),
        (lambda order: [*order[1:], order[0]], "'compute {0}': P:{0} has to come before"),
        (lambda order: [*order, f"P:{PART.backward.operators[0].name}"], " is done already"),
    ],
)
def test_an_end_that_does_not_fit_is_refused(change: Callable[[list[str]], list[str]], message: str) -> None:
    forward, backward = PART.forward.operators, [op.name for op in PART.backward.operators]
    late = [name for name in backward if name.endswith(".wgrad")][-2:]
    steps = (
        *(f"F:{op.name}" for op in forward),
        *(f"{'P' if name in late else 'B'}:{name}" for name in backward),
    )
    drawn = with_decision(PairingDecision(method=PairMethod.ORDER, steps=steps))
    order = [*(f"P:{name}" for name in late), *backward]
    assert lower(BENCH, replace(drawn, backward_orders={RUN: tuple(order)}))
    with pytest.raises(ValueError) as error:
        lower(BENCH, replace(drawn, backward_orders={RUN: tuple(change(order))}))
    assert message.format(late[0]) in str(error.value)


def test_an_end_that_nobody_has_left_is_refused() -> None:
    with pytest.raises(ValueError, match="B: no paired program puts off what it takes up"):
        lower(bench(micro_batches=1), decisions(BENCH)[-1][0])


def test_what_is_needed_cannot_be_put_off() -> None:
    forward = [f"F:{op.name}" for op in ALONE.layer.forward.operators]
    first, *between, last = (op.name for op in ALONE.layer.backward.operators)
    middle = [f"B:{name}" for name in between]
    assert refused(*forward, f"P:{first}", *middle, f"B:{last}").startswith(
        f"pairing: P:{first} is put off, but B:"
    )
    assert refused(*forward, f"B:{first}", *middle, f"P:{last}").endswith(
        f"'compute P:{last}': what follows in the same pass needs it, so it cannot be put off"
    )
