"""Gradients of 16-bit operands in a wider sum: the way that is taken, what it asks of torch, precision."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from braid.kernels.operators import accumulation
from braid.kernels.operators.accumulation import (
    accumulate_product,
    beside_the_product,
    inside_the_product,
    rounded_first,
    way_to_accumulate,
)
from braid.kernels.operators.linear import Linear

BF16, FP32 = torch.bfloat16, torch.float32
ELSEWHERE = "meta"
"""Stands for a device that is not the CPU; its tensors have no numbers, but torch's operators check them."""


class Calls(TorchDispatchMode):
    """Keeps which operators of torch are called, with what, and what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, tuple[Any, ...], Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, values: Any = (), named: Any = None) -> Any:
        result = function(*values, **(named or {}))
        if function is not torch.ops.aten.t.default:
            self.made.append((function, values, result))
        return result

    @property
    def names(self) -> list[str]:
        return [str(function) for function, _, _ in self.made]


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Any]]:
    """The ways that work on the device elsewhere; all tests begin with none."""
    ways: set[Any] = set()
    monkeypatch.setattr(accumulation, "_works", lambda way, *where: way in ways)
    way_to_accumulate.cache_clear()
    yield ways
    way_to_accumulate.cache_clear()


def accumulated(device: str) -> tuple[Tensor, Calls]:
    """The sum and the calls of one accumulation of 5 x 3 outputs over 4 tokens."""
    total = torch.zeros(5, 3, device=device)
    dy, x = (torch.ones(4, size, dtype=BF16, device=device) for size in (5, 3))
    with Calls() as calls:
        accumulate_product(total, dy, x)
    return total, calls


def test_the_sum_is_formed_inside_the_product_where_torch_offers_it(offered: set[Any]) -> None:
    offered |= {inside_the_product, beside_the_product}
    total, calls = accumulated(ELSEWHERE)
    assert calls.names == ["aten.addmm.dtype_out"]
    ((_, (begins_with, dy_OT, x_TI, dtype), result),) = calls.made
    assert begins_with is total, "it adds to what is there"
    assert result is total, "in place: nothing of its size is made"
    assert (dy_OT.shape, x_TI.shape, dy_OT.dtype, dtype) == ((5, 4), (4, 3), BF16, FP32)


def test_else_the_product_is_not_rounded_and_else_as_on_the_cpu(offered: set[Any]) -> None:
    rounded = ["aten.mm.default", "aten.add_.Tensor"]
    assert accumulated(ELSEWHERE)[1].names == rounded
    way_to_accumulate.cache_clear()
    offered |= {beside_the_product}
    total, calls = accumulated(ELSEWHERE)
    assert calls.names == ["aten.mm.dtype", "aten.add_.Tensor"]
    assert calls.made[0][2].dtype == FP32
    assert calls.made[1][2] is total
    assert accumulated("cpu")[1].names == rounded, "the CPU keeps its bits whatever torch offers"


def test_a_linear_map_asks_before_any_step_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(accumulation, "_works", lambda *question: bool(asked.append(question)))
    way_to_accumulate.cache_clear()
    there = {"bias": False, "device": torch.device(ELSEWHERE), "dtype": BF16}
    linear = Linear(inputs=3, outputs=5, **there)
    tried = [(way, ELSEWHERE, BF16, FP32) for way in (inside_the_product, beside_the_product)]
    assert asked == tried
    linear.gradients["weight"] = torch.zeros(5, 3, device=ELSEWHERE)
    linear.weight_gradient(*(torch.ones(4, size, dtype=BF16, device=ELSEWHERE) for size in (5, 3)))
    Linear(inputs=2, outputs=2, **there)
    Linear(inputs=2, outputs=2, bias=False, dtype=FP32)
    assert asked == tried
    way_to_accumulate.cache_clear()


# What a trial tells: emulations of ways that are right, and of ways that are wrong.


def precise(total: Tensor, a: Tensor, b: Tensor) -> None:
    """What a fused way computes: products of 16-bit numbers are exact in fp32, and are added in fp32."""
    total.addmm_(a.float(), b.float())


def forgetful(total: Tensor, a: Tensor, b: Tensor) -> None:
    total.copy_(a.float() @ b.float())


def fails(error: type[Exception]) -> Any:
    def way(total: Tensor, a: Tensor, b: Tensor) -> None:
        raise error("no such kernel")

    return way


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
def test_a_trial_finds_ways_that_round_forget_or_do_not_run(narrow: torch.dtype) -> None:
    assert accumulation._works(precise, "cpu", narrow, FP32)
    for way in (rounded_first, forgetful, fails(NotImplementedError), fails(TypeError)):
        assert not accumulation._works(way, "cpu", narrow, FP32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_sums_inside_the_product() -> None:
    assert way_to_accumulate("cuda", BF16, FP32) is inside_the_product
    torch.manual_seed(0)
    dy, x, total = torch.randn(64, 24).to(BF16), torch.randn(64, 32).to(BF16), torch.randn(24, 32)
    on_gpu = total.cuda()
    accumulate_product(on_gpu, dy.cuda(), x.cuda())
    exact = total.double() + dy.t().double() @ x.double()
    assert float((on_gpu.cpu() - exact).abs().max() / exact.abs().max()) < 1e-6
