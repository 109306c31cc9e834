"""The table of named schedules, what they need, and what they refuse."""

import pytest

from braid.scheduling.generate.lower import Choices, training_schedule
from braid.scheduling.generate.named import SCHEDULES, ScheduleName
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.schedule.gone import GONE
from tests.scheduling.cases import LOWERED, exists, layout_for, parts_for, setting_for


def refused(name: str, stages: int, micro_batches: int, choices: Choices | None = None) -> str:
    """The message with which a schedule is refused."""
    setting = setting_for(name, layout_for(name, stages), micro_batches)
    with pytest.raises(ValueError) as error:
        training_schedule(setting, parts_for(setting), choices)
    return str(error.value)


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError) as error:
        setting_for("gpipe", ParallelLayout(), 1)
    assert str(error.value) == "schedule='gpipe' is not known; did you mean 'megatron'?"
    with pytest.raises(ValueError) as error:
        setting_for("tetris", ParallelLayout(), 1)
    assert str(error.value) == f"schedule='tetris' must be one of {', '.join(SCHEDULES)}"


def test_what_a_schedule_cannot_run_is_refused_with_key_value_and_remedy() -> None:
    assert refused("interleaved", 4, 6) == (
        "overlap.schedule=interleaved needs a multiple of parallel.pp=4 micro-batches a replica, "
        "train.global_batch and train.micro_batch give 6; make them give 8, or use overlap.schedule=megatron"
    )
    for name in ("dualpipev", "braid:v"):
        assert refused(name, 4, 7) == (
            "overlap.schedule=dualpipev and overlap.pipeline=v need 2 micro-batches a replica for each of "
            "parallel.pp=4 stages, train.global_batch and train.micro_batch give 7; make them give 8 or "
            "more, or use overlap.schedule=braid"
        )
    for p in range(1, 7):
        for m in range(1, 13):
            for name in ("interleaved", "dualpipev"):
                if not exists(name, p, m):
                    assert f"give {m}; make them give " in refused(name, p, m)


@pytest.mark.parametrize("name", ["dhelix", "braid", "braid:v"])
def test_paired_blocks_need_a_decision(name: str) -> None:
    schedule = name.partition(":")[0]
    assert refused(name, 2, 8) == (
        f"overlap.schedule={schedule} needs a pairing: measure the run with `braid profile`, or "
        f"make a plan with `braid plan --output plan.yaml` and set overlap.plan"
    )


@pytest.mark.parametrize("name", ["dhelix", "braid"])
def test_without_paired_blocks_no_decision_is_needed(name: str) -> None:
    """So few micro-batches that no two ever meet."""
    setting = setting_for(name, layout_for(name, 3), 2)
    assert all(len(sides) == 1 for sides in training_schedule(setting, parts_for(setting)).programs)


def test_names_are_read_as_they_are_written() -> None:
    for text in (*LOWERED, "braid:eager_w/3", "megatron:1f1b"):
        assert str(ScheduleName.parse(text)) == text
    for text, message in {
        "braid:u": "pipeline='u' must be one of w, twins, eager_w,.* with schedule braid",
        "ddp:folded": "pipeline='folded' must be one of 1f1b with schedule ddp",
        "braid:eager_w/5": "hop=5, slots of a message in pipeline eager_w, must be one of 2, 3, 4",
        "braid:eager_w/x": "slots of a message must be a number, not 'x'",
        "braid:w/3": "hop=3, slots of a message in pipeline w, cannot be chosen; leave it out",
    }.items():
        with pytest.raises(ValueError, match=message):
            ScheduleName.parse(text)


def test_what_stands_in_the_place_of_names_that_are_gone_is_there() -> None:
    assert GONE.keys().isdisjoint(SCHEDULES)
    for schedule, pipeline in GONE.values():
        ScheduleName(schedule, pipeline).checked()
