"""Trials of implementations: that all operators can be tried, and what is found out about a wrong one.

Triton's run in its interpreter; the clock is one of our own.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from braid.kernels.family import TORCH, candidates
from braid.kernels.operators.activation import SwiGLU
from braid.kernels.operators.norm import RMSNorm
from braid.kernels.operators.operator import ComputeOperator
from braid.kernels.trials import Laboratory, Use

CPU = torch.device("cpu")


def use_of(operator: str, tokens: int = 12, times: int = 1, **more: Any) -> Use:
    """A use with settings; ``width`` and ``choices`` are not among them."""
    sizes = {name: more.pop(name) for name in ("width", "choices") if name in more}
    return Use(operator=operator, tokens=tokens, times=times, settings=more, **sizes)


USES = (
    *(use_of(operator, hidden=24, eps=1e-5) for operator in ("rms_norm", "layer_norm")),
    *(use_of(operator, width=20) for operator in ("swiglu", "gelu")),
    *(
        use_of(operator, experts=5, capacity=capacity, width=33, choices=2)
        for operator in ("permute", "unpermute")
        for capacity in (None, 3)
    ),
    use_of("attention", heads=4, kv_heads=2, head_dim=8, sequence=6, rotary_base=100.0),
    use_of("cross_entropy_statistics", rows=30, first_row=10, vocabulary=50),
    use_of(
        "cross_entropy_statistics", rows=30, first_row=10, vocabulary=50, label_smoothing=0.1, z_loss=0.01
    ),
)
SWIGLU = use_of("swiglu", tokens=5, width=7)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tries the CPU's implementations")


class SetClock:
    """Runs what is timed; it takes as long as the operator's class says, else a microsecond."""

    def __init__(self, times_ns: Mapping[type, int] | None = None) -> None:
        self._times_ns, self.calls = times_ns or {}, 0

    def ns(self, call: Callable[[], object]) -> int:
        """What was set."""
        call()
        self.calls += 1
        return self._times_ns.get(type(call.args[0]), 1000)  # type: ignore[attr-defined]


def laboratory(dtype: torch.dtype = torch.float32, clock: SetClock | None = None) -> Laboratory:
    return Laboratory(device=CPU, dtype=dtype, clock=clock or SetClock(), rounds=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("use", USES, ids=lambda use: f"{use.operator} {use.settings.get('capacity', '')}")
def test_torch_and_triton_agree_everywhere(use: Use, dtype: torch.dtype) -> None:
    kinds = candidates(use.operator, CPU, dtype)
    measured = laboratory(dtype).measure([use], kinds)
    assert list(measured) == list(kinds)
    assert (measured["torch"], measured["triton"]) == (1000, 1000)
    if use.operator == "attention":  # of torch's kernels the CPU has one
        assert (measured["torch+flash"], measured["triton+flash"]) == (1000, 1000)
        assert "RuntimeError" in str(measured["torch+cudnn"])
        assert "RuntimeError" in str(measured["triton+efficient"])


class Quick(SwiGLU):
    """Right, and another class."""


class Wrong(SwiGLU):
    """Off by a little in the gradient."""

    def input_gradient(self, d_a_TF: Tensor, gu_T2F: Tensor) -> tuple[Tensor]:
        (d_gu,) = super().input_gradient(d_a_TF, gu_T2F)
        return (d_gu * 1.001,)


class NoNumber(SwiGLU):
    def forward(self, gu_T2F: Tensor) -> tuple[Tensor]:
        return (super().forward(gu_T2F)[0] * torch.nan,)


class Wide(SwiGLU):
    def forward(self, gu_T2F: Tensor) -> tuple[Tensor]:
        return (super().forward(gu_T2F)[0].double(),)


class Broken(SwiGLU):
    def forward(self, gu_T2F: Tensor) -> tuple[Tensor]:
        raise RuntimeError("no such kernel\non this card")


class Tired(SwiGLU):
    """Fails at its third call: not when results are compared."""

    calls = 0

    def forward(self, gu_T2F: Tensor) -> tuple[Tensor]:
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("no memory")
        return super().forward(gu_T2F)


def test_what_disagrees_or_fails_is_out_and_says_why() -> None:
    others = {kind.__name__: kind for kind in (Quick, Wrong, NoNumber, Wide, Broken, Tired)}
    measured = laboratory(clock=SetClock({Quick: 10})).measure([SWIGLU], {"torch": SwiGLU, **others})
    assert (measured["torch"], measured["Quick"]) == (1000, 10)
    assert "result 2 is off by 0.00" in str(measured["Wrong"])
    assert "result 1 is off by nan" in str(measured["NoNumber"])
    assert "result 1 is torch.float64" in str(measured["Wide"])
    assert measured["Broken"] == "RuntimeError: no such kernel"
    assert measured["Tired"] == "RuntimeError: no memory"
    wide = laboratory(torch.bfloat16).measure([SWIGLU], {"torch": SwiGLU, "Wrong": Wrong})
    assert wide["Wrong"] == 1000, "within a rounding of bf16"


def test_gradients_of_parameters_must_agree_too() -> None:
    class Forgetful(RMSNorm):
        def weight_gradient(self, dy_tD: Tensor, *more: Any) -> None:
            super().weight_gradient(dy_tD.flip(0), *more)

    use = use_of("rms_norm", tokens=5, hidden=4, eps=1e-5)
    measured = laboratory().measure([use], {"torch": RMSNorm, "other": Forgetful})
    assert "result 4 is off" in str(measured["other"])


def test_all_places_count_and_one_that_fails_is_enough() -> None:
    def narrow(**settings: Any) -> ComputeOperator:
        if settings["hidden"] > 3:
            raise ValueError("too wide")
        return RMSNorm(**settings)

    uses = [use_of("rms_norm", 5, times, hidden=size, eps=1e-5) for size, times in ((3, 4), (9, 3))]
    clock = SetClock()
    measured = laboratory(clock=clock).measure(uses, {"torch": RMSNorm, "narrow": narrow})
    assert measured == {"torch": 7000, "narrow": "ValueError: too wide"}
    assert clock.calls == 3 * (2 + 1)


def test_where_pytorch_itself_fails_nothing_is_chosen() -> None:
    measured = laboratory().measure([SWIGLU], {"torch": Broken, "Quick": Quick})
    assert set(measured.values()) == {"RuntimeError: no such kernel"}


def test_the_generator_of_the_run_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    for use in USES:
        laboratory().measure([use], {"torch": getattr(TORCH, use.operator)})
    assert torch.equal(torch.random.get_rng_state(), before)
