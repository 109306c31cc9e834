"""The benchmark runs and reports; what it reports is for people to judge, not for tests."""

import io
import json
import math
from dataclasses import asdict

import pytest
from rich.console import Console

from braid.jobs.bench.training import BRAID, PLAIN, PROCESSES, RAY, run, show

TINY = {
    "model": {"hidden": 32, "layers": 2, "heads": 2, "sequence": 32},
    "train": {"global_batch": 4, "micro_batch": 2},
}


@pytest.mark.slow
@pytest.mark.own_process
def test_benchmark_reports_every_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    said: list[str] = []
    result = run(cases={"tiny": TINY}, rounds=1, steps=2, seed=3, progress=said.append)

    (loop,) = result.loops
    assert loop.tokens_per_step == 4 * 32
    assert loop.loss_difference < 1e-5
    assert list(loop.timing) == list(loop.memory) == [BRAID, PLAIN]
    for timing in loop.timing.values():
        assert 0 < timing.step_seconds.low <= timing.step_seconds.median <= timing.step_seconds.high
        assert timing.step_seconds.count == 1
    for memory in loop.memory.values():
        assert 0 < memory.imported_bytes < memory.peak_bytes
    assert result.launchers is not None
    assert list(result.launchers.timing) == [RAY, PROCESSES]
    for group in result.launchers.timing.values():
        assert group["wall_seconds"].median > group["step_seconds"].median > 0
        assert all(spread.median > 0 for spread in group.values())
    spreads = [loop.speed_ratio, loop.cpu_speed_ratio, result.launchers.wall_ratio]
    ratios = [loop.memory_ratio, loop.peak_ratio, *(spread.median for spread in spreads)]
    assert all(math.isfinite(ratio) and ratio > 0 for ratio in ratios)

    read = json.loads(json.dumps(asdict(result)))
    assert read["loops"][0]["speed_ratio"]["median"] == loop.speed_ratio.median
    assert read["machine"]["seed"] == 3
    text = io.StringIO()
    show(Console(file=text, width=160), result)
    assert all(name in text.getvalue() for name in (BRAID, PLAIN, RAY, PROCESSES))
    assert len(said) == 2
