"""The calls that the controller makes to a rank, by method; `Worker` answers them.

A `WorkerGroup` takes the method itself, as in ``group.call_all(Rank.train_step, step)``, and carries its name
and arguments to the rank's process or actor. Nothing here loads PyTorch.
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
    """What a rank at work answers to the question whether it lives."""

    progress: int | None
    """How much was done so far; None while that cannot be told."""
    awaits: str = ""
    """The transfer that has been under way for longest, where nothing was done since the last question."""


class Rank(ABC):
    """One rank of a run.

    The order of calls: `open_log` on all, `open_store` on rank 0, `setup` on all, then `train_step`,
    `validate`, `save`, `load` as the controller sees fit, and `close`. `pulse` and `interrupt` are answered
    while another method runs.
    """

    @abstractmethod
    def pulse(self) -> Pulse:
        """How much was done so far, and what is waited for."""

    @abstractmethod
    def interrupt(self, generation: int | None = None) -> None:
        """Make the method that waits for other ranks raise; the process groups are of no use afterwards.

        generation: the one that is meant, however late this comes; None: the one that runs.
        """

    @abstractmethod
    def open_log(self, run: str, generation: int) -> None:
        """Write to ``logs/rank-N.log`` of a run, which generation 1 begins anew."""

    @abstractmethod
    def open_store(self, timeout_s: float) -> int:
        """On rank 0: host the rendezvous on a free port of this node and return the port."""

    @abstractmethod
    def setup(self, plan: RunPlan, rendezvous: Rendezvous) -> str:
        """Join the process groups, build the model and bind the schedules.

        Returns which kernels were chosen by measurements, for people; empty where none were to choose.
        """

    @abstractmethod
    def train_step(self, step: int) -> StepResult:
        """Run one optimizer step on the samples of step ``step`` (from 0)."""

    @abstractmethod
    def validate(self) -> float:
        """This rank's part of the sum of token losses, in nats, over the samples of a validation."""

    @abstractmethod
    def data_facts(self) -> dict[str, int | str | None]:
        """What is to be known of the data (`ReplicaSamples.facts`)."""

    @abstractmethod
    def profile(self, rounds: int, seed: int) -> Samples:
        """Time operators alone and together; the parameters are of no use afterwards."""

    @abstractmethod
    def activation_bytes(self, step: int) -> int:
        """Most bytes of activations and messages that are alive at once in a step.

        The step runs once more without an update, slowly, as every operator is followed by a count.
        """

    @abstractmethod
    def stream_spans(self, target: Any, generation: int) -> None:
        """Stream the spans of all further steps to a collector (its ``target``)."""

    @abstractmethod
    def record_spans(self, on: bool) -> None:
        """Record the spans of further steps, or do not: what that costs is measured in one process."""

    @abstractmethod
    def keep_copy(self, step: int) -> None:
        """Keep a copy of the state after ``step`` steps, here and at the partner."""

    @abstractmethod
    def pair_copies(self, shift: int) -> None:
        """Send further copies of this rank's state to the rank ``shift`` further on; all ranks are asked.

        Copies of the state of another rank than the new partner's are forgotten.
        """

    @abstractmethod
    def copies_held(self) -> CopiesHeld:
        """What this rank could restore."""

    @abstractmethod
    def restore_copies(self, step: int, sources: Sequence[int]) -> None:
        """Go back to a step that all ranks' copies allow; all ranks are asked."""

    @abstractmethod
    def rescue(self, directory: str, plan: Rescue) -> Written:
        """Write, with the other survivors, a checkpoint of what copies hold of all ranks' states.

        All survivors are asked, after `leave`; it needs no other rank.
        """

    @abstractmethod
    def begin_save(self, directory: str, step: int, again: bool = False) -> None:
        """Begin to write this rank's shards; training may go on as soon as this returns.

        again: to another place, the state of the save that was begun last.
        """

    @abstractmethod
    def save_finished(self, wait: bool) -> Written | None:
        """What became of the save that was begun; None while it is under way."""

    @abstractmethod
    def save(self, directory: str, step: int) -> Written:
        """Write this rank's shards into a checkpoint directory that the controller publishes."""

    @abstractmethod
    def damage(self, directory: str) -> str | None:
        """What is wrong with this rank's share of a checkpoint's files, which all ranks check together."""

    @abstractmethod
    def load(self, directory: str, step: int) -> None:
        """Load parameters and optimizer from a verified checkpoint, whatever layout wrote it."""

    @abstractmethod
    def load_initial(self, directory: str) -> None:
        """Begin with the weights of a Hugging Face directory instead of random ones."""

    @abstractmethod
    def leave(self) -> None:
        """Leave the process groups; `setup` may follow, for another generation or another run."""

    @abstractmethod
    def close(self) -> None:
        """The end: leave the process groups."""

    @abstractmethod
    def hardware(self) -> str:
        """What this rank computes on, as profiles name it."""

    @abstractmethod
    def process_id(self) -> int:
        """The operating system's id of this rank's process."""
