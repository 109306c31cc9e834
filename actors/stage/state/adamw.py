"""AdamW as torch has it, with its states in the masters' dtype."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from braid.scheduling.schedule.states import MOMENTS


class TorchAdamW:
    """`torch.optim.AdamW` of some masters, whose gradients are in ``Tensor.grad``."""

    def __init__(self, masters: Sequence[tuple[Tensor, bool]], weight_decay: float, **settings: Any) -> None:
        """``masters``: at least one, each with whether it decays. ``settings``: ``lr``, ``betas``,
        ``eps``."""
        self.states: dict[Tensor, dict[str, Any]] = {}
        """A state of every kind (`MOMENTS`), by master."""
        for master, _ in masters:
            self.states[master] = {kind: torch.zeros_like(master) for kind in MOMENTS}
        self._adamw: torch.optim.Optimizer
        self._adamw = torch.optim.AdamW(decay_groups(masters, weight_decay), fused=True, **settings)
        for master, _ in masters:
            step = torch.tensor(0.0, device=master.device)
            self._adamw.state[master] = {"step": step, **self.states[master]}

    def step(self, lr: float) -> None:
        """Update the masters."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()

    def count(self, updates: int) -> None:
        """Set the number of updates that led to the moments, for the correction of their bias."""
        for state in self._adamw.state.values():
            state["step"].fill_(updates)


def decay_groups(tensors: Sequence[tuple[Tensor, bool]], weight_decay: float) -> list[dict[str, Any]]:
    """Return an optimizer's parameter groups: tensors that decay, and tensors that do not."""
    decayed, plain = ([tensor for tensor, decays in tensors if decays is which] for which in (True, False))
    groups = [(decayed, weight_decay), (plain, 0.0)]
    return [{"params": members, "weight_decay": decay} for members, decay in groups if members]
