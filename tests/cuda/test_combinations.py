"""Every pair of choices that a user can make, in about a hundred runs: a covering array.

A case is a run of two steps on the model of the CUDA machine (`tests.cuda.training`). Each asserts everything
at once: losses, norms and parameters of plain PyTorch, the bits of the serial schedule, bytes of memory and
operations as predicted, no race. What does not suit the model is in other tests: gloo's streams, the reader,
validation, checkpoints.
"""

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch

from braid.scheduling.lowering.named import SCHEDULES
from braid.scheduling.lowering.partitions import mega_scale
from braid.scheduling.planner.decide import Outcome
from tests.cuda.training import Runs, Trained, assert_predicted, assert_same_bits, short_documents
from tests.end_to_end.runs import PlainRun

pytestmark = pytest.mark.alone

SEED = int(os.environ["BRAID_TEST_SEED"])
"""Of weights and text; which cases there are does not depend on it."""
STEPS, MICRO_BATCHES = 2, 4
TOLERANCE = {"fp64": 1e-11, "fp32": 5e-5}
ROUNDED = 3e-2
"""How far losses in bfloat16 may be from those in single precision, relatively."""

PIPELINES: Mapping[str, tuple[str, ...]] = {
    "megatron": ("", "eager_1f1b", "folded"),
    "oases": ("", "folded_sub_batches"),
    "braid": (*("", "w", "twins", "eager_w/3", "v", "together_2", "sub_batches", "folded_sub_batches"),),
}
"""Of the schedules that have a choice; "": what is taken, or searched, where none is named."""
LAYOUTS: Mapping[str, Mapping[str, int]] = {
    "tp 2": {"tp": 2},
    "pp 2": {"pp": 2},
    "dp 2": {"dp": 2},
    "cp 2": {"cp": 2},
    "tp 2 pp 2": {"tp": 2, "pp": 2},
    "tp 2 dp 2": {"tp": 2, "dp": 2},
    "pp 2 dp 2": {"pp": 2, "dp": 2},
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"family": "llama", "kv_heads": 2},
    "gpt": {"family": "gpt"},
    "tied qwen": {"family": "llama", "head_norm": True, "qkv_bias": True, "tied_head": True},
    "moe": {"family": "moe", "experts": 4, "top_k": 2, "ffn": 32, "balance_loss": 0.02},
}
RECOMPUTE = {"none": "none", "selective": "selective", "full": "full", "fine": "fine", "mixed": "full none"}
FACTORS: Mapping[str, tuple[Any, ...]] = {
    "schedule": tuple(SCHEDULES),
    "pipeline": tuple(dict.fromkeys(name for names in PIPELINES.values() for name in names)),
    "layout": tuple(LAYOUTS),
    "zero": (0, 1, 2, 3),
    "model": tuple(MODELS),
    "dtype": ("fp64", "fp32", "bf16"),
    "recompute": tuple(RECOMPUTE),
    "partition": ("whole", "pieces"),
    "documents": (False, True),
    "degrees": (False, True),
    "context": ("all_gather", "ring"),
}
SEVERAL_STAGES = ("interleaved", "zbv", "dualpipev", "eager_1f1b", "folded", "eager_w/3", "v")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One choice of every factor."""

    schedule: str
    pipeline: str
    layout: str
    zero: int
    model: str
    dtype: str
    recompute: str
    partition: str
    documents: bool
    degrees: bool
    context: str

    @property
    def name(self) -> str:
        """For people: what is not usual."""
        usual = {"whole", "none", "all_gather", "", 0}
        said = {key: value for key, value in vars(self).items() if value not in usual}
        return ", ".join(key if value is True else f"{value}" for key, value in said.items())

    @property
    def possible(self) -> bool:
        """Whether Braid has such a run."""
        axes = LAYOUTS[self.layout]
        replicas = "dp" in axes or "cp" in axes
        names = {self.schedule, self.pipeline}
        decided = self.schedule in ("braid", "dhelix")
        return all(
            (
                self.pipeline in PIPELINES.get(self.schedule, ("",)),
                "pp" in axes or not names & {*SEVERAL_STAGES},
                "pp" not in axes or self.pipeline != "twins",
                replicas or not (self.zero or names & {"ddp", "together_2"}),
                self.schedule != "intra_batch" or "tp" in axes,
                self.schedule != "expert_overlap" or (self.model == "moe" and replicas),
                self.partition == "whole" or ("tp" in axes and not self.degrees),
                not self.degrees or ("tp" in axes and not decided),
                self.context == "all_gather" or "cp" in axes,
                not (self.degrees and self.model == "moe") or self.zero < 2,
            )
        )

    @property
    def plain(self) -> dict[str, dict[str, Any]]:
        """What a run without parallelism needs to know, by sections of the configuration."""
        layers = 4 if "pp" in self.layout else 2
        replicas = 2 if "dp" in self.layout else 1
        samples = 2 if self.degrees else 1
        return {
            "model": {
                "hidden": 32,
                "heads": 4,
                "kv_heads": 4,
                "sequence": 16,
                "layers": layers,
                **MODELS[self.model],
            },
            "data": {
                "document_mask": self.documents,
                "restart_positions": self.documents and self.model != "gpt",
            },
            "train": {
                "dtype": self.dtype,
                "steps": STEPS,
                "micro_batch": samples,
                "global_batch": MICRO_BATCHES * samples * replicas,
                "seed": SEED % 1000,
                "warmup_steps": 0,
                "eps": 1e-6,  # else AdamW blows up the rounding of gradients that are zero
            },
            "telemetry": {"spans": False},
        }

    @property
    def sections(self) -> dict[str, dict[str, Any]]:
        """The run's configuration."""
        parallel: dict[str, Any] = {**LAYOUTS[self.layout], "zero": self.zero, "context": self.context}
        layers = self.plain["model"]["layers"]
        if self.model == "moe" and ("dp" in parallel or "cp" in parallel):
            parallel["ep"] = 2
        if self.degrees:
            parallel["tensor_degrees"] = [2, 1] * (layers // 2)
        overlap = {"schedule": self.schedule} | ({"pipeline": self.pipeline} if self.pipeline else {})
        recompute = " ".join([RECOMPUTE[self.recompute]] * (layers // 2 if self.recompute == "mixed" else 1))
        return {
            **self.plain,
            "train": {**self.plain["train"], "recompute": recompute},
            "parallel": parallel,
            "overlap": overlap,
        }

    @property
    def serial(self) -> "Case":
        """The same numbers with nothing beside anything."""
        return replace(self, schedule="megatron", pipeline="", recompute="none", partition="whole")


# -- the array -----------------------------------------------------------------------------------------------

Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(case: Case) -> set[Pair]:
    """Pairs of choices that a case has."""
    return set(combinations(sorted(vars(case).items()), 2))


@cache
def possible() -> tuple[Case, ...]:
    """All cases that differ in more than dtype, recomputation and documents, which go with everything."""
    free = {"dtype": ("fp64",), "recompute": ("none",), "documents": (False,)}
    levels = {**FACTORS, **free}
    found = (Case(**dict(zip(levels, chosen, strict=True))) for chosen in product(*levels.values()))
    return tuple(case for case in found if case.possible)


def drawn(generator: random.Random, given: Mapping[str, Any]) -> Case | None:
    """A possible case with some choices given; None if there is none."""
    free = {name: FACTORS[name] for name in ("dtype", "recompute", "documents")}
    bound = {name: level for name, level in given.items() if name not in free}
    found = [case for case in possible() if all(getattr(case, name) == bound[name] for name in bound)]
    if not found:
        return None
    chosen = {name: generator.choice(levels) for name, levels in free.items()}
    return replace(generator.choice(found), **{**chosen, **given})


def improved(case: Case, given: Mapping[str, Any], wanted: set[Pair], generator: random.Random) -> Case:
    """The case with the choices that are not given changed, each in turn, for most new pairs."""

    def worth(one: Case) -> int:
        return len(pairs_of(one) & wanted) - 4 * ("2 " in one.layout)  # four ranks take twice as long

    free = [name for name in FACTORS if name not in given]
    for name in generator.sample(free, len(free)):
        tried = [replace(case, **{name: level}) for level in FACTORS[name]]
        case = max((one for one in (case, *tried) if one.possible), key=worth)
    return case


@cache
def cases() -> tuple[Case, ...]:
    """Cases that have every possible pair, greedily; the same ones in every process and run."""
    generator = random.Random(48)
    wanted: set[Pair] = {
        ((a, x), (b, y)) for a, b in combinations(sorted(FACTORS), 2) for x in FACTORS[a] for y in FACTORS[b]
    }
    found: list[Case] = []
    for pair in sorted(wanted, key=str):
        if pair not in wanted:
            continue
        given = dict(pair)
        if (first := drawn(generator, given)) is None:
            wanted.discard(pair)  # impossible
            continue
        best = improved(first, given, wanted, generator)
        found.append(best)
        wanted -= pairs_of(best)
    return tuple(found)


# -- runs ----------------------------------------------------------------------------------------------------


class Combined(Runs):
    """Runs of this module, each done once."""

    def __init__(self, folder: Path, data: Path) -> None:
        super().__init__(folder, data, STEPS)
        self._serial: dict[Case, Trained] = {}

    def trained(self, case: Case) -> tuple[Outcome, Trained]:
        """On the model of the machine."""
        cut = case.partition == "pieces" and case.schedule != "intra_batch"
        return self.of(case.sections, **({"partitions": mega_scale(2)} if cut else {}))

    def serial(self, case: Case) -> Trained:
        """The serial schedule on the same layout."""
        if case.serial not in self._serial:
            self._serial[case.serial] = self.trained(case.serial)[1]
        return self._serial[case.serial]

    def reference(self, case: Case) -> PlainRun:
        """Plain PyTorch on one rank; in single precision where the case is in bfloat16."""
        sections = case.plain
        if case.dtype == "bf16":
            sections["train"]["dtype"] = "fp32"
        return self.plain(sections)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Combined:
    folder = tmp_path_factory.mktemp("combinations")
    return Combined(folder / "runs", short_documents(folder, SEED))


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_a_combination(runs: Combined, case: Case) -> None:
    outcome, run = runs.trained(case)
    assert run.faults == []
    assert_predicted(outcome, run)
    plain, tolerance = runs.reference(case), TOLERANCE.get(case.dtype, ROUNDED)
    assert run.losses == pytest.approx(plain.losses, rel=tolerance, abs=0)
    if case.dtype == "bf16":
        return
    assert run.gradient_norms == pytest.approx(plain.gradient_norms, rel=tolerance, abs=0)
    if case.dtype == "fp64":
        trained = {name: tensor.detach() for name, tensor in plain.model.named_parameters()}
        found = {name: tensor for name, tensor in run.parameters().items() if name in trained}
        torch.testing.assert_close(found, trained, rtol=1e-7, atol=1e-9)
    # Gradients in shares are summed more often; the ends of a tied model add to one table as they come.
    if case.zero < 2 and "tied" not in case.model:
        assert_same_bits(run, runs.serial(case))


def test_every_pair_that_can_be_is_there() -> None:
    """No pair is left out that other draws find; every schedule goes with every stage of ZeRO."""
    had = set().union(*map(pairs_of, cases()))
    generator = random.Random(SEED)
    seen = [one for _ in range(300) if (one := drawn(generator, {})) is not None]
    assert not [pair for one in seen for pair in pairs_of(one) if pair not in had]
    assert {(one.schedule, one.zero) for one in cases()} == set(product(SCHEDULES, FACTORS["zero"]))
