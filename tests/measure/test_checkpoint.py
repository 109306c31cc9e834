"""The benchmark of checkpoints: its arithmetic on made-up rounds, and a small run; times are not tested."""

import json
from statistics import median

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
    found = summary(legs)
    alone, more, stall, less, short = map(median, zip(*rounds, strict=True))
    assert found["alone"]["median"] == pytest.approx(alone)
    assert found["cost"][SYNCHRONOUS]["median"] == pytest.approx(more)
    assert found["stall"][SYNCHRONOUS]["median"] == pytest.approx(stall)
    assert found["cost"][ASYNCHRONOUS]["median"] == pytest.approx(less)
    assert found["stall"][ASYNCHRONOUS]["median"] == pytest.approx(short)
    assert found["stall_ratio"]["median"] == pytest.approx(median(r[4] / r[2] for r in rounds))


@pytest.mark.slow
def test_it_measures_both_kinds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--hidden", "64", "--layers", "1", "--rounds", "2", "--steps", "1"]
    monkeypatch.setattr("sys.argv", ["checkpoint", *words])
    checkpoint.main()
    found = json.loads(capsys.readouterr().out)
    assert (found["rounds"], found["steps"], found["alone"]["count"]) == (2, 1, 2)
    assert found["checkpoint_bytes"] > 3 * 4 * 257 * 64, "three numbers per parameter"
    assert all(found["stall"][kind]["median"] > 0 for kind in (SYNCHRONOUS, ASYNCHRONOUS))
