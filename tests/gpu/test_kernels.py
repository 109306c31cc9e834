"""Triton's kernels, operator by operator: against PyTorch in float64, and beside PyTorch's kernels in time.

An operator is tried as a layer uses it (`braid.kernels.trials`): forward pass, input and weight gradient.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from braid.actors.stage.measure.kernel_uses import uses
from braid.kernels.family import Kind, OperatorFamily, candidates
from braid.kernels.trials import _TRIALS, DeviceClock, Laboratory, Use, _Operands, _results
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.model.sizes import PartSizes
from tests.gpu.conftest import Finding, Lab
from tests.gpu.runtime import llama
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


def shapes(tiny: bool) -> tuple[ModelShape, ...]:
    """Layers that have all operators among them: of a Llama, a GPT and a mixture of experts.

    Rows that sums run over are at least 256 wide, so that they fill a warp, whose lanes then hold different
    columns. Lanes that share a column hold sums that differ in their last bits, and all write theirs
    (triton-lang/triton#7264), which a race checker reports.
    """
    tiny_widths = {"hidden": 256, "ffn": 512, "heads": 2, "kv_heads": 2}
    shape = llama(1, 16, 40, **tiny_widths) if tiny else llama(1, 8192, 128256)
    return (
        shape,
        replace(shape, family="gpt", kv_heads=shape.heads),
        replace(shape, family="moe", experts=4, top_k=2),
    )


def use_of(operator: str, lab: Lab) -> tuple[Use, Mapping[str, Kind]]:
    """The first place of an operator in those layers, and all implementations; skips if one is PyTorch's."""
    kinds = candidates(operator, lab.device, lab.dtype)
    if "triton" not in kinds:
        pytest.skip("Triton is not installed, or has no such kernel")
    every = (use for shape in shapes(lab.tiny) for use in uses(PartSizes(shape, ParallelLayout(), 1)))
    return next(use for use in every if use.operator == operator), kinds


def laboratory(lab: Lab, dtype: torch.dtype) -> Laboratory:
    clock = DeviceClock(lab.device)
    return Laboratory(device=lab.device, dtype=dtype, clock=clock, rounds=1 if lab.tiny else 21)


@torch.no_grad()
def results(use: Use, kinds: Mapping[str, Kind], lab: Lab, name: str) -> list[Tensor]:
    """All results of both passes by an implementation; ``float64``: by PyTorch's, on widened operands."""
    like, wide = laboratory(lab, lab.dtype)._made(use, kinds["torch"]), name == "float64"
    made = laboratory(lab, torch.float64 if wide else lab.dtype)
    operator = made._made(use, kinds["torch" if wide else name], like)
    operands = (_Wide if wide else _Operands)(lab.device, lab.dtype)
    return _results(_TRIALS[use.operator](use, operands), operator)


@pytest.mark.parametrize("operator", OPERATORS)
def test_right(operator: str, lab: Lab, finding: Finding) -> None:
    """A Triton kernel gives what PyTorch gives in float64, within what its own dtype can hold."""
    use, kinds = use_of(operator, lab)
    expected = results(use, kinds, lab, "float64")
    for name in ("torch", "triton"):
        pairs = [(a.double(), b) for a, b in zip(results(use, kinds, lab, name), expected, strict=True)]
        errors = (float((a - b).abs().max()) / (float(b.abs().max()) or 1.0) for a, b in pairs)
        finding.numbers[f"error of {name}"] = max(errors)
    finding.numbers["allowed"] = TOLERANCES[lab.dtype]
    assert finding.numbers["error of triton"] <= TOLERANCES[lab.dtype]


@pytest.mark.parametrize("operator", OPERATORS)
def test_fast(operator: str, lab: Lab, finding: Finding) -> None:
    """A Triton kernel takes no longer than PyTorch's, both passes together."""
    use, kinds = use_of(operator, lab)
    measured: Mapping[str, Any] = laboratory(lab, lab.dtype).measure([use], kinds)
    times = {name: ns for name, ns in measured.items() if isinstance(ns, int)}
    finding.numbers |= {f"{name} us": ns / 1e3 for name, ns in times.items()}
    torchs, tritons = ([ns for name, ns in times.items() if name.startswith(s)] for s in ("torch", "triton"))
    assert tritons, measured
    finding.timed(min(tritons) <= min(torchs) * (1 + NOISE), speed_up=min(torchs) / min(tritons))
