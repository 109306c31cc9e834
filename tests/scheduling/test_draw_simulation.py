"""Pictures of a paired block and of a pipeline."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from braid.scheduling.cost.picture import (
    moving,
    pair_svg,
    paired_run,
    pipeline_rows,
    pipeline_svg,
)
from braid.scheduling.cost.simulate import Simulation
from braid.scheduling.model.presets.library import cluster_preset
from braid.scheduling.plan.decide import simulate_setting
from braid.scheduling.trace.arrays import length, shares
from braid.scheduling.trace.svg import EXPOSED, MOVES
from tests.scheduling.plans import SMALL, paired_runs, setting

WIDE = replace(
    SMALL, hidden=4096, ffn=11008, layers=16, heads=32, kv_heads=32, head_dim=128, vocabulary=32000
)


def simulated(schedule: str, tp: int = 2) -> Simulation:
    own = setting(schedule, tp=tp, micro_batches=6, model=WIDE)
    return simulate_setting(own, replace(cluster_preset("a40", 1), gpus_per_node=tp)).simulation


@pytest.mark.parametrize("schedule", ["megatron", "braid:w", "braid:twins"])
def test_every_pass_is_a_bar_of_the_pipeline(schedule: str) -> None:
    """Passes that run at the same time share the height; ends are part of the block that takes them up."""
    ((*bars,),) = (row.bars for row in pipeline_rows(simulated(schedule)))
    assert sorted(int(bar.label) for bar in bars) == sorted([*range(6)] * 2)
    for bar in bars:
        beside = [other.half for other in bars if other.begin == bar.begin and other is not bar]
        assert beside == {"": [], "^": ["_"], "_": ["^"]}[bar.half]
    first = min(bars, key=lambda bar: (bar.begin, bar.half == "_"))
    assert (first.half == "^") is (schedule == "braid:twins")


def test_columns_are_as_full_as_intervals_fill_them() -> None:
    disjoint = np.array([[0, 5], [10, 30], [35, 36]])
    assert shares(disjoint, np.array([0.0, 10, 20, 30, 40])).tolist() == pytest.approx([0.5, 1, 1, 0.1])
    assert shares(disjoint[:0], np.array([0.0, 10, 20])).tolist() == [0, 0]


def test_the_pipeline_has_an_axis_of_time_and_shows_communication() -> None:
    """Marks lie where their times do; strips are as full as links are."""
    found = simulated("megatron")
    picture = pipeline_svg(found, "a pipeline")
    marks = re.findall(r'<text x="([\d.]+)" [^>]*text-anchor="middle">([\d.]+)( ms)?</text>', picture)
    assert [unit for *_, unit in marks] == [" ms"] + [""] * (len(marks) - 1)
    assert 4 < len(marks) < 13
    for place, value, _ in marks:
        assert (float(place) - 90) / 1290 == pytest.approx(float(value) * 1e6 / found.step_ns, abs=1e-4)
    numbers = found.numbers(1)
    strips = [dict(row.strips) for row in pipeline_rows(found)]
    for colour, wanted in ((MOVES, numbers.communication_seconds), (EXPOSED, numbers.exposed_seconds)):
        assert picture.count(f'fill="{colour}"') == len(found.ranks) == len(strips)
        assert sum(length(own[colour]) for own in strips) / len(strips) / 1e9 == pytest.approx(
            wanted, rel=1e-3
        )


PICTURE = Path(__file__).parents[2] / "docs" / "images" / "paired-block.svg"


def test_the_picture_of_the_readme_is_what_is_drawn_today(update_golden: bool) -> None:
    """As `braid simulate ... --svg` draws it; to renew it: pytest THIS_FILE --update-golden."""
    found = simulated("braid:w", tp=4)
    run = paired_run(found)
    assert run is not None
    drawn = pair_svg(found, run, "braid:w: a paired block of two Llama layers on four A40s (simulated)")
    if update_golden:
        PICTURE.write_text(drawn, encoding="utf-8")
    assert PICTURE.read_text(encoding="utf-8") == drawn


def test_the_block_that_is_drawn_has_two_passes() -> None:
    found = simulated("braid:w")
    run = paired_run(found)
    assert run is not None
    assert run in paired_runs(found)[0]
    assert len(moving(run)) == 2
