"""Ranks that sum gradients in bf16: losses of plain PyTorch that rounds as they do, and half the bytes."""

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from braid.jobs.benchmarks.plain_torch import PlainModel, PlainSettings, PlainTrainer
from tests.end_to_end.command import overlap_of
from tests.end_to_end.runs import PlainRun, Run, prepare_text, run_layout, run_plain, small_config
from tests.spans import read_folder, spans_of

pytestmark = pytest.mark.slow

SEED, STEPS = 7, 6
TRAIN: Mapping[str, Any] = {"steps": STEPS, "global_batch": 16, "seed": SEED, "warmup_steps": 0}
IN_ORDER, IN_ANY_ORDER = 1e-4, 2e-2
"""How far losses may be apart: where sums have one order, what differs in fp32 may round another way."""
CASES: list[tuple[str, dict[str, int], float]] = [
    ("megatron", {"dp": 2}, IN_ORDER),
    ("ddp", {"dp": 2}, IN_ORDER),
    *((("megatron", "ddp")[zero % 2], {"dp": 2, "zero": zero}, IN_ORDER) for zero in (1, 2, 3)),
    ("ddp", {"dp": 4}, IN_ANY_ORDER),
    *((("ddp", "megatron")[zero % 2], {"dp": 4, "zero": zero}, IN_ORDER) for zero in (1, 2, 3)),
    *(("ddp", {"dp": 4, "zero": zero, "shards": 2}, IN_ORDER) for zero in (1, 2, 3)),
    ("ddp", {"tp": 2, "dp": 2, "zero": 1}, IN_ANY_ORDER),
    ("megatron", {"pp": 2, "dp": 2, "zero": 2}, IN_ORDER),
]
"""Schedule, layout, tolerance."""


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


class Runs:
    """Runs of this module and of plain PyTorch, each done once."""

    def __init__(self, path: Path) -> None:
        self._path, self.data = path, prepare_text(path, SEED)
        self._done: dict[str, Any] = {}

    def of(self, schedule: str, parallel: Mapping[str, int], **train: Any) -> Run:
        """In bf16, unless ``train`` says otherwise."""
        sections = self._sections(schedule, parallel, train)
        key = str(sections)
        if key not in self._done:
            self._done[key] = run_layout(self._path / "runs", self.data, **sections)
        run = self._done[key]
        assert isinstance(run, Run)
        return run

    def plain(self, parallel: Mapping[str, int] | None) -> PlainRun:
        """Rounded as in a layout, or not at all."""
        replicas = (
            {key: parallel[key] for key in ("dp", "zero", "shards") if key in parallel} if parallel else {}
        )
        key = f"plain {replicas}"
        if key not in self._done:
            config = small_config(self._path / "plain", train=TRAIN)
            trainer = partial(Replicas, parallel=replicas) if replicas else PlainTrainer
            self._done[key] = run_plain(config, self.data, trainer)
        run = self._done[key]
        assert isinstance(run, PlainRun)
        return run

    @staticmethod
    def _sections(schedule: str, parallel: Mapping[str, int], train: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "train": {**TRAIN, "reduce_dtype": "bf16", **train},
            "parallel": parallel,
            "overlap": overlap_of(schedule),
        }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("bf16"))


@pytest.mark.parametrize(
    ("schedule", "parallel", "tolerance"),
    CASES,
    ids=[f"{s}, {' x '.join(f'{a} {d}' for a, d in p.items())}" for s, p, _ in CASES],
)
def test_losses_are_those_of_plain_pytorch_that_rounds(
    runs: Runs, schedule: str, parallel: dict[str, int], tolerance: float
) -> None:
    run, plain = runs.of(schedule, parallel), runs.plain(parallel)
    assert len(run.losses) == STEPS
    assert run.losses == pytest.approx(plain.losses, rel=tolerance, abs=0)
    assert run.gradient_norms == pytest.approx(plain.gradient_norms, rel=10 * tolerance, abs=0)
    if tolerance == IN_ORDER:
        others = runs.plain(None).losses
        apart = max(abs(a - b) for a, b in zip(run.losses, plain.losses, strict=True))
        assert apart < max(abs(a - b) for a, b in zip(run.losses, others, strict=True)) / 3, "too easy a test"


def test_what_is_in_shares_changes_no_bit(runs: Runs) -> None:
    """Of two ranks that compute one micro-batch each there is one sum, in one order, whatever is in shares.

    Without clipping: the norm's squares are summed in another order.
    """
    one = {"global_batch": 4, "clip_norm": 0.0}
    first, *others = (runs.of("ddp", {"dp": 2, "zero": zero}, **one) for zero in range(4))
    for run in others:
        assert run.losses == first.losses
        parameters = run.parameters()
        assert not [n for n, own in first.parameters().items() if not torch.equal(own, parameters[n])]


@pytest.mark.parametrize(("pair"), [(0, 1), (2, 3)])
def test_shares_of_more_change_no_bit_where_sums_are_as_many(runs: Runs, pair: tuple[int, int]) -> None:
    """ZeRO 2 and 3 round the gradients of every pass, 0 and 1 those of all."""
    one, other = (runs.of("ddp", {"dp": 2, "zero": zero}, clip_norm=0.0) for zero in pair)
    assert one.losses == other.losses


@pytest.mark.parametrize(
    "parallel", [{"dp": 2}, {"dp": 4, "zero": 2, "shards": 2}, {"tp": 2, "dp": 2, "zero": 1}]
)
def test_half_the_bytes_of_gradients_travel(runs: Runs, parallel: dict[str, int]) -> None:
    """And as much as before of everything else."""
    moved = [moved_bytes(runs.of("ddp", parallel, reduce_dtype=dtype)) for dtype in (None, "bf16")]
    whole, rounded = moved
    assert whole.keys() == rounded.keys()
    assert any(name.startswith("gradients") for name in whole)
    for name, count in whole.items():
        assert rounded[name] == (count / 2 if name.startswith("gradients") else count), name


def moved_bytes(run: Run) -> dict[str, int]:
    """By rank and name, of all transfers of a step."""
    traces = read_folder(run.directory)
    found: dict[str, int] = {}
    for span in spans_of(traces.step(min(traces.steps))):
        if span.bytes:
            name = f"{span.operator} of rank {span.rank}"
            found[name] = found.get(name, 0) + span.bytes
    return found
