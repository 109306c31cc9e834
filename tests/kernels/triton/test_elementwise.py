"""What kernels do with large numbers, other strides and many tokens; rotary embedding against float64.

That norms, activations, cross-entropy do what PyTorch's operators do: `test_family`,
`tests.kernels.test_cross_entropy`; permutation: `tests.kernels.test_permute`.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from braid.kernels.triton.activation import TritonGELU
from braid.kernels.triton.cross_entropy import TritonCrossEntropyStatistics
from braid.kernels.triton.norm import TritonRMSNorm
from braid.kernels.triton.rotary import rotary
from tests.kernels.triton.cases import DEVICE, assert_near, dtypes, fresh, normal, seeds


def test_sums_over_many_tokens_are_the_same_bits_every_time():
    operator, x = TritonRMSNorm(hidden=20, eps=1e-5, device=DEVICE), normal(700, 20)
    totals = torch.zeros(2, 20, device=DEVICE)
    for total in totals:
        operator.gradients["weight"] = total
        operator.weight_gradient(x, x, torch.ones(700, 1, device=DEVICE))
    assert totals[0].any()
    assert torch.equal(*totals)


def test_gelu_of_large_numbers():
    h = torch.tensor([[-300.0, -20.0, 20.0, 300.0]], device=DEVICE)
    assert_near(TritonGELU()(h)[0], torch.tensor([[0.0, 0.0, 20.0, 300.0]], device=DEVICE), torch.float32)
    (gradient,) = TritonGELU().input_gradient(torch.ones_like(h), h)
    assert_near(gradient, torch.tensor([[0.0, 0.0, 1.0, 1.0]], device=DEVICE), torch.float32)


def reference_rotary(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries and keys turned, and values, side by side; sin of the other sign turns back."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = []
    for x in (q, k):
        first, second = x.chunk(2, dim=-1)
        turned.append(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
    return torch.cat((*turned, v), dim=2).flatten(2).flatten(0, 1)


@given(
    seed=seeds,
    b=st.integers(0, 2),
    s=st.integers(1, 4),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    half=st.sampled_from([1, 3, 8]),
    dtype=dtypes,
    back=st.booleans(),
)
@fresh
def test_rotary(seed, b, s, heads, half, dtype, back):
    torch.manual_seed(seed)
    n, k = heads
    q, k, v = (normal(b, count, s, 2 * half, dtype=dtype).transpose(1, 2) for count in (n, k, k))
    angles = torch.randn(s, half, device=DEVICE)
    cos, sin = angles.cos(), angles.sin()
    wide = (x.double() for x in (q, k, v, cos, -sin if back else sin))
    expected = reference_rotary(*wide)
    assert_near(rotary(q, k, v, cos, sin, back=back), expected, dtype)


def test_logits_that_forbid_tokens():
    """-inf stands for a forbidden token, also where a whole block is forbidden."""
    logits = torch.full((2, 9000), float("-inf"), device=DEVICE)
    logits[0, 8999], logits[1, 3], logits[1, 8000] = 1.0, 2.0, 2.0
    targets = torch.tensor([8999, 3], device=DEVICE)
    operator = TritonCrossEntropyStatistics(rows=9000, first_row=0, vocabulary=9000)
    (statistics,) = operator(logits, targets)
    assert statistics.tolist() == [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]
