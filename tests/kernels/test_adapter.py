"""A linear map with adapters against autograd, whole and in parts of its width."""

import random

import pytest
import torch
from torch import Tensor

from braid.kernels.operators.adapter import AdaptedLinear

T, INPUTS, OUTPUTS = 7, 10, 12
ADAPTED = {
    "all": [range(OUTPUTS)],
    "three in one": [range(6), range(6, 9), range(9, 12)],
    "the last": [range(9, 12)],
    "some": [range(6), range(9, 12)],
}


def operator(adapted: list[range], *, bias: bool) -> AdaptedLinear:
    """With random values, in float64."""
    sizes = {"inputs": INPUTS, "outputs": OUTPUTS, "rank": 2, "scale": random.uniform(0.3, 3)}
    found = AdaptedLinear(bias=bias, adapted=adapted, dtype=torch.float64, **sizes)  # type: ignore[arg-type]
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter)
    return found


def written_out(op: AdaptedLinear, adapted: list[range], x: Tensor) -> Tensor:
    """The same with one dense matrix."""
    dense, row = torch.zeros(OUTPUTS, INPUTS, dtype=torch.float64), 0
    for number, rows in enumerate(adapted):
        factors = op.b[row : row + len(rows)] @ op.a[2 * number : 2 * number + 2]
        dense = dense.index_put((torch.tensor([*rows]),), factors)
        row += len(rows)
    return torch.nn.functional.linear(x, op.weight + op._scale * dense, op.bias)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("case", ADAPTED)
def test_as_autograd(case: str, bias: bool) -> None:
    adapted = ADAPTED[case]
    op = operator(adapted, bias=bias)
    x = torch.randn(T, INPUTS, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(T, OUTPUTS, dtype=torch.float64)
    expected = written_out(op, adapted, x)
    expected.backward(dy)
    op.gradients = {name: torch.ones_like(getattr(op, name)) for name in "ab"}
    with torch.no_grad():
        close(op(x)[0], expected)
        close(op.input_gradient(dy)[0], x.grad)
        op.weight_gradient(dy, x)
        for name in "ab":
            close(op.gradients[name] - 1, getattr(op, name).grad)
        cut = random.randrange(1, OUTPUTS)
        parts = slice(0, cut), slice(cut, OUTPUTS)
        close(torch.cat([op(x, outputs=part)[0] for part in parts], 1), expected)
        close(sum(op.input_gradient(dy[:, part], outputs=part)[0] for part in parts), x.grad)
        cut = random.randrange(1, INPUTS)
        parts = slice(0, cut), slice(cut, INPUTS)
        close(sum(op(x[:, part], inputs=part)[0] for part in parts), expected)
        close(torch.cat([op.input_gradient(dy, inputs=part)[0] for part in parts], 1), x.grad)


def close(ours: Tensor | int, expected: Tensor | None) -> None:
    """Within rounding."""
    assert isinstance(ours, Tensor)
    assert expected is not None
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
