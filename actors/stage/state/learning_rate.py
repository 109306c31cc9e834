"""The learning rate of every step; importable without torch."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Linear warm-up, then cosine decay to a fraction of ``lr``; see ``train`` in the configuration."""

    lr: float
    min_lr_fraction: float
    warmup_steps: int
    steps: int

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of step ``step`` (from 0)."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        span = max(1, self.steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        floor = self.lr * self.min_lr_fraction
        return floor + 0.5 * (self.lr - floor) * (1.0 + math.cos(math.pi * progress))
