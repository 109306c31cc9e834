"""Rotary embeddings for more tokens than a model was first trained on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from braid.scheduling.text.records import require_positive


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """What becomes of the frequencies of a rotary embedding.

    Llama 3.1's (`_compute_llama3_parameters` of transformers): waves longer than ``original_sequence /
    low_frequency_factor`` tokens become ``factor`` times as long, those shorter than ``original_sequence /
    high_frequency_factor`` stay, and between the two it goes over. Without ``original_sequence`` all become
    ``factor`` times as long (``linear`` there; position interpolation, Chen et al. 2023).

    ``factors`` (LongRoPE's short ones, Ding et al. 2024, as Phi-3.5-MoE has them) are of every frequency, the
    highest first: so many times as long its wave becomes beside that. A sample must then be no longer than
    ``original_sequence``, beyond which other factors hold. ``magnitude``: what queries and keys are
    multiplied with when they are turned.
    """

    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_sequence: int | None = None
    """Tokens of the samples that the model was first trained on."""
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
        """Those, in radians per token, that take the place of the plain ones, the highest first."""
        if self.factors:
            return [frequency / one / self.factor for frequency, one in zip(plain, self.factors, strict=True)]
        return [self._scaled(frequency) for frequency in plain]

    def _scaled(self, frequency: float) -> float:
        if self.original_sequence is None:
            return frequency / self.factor
        waves = self.original_sequence * frequency / (2 * math.pi)
        share = (waves - self.low_frequency_factor) / (self.high_frequency_factor - self.low_frequency_factor)
        kept = min(max(share, 0.0), 1.0)
        return kept * frequency + (1 - kept) * frequency / self.factor
