"""The fixed orders of sub-batches: what Oases' algorithm and Merak's passes say of them."""

from itertools import groupby

import pytest

from braid.scheduling.generate.fixed_orders import across_passes, within_passes
from braid.scheduling.model.operators import Kind, Operator, Part, Phase
from braid.scheduling.model.recompute import RECOMPUTE_POLICIES
from braid.scheduling.model.units import joined
from braid.scheduling.schedule.order import Issue
from braid.scheduling.schedule.text import parse_sides
from tests.scheduling.cases import LLAMA, model_parts

HEAVY = (Kind.GEMM, Kind.ATTENTION)
POLICIES = pytest.mark.parametrize("policy", RECOMPUTE_POLICIES)
PASSES = pytest.mark.parametrize("kind", ["F", "B"])


def three_layers(policy: str) -> Part:
    return joined([model_parts(LLAMA, 2, policy)["layer"]] * 3)


def ordered(part: Part, kind: str, *, across: bool) -> list[tuple[int, Operator] | None]:
    """Steps as pairs of sub-batch and operator; None is a barrier."""
    sides = parse_sides(f"{kind}:{part.name}|{kind}:{part.name}")
    steps = (across_passes if across else within_passes)(sides, {part.name: part})
    graph = part.forward if kind == "F" else part.backward
    return [(step.turn, graph.named(step.operator)) if isinstance(step, Issue) else None for step in steps]


@POLICIES
@PASSES
def test_every_collective_but_the_last_has_the_other_sub_batch_beside_it(policy: str, kind: str) -> None:
    """From its start to what reads it, the other one computes something that can hide it."""
    steps = [step for step in ordered(three_layers(policy), kind, across=True) if step]
    exposed = []
    for place, (turn, op) in enumerate(steps):
        if not op.kind.communicates:
            continue
        beside = []
        for other, after in steps[place + 1 :]:
            if other == turn and set(after.reads) & set(op.writes):
                break
            beside.append((other, after.kind))
        if not any(other != turn and kind in HEAVY for other, kind in beside):
            exposed.append(op.kind)
    # The first gather of the first sub-batch, and the last collective of the last one: there is nothing. And
    # where a layer's recomputation ends with a single product there are two collectives to hide behind it.
    layers = 3 if kind == "B" and policy == "full" else 0
    assert len(exposed) <= 2 + layers


def test_what_is_recomputed_comes_right_before_it_is_needed() -> None:
    """Oases, IV-B: between two collectives of the backward pass that stretch's operators are recomputed."""
    for turn in range(2):
        own = [step[1] for step in ordered(three_layers("fine"), "B", across=True) if step[0] == turn]
        assert not any(op.kind.communicates for op in own if op.phase is Phase.RECOMPUTE)
        for place, op in enumerate(own):
            if op.phase is Phase.RECOMPUTE:
                stretch = own[place:]
                end = next(n for n, one in enumerate(stretch) if one.kind.communicates)
                assert any(set(op.writes) & set(one.reads) for one in stretch[:end]), op.name


def test_passes_wait_for_each_other_within_passes() -> None:
    """Recomputation of a layer, its backward pass: a barrier between each two, none inside, none forward."""
    steps = ordered(three_layers("full"), "B", across=False)
    stretches = [list(own) for barrier, own in groupby(steps, lambda step: step is None) if not barrier]
    assert len(stretches) == 6
    for number, stretch in enumerate(stretches):
        assert {step[1].phase is Phase.RECOMPUTE for step in stretch} == {number % 2 == 0}
        assert len({step[1].place for step in stretch}) == 1
    assert None not in ordered(three_layers("full"), "F", across=False)
    assert None not in ordered(three_layers("none"), "B", across=False)
