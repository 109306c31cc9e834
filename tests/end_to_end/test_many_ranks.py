"""Beyond four ranks and two stages, and layers that do not divide evenly: losses of plain PyTorch.

A few steps of tiny models, as all ranks share this machine's cores; orders come from plans with modelled
costs.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from braid.scheduling.spec import CONTEXT_MODES
from tests.end_to_end.command import overlap_of
from tests.end_to_end.runs import (
    PlainRun,
    planned,
    prepare_text,
    run_layout,
    run_plain,
    small_config,
)

STEPS = 5
STEPS_OF_REPLICAS = 20
CASES = [
    (4, "megatron", {"tp": 4}),
    (4, "braid:w", {"tp": 4}),
    *((6, name, {"pp": 3}) for name in ("dhelix", "braid:w", "zbv", "dualpipev")),
    *((8, name, {"pp": 4}) for name in ("dhelix", "braid:w", "zbv", "dualpipev")),
    (4, "megatron", {"tp": 2, "pp": 2, "dp": 2}),
    (4, "braid:w", {"tp": 2, "pp": 2, "dp": 2}),
    (4, "ddp", {"dp": 4}),
    (5, "ddp", {"tp": 2, "dp": 2}),
    (4, "ddp", {"tp": 2, "pp": 2, "dp": 2}),
    (5, "braid:together_4", {"dp": 2}),
    (4, "braid:together_2", {"tp": 2, "dp": 2}),
    (4, "braid:v", {"pp": 2, "dp": 2}),
    (4, "megatron", {"dp": 2, "zero": 1}),
    (4, "ddp", {"dp": 4, "zero": 1}),
    (5, "braid:together_4", {"dp": 2, "zero": 1}),
    (4, "braid:w", {"tp": 2, "dp": 2, "zero": 1}),
    (5, "megatron:folded", {"pp": 2, "dp": 2, "zero": 1}),
    (4, "braid:w", {"tp": 2, "pp": 2, "dp": 2, "zero": 1}),
    (4, "megatron", {"dp": 2, "zero": 2}),
    (4, "ddp", {"dp": 4, "zero": 2}),
    (5, "braid:together_4", {"dp": 2, "zero": 2}),
    (4, "braid:w", {"tp": 2, "pp": 2, "dp": 2, "zero": 2}),
    (4, "megatron", {"dp": 2, "zero": 3}),
    (4, "ddp", {"dp": 4, "zero": 3}),
    (5, "braid:together_4", {"dp": 2, "zero": 3}),
    (4, "braid:w", {"tp": 2, "dp": 2, "zero": 3}),
    (5, "zbv", {"pp": 2, "dp": 2, "zero": 3}),
    (4, "megatron", {"dp": 4, "zero": 1, "shards": 2}),
    (4, "braid:together_4", {"dp": 4, "zero": 1, "shards": 2}),
    (4, "ddp", {"dp": 4, "zero": 2, "shards": 2}),
    (4, "ddp", {"dp": 4, "zero": 3, "shards": 2}),
    (5, "braid:together_4", {"dp": 4, "zero": 3, "shards": 2}),
    (4, "braid:w", {"tp": 2, "dp": 4, "zero": 3, "shards": 2}),
    (4, "braid:w", {"tp": 2, "pp": 2, "dp": 2, "zero": 3}),
    (3, "megatron", {"pp": 2}),
    (5, "braid:w", {"pp": 2}),
    (5, "dhelix", {"tp": 2, "pp": 2}),
    (7, "braid:w", {"pp": 3}),
    (7, "interleaved", {"pp": 2}),
    (9, "zbv", {"pp": 2}),
    (5, "dualpipev", {"pp": 2}),
]
"""Layers, schedule, layout."""
OF_CONTEXT: list[tuple[int, str, dict[str, Any]]] = [
    (5, "braid:w", {"cp": 2, "pp": 2}),
    (4, "zbv", {"cp": 2, "pp": 2}),
    (4, "ddp", {"cp": 4, "dp": 2}),
    (4, "braid:w", {"cp": 2, "dp": 4, "zero": 2, "shards": 2}),
]
"""Beyond what `tests.end_to_end.test_context` has; with keys and values gathered, and passed around."""
OF_GPT: list[tuple[int, str, dict[str, int]]] = [
    (4, "ddp", {"dp": 4}),
    (4, "braid:together_4", {"dp": 4, "zero": 3}),
    (4, "braid:w", {"tp": 2, "dp": 2, "zero": 2}),
    (4, "megatron:folded", {"pp": 2, "dp": 2, "zero": 3}),
    (4, "braid:w", {"tp": 2, "pp": 2, "dp": 2, "zero": 1}),
    (4, "ddp", {"dp": 4, "zero": 3, "shards": 2}),
]
QWEN: Mapping[str, Any] = {
    "family": "llama",
    "qkv_bias": True,
    "head_norm": True,
    "head_dim": 24,
    "rotary_scaling": {"factor": 4.0, "original_sequence": 64},
}
OF_QWEN: list[tuple[int, str, dict[str, Any]]] = [
    (4, "braid:w", {"cp": 2, "tp": 2, "context": "ring"}),
    (4, "zbv", {"cp": 2, "pp": 2, "context": "all_gather"}),
    (4, "braid:together_4", {"tp": 2, "dp": 2, "zero": 3}),
]
ALL_CASES = [
    *((*case, "llama") for case in CASES),
    *((*case, "gpt") for case in OF_GPT),
    *((*case, "qwen") for case in OF_QWEN),
    *(
        (layers, schedule, {**parallel, "context": context}, family)
        for number, (layers, schedule, parallel) in enumerate(OF_CONTEXT)
        for place, context in enumerate(CONTEXT_MODES)
        for family in ("llama", *(("gpt",) if (number + place) % 2 else ()))
    ),
]
SEED = 5


class Plain:
    """The runs of plain PyTorch, by layers."""

    def __init__(self, path: Path) -> None:
        self.path, self.data = path, prepare_text(path, SEED)
        self._runs: dict[tuple[Any, ...], PlainRun] = {}

    def of(self, overrides: Mapping[str, Mapping[str, Any]]) -> PlainRun:
        """Done once."""
        key = json.dumps([overrides["model"], overrides["train"]])
        if key not in self._runs:
            config = small_config(self.path / "plain", **{**overrides, "parallel": {}, "overlap": {}})
            self._runs[key] = run_plain(config, self.data)
        return self._runs[key]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    return Plain(tmp_path_factory.mktemp("many"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "schedule", "parallel", "family"),
    ALL_CASES,
    ids=[f"{f}, {n} layers, {s}, {' x '.join(f'{a} {d}' for a, d in p.items())}" for n, s, p, f in ALL_CASES],
)
def test_losses_are_those_of_plain_pytorch(
    plain: Plain, layers: int, schedule: str, parallel: Mapping[str, Any], family: str
) -> None:
    steps = (
        STEPS if "dp" not in parallel else 6 if {"tp", "pp", "cp"} & parallel.keys() else STEPS_OF_REPLICAS
    )
    overrides: dict[str, Mapping[str, Any]] = {
        "model": {
            **(QWEN if family == "qwen" else {"family": family}),
            "layers": layers,
            "kv_heads": 4 if "tp" in parallel or family == "gpt" else 2,
        },
        "train": {"dtype": "fp64", "seed": SEED, "steps": steps, "global_batch": 16},
        "cluster": {"cpus_per_rank": 0.1},
    }
    expected = plain.of(overrides)
    overrides |= {"parallel": parallel, "overlap": overlap_of(schedule)}
    overrides["overlap"] = planned(plain.path / "plans", overrides)
    run = run_layout(plain.path / "runs", plain.data, **overrides)
    assert len(run.losses) == steps
    assert run.losses == pytest.approx(expected.losses, rel=1e-9, abs=0)
    assert run.gradient_norms == pytest.approx(expected.gradient_norms, rel=1e-9, abs=0)
