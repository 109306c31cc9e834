"""What a person reads of a run."""

import io
import math
from typing import Any

import pytest
from rich.console import Console

from braid.actors.config import Config, parse_config
from braid.actors.controller.records import Finished, Started, StepDone
from braid.actors.controller.reporting import build_report
from braid.jobs.display import Display, curve, validation_line
from tests.actors.test_records import a_record


@pytest.mark.parametrize(
    ("values", "blocks"),
    [
        ([], ""),
        ([2.0], "▁"),
        ([1.0, 8.0], "▁█"),
        ([1.0, math.nan, 8.0], "▁x█"),
        ([math.inf, math.nan], "xx"),
    ],
)
def test_a_curve_leaves_out_what_is_no_number(values: list[float], blocks: str) -> None:
    assert curve(values) == blocks


def test_columns_are_means_of_their_numbers() -> None:
    assert curve([1.0, math.nan, math.inf, 3.0, 2.0, 2.0, 3.0, 3.0], width=4) == "▁█▅█"


def test_validation_is_told_in_both_units() -> None:
    assert (
        validation_line({"loss": 2.5, "bits_per_byte": 3.0}) == "2.5000 nats per token, 3.000 bits per byte"
    )
    assert validation_line({"loss": 2.5, "bits_per_byte": None}) == "2.5000 nats per token"
    assert validation_line({"loss": None, "bits_per_byte": None}) == "-"


def test_a_run_with_a_skipped_step_ends_with_its_report() -> None:
    """Its first loss was no number; what follows is."""
    out = io.StringIO()
    display = Display(Console(file=out, width=160), live=False)
    validation: dict[str, Any] = {
        "validation_loss": 1.5,
        "validation_bits_per_byte": 2.0,
        "between_seconds": {"validation": 0.1},
    }
    records = [a_record(1, loss=math.nan, grad_norm=math.nan), a_record(2), a_record(3, **validation)]
    begun = Started(first_step=1, last_step=3, ranks=1, layout="one rank", run_directory="runs/skipped")
    display.show(begun)
    for record in records:
        display.show(StepDone(record=record, ranks={}))
    config: Config = parse_config({"name": "skipped", "train": {"steps": 3}})
    display.show(Finished(complete=True, report=build_report(iter(records), config, complete=True)))
    said = out.getvalue()
    assert "nan -> 3.0000  x▁█" in said
    assert "1.5000 nats per token, 2.000 bits per byte" in said
    assert said.endswith("done\n")
