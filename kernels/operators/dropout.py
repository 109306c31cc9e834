"""Dropout whose masks are a pure function of seed, token, place in the model and feature.

A rank needs no state and no other rank to know a mask, so masks are the same in every layout, and a backward
pass or a recomputation makes them again instead of keeping them. Every token has a number for each place in
the model, which starts a generator splitmix64 (Steele, Lea and Flood 2014); each of its outputs decides about
four features. Integers wrap around at 64 bits.

Legend: t tokens of this rank, D features, W outputs of 64 bits.
"""

import hashlib
from typing import Final

import torch
from torch import Tensor

from braid.kernels.operators.operator import ComputeOperator

_STEPS: Final = 1 << 16
"""Number of values of the 16 bits that decide about a feature: rates are multiples of 1 / 2^16."""
_CHUNK_WORDS: Final = {"cpu": 1 << 15}
"""Number of outputs that are computed at a time, by type of device: as many as stay in a core's cache."""
_LARGEST_CHUNK_WORDS: Final = 1 << 23
"""The same for other devices, where only the memory of temporary values matters."""


def _signed(number: int) -> int:
    """Return the int64 with the same bits as a uint64."""
    return (number + 2**63) % 2**64 - 2**63


_GOLDEN: Final = _signed(0x9E3779B97F4A7C15)
_ROUNDS: Final = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))


def _mixed(x: Tensor) -> Tensor:
    """Apply the bijection of splitmix64 to int64 numbers, in place."""
    for shift, factor in _ROUNDS:
        _folded(x, shift).mul_(factor)
    return _folded(x, 31)


def _folded(x: Tensor, shift: int) -> Tensor:
    """Add, without carries, the numbers moved to the right by ``shift`` bits, in place."""
    return x.bitwise_xor_((x >> shift).bitwise_and_(2 ** (64 - shift) - 1))  # >> repeats the sign


def token_numbers(seed: int, places: Tensor) -> Tensor:
    """Return random numbers of tokens, int64, of the shape of ``places``.

    ``places``: of each token the place in the order of all tokens of the run: its sample's place in the order
    of samples, times the tokens of a sample, plus its position in the sample.
    """
    of_seed = _mixed(torch.tensor([_signed(seed + _GOLDEN)]))
    return _mixed(places + of_seed.to(places.device) + _GOLDEN)


def site_number(layer: int, operator: str) -> int:
    """Return a number for a place in the model: an operator's name in a layer (-1: the embedding)."""
    return int.from_bytes(hashlib.sha256(f"{layer}/{operator}".encode()).digest()[:8], "little", signed=True)


def dropped(x_tD: Tensor, token_numbers_t: Tensor, site: int, rate: float) -> Tensor:
    """Return a new tensor: x with each element set to 0 with probability ``rate``, and others scaled so that
    the mean remains.

    ``rate`` is rounded to a multiple of 2^-16, and is below 1.
    """
    tokens, width = x_tD.shape
    limit = min(round(rate * _STEPS), _STEPS - 1)
    y_tD = x_tD * (_STEPS / (_STEPS - limit))
    words = -(-width // 4)
    state_t1 = _mixed(token_numbers_t + _signed(site + _GOLDEN)).unsqueeze(1)
    steps_W = torch.arange(1, words + 1, device=x_tD.device).mul_(_GOLDEN)
    count = max(1, _CHUNK_WORDS.get(x_tD.device.type, _LARGEST_CHUNK_WORDS) // words)
    for begin in range(0, tokens, count):
        chunk = slice(begin, begin + count)
        bits_cD = _mixed(state_t1[chunk] + steps_W).view(torch.int16)[:, :width]
        y_tD[chunk].masked_fill_(bits_cD < limit - _STEPS // 2, 0)
    return y_tD


class Dropout(ComputeOperator):
    """Dropout at the given rate if the tokens' numbers are given; otherwise the identity."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x_tD: Tensor, token_numbers_t: Tensor | None = None) -> tuple[Tensor]:
        """Return y_tD; without numbers x itself."""
        return (x_tD if token_numbers_t is None else dropped(x_tD, token_numbers_t, self.site, self.rate),)

    def input_gradient(self, dy_tD: Tensor, token_numbers_t: Tensor) -> tuple[Tensor]:
        """Return dx_tD, by the mask of the forward pass."""
        return (dropped(dy_tD, token_numbers_t, self.site, self.rate),)
