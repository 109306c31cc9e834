"""Tokens that attend to those of their own document only: losses of plain PyTorch with a mask.

Documents are short, so that samples have several of all lengths, of one token too, and some that go over the
borders of samples and of the pieces that ranks have.
"""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from braid.jobs.data.corpus import Corpus
from braid.jobs.data.prepare import prepare
from tests.end_to_end.command import overlap_of
from tests.end_to_end.runs import PlainRun, run_layout, run_plain, small_config

SEED, STEPS = 7, 4
CASES: list[tuple[str, dict[str, Any]]] = [  # more of cp: `tests.end_to_end.test_context`
    ("megatron", {}),
    ("megatron", {"tp": 2}),
    ("zbv", {"pp": 2}),
    ("megatron", {"cp": 2}),
    ("wavelet", {"cp": 4, "context": "ring"}),
    ("megatron:folded", {"pp": 2, "cp": 2}),
    ("megatron", {"tp": 2, "tensor_degrees": "2 1 1 2"}),
    ("ddp", {"dp": 2, "tp": 2, "zero": 1, "tensor_degrees": "1 2 1 2"}),
    ("wavelet", {"tp": 2, "cp": 2, "context": "ring", "tensor_degrees": "1 2 1 2"}),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, generator = tmp_path_factory.mktemp("documents"), random.Random(SEED)
    lengths = [generator.choice((0, 1, 3, 8, 15, 31, 90)) for _ in range(3000)]
    texts = ("".join(generator.choices("abcde \n", k=length)) for length in lengths)
    file = folder / "short.jsonl"
    file.write_text("".join(json.dumps({"text": f"x{text}"}) + "\n" for text in texts), encoding="utf-8")
    corpus = Corpus(files=[str(file)], validation_fraction=0.1)
    return prepare(corpus, output=folder / "data", executor=map).output


@pytest.fixture(scope="module")
def plain(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], PlainRun]:
    folder = tmp_path_factory.mktemp("plain")
    return {
        (family, restart): run_plain(small_config(folder, **overrides(family, restart)), data)
        for family in ("llama", "gpt")
        for restart in (False, True)
    }


def overrides(family: str, restart: bool) -> dict[str, Mapping[str, Any]]:
    return {
        "model": {"family": family, "kv_heads": 4 if family == "gpt" else 2},
        "data": {"document_mask": True, "restart_positions": restart},
        "train": {"dtype": "fp64", "seed": SEED, "steps": STEPS, "global_batch": 16, "validation_samples": 7},
        "cluster": {"cpus_per_rank": 0.1},
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "parallel", "family", "restart"),
    [
        pytest.param(
            schedule,
            parallel,
            family,
            (number + place) % 2 > 0,
            id=f"{family} {schedule} {' x '.join(f'{axis} {degree}' for axis, degree in parallel.items())}",
        )
        for number, (schedule, parallel) in enumerate(CASES)
        for place, family in enumerate(("llama", "gpt"))
    ],
)
def test_losses_are_those_of_plain_pytorch_with_a_mask(
    tmp_path: Path,
    data: Path,
    plain: dict[tuple[str, bool], PlainRun],
    schedule: str,
    parallel: Mapping[str, Any],
    family: str,
    restart: bool,
) -> None:
    expected = plain[family, restart]
    run = run_layout(
        tmp_path,
        data,
        **{**overrides(family, restart), "parallel": parallel, "overlap": overlap_of(schedule)},
    )
    assert run.losses == pytest.approx(expected.losses, rel=1e-9, abs=0)
    assert run.gradient_norms == pytest.approx(expected.gradient_norms, rel=1e-9, abs=0)
    assert run.report["validation"] == pytest.approx(expected.validation, rel=1e-9)
