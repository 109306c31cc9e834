"""Dropout, label smoothing and z-loss in the plain loop: masks by NumPy, losses by torch's own function."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from braid.actors.config import TrainConfig
from braid.jobs.bench.plain_torch import PlainModel, PlainTrainer

REGULARISED = {"dropout": 0.2, "label_smoothing": 0.15, "z_loss": 0.003}
"""Keys of the section ``train``."""
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@np.errstate(over="ignore")
def mix(z: np.ndarray) -> np.ndarray:
    """One output of splitmix64 for every state."""
    z = z + GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@np.errstate(over="ignore")
def keeps(seed: int, places: np.ndarray, site: str, features: int, rate: float) -> np.ndarray:
    """For every token, by its place in the order of all tokens, and every feature: whether it is kept."""
    digest = hashlib.sha256(site.encode()).digest()
    tokens = mix(places.astype(np.uint64) + mix(np.array([seed], np.uint64)))
    states = mix(tokens + np.frombuffer(digest[:8], "<u8"))
    columns = np.arange(features, dtype=np.uint64)
    outputs = mix(states[..., None] + columns // np.uint64(4) * GOLDEN)
    sixteen = (outputs >> (columns % np.uint64(4) * np.uint64(16))).astype(np.uint16)
    return (sixteen ^ np.uint16(0x8000)) >= round(rate * 2**16)


class RegularisedTrainer(PlainTrainer):
    """A plain trainer whose model drops what a run with these settings drops, and has its losses."""

    def __init__(self, model: PlainModel, settings: TrainConfig) -> None:
        super().__init__(model, settings)
        self.train, self.first = settings, 0
        for number, layer in model.layers.items():
            for name in ("attention", "mlp"):
                site = f"{number}/{name}_residual"
                setattr(layer, name, self.dropping(getattr(layer, name), site))
        model.layers["0"].register_forward_pre_hook(
            lambda _, inputs: (self.dropped(inputs[0], "-1/embedding_dropout"), *inputs[1:])
        )
        assert model.head is not None
        model.head.register_forward_hook(self.keep_logits)
        model.loss_sum = self.loss_sum

    def step(self, step: int, windows: Sequence[Tensor]) -> tuple[float, float]:
        """Samples are counted from the first one of the step."""
        self.first = step * self.train.global_batch
        return super().step(step, windows)

    def dropping(self, function: Callable[..., Tensor], site: str) -> Callable[..., Tensor]:
        return lambda *inputs: self.dropped(function(*inputs), site)

    def dropped(self, x_BSD: Tensor, site: str) -> Tensor:
        if not torch.is_grad_enabled():
            return x_BSD
        samples, sequence, hidden = x_BSD.shape
        places = (self.first + np.arange(samples))[:, None] * sequence + np.arange(sequence)
        rate = self.train.dropout
        kept = torch.from_numpy(keeps(self.train.seed, places, site, hidden, rate))
        return torch.where(kept, x_BSD / (1 - round(rate * 2**16) / 2**16), 0)

    def keep_logits(self, module: Any, inputs: Any, logits: Tensor) -> None:
        self.logits = logits

    def loss_sum(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """The cross-entropy; in training with the gradients of what is added to it."""
        loss = type(self.model).loss_sum(self.model, tokens_BS, targets_BS)
        if not torch.is_grad_enabled():
            return loss
        self.first += len(tokens_BS)
        logits_TV, targets_T = self.logits.flatten(0, 1), targets_BS.flatten()
        smoothed = F.cross_entropy(
            logits_TV, targets_T, reduction="sum", label_smoothing=self.train.label_smoothing
        )
        more = smoothed - F.cross_entropy(logits_TV, targets_T, reduction="sum")
        more = more + self.train.z_loss * logits_TV.logsumexp(-1).square().sum()
        return loss + (more - more.detach())
