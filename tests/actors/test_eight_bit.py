"""AdamW in 8 bits: torchao's own arithmetic, and moments that are restored bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.actors.stage.state.adamw import EightBitAdamW, QuantisedMoment
from braid.scheduling.schedule.states import BLOCK, OptimizerStates, quantised_elements

torchao_optim = pytest.importorskip("torchao.optim")
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}


def drawn(seed: int, count: int, exponents: float) -> torch.Tensor:
    """Values of both signs and of very different sizes, some of them 0."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** (exponents * torch.rand(count, generator=generator) - exponents)
    values = torch.randn(count, generator=generator) * sizes
    return values * (torch.rand(count, generator=generator) > 0.1)


@given(seed=st.integers(0, 1 << 30), count=st.integers(1, 6000), exponents=st.floats(0, 12))
def test_values_that_were_read_are_written_without_a_change(seed: int, count: int, exponents: float) -> None:
    master = torch.zeros(count)
    for signed in (True, False):
        moment, other = (QuantisedMoment(master, signed=signed) for _ in range(2))
        values = drawn(seed, count, exponents)
        moment.write(values if signed else values.abs())
        kept = moment.read()
        other.write(kept)
        assert torch.equal(other.read(), kept)
        whole = quantised_elements(count)
        rest = (values if signed else values.abs())[whole:]
        assert torch.equal(kept[whole:], rest), "fewer elements than a block keep fp32"


@pytest.mark.parametrize("count", [10, 4095, 4096, 4097, 8000, 16 * BLOCK + 3])
def test_a_moment_takes_the_bytes_that_are_predicted(count: int) -> None:
    moments = [QuantisedMoment(torch.zeros(count), signed=signed) for signed in (True, False)]
    states = OptimizerStates("adamw_8bit")
    assert sum(moment.nbytes for moment in moments) == states.bytes(count, 4, matrix=True)


def test_whole_tensors_are_updated_as_the_library_does() -> None:
    """Bit for bit, where the library keeps all of a tensor in 8 bits or none of it."""
    tensors = [torch.randn(64, 128), torch.randn(32), torch.randn(40, 256)]
    ours = [torch.nn.Parameter(tensor.clone()) for tensor in tensors]
    theirs = [torch.nn.Parameter(tensor.clone()) for tensor in tensors]
    for tensor in ours:
        tensor.grad = torch.zeros_like(tensor)
    adamw = EightBitAdamW([(tensor, tensor.dim() > 1) for tensor in ours], 0.1, **SETTINGS)
    groups = [{"params": theirs[::2]}, {"params": theirs[1:2], "weight_decay": 0.0}]
    library = torchao_optim.AdamW8bit(groups, weight_decay=0.1, **SETTINGS)
    for step in range(4):
        for our, their in zip(ours, theirs, strict=True):
            their.grad = torch.randn_like(their)
            assert our.grad is not None
            our.grad.copy_(their.grad)
        for group in library.param_groups:
            group["lr"].fill_(1e-3 * (step + 1))
        with torch.compiler.set_stance("force_eager"):
            library.step()
        adamw.step(1e-3 * (step + 1))
        assert all(map(torch.equal, ours, theirs))
