"""Dropout: masks are those of NumPy's splitmix64; gradients are autograd's.

Legend: t tokens, D features.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from braid.kernels.operators import dropout
from braid.kernels.operators.dropout import Dropout, dropped, site_number, token_numbers
from braid.kernels.operators.linear import Residual
from tests.end_to_end.plain_regularisation import keeps

SITES = [(-1, "embedding_dropout"), (0, "attention_residual"), (0, "mlp_residual"), (1, "mlp_residual")]


def mask(seed: int, places: Tensor, site: tuple[int, str], width: int, rate: float) -> Tensor:
    """Which features of tokens are kept, t x D."""
    ones_tD = torch.ones(len(places), width, dtype=torch.float64)
    return dropped(ones_tD, token_numbers(seed, places), site_number(*site), rate) != 0


@given(
    seed=st.integers(0, 2**32 - 1),
    first=st.integers(0, 2**62),
    tokens=st.integers(1, 9),
    width=st.integers(1, 19),
    rate=st.floats(0.001, 0.999),
    site=st.sampled_from(SITES),
)
def test_masks_are_those_of_another_implementation(
    seed: int, first: int, tokens: int, width: int, rate: float, site: tuple[int, str]
) -> None:
    places = torch.arange(first, first + tokens)
    expected = keeps(seed, places.numpy(), f"{site[0]}/{site[1]}", width, rate)
    x_tD = torch.randn(tokens, width, dtype=torch.float64)
    scaled_tD = torch.where(torch.from_numpy(expected), x_tD / (1 - round(rate * 2**16) / 2**16), 0)
    actual_tD = dropped(x_tD, token_numbers(seed, places), site_number(*site), rate)
    torch.testing.assert_close(actual_tD, scaled_tD, rtol=1e-13, atol=0)


def test_sites_have_numbers_of_their_own() -> None:
    names = [(layer, name) for layer in range(-1, 200) for name in ("attention_residual", "mlp_residual")]
    assert len({site_number(*name) for name in names}) == len(names)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_tokens_in_parts_have_the_masks_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    x_tD, numbers_t = torch.randn(50, 24).to(dtype), token_numbers(5, torch.arange(50))
    whole_tD = dropped(x_tD, numbers_t, 9, 0.3)
    assert whole_tD.dtype == dtype
    parts = [dropped(x_tD[part], numbers_t[part], 9, 0.3) for part in (slice(13), slice(13, 50))]
    assert torch.equal(torch.cat(parts), whole_tD)
    monkeypatch.setitem(dropout._CHUNK_WORDS, "cpu", 1)
    assert torch.equal(dropped(x_tD, numbers_t, 9, 0.3), whole_tD)


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_those_of_autograd(bias: bool) -> None:
    branch, x, dy = (torch.randn(7, 10, dtype=torch.float64) for _ in range(3))
    numbers_t = token_numbers(1, torch.arange(7))
    residual = Residual(hidden=10, bias=bias, dropout=0.4, dtype=torch.float64)
    residual.site = site_number(2, "mlp_residual")
    leaves = [branch.clone().requires_grad_(), x.clone().requires_grad_()]
    kept = mask(1, torch.arange(7), (2, "mlp_residual"), 10, 0.4)
    added = leaves[0]
    if residual.bias is not None:
        torch.nn.init.normal_(residual.bias)
        residual.gradients["bias"] = torch.zeros(10, dtype=torch.float64)
        leaves.append(residual.bias)
        added = added + residual.bias
    y = leaves[1] + added * kept / (1 - round(0.4 * 2**16) / 2**16)
    expected = torch.autograd.grad(y, leaves, dy)
    with torch.no_grad():
        torch.testing.assert_close(residual(branch, x, numbers_t), (y.detach(),))
        torch.testing.assert_close(residual.input_gradient(dy, numbers_t), expected[:2])
        if bias:
            residual.weight_gradient(dy, numbers_t)
            torch.testing.assert_close(residual.gradients["bias"], expected[2])


def test_without_numbers_nothing_is_dropped() -> None:
    """As in validation."""
    x = torch.randn(4, 6)
    assert Dropout(0.5)(x) == (x,)
    (y,) = Residual(hidden=6, bias=False, dropout=0.5)(x, x)
    assert torch.equal(y, x + x)
