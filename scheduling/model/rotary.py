"""Scaling of rotary embeddings, for samples longer than in the model's first training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from braid.scheduling.text.records import require_positive


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """How to scale the frequencies of a rotary embedding.

    Llama 3.1's rule (`_compute_llama3_parameters` of transformers): waves longer than ``original_sequence /
    low_frequency_factor`` tokens become ``factor`` times as long, waves shorter than ``original_sequence /
    high_frequency_factor`` stay, and waves between them are interpolated. Without ``original_sequence`` all
    waves become ``factor`` times as long (``linear``; position interpolation, Chen et al. 2023).

    ``factors`` (the short factors of LongRoPE, Ding et al. 2024, as in Phi-3.5-MoE) lengthen the wave of each
    frequency, the highest first, in addition. A sample must then be no longer than ``original_sequence``;
    longer samples need other factors. ``magnitude``: factor on rotated queries and keys.
    """

    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_sequence: int | None = None
    """Number of tokens per sample in the model's first training."""
    factors: tuple[float, ...] = ()
    magnitude: float = 1.0

    def __post_init__(self) -> None:
        require_positive(self, ("factor", "low_frequency_factor", "magnitude"))
        if not all(factor > 0 for factor in self.factors):
            raise ValueError(f"factors={list(self.factors)!r} must be greater than zero")
        if self.factors and self.original_sequence is None:
            raise ValueError("factors need original_sequence, the longest sample that they are for")
        if self.original_sequence is not None:
            require_positive(self, ("original_sequence",))
        if self.high_frequency_factor <= self.low_frequency_factor:
            raise ValueError(
                f"high_frequency_factor={self.high_frequency_factor} must be greater than "
                f"low_frequency_factor={self.low_frequency_factor}"
            )

    def frequencies(self, plain: Sequence[float]) -> list[float]:
        """Return the scaled frequencies for unscaled ones, both in radians per token, the highest first."""
        if self.factors:
            return [
                frequency / factor / self.factor
                for frequency, factor in zip(plain, self.factors, strict=True)
            ]
        return [self._scaled(frequency) for frequency in plain]

    def _scaled(self, frequency: float) -> float:
        if self.original_sequence is None:
            return frequency / self.factor
        waves = self.original_sequence * frequency / (2 * math.pi)
        share = (waves - self.low_frequency_factor) / (self.high_frequency_factor - self.low_frequency_factor)
        unscaled = min(max(share, 0.0), 1.0)
        return unscaled * frequency + (1 - unscaled) * frequency / self.factor
