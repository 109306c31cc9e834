"""The executor's interface to a device: collectives are issued, awaited and timed.

A rank has three streams: compute, intra-node, inter-node. A transfer's span begins when it is issued and ends
when it completes (docs/design.md, Numbers of overlap); a late wait must never look like hidden communication.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from braid.kernels.collectives.primitives import Launch, Work
from braid.scheduling.mesh.cluster import Stream

Mark = Any
"""A point in time: an integer (nanoseconds) on a CPU, an event on CUDA."""


@dataclass
class Transfer:
    """A collective or message in progress.

    The recorder stores transfers until the step is over, so a waiter must `take` the result: otherwise every
    gathered tensor of the step would stay alive.
    """

    launch: Launch | None
    """The launch, which holds the tensors that it reads and writes; None once the result was taken."""
    work: Work | None
    begin: Mark
    end: Mark = None
    issued: threading.Event | None = None
    done: threading.Event | None = None
    arrival: Any = None
    """What compute waits for on a device; in a graph this is not ``end``, which orders nothing."""
    error: BaseException | None = None
    sent: int | None = None
    """Number of bytes that this rank sends; None if unknown."""

    def take(self) -> Any:
        """Return the result after `Streams.wait` has returned; drop the references to result and inputs."""
        launch = self.launch
        assert launch is not None, "a transfer is taken once"
        self.launch = self.work = self.issued = self.done = None
        if launch.finish is not None:
            launch.finish()
        return launch.result


class Streams(ABC):
    """Interface to the device that the executor and the profiler use."""

    asynchronous = False
    """Whether the host issues work ahead of the device, which has its own clock."""

    @abstractmethod
    def mark(self) -> Mark:
        """Mark the present point of the compute stream."""

    @abstractmethod
    def start(self, stream: Stream, launch: Launch, *, awaited_next: bool, lane: str = "") -> Transfer:
        """Issue a transfer. ``awaited_next``: the caller's next operation is `wait` for this transfer.

        Transfers of one stream and lane complete in the order of their issue; messages between stages have
        separate lanes, since a send that waits for its receiver must not delay other transfers.
        """

    @abstractmethod
    def wait(self, transfer: Transfer) -> None:
        """Wait for a transfer, so that later work on the compute stream can use its result."""

    def result_of(self, transfer: Transfer) -> Any:
        """Wait for a transfer and return its result."""
        self.wait(transfer)
        return transfer.take()

    @abstractmethod
    def progress(self) -> int:
        """Return the number of marks that the device has passed: a cheap sign that the rank is alive."""

    @abstractmethod
    def complete(self, transfer: Transfer) -> bool:
        """Tell whether a transfer has ended; False also if unknown at present. Callable from any thread."""

    def forget(self, marks: Iterable[Mark]) -> None:
        """Drop the marks of the previous step, which are not read again; called when a step begins."""
        return

    def barrier(self) -> None:
        """Let later work on the compute stream wait for all collectives issued so far: DHelix's barrier. On a
        CPU there is nothing to do: compute is done when its call returns, and programs wait before a barrier.
        """
        return

    def lead(self) -> None:
        """Let the host get ahead of the device, which then does not wait for the next work."""
        return

    @abstractmethod
    def delay(self, ns: float) -> None:
        """Delay later work on the compute stream by ``ns`` nanoseconds."""

    @abstractmethod
    def nanoseconds(self, mark: Mark) -> int:
        """Return a mark as nanoseconds since a fixed point; wait for the device if necessary."""

    def between(self, begin: Mark, end: Mark) -> int:
        """Return the nanoseconds from one mark to another; wait for the device if necessary."""
        return self.nanoseconds(end) - self.nanoseconds(begin)

    @abstractmethod
    def epoch_ns(self) -> int:
        """Return the wall-clock time of the fixed point that `nanoseconds` counts from."""

    def close(self) -> None:
        """End the helper threads."""
        return
