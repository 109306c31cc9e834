"""Whole runs with partitions over four ranks of two hosts, from plans: losses of plain PyTorch.

Stages inside hosts and between them are on streams of their own, as the trace shows.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from braid.actors.controller.controller import Controller, RunOptions
from braid.actors.controller.planning import build_schedule
from braid.actors.controller.processes import Place, ProcessLauncher
from braid.actors.stage.messages import RunPlan
from braid.jobs.planning.work import Request, fixed_setting
from braid.scheduling.operators import Stream
from braid.scheduling.partition import parse_partition
from braid.scheduling.planner.cluster import plan_of
from braid.scheduling.planner.decide import evaluate
from braid.scheduling.schedule_text import write
from tests.end_to_end.command import overlap_of
from tests.end_to_end.runs import BYTES_VOCABULARY, Run, prepare_text, run_plain, small_config
from tests.scheduling.plans import cluster
from tests.spans import read_folder, spans_of

pytestmark = pytest.mark.slow

SEED, STEPS, TOLERANCE = 3, 3, 1e-9
GATHER_IN_PARTS = "tp/all_gather mesh 2x2 order 1,0,1 delivered of tokens with 2"
SCATTER_IN_PIECES = "tp/reduce_scatter mesh 2x2 order 1,0 pieces 3 of tokens with 1"
CASES: list[tuple[str, Mapping[str, int], tuple[str, ...]]] = [
    ("megatron", {"tp": 4}, (GATHER_IN_PARTS, SCATTER_IN_PIECES)),
    ("braid:w", {"tp": 4}, (GATHER_IN_PARTS, SCATTER_IN_PIECES)),
    (
        "braid:w",
        {"tp": 4},
        (
            "tp/all_gather mesh 2x2 order 0,1 pieces 2 of width with 1",
            "layer/mlp_scatter pieces 3 of width with 1",
        ),
    ),
    ("megatron", {"dp": 4}, ("dp/all_reduce mesh 2x2 order 1,0",)),
    ("ddp", {"dp": 4}, ("dp/all_reduce mesh 2x2 order 1,0",)),
    ("braid:together_4", {"dp": 4}, ("dp/all_reduce mesh 2x2 order 0,1",)),
    *(
        (
            "braid:together_4",
            {"dp": 4, "zero": zero},
            ("dp/reduce_scatter mesh 2x2 order 1,0", f"dp/all_gather mesh 2x2 order {order}"),
        )
        for zero, order in ((1, "0,1"), (1, "1,0"), (2, "0,1"), (3, "0,1"), (3, "1,0"))
    ),
]


@pytest.mark.parametrize(
    ("schedule", "parallel", "partitions"),
    CASES,
    ids=[f"{s} {' x '.join(f'{a} {d}' for a, d in p.items())} {n}" for n, (s, p, _) in enumerate(CASES)],
)
def test_losses_are_those_of_plain_pytorch(
    tmp_path: Path, schedule: str, parallel: Mapping[str, int], partitions: tuple[str, ...]
) -> None:
    overrides: dict[str, Mapping[str, Any]] = {
        "model": {"layers": 4, "kv_heads": 4},
        "train": {"dtype": "fp64", "seed": SEED, "steps": STEPS, "global_batch": 16},
        "cluster": {"cpus_per_rank": 0.1},
    }
    data = prepare_text(tmp_path / "data", SEED)
    expected = run_plain(small_config(tmp_path / "plain", **overrides), data)
    overrides |= {"parallel": parallel, "overlap": overlap_of(schedule)}
    config = small_config(tmp_path / "plans", **overrides)
    spec = cluster(nodes=2, gpus=2)
    setting = replace(
        fixed_setting(Request(config, config.model.shape(BYTES_VOCABULARY), spec)),
        partitions=tuple(map(parse_partition, partitions)),
    )
    plan = plan_of(evaluate(setting, spec), spec)
    assert plan.setting.partitions == setting.partitions
    file = tmp_path / "plan.yaml"
    file.write_text(plan.to_yaml(), encoding="utf-8")
    config = small_config(tmp_path / "runs", **{**overrides, "overlap": overlap_of(schedule, plan=str(file))})
    shape = config.check(BYTES_VOCABULARY)
    text = write(build_schedule(config, shape))
    assert all(f"\npartition {one}\n" in text for one in partitions)
    launcher = ProcessLauncher(config, [Place(machine=host) for host in "aabb"])
    run = RunPlan(config=config, shape=shape, schedule=text, data=str(data))
    events = tuple(Controller(run, launcher, RunOptions()).run())
    ours = Run(config=config, shape=shape, directory=config.run_directory, events=events)
    assert len(ours.losses) == STEPS
    assert ours.losses == pytest.approx(expected.losses, rel=TOLERANCE, abs=0)
    assert ours.gradient_norms == pytest.approx(expected.gradient_norms, rel=TOLERANCE, abs=0)
    traces = read_folder(config.run_directory)
    spans = [span for step in traces.steps for span in spans_of(traces.step(step))]
    busy = {stream: [s for s in spans if s.stream is stream] for stream in Stream}
    assert busy[Stream.INTRA]
    assert busy[Stream.INTER]
