"""The benchmark of checkpoints: its arithmetic on made-up rounds, and a small run; times are not tested."""

import json
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.measure import checkpoint
from tests.measure.checkpoint import ALONE, ASYNCHRONOUS, SYNCHRONOUS, Leg, summary

SECONDS = st.floats(0.01, 100.0)


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS), min_size=1, max_size=9))
def test_rounds_are_compared_within_themselves(
    rounds: list[tuple[float, float, float, float, float]],
) -> None:
    legs = [
        {
            ALONE: Leg(seconds=alone, stalled=0.0),
            SYNCHRONOUS: Leg(seconds=alone + more, stalled=stall),
            ASYNCHRONOUS: Leg(seconds=alone + less, stalled=short),
        }
        for alone, more, stall, less, short in rounds
    ]
    result = summary(legs, 3, 1000)
    assert (result.rounds, result.steps, result.checkpoint_bytes) == (len(rounds), 3, 1000)
    assert result.alone.median == pytest.approx(statistics.median(r[0] for r in rounds))
    assert result.synchronous_cost.median == pytest.approx(statistics.median(r[1] for r in rounds))
    assert result.synchronous_stall.median == pytest.approx(statistics.median(r[2] for r in rounds))
    assert result.asynchronous_cost.median == pytest.approx(statistics.median(r[3] for r in rounds))
    assert result.asynchronous_stall.median == pytest.approx(statistics.median(r[4] for r in rounds))
    assert result.stall_ratio.median == pytest.approx(statistics.median(r[4] / r[2] for r in rounds))


@pytest.mark.slow
def test_it_measures_both_kinds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--hidden", "64", "--layers", "1", "--rounds", "2", "--steps", "1", "--json"]
    monkeypatch.setattr("sys.argv", ["checkpoint", *words])
    checkpoint.main()
    result = json.loads(capsys.readouterr().out)
    assert (result["rounds"], result["steps"]) == (2, 1)
    assert result["checkpoint_bytes"] > 3 * 4 * 257 * 64, "three numbers per parameter"
    for name in ("synchronous_stall", "asynchronous_stall", "stall_ratio", "synchronous_cost", "alone"):
        assert result[name]["count"] == 2
    assert result["asynchronous_stall"]["median"] > 0
    assert result["synchronous_stall"]["median"] > 0
