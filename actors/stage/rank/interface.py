"""The calls of the controller to a rank, one method each; `Worker` answers them.

A `WorkerGroup` takes the method itself, as in ``group.call_all(Rank.train_step, step)``, and carries its name
and arguments to the rank's process or actor. This file does not load PyTorch.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from braid.actors.stage.rank.messages import (
    CopiesHeld,
    Rendezvous,
    Rescue,
    RunPlan,
    Samples,
    StepResult,
    Written,
)


class Pulse(NamedTuple):
    """A working rank's answer when the controller asks whether it is alive."""

    progress: int | None
    """Counter of the work done so far; None if unknown at present."""
    awaits: str = ""
    """Name of the transfer that has been under way longest, if nothing was done since the previous pulse."""


class Rank(ABC):
    """One rank of a run.

    The order of calls: `open_log` on all, `open_store` on rank 0, `setup` on all, then `train_step`,
    `validate`, `save`, `load` in any order, and `close`. `pulse` and `interrupt` are answered while another
    method runs.
    """

    @abstractmethod
    def pulse(self) -> Pulse:
        """Return the amount of work done so far, and the transfer that the rank waits for."""

    @abstractmethod
    def interrupt(self, generation: int | None = None) -> None:
        """Make the method that is waiting for other ranks raise; the process groups are unusable afterwards.

        ``generation``: the generation to break off, however late the call comes; None for the present
        generation.
        """

    @abstractmethod
    def open_log(self, run: str, generation: int) -> None:
        """Direct all output to ``logs/rank-N.log`` of a run; generation 1 empties the file first."""

    @abstractmethod
    def open_store(self, timeout_s: float) -> int:
        """On rank 0: host the rendezvous on a free port of this node and return the port."""

    @abstractmethod
    def setup(self, plan: RunPlan, rendezvous: Rendezvous) -> str:
        """Join the process groups, build the model and bind the schedules.

        Return a text about the kernels that measurements chose; empty if there was no choice.
        """

    @abstractmethod
    def train_step(self, step: int) -> StepResult:
        """Run one optimizer step on the samples of step ``step`` (from 0)."""

    @abstractmethod
    def validate(self) -> tuple[float, ...]:
        """Return this rank's parts of the sums of token losses, in nats, over the validation samples of each
        set of the data; there is one set without ``data.mixture``."""

    @abstractmethod
    def data_facts(self) -> dict[str, Any]:
        """Return facts about the data (see `ReplicaSamples.facts`)."""

    @abstractmethod
    def profile(self, rounds: int, seed: int) -> Samples:
        """Time operators alone and together; the parameters are unusable afterwards."""

    @abstractmethod
    def activation_bytes(self, step: int) -> int:
        """Return the peak bytes of activations and messages in a step.

        The step runs once more without an update, slowly, since the rank counts after every operator.
        """

    @abstractmethod
    def stream_spans(self, target: Any, generation: int) -> None:
        """Stream the spans of all further steps to a collector, whose address is ``target``."""

    @abstractmethod
    def record_spans(self, on: bool) -> None:
        """Switch the recording of spans on or off, so that its cost can be measured in one process."""

    @abstractmethod
    def keep_copy(self, step: int) -> None:
        """Store a copy of the state after ``step`` steps in this rank's memory and in its partner's."""

    @abstractmethod
    def pair_copies(self, shift: int) -> None:
        """Send further copies of this rank's state to the rank ``shift`` positions further on; all ranks are
        called.

        Stored copies of ranks other than the new partner are deleted.
        """

    @abstractmethod
    def copies_held(self) -> CopiesHeld:
        """Return the copies that this rank could restore."""

    @abstractmethod
    def restore_copies(self, step: int, sources: Sequence[int]) -> None:
        """Restore the state after ``step`` steps from copies; all ranks are called. ``sources``: for each
        rank, the rank that holds its copy."""

    @abstractmethod
    def rescue(self, directory: str, plan: Rescue) -> Written:
        """Write, with the other survivors, a checkpoint from copies of all ranks' states.

        All survivors are called, after `leave`; no other rank is needed.
        """

    @abstractmethod
    def begin_save(self, directory: str, step: int, again: bool = False) -> None:
        """Begin to write this rank's shards; training may continue as soon as this returns.

        ``again``: write the state of the latest save to another folder.
        """

    @abstractmethod
    def save_finished(self, wait: bool) -> Written | None:
        """Return the result of the save that `begin_save` began; None while it is under way."""

    @abstractmethod
    def save(self, directory: str, step: int) -> Written:
        """Write this rank's share of a checkpoint into a directory, which the controller publishes."""

    @abstractmethod
    def damage(self, directory: str) -> str | None:
        """Return what is wrong with this rank's share of a checkpoint's files; all ranks check together."""

    @abstractmethod
    def load(self, directory: str, step: int) -> None:
        """Load parameters and optimizer state from a verified checkpoint, whatever layout wrote it."""

    @abstractmethod
    def load_initial(self, directory: str) -> None:
        """Begin training with the weights of a Hugging Face directory instead of random weights."""

    @abstractmethod
    def leave(self) -> None:
        """Leave the process groups; `setup` may follow, for another generation or another run."""

    @abstractmethod
    def close(self) -> None:
        """Leave the process groups at the end of the run."""

    @abstractmethod
    def hardware(self) -> str:
        """Return a description of the rank's device, as profiles name it."""

    @abstractmethod
    def process_id(self) -> int:
        """Return the operating system's id of this rank's process."""
