"""Every pair of choices that a user can make, in about a hundred runs: a covering array.

A case is a run of two steps on the model of the CUDA machine (`tests.cuda.training`). Each asserts everything
at once: losses, norms and parameters of plain PyTorch, the bits of the serial schedule, bytes of memory and
operations as predicted, no race. What does not suit the model is in other tests: gloo's streams, the reader,
validation, checkpoints.
"""

import random
from collections.abc import Mapping
from dataclasses import make_dataclass, replace
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest

from braid.jobs.bench.plain_torch import PlainTrainer
from braid.scheduling.generate.named import SCHEDULES
from braid.scheduling.generate.partitions import mega_scale
from tests.cuda.training import SEED, Runs, assert_near, assert_predicted, assert_same_bits, sections
from tests.end_to_end.plain_regularisation import REGULARISED, RegularisedTrainer

pytestmark = pytest.mark.alone

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
    "regularised": (False, True),
}
FREE = ("dtype", "recompute", "documents", "regularised")
"""Factors that go with everything."""
SEVERAL_STAGES = ("interleaved", "zbv", "dualpipev", "eager_1f1b", "folded", "eager_w/3", "v")


class Case(make_dataclass("Choices", FACTORS, frozen=True, kw_only=True)):  # type: ignore[misc]
    """One choice of every factor."""

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
    def sections(self) -> dict[str, Any]:
        """The run's configuration."""
        parallel: dict[str, Any] = {**LAYOUTS[self.layout], "zero": self.zero, "context": self.context}
        layers = 4 if "pp" in parallel else 2
        if self.model == "moe" and ("dp" in parallel or "cp" in parallel):
            parallel["ep"] = 2
        if self.degrees:
            parallel["tensor_degrees"] = [2, 1] * (layers // 2)
        recompute = " ".join([RECOMPUTE[self.recompute]] * (layers // 2 if self.recompute == "mixed" else 1))
        train = {"dtype": self.dtype, "recompute": recompute, "micro_batch": 2 if self.degrees else 1}
        train |= REGULARISED if self.regularised else {}
        restart = self.documents and self.model != "gpt"
        data = {"document_mask": self.documents, "restart_positions": restart}
        model = {**MODELS[self.model], "layers": layers}
        return sections(f"{self.schedule}:{self.pipeline}", parallel, model, train, data=data)


# -- the array -----------------------------------------------------------------------------------------------

Pair = tuple[tuple[str, Any], tuple[str, Any]]
TWO_AXES = "two axes"


def levels_of(case: Case) -> dict[str, Any]:
    """A case's choices. Layouts of two axes are one: four ranks take twice as long."""
    return {**vars(case), "layout": TWO_AXES if len(LAYOUTS[case.layout]) > 1 else case.layout}


def pairs_of(case: Case) -> set[Pair]:
    """Pairs of choices that a case has."""
    return set(combinations(sorted(levels_of(case).items()), 2))


@cache
def possible() -> tuple[Case, ...]:
    """All cases that differ in more than the factors that go with everything."""
    levels = {**FACTORS, **{name: FACTORS[name][:1] for name in FREE}}
    pairs = [(name, point) for name in SCHEDULES for point in PIPELINES.get(name, ("",))]
    others = [levels[name] for name in FACTORS if name not in ("schedule", "pipeline")]
    found = (
        Case(**dict(zip(FACTORS, (*pair, *rest), strict=True))) for pair in pairs for rest in product(*others)
    )
    return tuple(case for case in found if case.possible)


@cache
def with_choice(name: str, level: Any) -> frozenset[int]:
    """Possible cases, by number, that have a choice."""
    return frozenset(number for number, case in enumerate(possible()) if levels_of(case)[name] == level)


def drawn(generator: random.Random, given: Mapping[str, Any]) -> Case | None:
    """A possible case with some choices given; None if there is none."""
    bound = [with_choice(name, level) for name, level in given.items() if name not in FREE]
    found = sorted(frozenset.intersection(*bound)) if bound else range(len(possible()))
    if not found:
        return None
    chosen = {name: given.get(name, generator.choice(FACTORS[name])) for name in FREE}
    return replace(possible()[generator.choice(found)], **chosen)


def improved(case: Case, given: Mapping[str, Any], wanted: set[Pair], generator: random.Random) -> Case:
    """The case with the choices that are not given changed, each in turn, for most new pairs."""

    def worth(case: Case) -> int:
        return len(pairs_of(case) & wanted) - 4 * (len(LAYOUTS[case.layout]) > 1)

    free = [name for name in FACTORS if name not in given]
    for name in generator.sample(free, len(free)):
        tried = [replace(case, **{name: level}) for level in FACTORS[name]]
        case = max((other for other in (case, *tried) if other.possible), key=worth)
    return case


@cache
def cases() -> tuple[Case, ...]:
    """Cases that have every possible pair, greedily; the same in every process and run."""
    generator = random.Random(48)
    levels = {**FACTORS, "layout": [name for name in LAYOUTS if len(LAYOUTS[name]) == 1] + [TWO_AXES]}
    wanted: set[Pair] = {
        ((a, x), (b, y)) for a, b in combinations(sorted(levels), 2) for x in levels[a] for y in levels[b]
    }
    found: list[Case] = []
    for pair in sorted(wanted, key=str):
        if pair not in wanted:
            continue
        given = dict(pair)
        tries = [first for _ in range(4) if (first := drawn(generator, given)) is not None]
        if not tries:
            wanted.discard(pair)  # impossible
            continue
        cases = [improved(first, given, wanted, generator) for first in tries]
        found.append(max(cases, key=lambda case: len(pairs_of(case) & wanted)))
        wanted -= pairs_of(found[-1])
    return tuple(found)


# -- runs ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("combinations"))


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_a_combination(runs: Runs, case: Case) -> None:
    content, rounded = case.sections, case.dtype == "bf16"
    cut = case.partition == "pieces" and case.schedule != "intra_batch"
    outcome, run = runs.of(content, **({"partitions": mega_scale(2)} if cut else {}))
    assert run.faults == []
    assert_predicted(outcome, run)
    trainer = RegularisedTrainer if case.regularised else PlainTrainer
    if rounded:
        assert_near(run, runs.plain(content, trainer_of=trainer, dtype="fp32"), ROUNDED, None)
        return
    plain = runs.plain(content, trainer_of=trainer)
    assert_near(run, plain, TOLERANCE[case.dtype], TOLERANCE[case.dtype])
    # Gradients in shares are summed more often; the ends of a tied model add to one table as they come.
    if case.zero < 2 and "tied" not in case.model:
        assert_same_bits(run, runs.serial(content))


def test_every_pair_that_can_be_is_there() -> None:
    """No pair is left out that other draws find; every schedule goes with every stage of ZeRO."""
    had = set().union(*map(pairs_of, cases()))
    generator = random.Random(SEED)
    seen = [case for _ in range(300) if (case := drawn(generator, {})) is not None]
    assert not [pair for case in seen for pair in pairs_of(case) if pair not in had]
    assert {(case.schedule, case.zero) for case in cases()} == set(product(SCHEDULES, FACTORS["zero"]))
    assert {case.layout for case in cases()} == {*LAYOUTS}
