"""Random inputs for kernels, and how their results are compared with float64.

On a machine with a GPU the kernels run there; elsewhere in Triton's interpreter (see `tests/conftest.py`).
"""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.cases import assert_close

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from([torch.float32, torch.float32, torch.float16, torch.bfloat16])
fresh = settings(max_examples=6, deadline=None)
"""The interpreter is slow: few examples of small shapes, other ones every time."""


def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Random numbers; of a matrix, some have rows farther apart than they are long."""
    gap = int(torch.randint(3, ())) if len(shape) == 2 else 0
    *outer, last = shape
    wide = torch.randn((*outer, last + gap), device=DEVICE) * scale
    return wide.to(dtype)[..., :last]


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Equal within the dtype's tolerance of the largest expected element (of 1, if that is larger)."""
    assert_close(actual, expected.detach(), TOLERANCE[dtype])
