"""Traces of `torch.profiler`: which steps and ranks they have, and the names of operators in them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from braid import train
from braid.actors.config import Config, parse_config
from braid.actors.stage.measure.torch_profile import TorchProfile
from braid.dashboards.trace_folder import TraceFolder
from tests.end_to_end.command import BASE, write_corpus


def config_of(folder: Path, **telemetry: Any) -> Config:
    data = {"files": [str(write_corpus(folder))], "validation_fraction": 0.1}
    content = {**BASE, "runs": str(folder / "runs"), "data": data, "telemetry": telemetry}
    return parse_config(
        {**content, "parallel": {"tp": 2}, "cluster": {**BASE["cluster"], "cpus_per_rank": 0.5}}
    )


def ranges_in(trace: Path) -> list[str]:
    """Names of the ranges in a Chrome trace."""
    events = json.loads(trace.read_text())["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "user_annotation"]


@pytest.mark.slow
def test_a_profiled_run(tmp_path: Path) -> None:
    """One rank's steps 2 to 3: every operator that Braid's own spans have, as often; the losses stay the same
    to the bit."""
    plain = train(config_of(tmp_path).model_copy(update={"name": "plain"}))
    found = train(config_of(tmp_path, profile={"steps": [2, 3], "ranks": [1]}))
    assert [step["loss"] for step in found.report["steps"]] == [
        step["loss"] for step in plain.report["steps"]
    ]
    run = tmp_path / "runs" / "run"
    (trace,) = (run / "profile").iterdir()
    assert trace.name == "rank-1.steps-2-3.json"
    names = ranges_in(trace)
    assert [name for name in names if name.startswith("step ")] == ["step 2", "step 3"]
    folder = TraceFolder.of_run(
        run, keep=4
    )  # counts steps from 0; a busy machine leaves out every second step
    (batch, *_) = (batch for step in (1, 2) for batch in folder.step(step) if batch.rank == 1)
    spans: dict[str, int] = {}
    for label, kind in zip(batch.records["label"], batch.records["kind"], strict=True):
        name = batch.labels[int(label)].operator
        if kind == 0:
            spans[name] = spans.get(name, 0) + 2
    assert len(spans) > 20
    assert not (tmp_path / "runs" / "plain" / "profile").exists()
    for name, count in spans.items():
        ranges = names.count(name) + names.count(f"start {name}")
        assert ranges == count, (name, ranges, count)


def test_ranges_cost_nothing_unless_somebody_records_them(tmp_path: Path) -> None:
    """A rank that is not asked for has none; under a tool that records NVTX ranges, ranks on CUDA have."""
    config = config_of(tmp_path, profile={"steps": [2, 3], "ranks": [1]})
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    under_nsys = {"NVTX_INJECTION64_PATH": "/opt/libToolsInjection64.so"}
    assert TorchProfile(config, 0, cpu, {}).around is None
    assert TorchProfile(config, 0, cpu, under_nsys).around is None
    assert TorchProfile(config, 0, cuda, {}).around is None
    assert TorchProfile(config, 0, cuda, under_nsys).around is not None
    assert TorchProfile(config, 1, cpu, {}).around is not None


def test_steps_that_are_broken_off_leave_nothing(tmp_path: Path) -> None:
    """Of a run that ends early, what there is remains. A profile that cannot be written ends no training."""
    config = config_of(tmp_path, profile={"steps": [2, 3], "ranks": [1]})
    profile = TorchProfile(config, 1, torch.device("cpu"), {})
    with profile.step(2):
        torch.ones(3).sum()
    profile.end(broken=True)
    assert not config.run_directory.exists()
    for step in (2, 3):
        with profile.step(step):
            torch.ones(3).sum()
    assert not config.run_directory.exists(), "told in the log"
    config.run_directory.mkdir(parents=True)
    for step in (1, 2, 3, 4):
        with profile.step(step):
            torch.ones(3).sum()
    (trace,) = (config.run_directory / "profile").iterdir()
    assert ranges_in(trace) == ["step 2", "step 3"]
    early = TorchProfile(config, 1, torch.device("cpu"), {})
    with early.step(2):
        torch.ones(3).sum()
    early.end()
    assert ranges_in(config.run_directory / "profile" / "rank-1.steps-2-2.json") == ["step 2"]
