"""Sequences cut over cp, with every other axis: losses and gradients of plain PyTorch.

Keys and values gathered or passed around, ranks of cp 2 and 4, one and two strands, with documents or
without them, grouped heads, both families; all in float64, a fifth of the cases in single precision too.
"""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from braid.jobs.data.corpus import Corpus
from braid.jobs.data.prepare import prepare
from braid.scheduling.spec import CONTEXT_MODES
from tests.end_to_end.command import overlap_of
from tests.end_to_end.runs import PlainRun, planned, run_layout, run_plain, small_config

SEED, STEPS = 11, 4
TOLERANCE = {"fp64": 1e-9, "fp32": 2e-5}
BESIDE: Mapping[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "alone": ({}, ("megatron", "wavelet", "dhelix", "braid:w")),
    "tp 2": ({"tp": 2}, ("braid:w", "dhelix", "megatron", "wavelet")),
    "pp 2 folded": ({"pp": 2}, ("megatron:folded", "dhelix", "wavelet", "braid:w")),
    "dp 2, ZeRO 3": ({"dp": 2, "zero": 3}, ("ddp", "braid:together_2", "wavelet", "braid:w")),
}
"""What cp is used with, and schedules, of which each case takes one."""
CASES = [
    (family, mask, context, cp, beside)
    for family in ("llama", "gpt")
    for mask in (False, True)
    for context in CONTEXT_MODES
    for cp in (2, 4)
    for beside in BESIDE
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short documents: most samples have several, some go over the borders of what ranks have."""
    folder, generator = tmp_path_factory.mktemp("context"), random.Random(SEED)
    lengths = [generator.choice((1, 5, 14, 40, 120)) for _ in range(2000)]
    texts = ("".join(generator.choices("abcdef \n", k=length)) for length in lengths)
    file = folder / "short.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    corpus = Corpus(files=[str(file)], validation_fraction=0.1)
    return prepare(corpus, output=folder / "data", executor=map).output


def overrides(family: str, mask: bool, dtype: str) -> dict[str, Mapping[str, Any]]:
    return {
        "model": {"family": family, "kv_heads": 4 if family == "gpt" else 2},
        "data": {"document_mask": mask, "restart_positions": mask and family == "llama"},
        "train": {"dtype": dtype, "seed": SEED, "steps": STEPS, "global_batch": 8},
        "cluster": {"cpus_per_rank": 0.1},
    }


_PLAIN: dict[tuple[str, bool, str], PlainRun] = {}


def plain(family: str, mask: bool, dtype: str, folder: Path, data: Path) -> PlainRun:
    """Made once."""
    key = family, mask, dtype
    if key not in _PLAIN:
        _PLAIN[key] = run_plain(small_config(folder, **overrides(*key)), data)
    return _PLAIN[key]


def id_of(case: tuple[str, bool, str, int, str]) -> str:
    family, mask, context, cp, beside = case
    return f"{family} {'documents ' * mask}{context} cp {cp} {beside}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mask", "context", "cp", "beside", "schedule", "dtype"),
    [
        pytest.param(*case, BESIDE[case[-1]][1][(place // 4 + place) % 4], dtype, id=f"{id_of(case)} {dtype}")
        for place, case in enumerate(CASES)
        for dtype in (("fp64", "fp32") if place % 5 == 0 else ("fp64",))
    ],
)
def test_losses_are_those_of_plain_pytorch(
    tmp_path: Path,
    data: Path,
    family: str,
    mask: bool,
    context: str,
    cp: int,
    beside: str,
    schedule: str,
    dtype: str,
) -> None:
    expected = plain(family, mask, dtype, tmp_path / "plain", data)
    sections = {
        **overrides(family, mask, dtype),
        "parallel": {"cp": cp, "context": context, **BESIDE[beside][0]},
        "overlap": overlap_of(schedule),
    }
    sections["overlap"] = planned(tmp_path / "plans", sections)
    run = run_layout(tmp_path / "run", data, **sections)
    assert len(run.losses) == STEPS
    assert run.losses == pytest.approx(expected.losses, rel=TOLERANCE[dtype], abs=0)
    assert run.gradient_norms == pytest.approx(expected.gradient_norms, rel=TOLERANCE[dtype], abs=0)
