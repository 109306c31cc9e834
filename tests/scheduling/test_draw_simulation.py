"""Pictures of a paired block: what a layer has left is marked where the next one takes it up."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from braid.scheduling.draw_simulation import (
    COLOURS,
    EXPOSED,
    MOVES,
    link_shares,
    moving,
    pair_bars,
    pair_svg,
    pair_text,
    paired_run,
    pipeline_bars,
    pipeline_svg,
)
from braid.scheduling.operators import Stream
from braid.scheduling.planner.decide import evaluate
from braid.scheduling.presets.library import cluster_preset
from braid.scheduling.schedule import PassKind, on_side
from braid.scheduling.simulate import Simulation
from tests.scheduling.plans import SMALL, paired_runs, setting

WIDE = replace(
    SMALL, hidden=4096, ffn=11008, layers=16, heads=32, kv_heads=32, head_dim=128, vocabulary=32000
)


@pytest.mark.parametrize("unit_layers", [0, 2])
def test_what_was_left_is_marked(unit_layers: int) -> None:
    own = setting("braid:w", tp=2, micro_batches=8, model=WIDE, unit_layers=unit_layers)
    found = evaluate(own, replace(cluster_preset("a40", 1), gpus_per_node=2)).simulation
    programs = found.code.schedule.programs
    late = [
        (side, {action.operator for action in on_side(program, number)})
        for sides, program in programs.items()
        for number, side in enumerate(sides)
        if side.kind is PassKind.END and len(sides) > 2
    ]
    side, operators = max(late, key=lambda one: len(one[1]))
    names = [op.own_name for op in found.code.parts[side.unit].backward.operators if op.name in operators]
    run = paired_run(found)
    assert names
    assert run is not None
    bars, _ = pair_bars(found, run)
    marked = sorted(bar.label for bar in bars if bar.kind == "L")
    assert marked == sorted(f"L:{name}" for name in names)
    assert all(not bar.label.startswith("L:") for bar in bars if bar.kind != "L")
    assert pair_svg(found, run, "a pair").count(f'fill="{COLOURS["L"]}"') == len(marked)
    assert {kind for _, pieces in pair_text(found, run) for _, kind in pieces} == {"F", "B", "L", ""}


def test_a_picture_without_ends_does_not_speak_of_them() -> None:
    with_ends, without = (pair_picture(name) for name in ("braid:w", "wavelet"))
    assert "pale with L: what the layer or the block before has left" in with_ends
    assert "pale" not in without


def pair_picture(schedule: str) -> str:
    found = simulated(schedule)
    run = paired_run(found)
    assert run is not None
    return pair_svg(found, run, "a pair")


def simulated(schedule: str, tp: int = 2) -> Simulation:
    own = setting(schedule, tp=tp, micro_batches=6, model=WIDE)
    return evaluate(own, replace(cluster_preset("a40", 1), gpus_per_node=tp)).simulation


@pytest.mark.parametrize("schedule", ["megatron", "braid:w", "braid:twins"])
def test_every_pass_is_a_bar_of_the_pipeline(schedule: str) -> None:
    """Passes that run at the same time share the height; ends are part of the block that takes them up."""
    bars = pipeline_bars(simulated(schedule))
    halves = {"^": "_", "_": "^", "": ""}
    assert sorted((bar.kind[0], int(bar.label)) for bar in bars) == [
        (kind, n) for kind in "BF" for n in range(6)
    ]
    for bar in bars:
        beside = [
            (other.kind[0], other.kind[1:]) for other in bars if other.begin == bar.begin and other is not bar
        ]
        assert len(beside) == bool(bar.kind[1:])
        assert all(half == halves[bar.kind[1:]] for _, half in beside)
    twins = [bar.label for bar in sorted(bars, key=lambda bar: (bar.begin, bar.kind)) if bar.kind == "F^"][:1]
    assert (twins == ["0"]) is (schedule == "braid:twins")


def test_pieces_are_told_without_colours() -> None:
    found = simulated("braid:w")
    run = paired_run(found)
    assert run is not None
    for width in (30, 120):
        pieces = [piece for _, row in pair_text(found, run, width) for piece in row if piece[1]]
        assert {kind for _, kind in pieces} == {"F", "B", "L"}
        assert all(text[0] == kind for text, kind in pieces if len(text) != 1 or text != "▏")


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
    links = link_shares(found)
    assert len(links) == len(found.ranks)
    for shares, wanted in (
        ([link.moves.mean() for link in links], numbers.communication_seconds),
        ([link.exposed.mean() for link in links], numbers.exposed_seconds),
    ):
        assert sum(shares) / len(links) * found.step_ns / 1e9 == pytest.approx(wanted, rel=1e-3)
    for colour in (MOVES, EXPOSED):
        assert picture.count(f'fill="{colour}"') == len(links)


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


def test_rows_are_streams_and_pieces_fill_them_in_order() -> None:
    found = simulated("braid:w")
    run = paired_run(found)
    assert run is not None
    assert run in paired_runs(found)[0]
    rows = pair_text(found, run, 80)
    assert [name for name, _ in rows] == [stream.value for stream in Stream]
    assert all(sum(len(text) for text, _ in pieces) <= 80 for _, pieces in rows)
    assert len(moving(run)) == 2
