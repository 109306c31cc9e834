"""Gradients that are summed in blocks: bucket by bucket, as soon as they are final, and none forgotten."""

from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.scheduling.cost.simulate import Simulation
from braid.scheduling.plan.decide import anything, modelled, outcome_of
from braid.scheduling.plan.orders import decisions
from braid.scheduling.schedule import buckets
from braid.scheduling.schedule.operations import Compute, Node, Reduce, Start
from tests.scheduling.cases import (
    LOWERED,
    code_of,
    kind_of,
    layout_for,
    named_schedule,
)
from tests.scheduling.plans import cluster, setting

EARLY = tuple(name for name in LOWERED if kind_of(name).early_sums)


@given(
    name=st.sampled_from(EARLY),
    p=st.integers(1, 3),
    m=st.integers(1, 8),
    tp=st.sampled_from([1, 2]),
    ends=st.booleans(),
    zero=st.sampled_from([0, 1]),
    least=st.sampled_from([1, 5000, 1 << 17]),
)
@settings(max_examples=30, deadline=None)
def test_every_bucket_is_summed_right_behind_its_last_gradient(
    name: str, p: int, m: int, tp: int, ends: bool, zero: int, least: int
) -> None:
    """That it is, once and over tp first: `tests.cuda.test_combinations`, on small buckets."""
    if name in ("braid:v",):
        m += 2 * p
    ends = ends and kind_of(name).searched
    layout = layout_for(name, p, tp, 2, zero)
    with patch.object(buckets, "LEAST_ELEMENTS", least):
        code = code_of(named_schedule(name, p, m, tp, dp=2, zero=zero, ends=ends), layout)
    for stage in range(p):
        added: dict[tuple[int, int], int] = {}
        started: dict[tuple[int, int], int] = {}
        stretches = [(stretch, one) for stretch in code.stages[stage] for one in stretch.operations]
        for number, (stretch, operation) in enumerate(stretches):
            match operation:
                case Compute(what=Node() as node) if node.operator.adds_gradients:
                    chunk = stretch.passes[operation.turn].chunk
                    if (key := code.buckets.home(chunk, node.part, node.operator.module)) is not None:
                        added[key] = number
                case Start(what=Reduce(int() as chunk, _, int() as bucket)):
                    started.setdefault((chunk, bucket), number)
        assert set(started) == set(added) == {k for k in code.buckets.keys if k[0] in layout.chunks_of(stage)}
        for key, last in added.items():
            first = started[key]
            assert first > last
            computes = any(isinstance(one, Compute) for _, one in stretches[last + 1 : first])
            # Where the last operator stands in an earlier block, the sums begin the next one.
            assert not computes or stretches[last][0] is not stretches[first][0]


# -- simulated -----------------------------------------------------------------------------------------------


def simulated(name: str, m: int = 6) -> Simulation:
    """A step on two replicas, each a GPU of a node of its own."""
    bench = modelled(cluster(gpus=2))(setting(schedule=name, dp=2, micro_batches=m))
    found = [outcome_of(bench, choices, note, anything) for choices, note in decisions(bench)]
    return min(found, key=lambda one: one.step_ns).simulation


def test_what_is_summed_in_blocks_is_hidden_there() -> None:
    """Nothing is sent twice or left out, a step takes no longer than without, and more is hidden."""
    plain, ddp, together = (simulated(name) for name in ("megatron", "ddp", "braid:together_4"))
    sent = [
        sum(span.bytes for span in one.spans() if span.operator == "gradients.0 dp")
        for one in (plain, ddp, together)
    ]
    assert sent[0] > 0
    assert sent[1] == pytest.approx(sent[0], abs=20)  # each part is rounded by itself
    assert sent[2] == sent[1]
    numbers = [one.numbers(1) for one in (plain, ddp, together)]
    assert numbers[0].hidden_fraction == pytest.approx(0.0, abs=1e-9)
    assert numbers[1].hidden_fraction > 0.0
    assert numbers[1].step_seconds < numbers[0].step_seconds
    assert numbers[2].step_seconds <= numbers[1].step_seconds * (1 + 1e-9)
