"""Copies of ranks' states in memory, so that a failure costs no more than the step under way.

Every rank stores its states after the last two copied steps, and the same states of a partner on another host
(docs/design.md, Failure): two states, since a failure may come while the newer copy is being sent. A copy is
sent to the partner in the background, over its own process group, while the next step runs. Where
data-parallel replicas on other hosts hold the same state anyway, no copy is sent.
"""

import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from braid.actors.stage.rank.messages import CopiesHeld
from braid.actors.stage.run.accelerator import Event
from braid.actors.stage.state.global_state import StateEntry
from braid.actors.stage.state.optimizer import Optimizer, state_slots
from braid.actors.stage.state.shards import Shard
from braid.scheduling.mesh.mesh import MeshShape

_LEAVE_SECONDS = 5.0
KEPT = 2
"""Number of states that a rank stores of itself, and likewise of its partner."""


@dataclass(frozen=True)
class HostState:
    """A rank's state after ``step`` finished steps, in the host's memory: master weights and moments,
    contiguous in one flat tensor.

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
    return torch.empty(state_elements(optimizer), dtype=optimizer.dtype, pin_memory=pinned)


def split(state: HostState, slots: Iterable[tuple[str, Shard]]) -> Iterator[StateEntry]:
    """Yield the state as `Optimizer.entries` does, as views. ``slots``: see `state_slots`."""
    begin, flat = 0, state.flat
    for kind, shard in slots:
        end = begin + shard.shape.numel()
        yield StateEntry(kind, shard, flat[begin:end].view(shard.shape))
        begin = end


class Copies:
    """The copies that one rank stores; they outlive the process groups of a generation."""

    def __init__(self) -> None:
        self._own: dict[int, HostState] = {}
        self._partners: dict[int, HostState] = {}
        self._partner_rank: int | None = None
        self._held_as: Hashable = None
        self._mesh: MeshShape | None = None
        self._exchange: _Exchange | None = None
        self._group: dist.ProcessGroup | None = None

    def join(
        self,
        optimizer: Optimizer,
        held_as: Hashable,
        mesh: MeshShape,
        shift: int,
        limit_bytes: int | None,
        timeout: timedelta,
    ) -> None:
        """Begin a generation; all ranks call this. Copies are sent to the rank ``shift`` positions further
        on; 0: to none.

        ``held_as``: the layout, which together with the rank determines the part of the model in a state.
        States of another layout are deleted.

        Raise `ValueError` if the copies would take more than ``limit_bytes`` of this rank's memory.
        """
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.leave()
        source = (rank - shift) % ranks if shift else None
        if held_as != self._held_as:
            self._own.clear()
        if held_as != self._held_as or source != self._partner_rank:
            self._partners.clear()
        self._held_as, self._mesh, self._partner_rank = held_as, mesh, source
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
        dist.all_gather(sizes, torch.tensor([state_elements(optimizer)]), group=self._group)
        elements = int(sizes[rank]) + (int(sizes[source]) if source is not None else 0)
        needed = KEPT * elements * optimizer.dtype.itemsize
        if limit_bytes is not None and needed > limit_bytes:
            raise ValueError(
                f"checkpoint.copies_mb={limit_bytes >> 20}: copies in memory take {needed / 2**20:.0f} MiB "
                f"of rank {rank}; raise it, or set checkpoint.copies_every to 0"
            )
        if source is not None:
            self._exchange = _Exchange(self._group, (rank + shift) % ranks, source, int(sizes[source]))

    def leave(self) -> None:
        """End a generation; wait a few seconds for a copy under way, and keep what has arrived."""
        if self._exchange is not None:
            self._exchange.wait(_LEAVE_SECONDS)
            self._take_arrived()
        self._exchange = None

    def keep(self, optimizer: Optimizer, step: int) -> None:
        """Copy the state after ``step`` steps, and begin to send the copy; wait for the previous copy first.

        Copies of this and later steps are deleted: the run has returned to an earlier state, perhaps a
        checkpoint.
        """
        self.settle()
        self._own = {at: state for at, state in self._own.items() if at < step}
        self._partners = {at: state for at, state in self._partners.items() if at < step}
        state = take(optimizer, step, self._forget(self._own))
        self._own[step] = state
        if self._exchange is not None:
            self._exchange.start(state, self._forget(self._partners), optimizer.dtype)

    def settle(self) -> None:
        """Wait for the copies that are being sent and received; raise their error."""
        if self._exchange is not None:
            self._exchange.wait()
            self._exchange.check()
            self._take_arrived()

    def _take_arrived(self) -> None:
        if self._exchange is not None and (arrived := self._exchange.arrived) is not None:
            self._partners[arrived.step], self._exchange.arrived = arrived, None

    @staticmethod
    def _forget(states: dict[int, HostState]) -> Tensor | None:
        """Remove the oldest of `KEPT` states and return its memory; None if there are fewer."""
        return states.pop(min(states)).memory if len(states) >= KEPT else None

    def held(self) -> CopiesHeld:
        """Return the steps of complete copies; copies that are still arriving do not count."""
        self._take_arrived()
        return CopiesHeld(
            own=tuple(sorted(self._own)), partner=self._partner_rank, partners=tuple(sorted(self._partners))
        )

    def restore(self, optimizer: Optimizer, step: int, sources: Sequence[int]) -> None:
        """Restore the state after ``step`` steps, on rank r from rank ``sources[r]``; for all ranks."""
        rank = dist.get_rank()
        state = self._own.get(step)
        if state is None and sources[rank] == rank:  # the stored state of a replica equals this rank's state
            state = HostState(step, self._partners[step].flat.clone())
        for target, source in enumerate(sources):
            if source == target:
                continue
            if rank == source:
                dist.send(self.state_of(target, rank, step).flat, target, self._group)
            elif rank == target:
                flat = empty_state(optimizer)
                dist.recv(flat, source, self._group)
                state = HostState(step, flat)
        assert state is not None, f"rank {rank} has no copy of step {step}"
        slots = state_slots(optimizer.shards, optimizer.settings.states)
        optimizer.restored(int(state.updates), split(state, slots))
        # Later states belong to steps that will run again.
        self._own = {step: state}
        self._partners = {at: state for at, state in self._partners.items() if at <= step}

    def state_of(self, target: int, rank: int, step: int) -> HostState:
        """Return the state of rank ``target`` after ``step`` steps, which this ``rank`` stores; where both
        ranks hold the same slices, this is the state of ``rank`` itself."""
        assert self._mesh is not None
        same = step in self._own and target in self._mesh.holders(rank)
        return (self._own if same else self._partners)[step]


class _Exchange:
    """Sends states to one rank and receives states from another, in a background thread."""

    def __init__(self, group: dist.ProcessGroup, target: int, source: int, elements: int) -> None:
        self._group, self._target, self._source, self._elements = group, target, source, elements
        self._thread: threading.Thread | None = None
        self.arrived: HostState | None = None
        """The received state, until `Copies` takes it."""
        self._error: Exception | None = None

    def start(self, state: HostState, memory: Tensor | None, dtype: torch.dtype) -> None:
        """Begin to send ``state``, and to receive into ``memory``, or into new memory."""
        into = memory if memory is not None else torch.empty(self._elements, dtype=dtype)
        self._thread = threading.Thread(target=self._run, args=(state, into), name="copies", daemon=True)
        self._thread.start()

    def _run(self, state: HostState, into: Tensor) -> None:
        try:
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, state.flat, self._target, self._group),
                    dist.P2POp(dist.irecv, into, self._source, self._group),
                ]
            )
            for work in works:
                work.wait()
        except RuntimeError as error:
            self._error = error
        else:
            self.arrived = HostState(state.step, into)

    def wait(self, timeout_s: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def check(self) -> None:
        """Raise the error of the exchange, if it failed; the error is raised once."""
        error, self._error = self._error, None
        if error is not None:
            raise error
