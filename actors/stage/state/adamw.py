"""AdamW as torch has it, and what the optimizer asks of it and of AdamW with moments in 8 bits."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from braid.scheduling.schedule.states import MOMENTS


class Moment(Protocol):
    """A moment that is not kept as a tensor of its master's dtype."""

    def read(self) -> Tensor:
        """Return its values in the host's memory, in the master's shape."""

    def write(self, values: Tensor) -> None:
        """Set its values; values that `read` returned are restored bit for bit."""


class AdamW(Protocol):
    """AdamW of some masters, whose gradients are in ``Tensor.grad``."""

    @property
    def states(self) -> Mapping[Tensor, dict[str, Any]]:
        """A tensor or a `Moment` of every kind (`MOMENTS`), by master."""

    def step(self, lr: float) -> None:
        """Update the masters."""

    def count(self, updates: int) -> None:
        """Set the number of updates that led to the moments, for the correction of their bias."""


def decay_groups(tensors: Sequence[tuple[Tensor, bool]], weight_decay: float) -> list[dict[str, Any]]:
    """Return an optimizer's parameter groups: tensors that decay, and tensors that do not."""
    decayed = [tensor for tensor, decays in tensors if decays]
    plain = [tensor for tensor, decays in tensors if not decays]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class TorchAdamW:
    """`torch.optim.AdamW`, with its states in the masters' dtype."""

    def __init__(self, masters: Sequence[tuple[Tensor, bool]], weight_decay: float, **settings: Any) -> None:
        """``masters``: at least one, each with whether it decays. ``settings``: ``lr``, ``betas``,
        ``eps``."""
        self._adamw = torch.optim.AdamW(decay_groups(masters, weight_decay), fused=True, **settings)
        self.states: dict[Tensor, dict[str, Any]] = {}
        for master, _ in masters:
            self.states[master] = {kind: torch.zeros_like(master) for kind in MOMENTS}
            step = torch.tensor(0.0, device=master.device)
            self._adamw.state[master] = {"step": step, **self.states[master]}

    def step(self, lr: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()

    def count(self, updates: int) -> None:
        for state in self._adamw.state.values():
            state["step"].fill_(updates)
