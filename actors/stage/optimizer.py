"""AdamW on master weights, clipping by the global norm, and the learning rate as a function of the step."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from braid.actors.stage.accelerator import Accelerator, Event, Stream
from braid.actors.stage.gradients import GradientBuckets
from braid.actors.stage.learning_rate import LearningRate
from braid.actors.stage.shares import Share, main_gradient_dtype
from braid.actors.stage.sharing import Sharing
from braid.actors.stage.weights import ShardedWeights
from braid.scheduling.buckets import BucketKey

if TYPE_CHECKING:  # tests of GPUs run where pydantic is not installed
    from braid.actors.config import Config

_MOMENTS = ("exp_avg", "exp_avg_sq")
STATE_KINDS = ("parameter", *_MOMENTS)
"""What there is of every parameter in a checkpoint, in the order of `Optimizer.named_tensors`."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(LearningRate):
    """What AdamW needs; see ``train`` in the configuration."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_norm: float


@dataclass
class _Group:
    """What is updated at once: all, or a bucket that is in shares."""

    adamw: torch.optim.AdamW
    masters: list[tuple[Tensor, Share]]
    rounded: list[tuple[Tensor, Tensor]]
    """Gradients in the masters' dtype, and the wider sums that they are rounded from."""
    signed: list[tuple[Tensor, Share, float]]
    """Those that follow the sign of their gradient instead of AdamW, with their rates."""


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
        self._factor: float | None = None
        """What the step's gradients are multiplied with; None: they are no numbers, and update nothing."""
        self.shares = shares = gradients.shares
        """What of its parameters the rank updates."""
        self.updates = 0
        """Updates that led to the state, for AdamW's bias correction; a skipped step is no update."""
        self.masters: list[Tensor] = [_master(share.tensor) for share in shares]
        self.states: dict[Tensor, dict[str, Tensor]] = {}
        """Of every master."""
        in_shares = any(plan.ways > 1 for plan in gradients.plans)
        keys = {
            id(share): (plan.chunk, plan.bucket or 0) if in_shares else None
            for plan in gradients.plans
            for share in plan.shares
        }
        held: dict[BucketKey | None, list[tuple[Tensor, Share]]] = {}
        for master, share in zip(self.masters, shares, strict=True):
            held.setdefault(keys[id(share)], []).append((master, share))
        assert None not in held or len(held) == 1, "all gradients are in shares, or none"
        self._groups = {key: self._group(own) for key, own in held.items()}
        buckets = [(plan.chunk, plan.bucket or 0) for plan in gradients.plans]
        self._keys: list[BucketKey | None] = [*dict.fromkeys(buckets)] if in_shares else [None]
        """Of all buckets. Other ranks may update a small one whole; its gradients are cleared here, too."""

    def _group(self, masters: list[tuple[Tensor, Share]]) -> _Group:
        rounded = []
        for master, share in masters:
            if share.gradient.dtype == master.dtype:
                master.grad = share.gradient
            else:
                master.grad = torch.zeros_like(master)
                rounded.append((master.grad, share.gradient))
        signed = [(m, share, rate) for m, share in masters if (rate := share.parameter.sign_rate)]
        adam = [(master, share.parameter) for master, share in masters if not share.parameter.sign_rate]
        decayed = [master for master, parameter in adam if parameter.decays]
        plain = [master for master, parameter in adam if not parameter.decays]
        groups = [
            {"params": decayed, "weight_decay": self.settings.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=self.settings.lr,
            betas=self.settings.betas,
            eps=self.settings.eps,
            fused=True,
        )
        for master, _ in masters:
            self.states[master] = adamw.state[master] = {
                "step": torch.tensor(0.0, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }
        return _Group(adamw, masters, rounded, signed)

    def named_tensors(self) -> list[tuple[str, list[Tensor]]]:
        """What a checkpoint holds, kind by kind, each in the order of the shares."""
        state = [self.states[master] for master in self.masters]
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
    def restored(self, updates: int) -> None:
        """Bring what follows from masters and moments in line after those were set from outside.

        ``updates``: how many led to them.
        """
        self._let_readers_end()
        self.updates = updates
        for master in self.masters:
            self.states[master]["step"].fill_(updates)
        for group in self._groups.values():
            _publish(group)

    def step(self, step: int, intact: Callable[[], None] = lambda: None) -> tuple[float, float]:
        """`clip` and update everything; returns what `clip` does."""
        norm, lr = self.clip(step, intact)
        for key in self._keys:
            self.update(key)
        return norm, lr

    @torch.no_grad()
    def clip(self, step: int, intact: Callable[[], None] = lambda: None) -> tuple[float, float]:
        """Decide the update; returns (gradient norm before clipping, learning rate).

        A norm that is not finite, which all ranks see alike, updates nothing. ``intact`` raises if
        communication was broken off by the time the norm is there: what an abort leaves in the results of
        collectives is garbage, and looks like numbers.
        """
        norm, lr = float(self._gradients.norm()), self.settings.learning_rate(step)
        intact()
        if not math.isfinite(norm):
            self._factor = None
            self._gradients.zero()
            return norm, lr
        self.updates += 1
        limit = self.settings.clip_norm
        self._factor = limit / (norm + 1e-6) if limit and norm > limit else 1.0
        for group in self._groups.values():
            for parameters in group.adamw.param_groups:
                parameters["lr"] = lr
        self._let_readers_end()
        return norm, lr

    @torch.no_grad()
    def update(self, key: BucketKey | None) -> None:
        """Update a bucket that is in shares, or (None) what is not, and clear its gradients."""
        if self._factor is None:
            return
        if (group := self._groups.get(key)) is not None:
            if self._factor != 1.0:
                self._gradients.scale(self._factor, key)
            for rounded, gradient in group.rounded:
                rounded.copy_(gradient)
            group.adamw.step()
            for master, share, rate in group.signed:
                master.add_(share.gradient.sign().to(master.dtype), alpha=-rate)
            _publish(group)
        self._gradients.zero(key)


def _publish(group: _Group) -> None:
    """Round masters to parameters."""
    for master, share in group.masters:
        if master.dtype != share.parameter.tensor.dtype:
            share.tensor.copy_(master)


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
        self._decided(*self._optimizer.step(self._step, self._intact))

    def clip(self) -> None:
        """Decide the update."""
        self._decided(*self._optimizer.clip(self._step, self._intact))

    def update(self, chunk: int, bucket: int) -> None:
        """Update a bucket, if the gradients are numbers."""
        self._optimizer.update((chunk, bucket))

    def _decided(self, norm: float, lr: float) -> None:
        self.gradient_norm, self.lr = norm, lr
        self.applied = math.isfinite(norm)


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
