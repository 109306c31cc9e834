"""Updates of master weights: clipping by the global norm, AdamW, Muon for matrices, and the average of the
weights."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from braid.actors.stage.run.accelerator import Accelerator, DeviceStream, Event
from braid.actors.stage.state.adamw import EightBitAdamW, QuantisedMoment, TorchAdamW
from braid.actors.stage.state.buckets import RankBuckets
from braid.actors.stage.state.global_state import StateEntry
from braid.actors.stage.state.learning_rate import LearningRate
from braid.actors.stage.state.muon import HeldMatrices, MatrixUpdates
from braid.actors.stage.state.parameters import main_gradient_dtype
from braid.actors.stage.state.shards import Shard
from braid.scheduling.schedule.buckets import BucketKey
from braid.scheduling.schedule.states import (
    AVERAGE,
    MOMENTS,
    MOMENTUM,
    PARAMETER,
    STATE_KINDS,
    OptimizerStates,
)

if TYPE_CHECKING:  # tests of GPUs run where pydantic is not installed
    from braid.actors.config import Config


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(LearningRate):
    """Settings of the optimizer; see ``train`` in the configuration."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_norm: float
    optimizer: str = "adamw"
    momentum: float = 0.95
    average: float = 0.0

    @property
    def states(self) -> OptimizerStates:
        """What is kept of every parameter."""
        return OptimizerStates(self.optimizer, self.average > 0)


def state_slots(shards: Sequence[Shard], states: OptimizerStates) -> Iterator[tuple[str, Shard]]:
    """Yield the states that are kept of shards as (kind, shard), in the order of copies and checkpoints."""
    kinds = [{PARAMETER, *states.kinds(matrix=shard.parameter.matrix)} for shard in shards]
    for kind in STATE_KINDS:
        yield from ((kind, shard) for shard, kept in zip(shards, kinds, strict=True) if kind in kept)


@dataclass
class _ParameterGroup:
    """Parameters that are updated at once: those of one bucket with ZeRO, otherwise all."""

    adamw: list[TorchAdamW]
    """AdamW of the masters that it updates: in the masters' dtype, and with moments in 8 bits."""
    masters: list[tuple[Tensor, Shard]]
    rounded: list[tuple[Tensor, Tensor]]
    """Pairs of a gradient in the master's dtype and the wider sum that it is rounded from."""
    signed: list[tuple[Tensor, Shard, float]]
    """Parameters that take steps against the sign of their gradient, without AdamW, with their step sizes."""
    averages: list[Tensor]
    """Averages of the masters, in their order; none if no averages are kept."""


class Optimizer:
    """One rank's optimizer. Parameters narrower than fp32 have fp32 masters; other parameters are their own
    masters.

    With Muon, all matrices of hidden layers are updated when the gradients are clipped (`MatrixUpdates`), and
    everything else bucket by bucket.
    """

    def __init__(
        self, buckets: RankBuckets, settings: OptimizerSettings, accelerator: Accelerator | None = None
    ) -> None:
        """``accelerator``: the device of the buckets; None for a CPU."""
        self._accelerator = accelerator
        self._reader: DeviceStream | None = None
        self._reading: list[Event] = []
        """Events that end the reads of the state that run at the same time as later work."""
        self.settings = settings
        self._buckets = buckets
        self._factor: float | None
        """Factor that clips the step's gradients; None: gradients are not finite, and nothing is updated."""
        self.shards = buckets.shards
        """The shards that this rank updates, in the order of its parameters."""
        self.updates = 0
        """Updates behind the state, for AdamW's bias correction; a skipped step is none."""
        self.dtype, self.device = main_gradient_dtype(buckets.dtype), buckets.device
        """Of masters and moments; of these a rank may have none, where shares are small."""
        self.masters: list[Tensor] = [_master(shard.tensor) for shard in self.shards]
        self._masters = dict(zip(self.shards, self.masters, strict=True))
        self.states: dict[Tensor, dict[str, Any]] = {}
        """A tensor or a `QuantisedMoment` of every kind of state, by master."""
        self.gradient_norm = self.lr = 0.0
        """The newest step's norm before clipping, and its learning rate."""
        self.begin(0)
        keys = {id(shard): bucket.key for bucket in buckets.buckets for shard in bucket.shards}
        members: dict[BucketKey | None, list[tuple[Tensor, Shard]]] = {}
        for master, shard in zip(self.masters, self.shards, strict=True):
            members.setdefault(keys[id(shard)] if buckets.cut else None, []).append((master, shard))
        self._groups = {key: self._group(pairs) for key, pairs in members.items()}
        self._matrices = self._matrix_updates() if settings.optimizer == "muon" else None

    def _by_muon(self, shard: Shard) -> bool:
        return self.settings.optimizer == "muon" and shard.parameter.matrix

    def _matrix_updates(self) -> MatrixUpdates:
        held = [
            HeldMatrices(master, self.states[master][MOMENTUM], shard)
            for master, shard in zip(self.masters, self.shards, strict=True)
            if self._by_muon(shard)
        ]
        mesh, device, given = self._buckets.mesh, self.device, self.settings
        return MatrixUpdates(mesh, held, device, given.momentum, given.weight_decay)

    def _group(self, masters: list[tuple[Tensor, Shard]]) -> _ParameterGroup:
        given = self.settings
        rounded = []
        others = [(master, shard) for master, shard in masters if not self._by_muon(shard)]
        for master, shard in others:
            if shard.gradient.dtype == master.dtype:
                master.grad = shard.gradient
            else:
                master.grad = torch.zeros_like(master)
                rounded.append((master.grad, shard.gradient))
        signed = [(m, shard, rate) for m, shard in masters if (rate := shard.parameter.sign_rate)]
        members: dict[type[TorchAdamW], list[tuple[Tensor, bool]]] = {}
        for master, shard in others:
            if not shard.parameter.sign_rate:
                in_8_bits = given.optimizer == "adamw_8bit" and shard.parameter.matrix
                rule = EightBitAdamW if in_8_bits else TorchAdamW
                members.setdefault(rule, []).append((master, shard.parameter.decays))
        settings = {"lr": given.lr, "betas": given.betas, "eps": given.eps}
        adamw = [rule(adam, given.weight_decay, **settings) for rule, adam in members.items()]
        moments = {master: state for rule in adamw for master, state in rule.states.items()}
        for master, shard in masters:
            own = (MOMENTUM,) if self._by_muon(shard) else MOMENTS
            self.states[master] = moments.get(master) or {kind: torch.zeros_like(master) for kind in own}
            if self.settings.average:
                self.states[master][AVERAGE] = master.detach().clone()
        averages = [self.states[master][AVERAGE] for master, _ in masters if self.settings.average]
        return _ParameterGroup(adamw, masters, rounded, signed, averages)

    def _state(self, kind: str, shard: Shard) -> Tensor | QuantisedMoment:
        master = self._masters[shard]
        return master if kind == PARAMETER else self.states[master][kind]

    def entries(self) -> Iterator[StateEntry]:
        """Yield masters and states as views; a `QuantisedMoment` is read when it is reached."""
        for kind, shard in state_slots(self.shards, self.settings.states):
            state = self._state(kind, shard)
            yield StateEntry(kind, shard, state if isinstance(state, Tensor) else state.read())

    @torch.no_grad()
    def read_beside(self, read: Callable[[], None]) -> Event | None:
        """Read the present state on a separate stream; return the event that ends the read, for which the
        next change of the state waits. On a CPU the state is read at once, and None is returned."""
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
    def restored(self, updates: int, entries: Iterable[StateEntry] = ()) -> None:
        """Take over ``entries``, which have the order of `entries`; then recompute what depends on masters
        and states, after these were set from outside.

        ``updates``: number of updates that led to them; from 0 updates on, averages begin with the masters.
        """
        self._let_readers_end()
        self.updates = updates
        for kind, shard, tensor in entries:
            state = self._state(kind, shard)
            if isinstance(state, QuantisedMoment):
                state.write(tensor)
            elif state is not tensor:
                state.copy_(tensor)
        for group in self._groups.values():
            for adamw in group.adamw:
                adamw.count(updates)
            if not updates:
                _average(group, 0.0)
            _publish(group)

    def begin(self, step: int, intact: Callable[[], None] = lambda: None) -> "Optimizer":
        """Begin the update of step ``step`` (from 0), of which a schedule names the calls; return the
        optimizer.

        ``intact`` raises if communication was broken off before the norm was complete: an abort leaves
        garbage in the results of collectives, which looks like numbers.
        """
        self._step, self._intact, self._factor = step, intact, None
        return self

    @property
    def applied(self) -> bool:
        """Whether the present step's gradients are finite, so that they update the parameters."""
        return self._factor is not None

    def norm(self) -> None:
        """Square and add up this rank's gradients, for the global norm."""
        self._buckets.square()

    def step(self) -> None:
        """Call `clip`, then update all parameters."""
        self.clip()
        # Buckets whose shards other ranks update are cleared here, too.
        keys = [bucket.key for bucket in self._buckets.buckets] if self._buckets.cut else [None]
        for key in dict.fromkeys(keys):
            self.update(key)

    @torch.no_grad()
    def clip(self) -> None:
        """Decide whether and how to update, and let Muon update its matrices. A norm that is not finite,
        which all ranks find alike, updates nothing."""
        self.gradient_norm = norm = float(self._buckets.norm())
        self.lr = self.settings.learning_rate(self._step)
        self._intact()
        if not math.isfinite(norm):
            self._buckets.zero()
            return
        self.updates += 1
        limit = self.settings.clip_norm
        self._factor = limit / (norm + 1e-6) if limit and norm > limit else 1.0
        self._let_readers_end()
        if self._matrices is not None:
            self._matrices.update(self.lr, self._factor)

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
            for adamw in group.adamw:
                adamw.step(self.lr)
            for master, shard, rate in group.signed:
                master.add_(shard.gradient.sign().to(master.dtype), alpha=-rate)
            _average(group, self.settings.average if self.updates > 1 else 0.0)
            _publish(group)
        self._buckets.zero(key)


def _publish(group: _ParameterGroup) -> None:
    """Round master weights to the dtype of the parameters and store them there."""
    for master, shard in group.masters:
        if master.dtype != shard.parameter.tensor.dtype:
            shard.tensor.copy_(master)


def _average(group: _ParameterGroup, decay: float) -> None:
    """Move the averages towards the masters, as `torch.optim.swa_utils.get_ema_multi_avg_fn` does; ``decay``
    0: set the averages to the masters, as torch's `AveragedModel` does at the first update."""
    if group.averages:
        torch._foreach_lerp_(group.averages, [master.detach() for master, _ in group.masters], 1 - decay)


def _master(tensor: Tensor) -> Tensor:
    if main_gradient_dtype(tensor.dtype) == tensor.dtype:
        return tensor if tensor.is_leaf else tensor.detach()
    return tensor.detach().to(torch.float32)


def optimizer_settings(config: "Config") -> OptimizerSettings:
    """Return the optimizer's settings, which have the names of keys of ``train``."""
    return OptimizerSettings(
        **{key.name: getattr(config.train, key.name) for key in fields(OptimizerSettings)}
    )
