"""Models whose layers are of several kinds: they train as on one rank, and all kinds are measured.

What these losses are is compared with autograd in `tests.end_to_end.test_own_layer`.
"""

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from braid.actors.controller.planning import build_schedule, model_graphs, plan_run, setting_of
from braid.actors.controller.profiling import measure
from braid.actors.stage.messages import RunPlan
from braid.scheduling.analytic import analytic_profile
from braid.scheduling.lowering.partitions import mega_scale
from braid.scheduling.planner.decide import anything, decide, measured
from braid.scheduling.planner.space import COARSE
from braid.scheduling.schedule import Sides
from braid.scheduling.schedule_text import parse, write
from tests.end_to_end.command import ROOT, overlap_of
from tests.end_to_end.runs import BYTES_VOCABULARY, KeptRanks, Run, prepare_text, run_layout, small_config
from tests.scheduling.plans import cluster

LAYERS = {"parallel": f"{ROOT}/docs/examples/parallel_layer.py:ParallelLayer"}
COUNTS = {"layer parallel": 4, "2*layer parallel": 6}
"""Layers, by pattern."""
STEPS = 3
CASES = [
    ("megatron", 0, {"tp": 2}),
    ("megatron", 0, {"pp": 2}),
    ("dhelix", 0, {"tp": 2}),
    ("dhelix", 0, {"pp": 2}),
    ("wavelet", 0, {"tp": 2}),
    ("wavelet", 0, {"pp": 2}),
    ("braid", 0, {"tp": 2}),
    ("braid", 2, {"tp": 2}),
    ("braid", 0, {"pp": 2}),
    ("braid", 2, {"pp": 2}),
    ("braid", 2, {"tp": 2, "pp": 2}),
    ("braid:twins", 0, {"tp": 2}),
    ("intra_batch", 0, {"tp": 2}),
]
"""Schedules with the most layers of a run, and layouts."""
QUICK = [("layer parallel", "dhelix", 0, {"pp": 2}), ("2*layer parallel", "braid", 2, {"tp": 2})]


def model(pattern: str) -> dict[str, Any]:
    """That part of the configuration."""
    return {"layer": LAYERS, "pattern": pattern, "layers": COUNTS[pattern], "hidden": 32, "sequence": 16}


class Runs:
    """Runs of this module on the same text."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self._seed = path, seed
        self.one = cache(self._one)

    @cached_property
    def data(self) -> Path:
        """The corpus of all runs."""
        return prepare_text(self.path, self._seed)

    def of(self, pattern: str, schedule: str, unit_layers: int, parallel: Mapping[str, int]) -> Run:
        """A run with the orders of a made-up cluster on which communication is worth hiding."""
        sections: dict[str, Any] = {
            "model": model(pattern),
            "train": {"dtype": "fp64", "seed": self._seed, "steps": STEPS},
            "parallel": parallel,
            "overlap": overlap_of(schedule),
        }
        file = self.path / f"{schedule}-{unit_layers}-{len(list(self.path.iterdir()))}.txt"
        config = small_config(self.path / "plans", **sections)
        shape = config.check(BYTES_VOCABULARY)
        cut = mega_scale(2) if schedule == "intra_batch" else ()
        setting = replace(setting_of(config, shape), unit_layers=unit_layers, partitions=cut)
        graphs, spec = model_graphs(config, shape), cluster(gpus=setting.layout.ranks, intra=2e8)
        bench_of = measured(graphs, analytic_profile(spec, setting.layout, graphs, 8))
        taken = decide([setting], bench_of, anything, COARSE)[0]
        file.write_text(write(taken.code.schedule), encoding="utf-8")
        sections["overlap"] = overlap_of(schedule, schedule_file=str(file))
        return run_layout(self.path / "runs", self.data, **sections)

    def _one(self, pattern: str) -> Run:
        return self.of(pattern, "megatron", 0, {})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("mixed"), random.SystemRandom().randrange(2**31))


def _cases() -> Iterator[Any]:
    for pattern, case in product(COUNTS, CASES):
        marks = () if (pattern, *case) in QUICK else pytest.mark.slow
        yield pytest.param(pattern, *case, id=f"{pattern}, {case}", marks=marks)


@pytest.mark.parametrize(("pattern", "schedule", "unit_layers", "parallel"), [*_cases()])
def test_mixed_layers_train_as_on_one_rank(
    runs: Runs, pattern: str, schedule: str, unit_layers: int, parallel: dict[str, int]
) -> None:
    run, one = runs.of(pattern, schedule, unit_layers, parallel), runs.one(pattern)
    assert len(run.losses) == STEPS
    assert run.losses == pytest.approx(one.losses, rel=1e-9, abs=0)
    assert run.gradient_norms == pytest.approx(one.gradient_norms, rel=1e-9, abs=0)
    text = (run.directory / "schedule.txt").read_text()
    if schedule not in ("megatron", "intra_batch"):
        _assert_paired(parse(text).programs)
    assert f"\nunit {unit_layers}\n" in text


def _assert_paired(programs: Iterable[Sides]) -> None:
    """Layers of both kinds run beside others."""
    units = {side.unit for sides in programs if len(sides) > 1 for side in sides}
    assert all(any(kind in unit for unit in units) for kind in ("layer", "parallel"))


@pytest.mark.parametrize("degrees", [{"pp": 2}, pytest.param({"tp": 2}, marks=pytest.mark.slow)])
def test_operators_of_all_kinds_are_measured(tmp_path: Path, degrees: dict[str, int]) -> None:
    """Also where one stage holds one kind and its neighbour another: they send each other messages."""
    sizes = {**model("layer parallel"), "pattern": "2*layer 2*parallel"}
    config = small_config(tmp_path, model=sizes, parallel=degrees)
    shape = config.check(BYTES_VOCABULARY)
    plan = RunPlan(config=config, shape=shape, schedule=write(build_schedule(config, shape)), data="")
    parts = model_graphs(config, shape)
    profile = measure(plan, KeptRanks(config), parts, rounds=2)
    graphs = (graph for part in parts.values() for graph in (part.forward, part.backward))
    operators = {op.key for graph in graphs for op in graph.operators}
    assert operators <= set(profile.solo_ns)
    assert {"layer/qkv", "parallel/qkv"} <= operators
    taken = plan_run(config.with_schedule("dhelix"), shape, profile).taken
    assert taken.step_ns > 0
    _assert_paired(taken.code.schedule.programs)
