"""The benchmark of telemetry on small cases; times are not tested."""

import json

import pytest

from tests.measure import telemetry


@pytest.mark.slow
def test_it_reports_price_and_throughput(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["telemetry", "--steps", "5", "--seconds", "0.5", "--json"])
    telemetry.main()
    result = json.loads(capsys.readouterr().out)
    (price,) = result["prices"]
    assert price["case"] == "demo"
    assert price["spans_per_step"] > 100
    assert price["on"]["count"] == price["off"]["count"] == price["ratio"]["count"] == 5
    free, paced = result["throughputs"]
    assert free["asked_per_second"] is None
    assert free["written_per_second"] > 0
    assert paced["asked_per_second"] == 200_000
    assert paced["lost"] == free["lost"] == 0
