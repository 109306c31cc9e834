"""Nothing impossible is printed: less than no loss, more than all, a negative nothing."""

import pytest

from braid.jobs.training.display import overlap_line
from braid.scheduling.trace.figures import lost, recovered, share

MEASURED = {
    "hidden_fraction": 0.9,
    "slowdown_seconds": -0.0444,
    "launch_gap_seconds": 0.002,
    "bubble_seconds": 0.0,
    "waiting_seconds": 0.003,
    "alpha": 0.4,
    "limit_speedup": 1 / 0.6,
    "recovered": 1.08,
}


@pytest.mark.parametrize(
    ("value", "places", "text"),
    [(-0.0004, 0, "0%"), (-0.0004, 1, "0.0%"), (-0.0006, 1, "-0.1%"), (0.5, 0, "50%"), (None, 0, "-")],
)
def test_shares(value: float | None, places: int, text: str) -> None:
    assert share(value, places) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.012, "12.0 ms"), (-0.044, "none"), (0.00004, "none"), (0.0, "none"), (None, "-")]
)
def test_losses(value: float | None, text: str) -> None:
    assert lost(value, lambda seconds: f"{seconds * 1e3:.1f} ms") == text


@pytest.mark.parametrize(
    ("value", "text"), [(1.08, "all"), (0.996, "all"), (0.63, "63%"), (0.001, "none"), (-0.2, "none")]
)
def test_gains(value: float, text: str) -> None:
    assert recovered(value) == text


def test_the_line_of_a_report() -> None:
    assert overlap_line(MEASURED) == (
        "90% of communication hidden, waiting for a peer 3.0 ms, no slowdown that can be told, "
        "launch gap 2.0 ms, bubble 0.0 ms, alpha 0.40, limit 1.67x, all of it recovered"
    )
    line = overlap_line({**MEASURED, "slowdown_seconds": 0.0444, "recovered": 0.63})
    assert "slowdown 44.4 ms" in line
    assert line.endswith("63% of it recovered")
    assert "none of it won: steps are 8% longer" in overlap_line({**MEASURED, "recovered": -0.2})
    assert "none of it won" in overlap_line({**MEASURED, "recovered": 0.001})
