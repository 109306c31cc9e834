"""Twins: the same pass of two micro-batches side by side, what `braid_twins` begins and ends a step with."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.scheduling.lowering.lower import Choices, training_schedule
from braid.scheduling.lowering.named import PairMethod
from braid.scheduling.lowering.pipelines import paired_w, twin_ended
from braid.scheduling.lowering.programs import twin_program
from braid.scheduling.memory import rank_memory
from braid.scheduling.operators import Graph, Pass
from braid.scheduling.planner.compose import decide, lower, prepare
from braid.scheduling.planner.list_schedule import issue_ns
from braid.scheduling.planner.strands import twin_problem
from braid.scheduling.profile import Profile
from braid.scheduling.schedule import (
    Action,
    Block,
    Compute,
    Direction,
    Instruction,
    Pair,
    Schedule,
    Strand,
    Twin,
    Twins,
)
from braid.scheduling.schedule_parser import parse
from braid.scheduling.simulate import simulate
from braid.scheduling.spec import ParallelLayout, Placement
from braid.scheduling.timeline import in_flight, unit_timeline
from braid.scheduling.validate import ScheduleError, validate
from tests.scheduling.cases import LLAMA, in_turn, model_parts, on_strands, with_stage
from tests.scheduling.plans import cluster, setting

LAYOUT = ParallelLayout(tp=2)
PARTS = model_parts(tp=2)
KIND = "order"


def both(names: list[str]) -> tuple[str, ...]:
    """The first micro-batch a step ahead of the second."""
    order = []
    for n in range(len(names) + 1):
        order += [f"1:{names[n]}"] if n < len(names) else []
        order += [f"2:{names[n - 1]}"] if n else []
    return tuple(order)


def schedule_of(micro_batches: int) -> Schedule:
    """`braid_twins` with orders that need no profile."""
    layer = PARTS["layer"]
    names = {"FF": layer.forward.operators, "BB": layer.backward.operators}
    choices = Choices(
        pairings={"layer|layer": in_turn(layer, PairMethod.ORDER)},
        twin_orders={f"layer {key}": both([op.name for op in ops]) for key, ops in names.items()},
    )
    return training_schedule("braid_twins", LAYOUT, micro_batches, PARTS, choices)


@pytest.mark.parametrize("m", range(3, 14))
def test_no_pass_is_alone_where_there_is_another(m: int) -> None:
    schedule = schedule_of(m)
    validate(schedule, LAYOUT, PARTS)
    blocks = [i for i in schedule.stages[0] if isinstance(i, Block | Pair | Twins)]
    kinds = [type(i) for i in blocks]
    assert kinds == [Twins, *([Pair] * (m - 2)), *([Block, Block] if m % 2 else [Twins])]
    ran = [str(block.whole).rstrip("b") for block in schedule.blocks(0)]
    assert sorted(ran) == sorted(f"{letter}{n}.0" for letter in "FB" for n in range(m))
    gradients = [b.micro_batch for b in schedule.blocks(0) if b.direction is Direction.BACKWARD]
    assert gradients == sorted(gradients), "gradients are added up in the order of micro-batches"
    assert in_flight(schedule, 0) == 2
    assert parse(schedule.to_text()) == schedule
    assert unit_timeline(schedule).length == 3 * m


@pytest.mark.parametrize(("stages", "m"), [(1, 1), (1, 2), (2, 8), (3, 12)])
def test_elsewhere_it_is_braid(stages: int, m: int) -> None:
    layout = ParallelLayout(pp=stages, placement=Placement.FOLDED if stages > 1 else Placement.LINEAR)
    assert twin_ended(layout, m) == paired_w(layout, m)


def refused(schedule: Schedule) -> str:
    """The message with which it is."""
    with pytest.raises(ScheduleError) as error:
        validate(schedule, LAYOUT, PARTS)
    return str(error.value).partition("\n")[0]


@pytest.mark.parametrize("at", ["first", "last"])
def test_twins_that_are_none(at: str) -> None:
    schedule = schedule_of(6)
    places = [n for n, i in enumerate(schedule.stages[0]) if isinstance(i, Twins)]
    place = places[0 if at == "first" else 1]
    twins = schedule.stages[0][place]
    assert isinstance(twins, Twins)

    def with_twins(first: Block, second: Block) -> str:
        instructions: list[Instruction] = [*schedule.stages[0]]
        instructions[place] = Twins(first, second)
        return refused(with_stage(schedule, 0, instructions))

    first, second = twins.blocks
    assert "does not come before" in with_twins(second, first)
    assert "does not come before" in with_twins(first, first)
    assert "the same pass over the same chunk" in with_twins(first, replace(second, chunk=1))
    if at == "first":  # where the micro-batches have no home yet, any strand would do
        other = Strand.ALPHA if second.strand is Strand.BETA else Strand.BETA
        alike = on_strands(schedule, frozenset() if other is Strand.ALPHA else frozenset(range(6)))
        assert "both are on strand" in refused(alike)


@pytest.mark.parametrize("direction", Direction)
def test_programs_that_would_not_do(direction: Direction) -> None:
    schedule = schedule_of(4)
    key = ("layer", direction)
    program = schedule.twins[key]
    letters = direction.value * 2
    graph = PARTS["layer"].forward if direction is Direction.FORWARD else PARTS["layer"].backward

    def with_program(changed: Sequence[Action]) -> str:
        return refused(replace(schedule, twins={**schedule.twins, key: tuple(changed)}))

    assert f"program layer {letters}: operators " in with_program(program[:-1])
    assert "are written 1:NAME and 2:NAME" in with_program(
        [replace(program[0], side=direction), *program[1:]]
    )
    last = max(n for n, a in enumerate(program) if isinstance(a, Compute) and a.side is Twin.SECOND)
    behind = program[last]
    assert isinstance(behind, Compute)
    first = program.index(replace(behind, side=Twin.FIRST))
    turned = [*program]
    turned[first], turned[last] = turned[last], turned[first]
    assert "has to come before" in with_program(turned) or "before it is there" in with_program(turned)
    for steps in (["qkv"], ["3:qkv"], ["1:nothing"], ["1:qkv", "1:qkv"]):
        with pytest.raises(ValueError, match=r"must be written|no operator|stands twice|missing"):
            twin_program(graph, steps)
    unused = replace(schedule, stages=(paired_only(schedule),))
    assert "is used by no block" in refused(unused)
    without = replace(schedule, twins={})
    validate(without, LAYOUT, PARTS)  # then one goes behind the other


def paired_only(schedule: Schedule) -> tuple[Instruction, ...]:
    """The list with twins one after the other."""
    found: list[Instruction] = []
    for instruction in schedule.stages[0]:
        found += instruction.blocks if isinstance(instruction, Twins) else [instruction]
    return tuple(found)


# -- decisions, simulation, memory ---------------------------------------------------------------------------


@given(
    intra=st.floats(2e9, 4e10),
    m=st.integers(3, 7),
    recompute=st.sampled_from(["none", "selective", "full"]),
    fused=st.sampled_from([0, 2]),
)
@settings(max_examples=10, deadline=None)
def test_twins_take_what_the_search_found(intra: float, m: int, recompute: str, fused: int) -> None:
    """The simulator runs them as the machine of the search does."""
    small = replace(setting().model, layers=2)
    spec = cluster(gpus=2, intra=intra)
    case = setting("braid_twins", tp=2, micro_batches=m, model=small, recompute=recompute)
    bench = prepare(replace(case, fused=fused, layout=LAYOUT), spec)
    choices, _ = decide(bench)
    schedule = lower(bench, choices)
    s = bench.setting
    step = simulate(schedule, s.layout, s.model, bench.parts, bench.profile)
    run = step.ranks[0].blocks[0]
    assert [str(block) for block in run.blocks] == ["F0.0", "F1.0b"]
    expected = 0.0
    for name, direction in [(n, Direction.FORWARD) for n in held(fused)]:
        graph = bench.parts[name].forward
        if (name, direction) in schedule.twins:
            problem = twin_problem(name, graph, bench.profile)
            names = problem.backward.names
            order = [names.index(step) for step in choices.twin_orders[f"{name} FF"]]
            ns = issue_ns(problem, order)
            assert ns <= problem.serial_ns * (1 + 1e-9)
            expected += ns
        else:
            expected += 2 * alone_ns(bench.profile, name, graph)
    assert run.course.duration == pytest.approx(expected, rel=1e-6)
    spans = [span for span in step.spans() if span.micro_batch == 1 and span.operator == "qkv"]
    assert {span.layer for span in spans} == {0, 1}


def held(fused: int) -> list[str]:
    """The runs of two layers."""
    return ["embedding+2*layer+head"] if fused else ["embedding", "layer", "layer", "head"]


def alone_ns(profile: Profile, name: str, graph: Graph) -> float:
    """A pass by itself."""
    return sum(profile.operator_ns(name, op) for op in graph.operators)


def test_weight_gradients_keep_their_order() -> None:
    bench = prepare(
        replace(setting("braid_twins", tp=2, micro_batches=4), layout=LAYOUT), cluster(gpus=2, intra=4e9)
    )
    choices, _ = decide(bench)
    order = choices.twin_orders["layer BB"]
    weights = [op.name for op in bench.layer.backward.operators if op.phase is Pass.WEIGHT_GRADIENT]
    assert len(weights) > 3
    assert all(order.index(f"1:{name}") < order.index(f"2:{name}") for name in weights)
    compute = [op.name for op in bench.layer.backward.operators if not op.kind.communicates]
    turns = [step[0] for step in order if step[2:] in compute]
    assert turns != sorted(turns), "the second begins before the first has ended"


@pytest.mark.parametrize("m", [4, 7])
def test_two_micro_batches_of_activations(m: int) -> None:
    """What `braid` holds and one micro-batch more, but for what its pairs need beyond that."""
    twins = rank_memory(schedule_of(m), LAYOUT, LLAMA, PARTS, "fp32", 0)
    serial = training_schedule("megatron", LAYOUT, m, PARTS)
    one = rank_memory(serial, LAYOUT, LLAMA, PARTS, "fp32", 0)
    assert 2 <= twins.activation_bytes / one.activation_bytes < 3.2
    assert twins.parameter_bytes == one.parameter_bytes
