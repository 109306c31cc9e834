"""Triton's kernels, operator by operator: against PyTorch in float64, and beside PyTorch's kernels in time.

An operator is tried as a layer uses it (`braid.kernels.trials`): forward pass, input and weight gradient.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from braid.actors.stage.kernel_choice import uses
from braid.kernels.clock import DeviceClock
from braid.kernels.family import Kind, OperatorFamily, candidates
from braid.kernels.trials import _TRIALS, Laboratory, Use, _Operands, _results
from braid.scheduling.sizes import part_sizes
from braid.scheduling.spec import ModelShape, ParallelLayout
from tests.gpu.conftest import Finding, Lab
from tests.gpu.test_schedules import NOISE

OPERATORS: Final = [field.name for field in fields(OperatorFamily)]
TOLERANCES: Final = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Largest error of a right kernel, of the largest number of a result, by the dtype of its operands."""


class _Wide(_Operands):
    """The same numbers, widened."""

    def random(self, *shape: int) -> Tensor:
        return super().random(*shape).double()

    def routing(self, count: int, experts: int, choices: int) -> tuple[Tensor, Tensor]:
        chosen, gates = super().routing(count, experts, choices)
        return chosen, gates.double()


def shapes(tiny: bool) -> Iterator[ModelShape]:
    """Layers that have all operators among them: of a Llama, a GPT and a mixture of experts.

    Rows that sums run over are at least 256 wide, so that they fill a warp, whose lanes then hold different
    columns. Lanes that share a column hold sums that differ in their last bits, and all write theirs
    (triton-lang/triton#7264), which a race checker reports.
    """
    names = ("hidden", "ffn", "heads", "kv_heads", "vocabulary", "sequence")
    sizes = dict(
        zip(names, (256, 512, 2, 2, 40, 16) if tiny else (4096, 14336, 32, 8, 128256, 8192), strict=True)
    )
    yield ModelShape(family="llama", layers=1, head_dim=128, **sizes)
    yield ModelShape(family="gpt", layers=1, head_dim=128, **{**sizes, "kv_heads": sizes["heads"]})
    yield ModelShape(family="moe", layers=1, head_dim=128, experts=4, top_k=2, **sizes)


def use_of(operator: str, lab: Lab) -> tuple[Use, Mapping[str, Kind]]:
    """The first place of an operator in those layers, and all implementations; skips if one is PyTorch's."""
    kinds = candidates(operator, lab.device, lab.dtype)
    if "triton" not in kinds:
        pytest.skip("Triton is not installed, or has no such kernel")
    every = (use for shape in shapes(lab.tiny) for use in uses(part_sizes(shape, ParallelLayout(), 1)))
    return next(use for use in every if use.operator == operator), kinds


def laboratory(lab: Lab, dtype: torch.dtype) -> Laboratory:
    clock = DeviceClock(lab.device)
    return Laboratory(device=lab.device, dtype=dtype, clock=clock, rounds=1 if lab.tiny else 21)


@torch.no_grad()
def results(use: Use, kinds: Mapping[str, Kind], lab: Lab, name: str) -> list[Tensor]:
    """All results of both passes by an implementation; ``float64``: by PyTorch's, on widened operands."""
    like = laboratory(lab, lab.dtype)._made(use, kinds["torch"])
    if name == "float64":
        operator = laboratory(lab, torch.float64)._made(use, kinds["torch"], like)
        return _results(_TRIALS[use.operator](use, _Wide(lab.device, lab.dtype)), operator)
    operator = laboratory(lab, lab.dtype)._made(use, kinds[name], like)
    return _results(_TRIALS[use.operator](use, _Operands(lab.device, lab.dtype)), operator)


@pytest.mark.parametrize("operator", OPERATORS)
def test_right(operator: str, lab: Lab, finding: Finding) -> None:
    """A Triton kernel gives what PyTorch gives in float64, within what its own dtype can hold."""
    use, kinds = use_of(operator, lab)
    expected = results(use, kinds, lab, "float64")
    for name in ("torch", "triton"):
        pairs = zip(results(use, kinds, lab, name), expected, strict=True)
        finding.numbers[f"error of {name}"] = max(_error(one, other) for one, other in pairs)
    finding.numbers["allowed"] = TOLERANCES[lab.dtype]
    assert finding.numbers["error of triton"] <= TOLERANCES[lab.dtype]


def _error(one: Tensor, other: Tensor) -> float:
    """The largest difference, of the largest number."""
    return float((one.double() - other).abs().max()) / (float(other.abs().max()) or 1.0)


@pytest.mark.parametrize("operator", OPERATORS)
def test_fast(operator: str, lab: Lab, finding: Finding) -> None:
    """A Triton kernel takes no longer than PyTorch's, both passes together."""
    measured: Mapping[str, Any] = laboratory(lab, lab.dtype).measure(
        [(use := use_of(operator, lab))[0]], use[1]
    )
    times = {name: ns for name, ns in measured.items() if isinstance(ns, int)}
    finding.numbers |= {f"{name} us": ns / 1e3 for name, ns in times.items()}
    torchs, tritons = ([ns for name, ns in times.items() if name.startswith(s)] for s in ("torch", "triton"))
    assert tritons, measured
    finding.timed(min(tritons) <= min(torchs) * (1 + NOISE), speed_up=min(torchs) / min(tritons))
