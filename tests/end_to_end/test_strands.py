"""Overlap changes no result: two strands (paired and split blocks), and one that overlaps with itself (in
pieces: gathers and GEMMs), train exactly as one strand without overlap does, and as plain PyTorch.

Pairings come from plans with modelled costs of a made-up cluster: whatever they are, results do not change.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from braid.jobs.planning.work import Request, fixed_setting
from braid.scheduling.cluster import ClusterSpec
from braid.scheduling.plan import read_plan
from braid.scheduling.planner.cluster import plan_of
from braid.scheduling.planner.decide import evaluate, modelled, replay
from braid.scheduling.planner.orders import decisions
from tests.end_to_end.command import overlap_of
from tests.end_to_end.runs import BYTES_VOCABULARY, Run, prepare_text, run_layout, run_plain, small_config
from tests.scheduling.cases import LOWERED, kind_of
from tests.scheduling.plans import cluster

pytestmark = pytest.mark.slow

STEPS = 5
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"family": "llama"},
    "gpt": {"family": "gpt", "kv_heads": 4},
    "llama of 8 layers": {"family": "llama", "layers": 8},
    "gpt, one table": {"family": "gpt", "kv_heads": 4, "tied_head": True},
    "llama, norms of heads": {"family": "llama", "head_norm": True, "qkv_bias": True},
}
ON_ONE_STAGE = ("megatron", "megatron:folded", "intra_batch", "braid:twins", "braid:together_4")
TWO_STRANDS = [name for name in LOWERED if name not in ON_ONE_STAGE]
"""Of two stages; the others are like another one there."""
CASES = [
    *(("llama", name, {"tp": 2}, "fp64") for name in ("wavelet", "dhelix", "braid", "braid:w")),
    *(("llama", name, {"pp": 2}, "fp64") for name in TWO_STRANDS),
    ("llama", "braid:w", {"tp": 2, "pp": 2}, "fp64"),
    ("llama", "braid:v", {"tp": 2, "pp": 2}, "fp64"),
    ("gpt", "braid:eager_w", {"tp": 2, "pp": 2}, "fp64"),
    ("llama", "braid:w", {"dp": 2, "tp": 2}, "fp64"),
    ("gpt", "braid:w", {"tp": 2}, "fp64"),
    ("llama", "braid:twins", {"tp": 2}, "fp64"),
    ("llama", "braid:twins", {"dp": 2, "tp": 2}, "fp64"),
    ("gpt", "braid:twins", {"tp": 2}, "fp64"),
    ("llama", "braid:twins", {"tp": 2}, "fp32"),
    ("gpt", "units twins", {"tp": 2}, "fp64"),
    ("gpt", "dhelix", {"tp": 2, "pp": 2}, "fp64"),
    ("llama", "braid:w", {"tp": 2}, "fp32"),
    *(
        ("llama", "units", parallel, "fp64")
        for parallel in ({"tp": 2}, {"tp": 2, "pp": 2}, {"dp": 2, "tp": 2})
    ),
    ("gpt", "units", {"tp": 2}, "fp64"),
    *(("llama", "far", parallel, "fp64") for parallel in ({"tp": 2}, {"tp": 2, "pp": 2}, {"dp": 2, "tp": 2})),
    ("gpt", "far", {"tp": 2}, "fp64"),
    ("llama", "far", {"tp": 2}, "fp32"),
    ("gpt", "far twins", {"tp": 2}, "fp64"),
    *(
        (model, "intra_batch", parallel, "fp64")
        for model in ("llama", "gpt")
        for parallel in ({"tp": 2}, {"tp": 2, "pp": 2})
    ),
    ("gpt", "intra_batch", {"tp": 4}, "fp64"),
    ("llama", "intra_batch", {"tp": 2}, "fp32"),
    ("llama", "planned pieces", {"tp": 2}, "fp64"),
    *(("llama, norms of heads", name, {"tp": 2}, "fp64") for name in ("braid:w", "intra_batch")),
]
"""``intra_batch`` is exact to the bit as long as a row of a GEMM comes out the same beside fewer other rows:
so it is in single and double precision on the CPU that this was tried on."""
UNIT = "embedding+4*layer+head"
ENDS = (f"F:{UNIT}|B:{UNIT}|L:{UNIT}", f"B:{UNIT}|L:{UNIT}")
"""Programs that take up what a backward pass has left."""
UNIT_LAYERS = 4
"""Most layers of a unit in the schedules that these tests call units and far."""


class Runs:
    """Runs of this module, each done once."""

    def __init__(self, path: Path, seed: int) -> None:
        self._path, self._seed = path, seed
        self._runs: dict[tuple[object, ...], Run] = {}
        self._plain: dict[tuple[str, str], list[float]] = {}

    @cached_property
    def data(self) -> Path:
        """The corpus of all runs."""
        return prepare_text(self._path, self._seed)

    def of(self, model: str, schedule: str, parallel: Mapping[str, int], dtype: str) -> Run:
        """Through controller and processes; schedules that need a pairing get a plan.

        ``planned pieces``: ``intra_batch`` with a plan. ``far``: runs whose backward passes leave all that
        they may to the next block.
        """
        key = (model, schedule, tuple(parallel.items()), dtype)
        far = schedule.startswith("far")
        unit_layers = UNIT_LAYERS if far or schedule.startswith("units") else 0
        plans = schedule == "planned pieces"
        aliases = {"units": "braid:w", "units twins": "braid:twins", "planned pieces": "intra_batch"}
        aliases |= {"far": "braid:w", "far twins": "braid:twins"}
        schedule = aliases.get(schedule, schedule)
        if key not in self._runs:
            overrides: dict[str, Mapping[str, Any]] = {
                "model": MODELS[model],
                "train": {"dtype": dtype, "seed": self._seed, "steps": STEPS},
                "parallel": parallel,
                "overlap": overlap_of(schedule),
            }
            if plans or kind_of(schedule).decided:
                plan = self._plan(overrides, unit_layers, far=far)
                overrides["overlap"] = overlap_of(schedule, plan=str(plan))
            self._runs[key] = run_layout(self._path / "runs", self.data, **overrides)
        return self._runs[key]

    def plain(self, model: str, dtype: str, run: Run) -> list[float]:
        """Losses of the plain loop for what ``run`` trains."""
        if (model, dtype) not in self._plain:
            self._plain[model, dtype] = run_plain(run.config, self.data).losses
        return self._plain[model, dtype]

    def _plan(self, overrides: Mapping[str, Mapping[str, Any]], unit_layers: int, *, far: bool) -> Path:
        """A plan for links on which communication is worth hiding, and of runs also worth putting off for."""
        config = small_config(self._path / "plans", **overrides)
        ranks = config.layout().ranks
        spec: ClusterSpec = cluster(gpus=ranks, intra=4e8 if unit_layers else 2e8)
        job = Request(config, config.model.shape(BYTES_VOCABULARY), spec)
        setting = replace(fixed_setting(job), unit_layers=unit_layers)
        outcome = evaluate(setting, spec)
        if far:
            choices, _ = decisions(modelled(spec)(setting))[-1]
            outcome = replay(outcome.setting, choices, spec)
        plan = plan_of(outcome, spec)
        file = self._path / f"plan-{len(self._runs)}.yaml"
        file.write_text(plan.to_yaml(), encoding="utf-8")
        return file


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("strands"), random.SystemRandom().randrange(2**31))


def _cases() -> list[Any]:
    quick = [("braid:w", {"tp": 2}, "fp64"), ("intra_batch", {"tp": 2}, "fp64")]
    return [
        pytest.param(*case, id=f"{case[0]}, {case[1]}, {case[2]}, {case[3]}")
        if case[0] == "llama" and case[1:] in quick
        else pytest.param(*case, id=f"{case[0]}, {case[1]}, {case[2]}, {case[3]}", marks=pytest.mark.slow)
        for case in CASES
    ]


@pytest.mark.parametrize(("model", "schedule", "parallel", "dtype"), _cases())
def test_overlap_changes_no_result(
    runs: Runs, model: str, schedule: str, parallel: dict[str, int], dtype: str
) -> None:
    run = runs.of(model, schedule, parallel, dtype)
    one = runs.of(model, "megatron", parallel, dtype)
    assert len(run.losses) == STEPS
    assert run.losses == one.losses
    assert run.gradient_norms == one.gradient_norms
    ours, theirs = run.parameters(), one.parameters()
    assert not [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]
    plain = runs.plain(model, dtype, run)
    tolerance = {"fp64": 1e-9, "fp32": 2e-5}[dtype]
    assert run.losses == pytest.approx(plain, rel=tolerance, abs=0)


@pytest.mark.parametrize("schedule", ["megatron", "megatron:folded", "interleaved", "braid:w", "zbv"])
def test_a_table_that_is_both_ends_trains_as_plain_torch(runs: Runs, schedule: str) -> None:
    """Embedding and head add their gradients to one table, in an order that depends on the schedule."""
    run = runs.of("gpt, one table", schedule, {"pp": 2}, "fp64")
    assert run.losses == pytest.approx(runs.plain("gpt, one table", "fp64", run), rel=1e-9, abs=0)


def test_the_plans_of_these_tests_put_something_off(runs: Runs) -> None:
    """Late weight gradients are part of what is tested."""
    text = (runs.of("llama", "braid:w", {"tp": 2}, "fp64").directory / "schedule.txt").read_text()
    assert "\nprogram F:layer|B:layer|L:layer\n" in text
    text = (runs.of("llama", "units", {"tp": 2}, "fp64").directory / "schedule.txt").read_text()
    assert f"|L:{UNIT}\n" in text
    assert "  compute 2:" in text
    assert "unit 4" in text
    assert re.search(r"\[F2\.0\|B1\.0b?\|L0\.0", text), "blocks take up what the block before has left"
    text = (runs.of("llama", "far", {"tp": 2}, "fp64").directory / "schedule.txt").read_text()
    late = [f"start {turn}:1.layer/attention_gather.grad on intra" for turn in (1, 2)]
    of_both, of_one = (text.partition(f"program {sides}\n")[2].partition("\nprogram")[0] for sides in ENDS)
    assert late[1] in of_both, "collectives are put off as well"
    assert late[0] not in of_both
    assert late[0] in of_one, "and taken up by the last backward pass"


def test_pieces_are_in_the_schedules_of_these_tests(runs: Runs) -> None:
    """Two without a plan, as many as the plan says with one."""
    text = (runs.of("llama", "intra_batch", {"tp": 2}, "fp64").directory / "schedule.txt").read_text()
    assert "\npartition tp/all_gather pieces 2 of tokens with 1\n" in text
    begin = text.index("start attention_gather.2of2 on intra")
    assert begin < text.index("compute qkv.1of2") < text.index("wait attention_gather.2of2")
    run = runs.of("llama", "planned pieces", {"tp": 2}, "fp64")
    plan = run.config.overlap.plan
    assert plan is not None
    (partition,) = read_plan(plan).setting.partitions
    assert partition.pieces > 1
    assert f"\npartition {partition}\n" in (run.directory / "schedule.txt").read_text()


def test_a_plan_for_something_else_is_refused(runs: Runs) -> None:
    run = runs.of("llama", "braid:w", {"tp": 2}, "fp64")
    plan = str(run.config.overlap.plan)
    train = {"dtype": "fp64", "steps": 1}
    for overlap, parallel, message in (
        (
            {"schedule": "dhelix", "plan": plan},
            {"tp": 2},
            "is for overlap.schedule=braid, the conf.* dhelix",
        ),
        (
            overlap_of("braid:w", plan=plan),
            {"pp": 2},
            "is for parallel=tp 2, the configuration has pp 2",
        ),
        (overlap_of("braid:w"), {"tp": 2}, "needs a pairing: measure the run"),
    ):
        with pytest.raises(ValueError, match=message):
            run_layout(
                runs.data.parent / "refused", runs.data, overlap=overlap, parallel=parallel, train=train
            )
