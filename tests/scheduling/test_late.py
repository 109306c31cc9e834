"""What paired blocks leave to the next one: ends of backward passes, where they help."""

from dataclasses import replace

from braid.scheduling.generate.lower import Choices
from braid.scheduling.plan.decide import modelled
from braid.scheduling.plan.orders import CostedSetting, decisions
from braid.scheduling.schedule.operations import Start
from braid.scheduling.schedule.order import Issue, Order, parse_orders
from braid.scheduling.schedule.text import parse_sides
from tests.scheduling.plans import SMALL, cluster, fastest, lowered, setting

LAYERS = 2
RUN = f"embedding+{LAYERS}*layer+head"
PAIR, ENDING = f"F:{RUN}|B:{RUN}", f"B:{RUN}|L:{RUN}"
MICRO_BATCHES = 4


def bench(
    micro_batches: int = MICRO_BATCHES, layers: int = LAYERS, pp: int = 1, rate: float = 8.4e9
) -> CostedSetting:
    """A model in units of four layers, on links on which it communicates almost as long as it computes."""
    model = replace(SMALL, layers=layers, hidden=2048, ffn=5440, heads=32, kv_heads=32, sequence=256)
    own = setting("braid:w", tp=2, pp=pp, micro_batches=micro_batches, model=model, unit_layers=4)
    return modelled(cluster(gpus=2 * pp, intra=rate))(own)


BENCH = bench()


def late_of(order: Order, turn: int = 2) -> list[str]:
    """The operators of an order that belong to the end of an earlier pass."""
    return [step.operator for step in order if isinstance(step, Issue) and step.turn == turn]


def starts(one: Choices) -> set[str]:
    """Collectives that a decision leaves to the next block."""
    programs = lowered(BENCH, one).code.schedule.programs
    program = programs.get(parse_sides(f"{PAIR}|L:{RUN}"), ())
    return {str(one.what) for one in program if isinstance(one, Start) and one.turn == 2}


def taken_up(one: Choices) -> set[str]:
    """What a backward pass by itself does for the one before."""
    return set(late_of(one.orders.get(parse_sides(ENDING), ()), 1))


def test_ends_of_backward_passes_are_tried_and_taken_where_they_help() -> None:
    short, far, *_ = (one for one, _ in decisions(BENCH))
    assert starts(short) == set()
    assert starts(far) == {"1.layer/attention_gather.grad", "0.embedding/embedding_scatter.grad"}
    many = bench(micro_batches=16)
    tried = [one for one, _ in decisions(many)]
    assert starts(tried[0]) == set()
    assert starts(tried[1])
    times = [lowered(many, one).numbers for one in tried]
    assert times[1].step_seconds < times[0].step_seconds
    assert times[1].hidden_fraction > times[0].hidden_fraction
    assert times[-1].step_seconds < times[1].step_seconds
    assert times[-1].hidden_fraction > times[1].hidden_fraction
    assert taken_up(tried[-1]) >= starts(far) > taken_up(far) == set()
    assert fastest(many).choices == tried[-1]


def test_nothing_is_left_without_a_block_that_takes_it_up() -> None:
    assert len(decisions(bench(micro_batches=2))) == 1


def test_a_pass_that_gives_its_gradient_on_keeps_its_end() -> None:
    """The stage before waits for it; what it may leave are weight gradients."""
    two = bench(micro_batches=6, layers=8, pp=2)
    seen = set()
    for one, _ in decisions(two):
        for sides, order in one.orders.items():
            if len(sides) == 3 and "embedding" not in (unit := sides[-1].unit):
                late = [two.parts[unit].backward.named(name) for name in late_of(order)]
                assert late
                assert all(op.name.endswith(".wgrad") for op in late)
                seen.add(unit)
    assert seen


def test_what_a_pass_has_run_is_not_left_too() -> None:
    """A step may say so: nothing of it is left then."""
    own = modelled(cluster(gpus=2))(setting("braid:w", tp=2))
    layer = own.members["layer"]
    both = (
        *(f"0:{op.name}" for op in layer.forward.operators),
        *(f"1:{op.name}" for op in layer.backward.operators),
    )
    outcome = lowered(own, Choices(orders=parse_orders({"F:layer|B:layer|L:layer": (*both, "2:qkv.wgrad")})))
    count = sum(span.operator == "qkv.wgrad" for span in outcome.simulation.spans())
    assert count == own.setting.model.layers * own.setting.micro_batches
