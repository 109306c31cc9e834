"""AdamW on master weights, clipping by the global norm, and the learning rate as a function of the step."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from braid.actors.stage.run.accelerator import Accelerator, DeviceStream, Event
from braid.actors.stage.state.buckets import RankBuckets
from braid.actors.stage.state.learning_rate import LearningRate
from braid.actors.stage.state.parameters import main_gradient_dtype
from braid.actors.stage.state.shards import Shard
from braid.scheduling.schedule.buckets import BucketKey

if TYPE_CHECKING:  # tests of GPUs run where pydantic is not installed
    from braid.actors.config import Config

_MOMENTS = ("exp_avg", "exp_avg_sq")
STATE_KINDS = ("parameter", *_MOMENTS)
"""Kinds of state that a checkpoint has of every parameter, in the order of `Optimizer.named_tensors`."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(LearningRate):
    """Settings of AdamW; see ``train`` in the configuration."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_norm: float


@dataclass
class _ParameterGroup:
    """Parameters that are updated at once: those of one bucket with ZeRO, otherwise all."""

    adamw: torch.optim.AdamW
    masters: list[tuple[Tensor, Shard]]
    rounded: list[tuple[Tensor, Tensor]]
    """Pairs of a gradient in the master's dtype and the wider sum that it is rounded from."""
    signed: list[tuple[Tensor, Shard, float]]
    """Parameters that take steps against the sign of their gradient, without AdamW, with their step sizes."""


class Optimizer:
    """One rank's AdamW. Parameters narrower than fp32 have fp32 masters; other parameters are their own
    masters.
    """

    def __init__(
        self,
        buckets: RankBuckets,
        settings: OptimizerSettings,
        accelerator: Accelerator | None = None,
    ) -> None:
        """``accelerator``: the device of the buckets; None for a CPU."""
        self._accelerator = accelerator
        self._reader: DeviceStream | None = None
        self._reading: list[Event] = []
        """Events that end the reads of the state that run at the same time as later work."""
        self.settings = settings
        self._buckets = buckets
        self._factor: float | None = None
        """Factor that clips the step's gradients; None: gradients are not finite, and nothing is updated."""
        self.shards = buckets.shards
        """The shards that this rank updates, in the order of its parameters."""
        self.updates = 0
        """Number of updates that led to the state, for AdamW's bias correction; a skipped step is no
        update.
        """
        self.dtype, self.device = main_gradient_dtype(buckets.dtype), buckets.device
        """Of masters and moments; of these a rank may have none, where shares are small."""
        self.masters: list[Tensor] = [_master(shard.tensor) for shard in self.shards]
        self.states: dict[Tensor, dict[str, Tensor]] = {}
        """AdamW's state tensors of every master."""
        keys = {id(shard): bucket.key for bucket in buckets.buckets for shard in bucket.shards}
        members: dict[BucketKey | None, list[tuple[Tensor, Shard]]] = {}
        for master, shard in zip(self.masters, self.shards, strict=True):
            members.setdefault(keys[id(shard)] if buckets.cut else None, []).append((master, shard))
        self._groups = {key: self._group(pairs) for key, pairs in members.items()}

    def _group(self, masters: list[tuple[Tensor, Shard]]) -> _ParameterGroup:
        rounded = []
        for master, shard in masters:
            if shard.gradient.dtype == master.dtype:
                master.grad = shard.gradient
            else:
                master.grad = torch.zeros_like(master)
                rounded.append((master.grad, shard.gradient))
        signed = [(m, shard, rate) for m, shard in masters if (rate := shard.parameter.sign_rate)]
        adam = [(master, shard.parameter) for master, shard in masters if not shard.parameter.sign_rate]
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
        return _ParameterGroup(adamw, masters, rounded, signed)

    def named_tensors(self) -> list[tuple[str, list[Tensor]]]:
        """Return the content of a checkpoint as (kind, tensors), tensors in the order of the shards."""
        state = [self.states[master] for master in self.masters]
        moments = [(kind, [entry[kind] for entry in state]) for kind in _MOMENTS]
        return [("parameter", self.masters), *moments]

    @torch.no_grad()
    def read_beside(self, read: Callable[[], None]) -> Event | None:
        """Read the present state on a separate stream; return the event that ends the read, for which the
        next change of the state waits. On a CPU the state is read at once, and None is returned.
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
        """Recompute what depends on masters and moments, after these were set from outside.

        ``updates``: number of updates that led to them.
        """
        self._let_readers_end()
        self.updates = updates
        for master in self.masters:
            self.states[master]["step"].fill_(updates)
        for group in self._groups.values():
            _publish(group)

    def square(self) -> None:
        """Square and add up this rank's gradients, for the global norm."""
        self._buckets.square()

    def step(self, step: int, intact: Callable[[], None] = lambda: None) -> tuple[float, float]:
        """Call `clip`, then update all parameters; return the result of `clip`."""
        norm, lr = self.clip(step, intact)
        # Buckets whose shards other ranks update are cleared here, too.
        keys = [bucket.key for bucket in self._buckets.buckets] if self._buckets.cut else [None]
        for key in dict.fromkeys(keys):
            self.update(key)
        return norm, lr

    @torch.no_grad()
    def clip(self, step: int, intact: Callable[[], None] = lambda: None) -> tuple[float, float]:
        """Decide whether and how to update; return (gradient norm before clipping, learning rate).

        A norm that is not finite, which all ranks find alike, updates nothing. ``intact`` raises if
        communication was broken off before the norm was complete: an abort leaves garbage in the results of
        collectives, which looks like numbers.
        """
        norm, lr = float(self._buckets.norm()), self.settings.learning_rate(step)
        intact()
        if not math.isfinite(norm):
            self._factor = None
            self._buckets.zero()
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
        """Update one bucket (``key``), or all parameters without ZeRO (None), and clear the gradients."""
        if self._factor is None:
            return
        if (group := self._groups.get(key)) is not None:
            if self._factor != 1.0:
                self._buckets.scale(self._factor, key)
            for rounded, gradient in group.rounded:
                rounded.copy_(gradient)
            group.adamw.step()
            for master, shard, rate in group.signed:
                master.add_(shard.gradient.sign().to(master.dtype), alpha=-rate)
            _publish(group)
        self._buckets.zero(key)


def _publish(group: _ParameterGroup) -> None:
    """Round master weights to the dtype of the parameters and store them there."""
    for master, shard in group.masters:
        if master.dtype != shard.parameter.tensor.dtype:
            shard.tensor.copy_(master)


def _master(tensor: Tensor) -> Tensor:
    if main_gradient_dtype(tensor.dtype) == tensor.dtype:
        return tensor if tensor.is_leaf else tensor.detach()
    return tensor.detach().to(torch.float32)


class StepUpdate:
    """The update at the end of one step, divided into the calls that a schedule names."""

    def __init__(self, optimizer: Optimizer, step: int, intact: Callable[[], None] = lambda: None) -> None:
        """``step``: number of the step, from 0. ``intact``: see `Optimizer.clip`."""
        self._optimizer, self._step, self._intact = optimizer, step, intact
        self.gradient_norm = self.lr = 0.0
        self.applied = False

    def norm(self) -> None:
        """Square and add up this rank's gradients."""
        self._optimizer.square()

    def step(self) -> None:
        """Clip the gradients and update all parameters, if the gradients are finite."""
        self._decided(*self._optimizer.step(self._step, self._intact))

    def clip(self) -> None:
        """Decide whether and how to update, before buckets are updated one by one."""
        self._decided(*self._optimizer.clip(self._step, self._intact))

    def update(self, chunk: int, bucket: int) -> None:
        """Update one bucket, if the gradients are finite."""
        self._optimizer.update((chunk, bucket))

    def _decided(self, norm: float, lr: float) -> None:
        self.gradient_norm, self.lr = norm, lr
        self.applied = math.isfinite(norm)


def optimizer_settings(config: "Config") -> OptimizerSettings:
    """Return the optimizer's settings from the configuration."""
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
