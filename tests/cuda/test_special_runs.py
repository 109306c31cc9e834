"""Runs that pairs of choices do not reach: many ranks, uneven layers, mixtures of experts, collectives in
stages, units, gradients in bfloat16. On the model of the CUDA machine (`tests.cuda.training`), against plain
PyTorch."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial, reduce
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from braid.actors.config import TrainConfig
from braid.jobs.bench.plain_torch import PlainModel, PlainTrainer, learning_rate
from braid.scheduling.mesh.partition import parse_partition
from tests.cuda.steps import IN_STAGES, OF_TOKENS
from tests.cuda.training import Runs, assert_near, assert_predicted, assert_same_bits, sections
from tests.end_to_end.command import ROOT
from tests.end_to_end.plain_regularisation import REGULARISED, RegularisedTrainer
from tests.scheduling.partition_cases import Cut, cuts

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("special"))


MESHES = {2: (), 4: ((2, 2),)}
"""Of so many tensor-parallel ranks, two on each host."""
DOCUMENTS = {"data": {"document_mask": True, "restart_positions": True}}
MOE = {"family": "moe", "layers": 2, "experts": 4, "top_k": 2, "ffn": 32}
OF_WIDTH = (
    "tp/all_gather mesh 2x2 order 0,1 pieces 2 of width with 1",
    "layer/mlp_scatter pieces 3 of width with 1",
)
SHARED = {**MOE, "balance_loss": 0.05, "z_loss": 0.01, "shared_experts": 1, "expert_ffn": 48}
CAPACITY = {**MOE, "capacity_factor": 0.7, "balance_loss": 0.02}
SOME = {**MOE, "layers": 4, "pattern": "dense layer", "softmax_after": True, "capacity_factor": 1.5}
PAIRS, POLICIES = {"micro_batch": 2}, {"micro_batch": 4, "recompute": "full none fine selective"}
AGAIN, ROUNDED = {"recompute": "full"}, {"dtype": "fp32", "reduce_dtype": "bf16"}
CASES: dict[str, dict[str, Any]] = {
    "units": sections("braid:w", {"tp": 2}),
    "put off by twins": sections("braid:twins", {"tp": 2}),
    "pp 3, uneven": sections("braid:w", {"pp": 3}, {"layers": 7}, {"global_batch": 6}),
    "pp 4": sections("dhelix", {"pp": 4}, {"layers": 8}),
    "zbv, uneven": sections("zbv", {"pp": 2}, {"layers": 5}),
    "dualpipev, pp 3": sections("dualpipev", {"pp": 3}, {"layers": 6}, {"global_batch": 6}),
    "eight ranks": sections("braid:w", {"tp": 2, "pp": 2, "dp": 2, "zero": 3}),
    "shares of two in four": sections("ddp", {"dp": 4, "zero": 3, "shards": 2}),
    "ring of four, documents": sections("wavelet", {"cp": 4, "context": "ring"}, **DOCUMENTS),
    "degrees and policies": sections("oases", {"tp": 4, "tensor_degrees": "4 2 1 2"}, None, POLICIES),
    "degrees of a mixture": sections(
        "ddp",
        {"tp": 2, "dp": 2, "ep": 2, "zero": 1, "tensor_degrees": "2 1 1 2"},
        {**MOE, "layers": 4},
        {"micro_batch": 2, "global_batch": 8},
    ),
    "gathers in parts": sections("braid:w", {"tp": 4}, None, PAIRS),
    "pieces of width": sections("braid:w", {"tp": 4}),
    "sums in stages": sections("ddp", {"dp": 4}),
    "shares in stages": sections("braid:together_4", {"dp": 4, "zero": 3}),
    "a shared expert": sections("expert_overlap", {"dp": 2, "ep": 2, "zero": 1}, SHARED),
    "experts of four ranks": sections("dhelix", {"dp": 2, "cp": 2, "ep": 4, "zero": 3}, MOE),
    "stages in a pipeline": sections("zbv", {"pp": 2, "dp": 4, "zero": 2}),
    "shares of four in stages": sections("ddp", {"dp": 8, "zero": 3, "shards": 4}),
    "far ahead": sections("zbv", {"pp": 2, "dp": 2, "zero": 3}),
    "just in time": sections("braid:w", {"tp": 2, "dp": 2, "zero": 3}),
    "a capacity": sections("wavelet", {"tp": 2, "dp": 2, "ep": 2}, CAPACITY, AGAIN),
    "some layers of experts": sections(
        "megatron:folded", {"dp": 2, "ep": 2, "pp": 2}, SOME, {"recompute": "fine"}
    ),
    "a bias of the router": sections("braid:w", {"dp": 2, "ep": 2, "tp": 2}, {**MOE, "balance_rate": 0.02}),
}
REGULAR: dict[str, dict[str, Any]] = {
    "dropout, ring, documents": sections(
        "wavelet", {"cp": 2, "context": "ring"}, None, REGULARISED, **DOCUMENTS
    ),
    "dropout, degrees": sections(
        "oases", {"tp": 4, "tensor_degrees": "4 2 1 2"}, None, {**REGULARISED, "micro_batch": 4}
    ),
    "dropout, a capacity": sections(
        "wavelet", {"tp": 2, "dp": 2, "ep": 2}, CAPACITY, {**REGULARISED, **AGAIN, "micro_batch": 2}
    ),
    "dropout, a tied table in shares": sections(
        "ddp", {"dp": 2, "zero": 3}, {"family": "gpt", "tied_head": True, "hidden": 36}, REGULARISED
    ),
}
"""With dropout, label smoothing and z-loss, whose masks NumPy makes for plain PyTorch."""
DECIDED: dict[str, dict[str, Any]] = {
    "units": {"unit_layers": 4},
    "put off by twins": {"unit_layers": 4, "put_off": True},
    "far ahead": {"distances": (3, 7)},
    "just in time": {"distances": (1, 0)},
}
"""What is decided for some of them (`Runs.of`)."""
PARTITIONS = {
    "gathers in parts": OF_TOKENS,
    "pieces of width": OF_WIDTH,
    "sums in stages": ("dp/all_reduce mesh 2x2 order 1,0",),
    "shares in stages": IN_STAGES,
    "stages in a pipeline": IN_STAGES,
    "shares of four in stages": IN_STAGES,
}
"""Of collectives, where two ranks are on each host."""


def cut(sections: Mapping[str, Any], partitions: Iterable[str]) -> dict[str, Any]:
    """What is decided of a run so that its collectives are cut, of ranks that are two on each host."""
    ranks = prod(sections["parallel"].get(axis, 1) for axis in ("tp", "pp", "dp"))
    return {"hosts": ranks // 2, "partitions": tuple(map(parse_partition, partitions))}


@pytest.mark.parametrize("name", [*CASES, *REGULAR])
def test_a_special_run(runs: Runs, name: str) -> None:
    content, decided = {**CASES, **REGULAR}[name], dict(DECIDED.get(name, {}))
    if name in PARTITIONS:
        decided |= cut(content, PARTITIONS[name])
    outcome, run = runs.of(content, **decided)
    assert run.faults == []
    assert_predicted(outcome, run)
    kept = ("tp", "cp") if "capacity_factor" in content["model"] else ()
    trainer = RegularisedTrainer if name in REGULAR else PlainTrainer
    assert_near(run, runs.plain(content, *kept, trainer_of=trainer), 1e-9, 1e-9)


@pytest.mark.slow
@given(cuts(MESHES))
@settings(max_examples=5)
def test_collectives_in_any_stages_and_pieces(runs: Runs, drawn: Cut) -> None:
    """A layer whose collectives are each cut in a way of its own computes what the whole one does."""
    model = {"family": drawn.family, "heads": 8, "kv_heads": 8, "layers": 2}
    train = {"micro_batch": 2, "recompute": drawn.recompute}
    content = sections("megatron", {"tp": drawn.tp}, model, train)
    outcome, run = runs.of(content, **cut(content, drawn.partitions))
    assert run.faults == []
    assert_predicted(outcome, run)
    assert_near(run, runs.plain(content), 1e-9, 1e-9)


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
    content = sections(schedule, parallel, OWN)
    outcome, run = runs.of(content, unit_layers=unit_layers)
    assert run.faults == []
    assert_predicted(outcome, run)
    assert_same_bits(run, runs.serial(content))


def test_own_layers_drop_what_they_add_to_the_residual_stream(runs: Runs) -> None:
    """And not what they add to each other. Masks are the same whether one rank has all features or two."""
    own = {**OWN, "pattern": "parallel", "layers": 2}
    one, two = (runs.of(sections("braid:w", {"tp": tp}, own, REGULARISED))[1] for tp in (1, 2))
    assert two.losses == pytest.approx(one.losses, rel=1e-12)
    plain = runs.of(sections("megatron", {}, own))[1]
    assert plain.losses[0] != one.losses[0]


def test_replicas_change_no_bit_of_deterministic_sums(runs: Runs) -> None:
    """With ``train.deterministic_reduction``, for any number of replicas that share a batch."""
    train = {"dtype": "fp32", "deterministic_reduction": True, "global_batch": 12}
    model = {"family": "gpt", "layers": 2}
    first, *others = (runs.of(sections("megatron", {"dp": dp}, model, train))[1] for dp in (1, 2, 3))
    for run in others:
        assert_same_bits(run, first)


@pytest.mark.parametrize("schedule", ["ddp", "braid:w"])
def test_parameters_in_shares_beside_gradients_change_no_bit(runs: Runs, schedule: str) -> None:
    parted, whole = (runs.of(sections(schedule, {"dp": 2, "zero": zero}))[1] for zero in (3, 2))
    assert_same_bits(parted, whole)
    for run, kept in ((parted, 0), (whole, 1)):
        held = [one.tensor.untyped_storage().nbytes() for rank in run.ranks for one in rank.model.parameters]
        assert all(bool(nbytes) == kept for nbytes in held)
        assert all(rank.buckets.passing == [] for rank in run.ranks), "of a step nothing whole is left"


# -- gradients that are rounded for the way ------------------------------------------------------------------


IN_ORDER, IN_ANY_ORDER = 1e-4, 2e-2
"""How far losses may be apart: where sums have one order, what differs in fp32 may round another way."""


def summed(parts: Sequence[Tensor]) -> Tensor:
    """Each part rounded to bf16, and every sum of them, in order."""
    return reduce(torch.add, [part.bfloat16() for part in parts]).float()


class Replicas(PlainTrainer):
    """Ranks that have every so many-th micro-batch of a step, in one process."""

    def __init__(self, model: PlainModel, settings: TrainConfig, parallel: Mapping[str, int]) -> None:
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
            group["lr"] = learning_rate(self.settings, step)
        self.optimizer.step()
        return total / tokens, norm.item()

    def _sum(self, by_rank: Sequence[Sequence[Tensor]]) -> Tensor:
        """Of what every rank's passes have: inside groups that hold shares, then over these."""
        sums = by_rank if self._each_pass else [[reduce(torch.add, own)] for own in by_rank]
        groups = [sums[at : at + self._group] for at in range(0, self._ranks, self._group)]
        within = [reduce(torch.add, map(summed, zip(*group, strict=True))) for group in groups]
        return within[0] if len(within) == 1 else summed(within)


STAGED = ("dp/all_reduce mesh 2x2 order 1,0",)


@pytest.mark.parametrize(
    ("schedule", "parallel", "tolerance", "partitions"),
    [
        ("ddp", {"dp": 2, "zero": 1}, IN_ORDER, ()),
        ("braid:w", {"dp": 2, "zero": 2}, IN_ORDER, ()),
        ("ddp", {"dp": 4}, IN_ANY_ORDER, ()),
        ("ddp", {"dp": 4, "zero": 3, "shards": 2}, IN_ORDER, ()),
        ("megatron", {"pp": 2, "dp": 2, "zero": 2}, IN_ORDER, ()),
        ("megatron", {"tp": 4, "tensor_degrees": "4 2 2 4"}, None, ()),
        ("ddp", {"dp": 4}, None, STAGED),
        ("zbv", {"pp": 2, "dp": 4, "zero": 1}, None, IN_STAGES),
    ],
    ids=str,
)
def test_gradients_in_bfloat16_are_those_of_plain_pytorch_that_rounds(
    runs: Runs,
    schedule: str,
    parallel: dict[str, Any],
    tolerance: float | None,
    partitions: tuple[str, ...],
) -> None:
    """And copies that are rounded are counted, everywhere; orders are those of `tests.cuda.test_machine`."""
    content = sections(schedule, parallel, train={**ROUNDED, "micro_batch": 1 if tolerance else 4})
    outcome, run = runs.of(content, **(cut(content, partitions) if partitions else {}))
    assert run.faults == []
    assert_predicted(outcome, run)
    if tolerance is not None:
        plain = runs.plain(content, trainer_of=partial(Replicas, parallel=parallel), reduce_dtype=None)
        assert_near(run, plain, tolerance, 10 * tolerance)
