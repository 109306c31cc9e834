"""Gradients of 16-bit operands in a wider sum: what is asked of torch, and how precise it is."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from braid.kernels.operators.accumulation import accumulate_product

BF16 = torch.bfloat16


class Calls(TorchDispatchMode):
    """Keeps the names of torch's operators that are called, and what the last one returns."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.result: object = None

    def __torch_dispatch__(self, function, types, values=(), named=None):  # type: ignore[no-untyped-def]
        self.result = function(*values, **(named or {}))
        if function is not torch.ops.aten.t.default:
            self.names.append(str(function))
        return self.result


@pytest.mark.parametrize(
    ("device", "names"),
    [("meta", ["aten.addmm.dtype_out"]), ("cpu", ["aten.mm.default", "aten.add_.Tensor"])],
    ids=["inside the product on a GPU", "behind the product on a CPU"],
)
def test_a_sum_is_added_to_in_place(device: str, names: list[str]) -> None:
    """The device "meta" stands for a GPU: its tensors have no numbers, but torch's operators check them."""
    total = torch.zeros(5, 3, device=device)
    dy, x = (torch.ones(4, size, dtype=BF16, device=device) for size in (5, 3))
    with Calls() as calls:
        accumulate_product(total, dy, x)
    assert calls.names == names
    assert calls.result is total


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_sums_without_rounding() -> None:
    torch.manual_seed(0)
    dy, x, total = torch.randn(64, 24).to(BF16), torch.randn(64, 32).to(BF16), torch.randn(24, 32)
    on_gpu = total.cuda()
    accumulate_product(on_gpu, dy.cuda(), x.cuda())
    exact = total.double() + dy.t().double() @ x.double()
    assert float((on_gpu.cpu() - exact).abs().max() / exact.abs().max()) < 1e-6
