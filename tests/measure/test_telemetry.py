"""The benchmark of telemetry on small cases; times are not tested."""

import json
from pathlib import Path

import pytest

from tests.end_to_end.command import write_config
from tests.measure import telemetry


@pytest.mark.slow
def test_it_reports_price_and_throughput(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = write_config(tmp_path, parallel={"tp": 2}, overlap={"schedule": "wavelet"})
    options = ["--steps", "5", "--seconds", "0.3"]
    monkeypatch.setattr("sys.argv", ["telemetry", str(config), *options])
    telemetry.main()
    result = json.loads(capsys.readouterr().out)
    price = result["price"]
    assert price["case"] == "run"
    assert price["spans_per_step"] > 100
    assert price["with"]["count"] == price["without"]["count"] == price["ratio"]["count"] == 5
    free, paced = result["throughput"]
    assert free["written_per_second"] > 0
    assert (free["asked_per_second"], paced["asked_per_second"]) == (None, 200_000)
    assert paced["lost"] == free["lost"] == 0
