"""Tensors that a kernel would read wrongly are refused by name; large, forbidden and wrong numbers.

That kernels do what PyTorch's operators do: `test_family`, `tests.kernels.test_trials`.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from braid.kernels.family import operator_family
from braid.kernels.triton import cross_entropy, launch, permute
from braid.kernels.triton.activation import TritonGELU
from braid.kernels.triton.cross_entropy import TritonCrossEntropyStatistics
from braid.kernels.triton.launch import check
from braid.kernels.triton.norm import TritonRMSNorm
from braid.kernels.triton.rotary import rotary
from tests.kernels.cases import DEVICE, assert_close

TRITON = operator_family("triton", DEVICE, torch.float32)


def f(*shape: int) -> Tensor:
    """Floats."""
    return torch.randn(shape, device=DEVICE)


def i(*values: int) -> Tensor:
    """int32 numbers."""
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(
    ("x", "dims", "says"),
    [
        (f(3, 5).double(), "TD", "has dtype torch.float64, not one of"),
        (f(3), "TD", r"has shape \(3,\), not any x any"),
        (f(3, 5), "TT", r"has shape \(3, 5\), not 3 x 3"),
        (f(5, 3).t(), "TD", "last dim must be contiguous"),
        (f(3, 6)[:, :5], "TD ", "must be contiguous"),
        (f(5, 1).t(), "TD", ""),
        (f(3, 6)[:, :5], "TD", ""),
    ],
)
def test_one_tensor(x: Tensor, dims: str, says: str) -> None:
    if not says:
        return check("kernel", x=(x, dims))
    with pytest.raises(ValueError, match=f"^kernel: x .*{says}"):
        check("kernel", x=(x, dims))
    return None


def test_several_tensors_and_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    check("kernel", x=(f(3, 5), "TD"), absent=(None, "D"), weight=(f(5), "D"), scale=(f(), ""))
    with pytest.raises(ValueError, match=r"weight has shape \(4,\), not 5"):
        check("kernel", x=(f(3, 5), "TD"), weight=(f(4), "D"))
    with pytest.raises(ValueError, match="weight is on meta, not on"):
        check("kernel", x=(f(3, 5), "TD"), weight=(f(5).to("meta"), "D"))
    monkeypatch.setattr(launch, "INTERPRETING", False)
    with pytest.raises(ValueError, match="x is on the CPU"):
        check("kernel", x=(torch.ones(3), "T"))


NORM = TRITON.rms_norm(hidden=5, eps=1e-5, device=DEVICE)
UNPERMUTE = TRITON.unpermute(experts=2, capacity=None)
STATISTICS = TRITON.cross_entropy_statistics(rows=5, first_row=0, vocabulary=9)
CHOICE, TARGETS = torch.tensor([[0, 1]] * 3, device=DEVICE), torch.tensor([0, 4, 2], device=DEVICE)
REFUSED: dict[str, Callable[[], Any]] = {
    "norm: weight": lambda: NORM(f(3, 6)),
    "norm: x has 40000 columns": lambda: TRITON.rms_norm(hidden=40000, eps=1, device=DEVICE)(f(3, 40000)),
    "norm_input_gradient: statistics": lambda: NORM.input_gradient(f(3, 5), f(3, 5), f(4, 1)),
    "swiglu_gradient: gu": lambda: TRITON.swiglu().input_gradient(f(3, 5), f(3, 12)),
    "rotary: k": lambda: rotary(f(2, 3, 4, 6), f(2, 3, 2, 8), f(2, 3, 2, 6), f(3, 3), f(3, 3), back=False),
    "gather_rows: gates": lambda: UNPERMUTE.input_gradient(f(3, 4), f(6, 4), f(3, 1), CHOICE),
    "gate_gradient: dy": lambda: UNPERMUTE.input_gradient(f(3, 5), f(6, 4), f(3, 2), CHOICE),
    "cross_entropy_statistics: targets": lambda: STATISTICS(f(4, 5), TARGETS),
    "cross_entropy_gradient: log_partition": lambda: STATISTICS.input_gradient(f(3, 5), f(4), TARGETS, 1.0),
}


@pytest.mark.parametrize("says", REFUSED)
@torch.no_grad()
def test_operators_say_which_tensor_does_not_fit(says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}"):
        REFUSED[says]()


def test_out_of_range_on_a_device_is_nan_not_garbage() -> None:
    """The kernels, which on a GPU are reached with wrong indices, neither crash nor make up numbers."""
    statistics = torch.empty(3, 3, device=DEVICE)
    logits, targets = f(3, 5), torch.tensor([-1, 2, 99], device=DEVICE)
    cross_entropy.statistics_kernel[(3,)](logits, targets, statistics, 5, 5, 0, 5, BLOCK=16)
    assert statistics[:, 2].isnan().tolist() == [True, False, True]
    out = torch.empty(3, 5, device=DEVICE)
    permute.gather_kernel[(3,)](logits, i(0, 6, -1), logits, out, 5, 5, 2, 6, 1, WEIGHTED=False, BLOCK=16)
    assert out.isnan().all(1).tolist() == [False, True, False]
    assert_close(out[0], logits[0].double(), 1e-5)
    permute.combine_kernel[(3,)](
        logits, i(0, 3, -1), logits, out, 5, 5, 3, 1, CHOICES=1, WEIGHTED=False, BLOCK=16
    )
    assert out.isnan().all(1).tolist() == [False, True, False]


def test_sums_over_many_tokens_are_the_same_bits_every_time():
    operator, x = TritonRMSNorm(hidden=20, eps=1e-5, device=DEVICE), f(700, 20)
    totals = torch.zeros(2, 20, device=DEVICE)
    for total in totals:
        operator.gradients["weight"] = total
        operator.weight_gradient(x, x, torch.ones(700, 1, device=DEVICE))
    assert totals[0].any()
    assert torch.equal(*totals)


def test_gelu_of_large_numbers():
    h = torch.tensor([[-300.0, -20.0, 20.0, 300.0]], device=DEVICE)
    assert_close(TritonGELU()(h)[0], torch.tensor([[0.0, 0.0, 20.0, 300.0]], device=DEVICE), 1e-5)
    (gradient,) = TritonGELU().input_gradient(torch.ones_like(h), h)
    assert_close(gradient, torch.tensor([[0.0, 0.0, 1.0, 1.0]], device=DEVICE), 1e-5)


def test_logits_that_forbid_tokens():
    """-inf stands for a forbidden token, also where a whole block is forbidden."""
    logits = torch.full((2, 9000), float("-inf"), device=DEVICE)
    logits[0, 8999], logits[1, 3], logits[1, 8000] = 1.0, 2.0, 2.0
    targets = torch.tensor([8999, 3], device=DEVICE)
    operator = TritonCrossEntropyStatistics(rows=9000, first_row=0, vocabulary=9000)
    (statistics,) = operator(logits, targets)
    assert statistics.tolist() == [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]
