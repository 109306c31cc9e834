"""Linear maps of experts against one einsum over all rows, each with its expert's matrix, in float64.

Legend: n rows, I input and O output features, E experts.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.kernels.operators.grouped_linear import GroupedLinear
from tests.kernels.cases import TOLERANCE, assert_close, normal, prepare, wide_leaf


def check(sizes: list[int], inputs: int, outputs: int, dtype: torch.dtype, form: type) -> None:
    """Compare output, input gradient and twice accumulated weight gradient with autograd."""
    operator = GroupedLinear(experts=len(sizes), inputs=inputs, outputs=outputs, dtype=dtype)
    before = prepare(operator, torch.promote_types(dtype, torch.float32))["weight"]
    told = torch.tensor(sizes) if form is torch.Tensor else form(sizes)
    x_nI, dy_nO = (normal(sum(sizes), width, dtype=dtype) for width in (inputs, outputs))
    x, weight = wide_leaf(x_nI), wide_leaf(operator.weight)
    expert_n = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    y = torch.einsum("ni,noi->no", x, weight[expert_n])
    d_x, d_weight = torch.autograd.grad(y, (x, weight), dy_nO.double())
    kept = [x_nI.clone(), dy_nO.clone()]
    with torch.no_grad():
        (y_nO,) = operator(x_nI, told)
        (dx_nI,) = operator.input_gradient(dy_nO, told)
        for _ in range(2):
            operator.weight_gradient(dy_nO, x_nI, told)
    assert y_nO.dtype == dx_nI.dtype == dtype
    assert_close(y_nO, y, TOLERANCE[dtype])
    assert_close(dx_nI, d_x, TOLERANCE[dtype])
    assert_close(operator.gradients["weight"], before + 2 * d_weight, TOLERANCE[dtype])
    unvisited = [expert for expert, size in enumerate(sizes) if not size]
    assert torch.equal(operator.gradients["weight"][unvisited], before[unvisited])
    assert all(map(torch.equal, (x_nI, dy_nO), kept))


@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    inputs=st.integers(1, 9),
    outputs=st.integers(1, 9),
    form=st.sampled_from([list, tuple, torch.Tensor]),
)
@settings(max_examples=100, deadline=None)
def test_equals_autograd(seed, sizes, inputs, outputs, form):
    torch.manual_seed(seed)
    check(sizes, inputs, outputs, torch.float64, form)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [[90, 0, 3, 1], [0, 0, 64, 0], [0, 0]], ids=str)
def test_narrow_dtypes_accumulate_in_fp32(dtype, sizes):
    torch.manual_seed(0)
    check(sizes, 33, 48, dtype, list)


@torch.no_grad()
def test_one_kernel_for_all_experts_gives_what_products_one_by_one_give(monkeypatch):
    """The same operands, layouts and ends of rows as on a GPU; also after other sizes."""
    torch.manual_seed(0)
    operator = GroupedLinear(experts=4, inputs=16, outputs=24, dtype=torch.bfloat16)
    prepare(operator, torch.float32)
    for sizes in ([5, 0, 2, 1], [5, 0, 2, 1], [0, 8, 0, 0]):
        x_nI, dy_nO = normal(8, 16, dtype=torch.bfloat16), normal(8, 24, dtype=torch.bfloat16)
        assert not operator._at_once(x_nI)
        expected = *operator(x_nI, sizes), *operator.input_gradient(dy_nO, sizes)
        with monkeypatch.context() as patch:
            patch.setattr(operator, "_at_once", lambda x: True)
            actual = *operator(x_nI, sizes), *operator.input_gradient(dy_nO, sizes)
        for mine, other in zip(actual, expected, strict=True):
            assert mine.stride() == other.stride()
            assert_close(mine, other, TOLERANCE[torch.bfloat16])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@torch.no_grad()
def test_a_gpu_does_all_experts_at_once():
    torch.manual_seed(0)
    device, sizes = torch.device("cuda"), [5, 0, 250, 1]
    operator = GroupedLinear(experts=4, inputs=64, outputs=48, device=device, dtype=torch.bfloat16)
    torch.nn.init.normal_(operator.weight)
    x_nI, dy_nO = (normal(256, width, dtype=torch.bfloat16).to(device) for width in (64, 48))
    assert operator._at_once(x_nI) == (torch.cuda.get_device_capability()[0] in (9, 10))
    (y_nO,), (dx_nI,) = operator(x_nI, sizes), operator.input_gradient(dy_nO, sizes)
    for expert, rows in operator._segments(x_nI, sizes):
        weight = operator.weight[expert].double()
        assert_close(y_nO[rows], x_nI[rows].double() @ weight.t(), 1e-2)
        assert_close(dx_nI[rows], dy_nO[rows].double() @ weight, 1e-2)


@pytest.mark.parametrize(
    "sizes",
    [(2, 2), torch.tensor([2, 4]), (5,), (6, -1)],
    ids=str,
)
@torch.no_grad()
def test_sizes_that_are_not_the_rows_are_refused(sizes):
    operator = GroupedLinear(experts=2, inputs=3, outputs=3)
    x = torch.zeros(5, 3)
    for call in (operator.forward, operator.input_gradient, lambda x, n: operator.weight_gradient(x, x, n)):
        with pytest.raises(ValueError, match=r"sizes=\[.*\] are not the 5 rows of experts=2"):
            call(x, sizes)


@torch.no_grad()
def test_small_gradients_are_not_lost_in_a_large_sum():
    operator = GroupedLinear(experts=2, inputs=1, outputs=1, dtype=torch.bfloat16)
    assert operator.weight.shape == (2, 1, 1)
    operator.gradients["weight"] = torch.full((2, 1, 1), 256.0)
    ones = torch.ones(3, 1, dtype=torch.bfloat16)
    for _ in range(8):
        operator.weight_gradient(0.125 * ones, ones, (2, 1))
    assert operator.gradients["weight"].flatten().tolist() == [258, 257]
