"""Rotary embeddings for more tokens than a model was first trained on."""

import math
from dataclasses import dataclass

from braid.scheduling.records import require_positive


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """What becomes of the frequencies of a rotary embedding.

    Llama 3.1's (`_compute_llama3_parameters` of transformers): waves longer than ``original_sequence /
    low_frequency_factor`` tokens become ``factor`` times as long, those shorter than ``original_sequence /
    high_frequency_factor`` stay, and between the two it goes over. Without ``original_sequence`` all become
    ``factor`` times as long (``linear`` there; position interpolation, Chen et al. 2023).
    """

    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_sequence: int | None = None
    """Tokens of the samples that the model was first trained on."""

    def __post_init__(self) -> None:
        require_positive(self, ("factor", "low_frequency_factor"))
        if self.original_sequence is not None:
            require_positive(self, ("original_sequence",))
        if self.high_frequency_factor <= self.low_frequency_factor:
            raise ValueError(
                f"high_frequency_factor={self.high_frequency_factor} must be greater than "
                f"low_frequency_factor={self.low_frequency_factor}"
            )

    def __call__(self, frequency: float) -> float:
        """The frequency, in radians per token, that takes the place of one."""
        if self.original_sequence is None:
            return frequency / self.factor
        waves = self.original_sequence * frequency / (2 * math.pi)
        share = (waves - self.low_frequency_factor) / (self.high_frequency_factor - self.low_frequency_factor)
        kept = min(max(share, 0.0), 1.0)
        return kept * frequency + (1 - kept) * frequency / self.factor
