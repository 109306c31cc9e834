"""Torch's switches for arithmetic are what the configuration says, whatever a run before has set."""

from collections.abc import Iterator

import pytest
import torch

from braid.actors.stage.devices import set_arithmetic


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    tf32 = torch.backends.cuda.matmul.allow_tf32
    yield
    set_arithmetic(deterministic=deterministic, tf32=tf32)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("tf32", [True, False])
def test_switches(deterministic: bool, tf32: bool) -> None:
    for turn in (not deterministic, deterministic):
        set_arithmetic(deterministic=turn, tf32=tf32 == (turn == deterministic))
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    assert torch.backends.cuda.matmul.allow_tf32 == tf32
