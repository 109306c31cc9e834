"""The benchmark runs and reports; what it reports is for people to judge, not for tests."""

import io
import json
import math
from dataclasses import asdict

import pytest
from rich.console import Console

from braid.jobs.bench.training import BRAID, PLAIN, run, show

TINY = {
    "model": {"hidden": 32, "layers": 2, "heads": 2, "sequence": 32},
    "train": {"global_batch": 4, "micro_batch": 2},
}


@pytest.mark.slow
def test_benchmark_reports_every_comparison() -> None:
    said: list[str] = []
    (result,) = run(cases={"tiny": TINY}, rounds=1, progress=said.append)
    assert result.tokens_per_step == 4 * 32
    assert result.loss_difference < 1e-5
    assert list(result.step_seconds) == [BRAID, PLAIN]
    for step in result.step_seconds.values():
        assert 0 < step.low <= step.median <= step.high
        assert step.count == 1
    assert 0 < result.speed_ratio.median < math.inf
    assert json.loads(json.dumps(asdict(result)))["speed_ratio"]["median"] == result.speed_ratio.median
    text = io.StringIO()
    show(Console(file=text, width=160), [result])
    assert all(name in text.getvalue() for name in (BRAID, PLAIN))
    assert len(said) == 1
