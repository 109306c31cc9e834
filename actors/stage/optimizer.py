"""AdamW on master weights, clipping by the global norm, and the learning rate as a function of the step."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from braid.actors.stage.accelerator import Accelerator, Event, Stream
from braid.actors.stage.gradients import GradientBuckets
from braid.actors.stage.shares import main_gradient_dtype
from braid.actors.stage.sharing import Sharing
from braid.actors.stage.weights import ShardedWeights

if TYPE_CHECKING:  # benchmarks on GPUs run where pydantic is not installed
    from braid.actors.config import Config

_MOMENTS = ("exp_avg", "exp_avg_sq")
STATE_KINDS = ("parameter", *_MOMENTS)
"""What there is of every parameter in a checkpoint, in the order of `Optimizer.named_tensors`."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """What AdamW needs; see ``train`` in the configuration."""

    lr: float
    min_lr_fraction: float
    warmup_steps: int
    steps: int
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_norm: float

    def learning_rate(self, step: int) -> float:
        """Learning rate of step ``step`` (from 0): linear warm-up, then cosine decay to a fraction."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        span = max(1, self.steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        floor = self.lr * self.min_lr_fraction
        return floor + 0.5 * (self.lr - floor) * (1.0 + math.cos(math.pi * progress))


class Optimizer:
    """One rank's AdamW. Parameters narrower than fp32 have fp32 masters; others are their own."""

    def __init__(
        self,
        gradients: GradientBuckets,
        settings: OptimizerSettings,
        accelerator: Accelerator | None = None,
    ) -> None:
        """``gradients``: of what is updated. ``accelerator``: what that is on; None: the CPU."""
        self._accelerator = accelerator
        self._reader: Stream | None = None
        self._reading: list[Event] = []
        """The ends of what reads the state beside what follows."""
        self.settings = settings
        self._gradients = gradients
        self._rounded: list[tuple[Tensor, Tensor]] = []
        """Gradients in the masters' dtype, and the wider sums that they are rounded from."""
        self.shares = shares = gradients.shares
        """What of its parameters the rank updates."""
        self.masters: list[Tensor] = [_master(share.tensor) for share in shares]
        for master, share in zip(self.masters, shares, strict=True):
            gradient = share.gradient
            if gradient.dtype == master.dtype:
                master.grad = gradient
            else:
                master.grad = torch.zeros_like(master)
                self._rounded.append((master.grad, gradient))
        decayed = [m for m, share in zip(self.masters, shares, strict=True) if share.parameter.decays]
        plain = [m for m, share in zip(self.masters, shares, strict=True) if not share.parameter.decays]
        groups = [
            {"params": decayed, "weight_decay": settings.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )

        for master in self.masters:
            self.adamw.state[master] = {
                "step": torch.tensor(0.0, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    def named_tensors(self) -> list[tuple[str, list[Tensor]]]:
        """What a checkpoint holds, kind by kind, each in the order of the shares."""
        state = [self.adamw.state[master] for master in self.masters]
        moments = [(kind, [entry[kind] for entry in state]) for kind in _MOMENTS]
        return [("parameter", self.masters), *moments]

    @torch.no_grad()
    def read_beside(self, read: Callable[[], None]) -> Event | None:
        """Read the state as it is now, on a stream of its own; what changes it next waits for the event.

        On a CPU it is read at once, and there is no event.
        """
        device = self._accelerator
        if device is None:
            read()
            return None
        reader = self._reader = self._reader or device.stream()
        now, read_all = device.event(), device.event()
        now.record(device.current())
        reader.wait_event(now)
        with device.on(reader):
            read()
        read_all.record(reader)
        self._reading.append(read_all)
        return read_all

    def _let_readers_end(self) -> None:
        while self._accelerator is not None and self._reading:
            self._accelerator.current().wait_event(self._reading.pop())

    @torch.no_grad()
    def restored(self, steps_done: int) -> None:
        """Bring what follows from masters and moments in line after those were set from outside."""
        self._let_readers_end()
        for master in self.masters:
            self.adamw.state[master]["step"].fill_(steps_done)
        self._publish_masters()

    def _publish_masters(self) -> None:
        for master, share in zip(self.masters, self.shares, strict=True):
            if master.dtype != share.parameter.tensor.dtype:
                share.tensor.copy_(master)

    @torch.no_grad()
    def step(self, step: int, intact: Callable[[], None] = lambda: None) -> tuple[float, float]:
        """Clip, update, clear the gradients; returns (gradient norm before clipping, learning rate).

        A norm that is not finite, which all ranks see alike, updates nothing. ``intact`` raises if
        communication was broken off by the time the norm is there: what an abort leaves in the results of
        collectives is garbage, and looks like numbers.
        """
        norm = float(self._gradients.norm())
        intact()
        if not math.isfinite(norm):
            self._gradients.zero()
            return norm, self.settings.learning_rate(step)
        if self.settings.clip_norm and norm > self.settings.clip_norm:
            self._gradients.scale(self.settings.clip_norm / (norm + 1e-6))
        for rounded, gradient in self._rounded:
            rounded.copy_(gradient)
        lr = self.settings.learning_rate(step)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self._let_readers_end()
        self.adamw.step()
        self._publish_masters()
        self._gradients.zero()
        return norm, lr


def _master(held: Tensor) -> Tensor:
    if main_gradient_dtype(held.dtype) == held.dtype:
        return held if held.is_leaf else held.detach()
    return held.detach().to(torch.float32)


class Update(Sharing):
    """Ends the step of a schedule."""

    def __init__(
        self,
        gradients: GradientBuckets,
        weights: ShardedWeights,
        optimizer: Optimizer,
        step: int,
        intact: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(weights, gradients)
        self._optimizer, self._step, self._intact = optimizer, step, intact
        self.gradient_norm = self.lr = 0.0
        self.applied = False

    def norm(self) -> None:
        """Square and add up this rank's gradients."""
        self._gradients.square()

    def step(self) -> None:
        """Clip and update, if the gradients are numbers."""
        self.gradient_norm, self.lr = self._optimizer.step(self._step, self._intact)
        self.applied = math.isfinite(self.gradient_norm)


def optimizer_settings(config: "Config") -> OptimizerSettings:
    """The optimizer's part of the configuration."""
    train = config.train
    return OptimizerSettings(
        lr=train.lr,
        min_lr_fraction=train.min_lr_fraction,
        warmup_steps=train.warmup_steps,
        steps=train.steps,
        betas=train.betas,
        eps=train.eps,
        weight_decay=train.weight_decay,
        clip_norm=train.clip_norm,
    )
