"""Twins: the same pass of two micro-batches side by side, begin and end of a step of ``braid:twins``."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.scheduling.generate.pipelines import paired_w, twin_ended
from braid.scheduling.mesh.layout import ParallelLayout, Placement
from braid.scheduling.plan.decide import modelled
from braid.scheduling.plan.list_schedule import issue_ns
from braid.scheduling.plan.strands import joint_problem
from braid.scheduling.schedule.operations import Direction, PassKind
from braid.scheduling.schedule.schedule import Block, Side
from braid.scheduling.schedule.text import parse, write
from braid.scheduling.schedule.timeline import in_flight, unit_timeline
from tests.scheduling.cases import linked_schedule
from tests.scheduling.plans import cluster, fastest, setting

F, B = PassKind.FORWARD, PassKind.BACKWARD


@pytest.mark.parametrize("m", range(3, 14))
def test_no_pass_is_alone_where_there_is_another(m: int) -> None:
    schedule = linked_schedule("braid:twins", 1, m, 2).schedule
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
