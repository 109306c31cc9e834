"""A rank's training state in the host's memory: copied at one moment, restored bit for bit."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from braid.actors.stage.run.accelerator import Event
from braid.actors.stage.state.global_state import StateEntry
from braid.actors.stage.state.optimizer import Optimizer, state_slots
from braid.actors.stage.state.shards import Shard


@dataclass(frozen=True)
class HostState:
    """Master weights and moments after ``step`` finished steps, contiguous in one flat tensor.

    The last element is the number of updates that led to this state, which fp32 holds exactly up to 2^24.
    """

    step: int
    memory: Tensor
    """1-dim tensor on the host, in the masters' dtype."""
    arrived: Event | None = None
    """Event after which the copy into ``memory`` is complete; None if it was complete from the beginning."""

    @property
    def flat(self) -> Tensor:
        """The state's memory; waits until the state is complete."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.memory

    @property
    def updates(self) -> Tensor:
        """The number of updates, as a view of one element."""
        return self.flat[-1:]


def state_elements(optimizer: Optimizer) -> int:
    """Return the length of `HostState.flat`: an element per parameter and kind of state, and one more."""
    slots = state_slots(optimizer.shards, optimizer.settings.states)
    return 1 + sum(shard.shape.numel() for _, shard in slots)


def state_dtype(optimizer: Optimizer) -> torch.dtype:
    return optimizer.dtype


def take(optimizer: Optimizer, step: int, into: Tensor | None = None) -> HostState:
    """Copy the present state into ``into``, the memory of an older state; None: into new memory.

    A GPU copies at the same time as it computes later work: the next forward passes hide the copy, the next
    update waits for it.
    """
    flat = into if into is not None else empty_state(optimizer)
    flat[-1:].fill_(optimizer.updates)

    def copy() -> None:
        begin = 0
        for _, _, tensor in optimizer.entries():
            flat[begin : begin + tensor.numel()].copy_(tensor.detach().reshape(-1), non_blocking=True)
            begin += tensor.numel()

    return HostState(step, flat, optimizer.read_beside(copy))


def empty_state(optimizer: Optimizer) -> Tensor:
    """Return memory for one state; it is pinned if the state comes from a GPU."""
    pinned = optimizer.device.type == "cuda"
    return torch.empty(state_elements(optimizer), dtype=state_dtype(optimizer), pin_memory=pinned)


def split(state: HostState, slots: Iterable[tuple[str, Shard]]) -> Iterator[StateEntry]:
    """Yield the state as `Optimizer.entries` does, as views. ``slots``: see `state_slots`."""
    begin, flat = 0, state.flat
    for kind, shard in slots:
        end = begin + shard.shape.numel()
        yield StateEntry(kind, shard, flat[begin:end].view(shard.shape))
        begin = end


@torch.no_grad()
def put_back(state: HostState, optimizer: Optimizer) -> None:
    """Set the optimizer's masters, moments and parameters to a state."""
    slots = state_slots(optimizer.shards, optimizer.settings.states)
    optimizer.restored(int(state.updates), split(state, slots))
