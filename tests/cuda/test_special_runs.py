"""Runs that pairs of choices do not reach: many ranks, uneven layers, mixtures of experts, collectives in
stages, units, gradients in bfloat16. On the model of the CUDA machine (`tests.cuda.training`), against plain
PyTorch."""

import os
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from braid.jobs.benchmarks.plain_torch import PlainModel, PlainSettings, PlainTrainer
from braid.scheduling.partition import parse_partition
from tests.cuda.training import Runs, assert_predicted, assert_same_bits, short_documents
from tests.end_to_end.command import ROOT

pytestmark = pytest.mark.alone

SEED = int(os.environ["BRAID_TEST_SEED"])
STEPS = 2


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("special")
    return Runs(folder / "runs", short_documents(folder, SEED), STEPS)


def sections(
    schedule: str,
    parallel: Mapping[str, Any],
    model: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
    **more: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """A small run in double precision with four micro-batches a replica."""
    schedule, _, pipeline = schedule.partition(":")
    usual = {"hidden": 32, "heads": 4, "kv_heads": 4, "sequence": 16, "layers": 4}
    given = {"micro_batch": 1, **(train or {})}
    batch = 4 * given["micro_batch"] * parallel.get("dp", 1)
    steps = {
        "dtype": "fp64",
        "steps": STEPS,
        "warmup_steps": 0,
        "eps": 1e-6,
        "seed": SEED % 1000,
        "global_batch": batch,
    }
    return {
        "model": {**usual, **(model or {})},
        "train": {**steps, **given},
        "parallel": dict(parallel),
        "overlap": {"schedule": schedule, "pipeline": pipeline or None},
        "telemetry": {"spans": False},
        **{name: dict(section) for name, section in more.items()},
    }


def plain_of(run: Mapping[str, Mapping[str, Any]], *kept: str) -> dict[str, Mapping[str, Any]]:
    """The same without parallelism; ``kept``: degrees on which the numbers themselves depend."""
    train = {**run["train"], "recompute": "none"}
    return {
        **run,
        "train": train,
        "overlap": {},
        "parallel": {k: v for k, v in run["parallel"].items() if k in kept},
    }


DOCUMENTS = {"data": {"document_mask": True, "restart_positions": True}}
MOE = {"family": "moe", "layers": 2, "experts": 4, "top_k": 2, "ffn": 32}
GATHER_IN_PARTS = "tp/all_gather mesh 2x2 order 1,0,1 delivered of tokens with 2"
SCATTER_IN_PIECES = "tp/reduce_scatter mesh 2x2 order 1,0 pieces 3 of tokens with 1"
OF_WIDTH = (
    "tp/all_gather mesh 2x2 order 0,1 pieces 2 of width with 1",
    "layer/mlp_scatter pieces 3 of width with 1",
)
IN_STAGES = ("dp/reduce_scatter mesh 2x2 order 1,0", "dp/all_gather mesh 2x2 order 0,1")
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "units": (sections("braid:w", {"tp": 2}), {"unit_layers": 4}),
    "put off by twins": (sections("braid:twins", {"tp": 2}), {"unit_layers": 4, "put_off": True}),
    "tp 4": (sections("braid", {"tp": 4}), {}),
    "pp 3, uneven": (sections("braid:w", {"pp": 3}, {"layers": 7}, {"global_batch": 6}), {}),
    "pp 4": (sections("dhelix", {"pp": 4}, {"layers": 8}), {}),
    "zbv, uneven": (sections("zbv", {"pp": 2}, {"layers": 5}), {}),
    "dualpipev, pp 3": (sections("dualpipev", {"pp": 3}, {"layers": 6}, {"global_batch": 6}), {}),
    "eight ranks": (sections("braid:w", {"tp": 2, "pp": 2, "dp": 2, "zero": 3}), {}),
    "shares of two in four": (sections("ddp", {"dp": 4, "zero": 3, "shards": 2}), {}),
    "ring of four, documents": (sections("wavelet", {"cp": 4, "context": "ring"}, **DOCUMENTS), {}),
    "cp and replicas": (sections("braid:w", {"cp": 2, "dp": 2, "zero": 2}), {}),
    "degrees and policies": (
        sections(
            *("oases", {"tp": 4, "tensor_degrees": "4 2 1 2"}),
            train={"micro_batch": 4, "recompute": "full none fine selective"},
        ),
        {},
    ),
    "degrees of a mixture": (
        sections(
            *("ddp", {"tp": 2, "dp": 2, "ep": 2, "zero": 1, "tensor_degrees": "2 1 1 2"}),
            *({**MOE, "layers": 4}, {"micro_batch": 2, "global_batch": 8}),
        ),
        {},
    ),
    "gathers in parts": (
        sections("braid:w", {"tp": 4}, train={"micro_batch": 2}),
        {"hosts": 2, "partitions": (GATHER_IN_PARTS, SCATTER_IN_PIECES)},
    ),
    "pieces of width": (sections("braid:w", {"tp": 4}), {"hosts": 2, "partitions": OF_WIDTH}),
    "sums in stages": (
        sections("ddp", {"dp": 4}),
        {"hosts": 2, "partitions": ("dp/all_reduce mesh 2x2 order 1,0",)},
    ),
    "shares in stages": (
        sections("braid:together_4", {"dp": 4, "zero": 3}),
        {"hosts": 2, "partitions": IN_STAGES},
    ),
    "a shared expert": (
        sections(
            *("expert_overlap", {"dp": 2, "ep": 2, "zero": 1}),
            {**MOE, "balance_loss": 0.05, "z_loss": 0.01, "shared_experts": 1, "expert_ffn": 48},
        ),
        {},
    ),
    "experts of four ranks": (sections("dhelix", {"dp": 2, "cp": 2, "ep": 4, "zero": 3}, MOE), {}),
    "a capacity": (
        sections(
            "wavelet", {"tp": 2, "dp": 2, "ep": 2}, {**MOE, "capacity_factor": 0.7, "balance_loss": 0.02}
        ),
        {},
    ),
    "some layers of experts": (
        sections(
            *("megatron:folded", {"dp": 2, "ep": 2, "pp": 2}),
            {**MOE, "layers": 4, "pattern": "dense layer", "softmax_after": True, "capacity_factor": 1.5},
        ),
        {},
    ),
    "a bias of the router": (
        sections("braid:w", {"dp": 2, "ep": 2, "tp": 2}, {**MOE, "balance_rate": 0.02}),
        {},
    ),
}
"""Configurations, and what is decided for them (`Runs.of`)."""


@pytest.mark.parametrize("name", CASES)
def test_a_special_run(runs: Runs, name: str) -> None:
    content, decided = CASES[name]
    decided = dict(decided)
    if "partitions" in decided:
        decided["partitions"] = tuple(map(parse_partition, decided["partitions"]))
    outcome, run = runs.of(content, **decided)
    assert run.faults == []
    assert_predicted(outcome, run)
    plain = runs.plain(
        plain_of(content, "tp", "cp") if "capacity_factor" in content["model"] else plain_of(content)
    )
    assert run.losses == pytest.approx(plain.losses, rel=1e-9, abs=0)
    assert run.gradient_norms == pytest.approx(plain.gradient_norms, rel=1e-9, abs=0)
    trained = {key: tensor.detach() for key, tensor in plain.model.named_parameters()}
    found = {key: tensor for key, tensor in run.parameters().items() if key in trained}
    torch.testing.assert_close(found, trained, rtol=1e-7, atol=1e-9)


OWN = {
    "layer": {"parallel": f"{ROOT}/docs/examples/parallel_layer.py:ParallelLayer"},
    "pattern": "layer parallel",
    "layers": 4,
}


@pytest.mark.parametrize(
    ("schedule", "parallel", "unit_layers"),
    [("dhelix", {"pp": 2}, 0), ("braid:w", {"tp": 2, "pp": 2}, 2)],
    ids=str,
)
def test_layers_of_several_kinds_train_as_with_nothing_beside_anything(
    runs: Runs, schedule: str, parallel: dict[str, int], unit_layers: int
) -> None:
    """What their losses are is compared with autograd in `tests.end_to_end.test_own_layer`."""
    outcome, run = runs.of(sections(schedule, parallel, OWN), unit_layers=unit_layers)
    assert run.faults == []
    assert_predicted(outcome, run)
    assert_same_bits(run, runs.of(sections("megatron", parallel, OWN))[1])


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_replicas_change_no_bit_of_deterministic_sums(runs: Runs, family: str) -> None:
    """With ``train.deterministic_reduction``, for any number of replicas that share a batch."""
    train = {"dtype": "fp32", "deterministic_reduction": True, "global_batch": 12}
    model = {"family": family, "layers": 2}
    first, *others = (runs.of(sections("megatron", {"dp": dp}, model, train))[1] for dp in (1, 2, 3))
    for run in others:
        assert_same_bits(run, first)


# -- gradients that are rounded for the way ------------------------------------------------------------------

IN_ORDER, IN_ANY_ORDER = 1e-4, 2e-2
"""How far losses may be apart: where sums have one order, what differs in fp32 may round another way."""


def summed(parts: Sequence[Tensor]) -> Tensor:
    """Each part rounded to bf16, and every sum of them, in order."""
    return reduce(torch.add, [part.bfloat16() for part in parts]).float()


class Replicas(PlainTrainer):
    """Ranks that have every so many-th micro-batch of a step, in one process."""

    def __init__(self, model: PlainModel, settings: PlainSettings, parallel: Mapping[str, int]) -> None:
        super().__init__(model, settings)
        self._ranks, self._each_pass = parallel["dp"], parallel.get("zero", 0) > 1
        self._group = parallel.get("shards", 0) or self._ranks

    def step(self, step: int, windows: Sequence[Tensor]) -> tuple[float, float]:
        """As the plain one, with gradients as ranks have them."""
        tokens = sum(window.shape[0] * (window.shape[1] - 1) for window in windows)
        parameters = list(self.model.parameters())
        total, passes = 0.0, list[list[Tensor]]()
        for window in windows:
            loss = self.model.loss_sum(window[:, :-1], window[:, 1:])
            passes.append(list(torch.autograd.grad(loss / tokens, parameters)))
            total += loss.item()
        for place, parameter in enumerate(parameters):
            each = [gradients[place] for gradients in passes]
            parameter.grad = self._sum([each[rank :: self._ranks] for rank in range(self._ranks)])
        norm = nn.utils.clip_grad_norm_(parameters, self.settings.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate(step)
        self.optimizer.step()
        return total / tokens, norm.item()

    def _sum(self, by_rank: Sequence[Sequence[Tensor]]) -> Tensor:
        """Of what every rank's passes have: inside groups that hold shares, then over these."""
        sums = by_rank if self._each_pass else [[reduce(torch.add, own)] for own in by_rank]
        groups = [sums[at : at + self._group] for at in range(0, self._ranks, self._group)]
        within = [reduce(torch.add, map(summed, zip(*group, strict=True))) for group in groups]
        return within[0] if len(within) == 1 else summed(within)


@pytest.mark.parametrize(
    ("schedule", "parallel", "tolerance"),
    [
        ("ddp", {"dp": 2, "zero": 1}, IN_ORDER),
        ("braid:w", {"dp": 2, "zero": 2}, IN_ORDER),
        ("ddp", {"dp": 4}, IN_ANY_ORDER),
        ("ddp", {"dp": 4, "zero": 3, "shards": 2}, IN_ORDER),
        ("megatron", {"pp": 2, "dp": 2, "zero": 2}, IN_ORDER),
    ],
    ids=str,
)
def test_gradients_in_bfloat16_are_those_of_plain_pytorch_that_rounds(
    runs: Runs, schedule: str, parallel: dict[str, int], tolerance: float
) -> None:
    content = sections(schedule, parallel, train={"dtype": "fp32", "reduce_dtype": "bf16"})
    outcome, run = runs.of(content)
    assert run.faults == []
    assert_predicted(outcome, run)
    unrounded = plain_of(content)
    unrounded["train"] = {**unrounded["train"], "reduce_dtype": None}
    plain = runs.plain(unrounded, partial(Replicas, parallel=parallel))
    assert run.losses == pytest.approx(plain.losses, rel=tolerance, abs=0)
    assert run.gradient_norms == pytest.approx(plain.gradient_norms, rel=10 * tolerance, abs=0)
