"""A dozen runs on real ranks: gloo's streams, the reader, validation, reports; losses of plain PyTorch, also
with dropout, label smoothing and z-loss.

Every pair of choices is in `tests.cuda.test_combinations`, on a model of the CUDA machine. Inputs are fresh
in every session: the seed stands in the tests' names, and BRAID_TEST_SEED sets it.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from braid.actors.controller.controller import Controller, RunOptions
from braid.actors.controller.planning import build_schedule, setting_of
from braid.actors.controller.ranks.processes import ProcessLauncher, ProcessPlace
from braid.actors.stage.rank.messages import RunPlan
from braid.jobs.bench.plain_torch import PlainTrainer
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.partition import parse_partition
from braid.scheduling.plan.decide import simulate_setting
from braid.scheduling.plan.layouts import plan_of
from braid.scheduling.schedule.text import write
from tests.end_to_end.plain_regularisation import REGULARISED, RegularisedTrainer
from tests.end_to_end.runs import (
    BYTES_VOCABULARY,
    PlainRun,
    Run,
    planned,
    prepare_text,
    run_layout,
    run_plain,
    run_plan,
    small_config,
    trained,
)
from tests.scheduling.plans import cluster
from tests.spans import read_folder, spans_of

pytestmark = pytest.mark.slow

SEED = int(os.environ["BRAID_TEST_SEED"])
STEPS = 6
TOLERANCE = {"fp64": 1e-9, "fp32": 5e-5}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"family": "llama"},
    "tied gpt": {"family": "gpt", "kv_heads": 4, "tied_head": True},
    "qwen": {"family": "llama", "head_norm": True, "qkv_bias": True, "head_dim": 24},
    "moe": {"family": "moe", "experts": 4, "top_k": 2, "ffn": 96, "shared_experts": 1, "balance_loss": 0.02},
}
CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("llama", "braid:w", {"tp": 2}, {"dtype": "fp32"}),
    ("tied gpt", "megatron:folded", {"pp": 2}, {}),
    ("qwen", "braid:together_2", {"dp": 2, "zero": 1}, {}),
    ("llama", "wavelet", {"cp": 2, "context": "ring"}, {}),
    ("llama", "oases", {"tp": 2, "tensor_degrees": "2 1 1 2"}, {}),
    ("qwen", "intra_batch", {"tp": 2, "dp": 2}, {}),
    ("tied gpt", "ddp", {"dp": 2, "zero": 3}, REGULARISED),
    ("moe", "megatron", {"dp": 2, "ep": 2}, {**REGULARISED, "recompute": "selective"}),
    ("llama", "dhelix", {"tp": 2, "pp": 2}, {**REGULARISED, "recompute": "full"}),
]
"""Model, schedule, layout, and what else of the section ``train``."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_text(tmp_path_factory.mktemp("text"), SEED)


def content(schedule: str, parallel: Mapping[str, Any], **more: Mapping[str, Any]) -> dict[str, Any]:
    schedule, _, pipeline = schedule.partition(":")
    train = {"dtype": "fp64", "seed": SEED, "steps": STEPS, "validation_samples": 7, **more.get("train", {})}
    overlap = {"schedule": schedule, "pipeline": pipeline or None}
    cpus = {"cpus_per_rank": 0.1}
    return {**more, "train": train, "parallel": parallel, "overlap": overlap, "cluster": cpus}


def both(folder: Path, data: Path, sections: Mapping[str, Mapping[str, Any]]) -> tuple[Run, PlainRun]:
    overlap = planned(folder / "plans", sections)
    run = run_layout(folder / "run", data, **{**sections, "overlap": overlap})
    return run, run_plain(run.config, data, RegularisedTrainer if run.config.train.dropout else PlainTrainer)


def assert_alike(run: Run, plain: PlainRun, tolerance: float) -> None:
    """Losses, norms, learning rates, and what the report says of validation."""
    assert len(run.losses) == len(plain.losses)
    assert run.losses == pytest.approx(plain.losses, rel=tolerance, abs=0)
    assert run.gradient_norms == pytest.approx(plain.gradient_norms, rel=5 * tolerance, abs=0)
    assert [record.lr for record in run.records] == pytest.approx(plain.lr, rel=1e-12)
    assert run.report["validation"] == pytest.approx(plain.validation, rel=tolerance)


@pytest.mark.parametrize(
    ("model", "schedule", "parallel", "train"), CASES, ids=[f"{m}, {s}, {p}" for m, s, p, _ in CASES]
)
def test_ranks_train_as_plain_pytorch_does(
    tmp_path: Path, data: Path, model: str, schedule: str, parallel: dict[str, Any], train: dict[str, Any]
) -> None:
    run, plain = both(tmp_path, data, content(schedule, parallel, model=MODELS[model], train=train))
    assert_alike(run, plain, TOLERANCE[run.config.train.dtype])
    assert max(plain.gradient_norms) > run.config.train.clip_norm, "nothing was clipped: too easy a test"
    if run.config.train.dtype == "fp64":  # in fp32, Adam blows up the rounding of gradients that are zero
        ours = {name: tensor.detach() for name, tensor in plain.model.named_parameters()}
        torch.testing.assert_close(run.parameters(), ours, rtol=1e-8, atol=1e-10)


def test_a_run_goes_on_in_another_layout_with_the_same_dropout(tmp_path: Path, data: Path) -> None:
    begun = run_layout(tmp_path, data, 3, **content("megatron", {"tp": 2}, train=REGULARISED))
    moved = begun.config.changed(parallel={"tp": 1, "dp": 2, "zero": 1})
    ended = trained(run_plan(moved, data), resume=True)
    plain = run_plain(begun.config, data, RegularisedTrainer)
    assert begun.losses + ended.losses == pytest.approx(plain.losses, rel=1e-9, abs=0)


def test_partitions_run_inside_hosts_and_between_them(tmp_path: Path, data: Path) -> None:
    """Over four ranks of two hosts, from a plan; stages are on streams of their own."""
    partitions = (
        "tp/all_gather mesh 2x2 order 1,0,1 delivered of tokens with 2",
        "tp/reduce_scatter mesh 2x2 order 1,0 pieces 3 of tokens with 1",
    )
    sections = content("braid:w", {"tp": 4}, model={"kv_heads": 4})
    config, spec = small_config(tmp_path / "plans", **sections), cluster(nodes=2, gpus=2)
    setting = replace(
        setting_of(config, config.model.shape(BYTES_VOCABULARY)),
        partitions=tuple(map(parse_partition, partitions)),
    )
    file = tmp_path / "plan.yaml"
    file.write_text(plan_of(simulate_setting(setting, spec), spec).to_yaml(), encoding="utf-8")
    overlap = {**sections["overlap"], "plan": str(file)}
    config = small_config(tmp_path / "runs", **{**sections, "overlap": overlap})
    shape = config.check(BYTES_VOCABULARY)
    text = write(build_schedule(config, shape))
    assert all(f"\npartition {one}\n" in text for one in partitions)
    launcher = ProcessLauncher(config, [ProcessPlace(machine=host) for host in "aabb"])
    plan = RunPlan(config=config, shape=shape, schedule=text, data=str(data))
    events = tuple(Controller(plan, launcher, RunOptions()).run())
    run = Run(config=config, shape=shape, directory=config.run_directory, events=events)
    assert_alike(run, run_plain(config, data), TOLERANCE["fp64"])
    traces = read_folder(config.run_directory)
    streams = {span.stream for span in spans_of(traces.step(traces.newest))}
    assert {Stream.INTRA, Stream.INTER} <= streams


# -- experts -------------------------------------------------------------------------------------------------

MIXTURES: Mapping[str, Mapping[str, Any]] = {
    "losses": {"balance_loss": 0.05, "z_loss": 0.01, "shared_experts": 1, "expert_ffn": 48},
    "both": {"capacity_factor": 0.9, "balance_loss": 0.02, "z_loss": 0.01},
    "mixed": {"pattern": "dense layer", "softmax_after": True, "balance_rate": 0.02},
}


@pytest.mark.parametrize(
    ("mixture", "schedule", "parallel"),
    [
        ("losses", "expert_overlap", {"dp": 2, "ep": 2}),
        ("both", "megatron", {"tp": 2}),
        ("mixed", "megatron:folded", {"dp": 2, "ep": 2, "pp": 2}),
    ],
)
def test_routing_is_counted_as_plain_pytorch_does(
    tmp_path: Path, data: Path, mixture: str, schedule: str, parallel: dict[str, int]
) -> None:
    """Once: what is recomputed and validated is not counted again."""
    model = {"family": "moe", "experts": 8, "top_k": 2, "ffn": 96, **MIXTURES[mixture]}
    # Whole micro-batches: with a capacity, it matters beside which tokens a token is validated.
    train = {"recompute": "full", "validate_every": 1, "validation_samples": 8}
    run, plain = both(tmp_path, data, content(schedule, parallel, model=model, train=train))
    assert_alike(run, plain, TOLERANCE["fp64"])
    assert all(record.validation_bits_per_byte is not None for record in run.records)
    _check_routing(run, plain)


def _check_routing(run: Run, expected: PlainRun) -> None:
    """Visits, dropped ones and the auxiliary losses as plain PyTorch counts them.

    What follows from these: `tests.actors.test_routing_numbers`.
    """
    shape, dropped = run.shape, 0
    for record, counted in zip(run.records, expected.counted, strict=True):
        found = record.experts
        assert found is not None
        assert found.layers == tuple(n for n, kind in enumerate(shape.kinds) if kind != "dense")
        assert [list(visits) for visits in found.visits] == [one.visits.tolist() for one in counted]
        if shape.capacity_factor:
            lost = sum(one.dropped for one in counted)
            visits = record.tokens * shape.top_k * len(counted)
            assert found.dropped == pytest.approx(lost / visits, abs=1e-5)
            dropped += lost
        for name, factor in (("balance", shape.balance_loss), ("z", shape.z_loss)):
            wanted = sum(getattr(one, name) for one in counted) / record.tokens
            loss = getattr(found, f"{name}_loss")
            assert loss == (pytest.approx(wanted, rel=1e-9) if factor else None)
    assert bool(dropped) == bool(shape.capacity_factor), "nothing was dropped: too easy"
