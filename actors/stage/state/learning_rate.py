"""The learning rate of every step; importable without torch."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Linear warm-up, then one of the schedules of ``train.schedule`` down to a fraction of ``lr``; see
    ``train`` in the configuration."""

    lr: float
    min_lr_fraction: float
    warmup_steps: int
    steps: int
    schedule: str = "cosine"
    decay_steps: int = 0
    """Number of steps of the decay that ends ``stable_decay``; 0: a fifth of ``steps``."""

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of step ``step`` (from 0)."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        floor = self.lr * self.min_lr_fraction
        match self.schedule:
            case "constant":
                return self.lr
            case "linear":
                return self.lr + (floor - self.lr) * self._progress(step, self.warmup_steps)
            case "stable_decay":
                decay = self.decay_steps or max(1, self.steps // 5)
                begin = max(self.warmup_steps, self.steps - decay)
                return self.lr + (floor - self.lr) * self._progress(step, begin)
        turn = math.pi * self._progress(step, self.warmup_steps)
        return floor + 0.5 * (self.lr - floor) * (1.0 + math.cos(turn))

    def _progress(self, step: int, begin: int) -> float:
        """Return the share, from 0 to 1, of the steps from ``begin`` to the end of the run that are over at
        ``step``."""
        return min(1.0, max(0, step - begin) / max(1, self.steps - begin))
