"""``braid demo``: two short runs, the same losses, both timelines; and what it says where that is not so."""

from dataclasses import replace
from pathlib import Path

import pytest

from braid.actors.controller.json_lines import read_lines
from braid.jobs.demo import PICTURE, STRETCH, Demo
from tests.end_to_end.command import braid

FOUND = Demo(
    seconds=((0.3, 0.9, 0.36, 0.32), (0.2, 0.6, 0.3, 0.1)),
    hidden=(0.0, 0.82),
    compared=12,
    alike=12,
    validation={"loss": 5.0, "bits_per_byte": 3.0},
    link_mbit=300.0,
    runs=(Path("a"), Path("b")),
)


def test_the_sentence_says_what_was_won() -> None:
    """Pair by pair: other work slows both steps of a pair alike."""
    assert FOUND.sentence == (
        "1.50x faster: 82% of communication hidden (0% without); same losses to the last bit in the 12 steps "
        "that both made"
    )
    assert "a fault: other losses in 1 of the 12 steps" in replace(FOUND, alike=11).sentence


def test_the_pictures_are_of_steps_of_median_length() -> None:
    assert FOUND.typical == (4, 4), "0.36 s and 0.3 s, behind the two steps that are left out"


@pytest.mark.slow
def test_a_small_demo(tmp_path: Path) -> None:
    sizes = ("model.hidden=64", "model.layers=2", "model.heads=4", "model.kv_heads=2", "model.sequence=64")
    short = (f"train.steps={STRETCH + 3}", "train.validate_every=0", "telemetry.page=false")
    words = [word for key in (*sizes, *short) for word in ("--set", key)]
    outcome = braid(tmp_path, "demo", *words, timeout=240)
    assert outcome.code == 0, outcome.errors
    assert f"same losses to the last bit in the {STRETCH} steps that both made" in outcome.output
    assert "emulated" in outcome.output
    for name in ("without overlap: ", "with overlap: ", "bits per byte"):
        assert name in outcome.output
    runs = [tmp_path / "runs" / name for name in ("demo", "demo-without-overlap")]
    ends = [[line["time"] for line in read_lines(run / "metrics.jsonl")[:STRETCH]] for run in runs]
    both = [end for pair in zip(*ends, strict=True) for end in pair]
    assert both == sorted(both), "the two runs made their steps by turns"
    assert (runs[0] / PICTURE).read_text().startswith("<svg")
