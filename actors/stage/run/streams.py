"""The executor's interface to a device: collectives are issued, awaited and timed.

A rank has three streams: compute, intra-node, inter-node. A transfer's span begins when it is issued and ends
when it completes (docs/design.md, Numbers of overlap); a late wait must never look like hidden communication.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from braid.kernels.collectives.primitives import Launch, Work
from braid.scheduling.mesh.cluster import Stream

Mark = Any
"""A point in time: nanoseconds on the host, an event on CUDA."""


@dataclass
class Transfer:
    """A collective or message under way.

    The recorder stores transfers until the step is over, so a waiter must `take` the result: otherwise every
    gathered tensor of the step would stay alive.
    """

    launch: Launch | None
    """The launch, with the tensors that it reads and writes; None once the result was taken."""
    work: Work | None
    begin: Mark
    end: Mark = None
    issued: threading.Event | None = None
    done: threading.Event | None = None
    arrival: Any = None
    """On a device: the event that compute waits for; in a graph not ``end``, which orders nothing."""
    error: BaseException | None = None
    sent: int | None = None
    """Number of bytes that this rank sends, if known."""

    def take(self) -> Any:
        """Return the result once `Streams.wait` has returned; the transfer drops it and its inputs."""
        launch = self.launch
        assert launch is not None, "a transfer is taken once"
        self.launch = self.work = self.issued = self.done = None
        if launch.finish is not None:
            launch.finish()
        return launch.result


class Streams(Protocol):
    """The device interface of the executor and the profiler."""

    asynchronous: bool
    """Whether the host issues ahead of the device, which has a clock of its own."""

    def mark(self) -> Mark:
        """Mark the present point of the compute stream."""

    def start(self, stream: Stream, launch: Launch, *, awaited_next: bool, lane: str = "") -> Transfer:
        """Issue a transfer. ``awaited_next``: no operation runs before its `wait`.

        Transfers of one stream and lane complete in the order of their issue; messages between stages have
        lanes of their own, since a send that waits for its receiver must not delay other transfers.
        """

    def wait(self, transfer: Transfer) -> None:
        """Make the transfer's result available to later work on the compute stream."""

    def progress(self) -> int:
        """Return the number of marks that the device has passed: a nearly free sign of life."""

    def complete(self, transfer: Transfer) -> bool:
        """Tell whether a transfer has ended; False also if unknown at present. Another thread may call it."""

    def forget(self, marks: Iterable[Mark]) -> None:
        """Drop the previous step's marks, which are not read again; a step begins."""

    def barrier(self) -> None:
        """Let later work on the compute stream wait for all collectives so far: DHelix's barrier."""

    def lead(self) -> None:
        """Let the host get ahead: the device then does the next work without waiting for the host."""

    def delay(self, ns: float) -> None:
        """Delay later work on the compute stream by ``ns`` nanoseconds."""

    def nanoseconds(self, mark: Mark) -> int:
        """Return a mark as nanoseconds since a fixed point; wait for the device if necessary."""

    def epoch_ns(self) -> int:
        """Return the wall-clock time of the fixed point that `nanoseconds` counts from."""

    def close(self) -> None:
        """End helper threads."""
