"""Twins: the same pass of two micro-batches side by side, begin and end of a step of ``braid:twins``."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.scheduling.generate.lower import Choices, training_schedule
from braid.scheduling.generate.named import PairMethod
from braid.scheduling.generate.pipelines import paired_w, twin_ended
from braid.scheduling.mesh.layout import ParallelLayout, Placement
from braid.scheduling.plan.decide import modelled
from braid.scheduling.plan.list_schedule import issue_ns
from braid.scheduling.plan.strands import joint_problem
from braid.scheduling.schedule.operations import Direction, PassKind
from braid.scheduling.schedule.order import parse_orders
from braid.scheduling.schedule.schedule import Block, Schedule, Side
from braid.scheduling.schedule.text import parse, write
from braid.scheduling.schedule.timeline import in_flight, unit_timeline
from tests.scheduling.cases import code_of, in_turn, model_parts, setting_for
from tests.scheduling.plans import cluster, fastest, setting

LAYOUT = ParallelLayout(tp=2)
PARTS = model_parts(tp=2)
F, B = PassKind.FORWARD, PassKind.BACKWARD


def both(names: list[str]) -> tuple[str, ...]:
    """The first micro-batch a step ahead of the second."""
    order = []
    for n in range(len(names) + 1):
        order += [f"0:{names[n]}"] if n < len(names) else []
        order += [f"1:{names[n - 1]}"] if n else []
    return tuple(order)


def schedule_of(micro_batches: int) -> Schedule:
    """``braid:twins`` with orders that need no profile."""
    layer = PARTS["layer"]
    names = {"F": layer.forward.operators, "B": layer.backward.operators}
    twins = {f"{key}:layer|{key}:layer": both([op.name for op in ops]) for key, ops in names.items()}
    choices = Choices(orders=parse_orders({**in_turn(layer, PairMethod.ORDER), **twins}))
    return training_schedule(setting_for("braid:twins", LAYOUT, micro_batches), PARTS, choices)


@pytest.mark.parametrize("m", range(3, 14))
def test_no_pass_is_alone_where_there_is_another(m: int) -> None:
    schedule = schedule_of(m)
    code_of(schedule, LAYOUT)
    blocks = [i for i in schedule.stages[0] if isinstance(i, Block)]
    kinds = [tuple(one.kind for one in block.passes) for block in blocks]
    assert kinds == [(F, F), *([(F, B)] * (m - 2)), *([(B,), (B,)] if m % 2 else [(B, B)])]
    ran = [str(one.whole).rstrip("b") for one in schedule.passes[0]]
    assert sorted(ran) == sorted(f"{letter}{n}.0" for letter in "FB" for n in range(m))
    gradients = [one.micro_batch for one in schedule.passes[0] if one.direction is Direction.BACKWARD]
    assert gradients == sorted(gradients), "gradients are added up in the order of micro-batches"
    assert all(len({one.strand for one in block.passes}) == len(block.passes) for block in blocks)
    assert in_flight(schedule, 0) == 2
    assert parse(write(schedule)) == schedule
    assert unit_timeline(schedule).length == 3 * m


@pytest.mark.parametrize(("stages", "m"), [(1, 1), (1, 2), (2, 8), (3, 12)])
def test_elsewhere_it_is_braid(stages: int, m: int) -> None:
    layout = ParallelLayout(pp=stages, placement=Placement.FOLDED if stages > 1 else Placement.LINEAR)
    assert twin_ended(layout, m) == paired_w(layout, m)


# -- decisions, simulation, memory ---------------------------------------------------------------------------


@given(
    intra=st.floats(2e9, 4e10),
    m=st.integers(3, 7),
    recompute=st.sampled_from(["none", "selective", "full"]),
)
@settings(max_examples=10, deadline=None)
@pytest.mark.slow
def test_twins_take_what_the_search_found(intra: float, m: int, recompute: str) -> None:
    """The simulator runs them as the machine of the search does."""
    small = replace(setting().model, layers=2)
    case = setting("braid:twins", tp=2, micro_batches=m, model=small, recompute=recompute)
    bench = modelled(cluster(gpus=2, intra=intra))(case)
    found = fastest(bench)
    run = found.simulation.ranks[0].blocks[0]
    assert [str(one) for one in run.stretch.block_passes] == ["F0.0", "F1.0b"]
    expected = 0.0
    for name in ("embedding", "layer", "layer", "head"):
        graph = bench.parts[name].forward
        if (Side(F, name),) * 2 in found.code.schedule.programs:
            problem = joint_problem([graph, graph], bench.profile)
            issues = problem.backward.issues
            order = [issues.index(step) for step in found.choices.orders[(Side(F, name),) * 2]]
            ns = issue_ns(problem, order)
            assert ns <= problem.serial_ns * (1 + 1e-9)
            expected += ns
        else:
            expected += 2 * sum(bench.profile.solo(op.key) for op in graph.operators)
    assert run.course.duration == pytest.approx(expected, rel=1e-6)
    spans = [span for span in found.simulation.spans() if span.micro_batch == 1 and span.operator == "qkv"]
    assert {span.layer for span in spans} == {0, 1}
