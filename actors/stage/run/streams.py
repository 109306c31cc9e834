"""How collectives are issued, awaited and timed: what the executor needs of a device.

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

    The recorder keeps transfers until the step is over, so those who wait must `take` the result: else every
    gathered tensor of the step would stay alive.
    """

    launch: Launch | None
    """With all that it reads and writes; None once it was taken."""
    work: Work | None
    begin: Mark
    end: Mark = None
    issued: threading.Event | None = None
    done: threading.Event | None = None
    arrival: Any = None
    """On a device: what compute waits for. In a graph not the mark of the end, which orders nothing."""
    error: BaseException | None = None
    sent: int | None = None
    """Bytes that this rank sends, where they are known."""

    def take(self) -> Any:
        """The result, once `Streams.wait` has returned; the transfer lets go of it, and of what it read."""
        launch = self.launch
        assert launch is not None, "a transfer is taken once"
        self.launch = self.work = self.issued = self.done = None
        if launch.finish is not None:
            launch.finish()
        return launch.result


class Streams(Protocol):
    """What the executor, and the profiler, need of a device."""

    asynchronous: bool
    """Whether the host issues ahead of the device, which has a clock of its own."""

    def mark(self) -> Mark:
        """Now, on the compute stream."""

    def start(self, stream: Stream, launch: Launch, *, awaited_next: bool, lane: str = "") -> Transfer:
        """Issue a transfer. ``awaited_next``: nothing runs before its `wait`.

        Transfers of one stream and lane complete in the order of their issue; messages between stages have
        lanes of their own, since a send that waits for its receiver must hold up nothing else.
        """

    def wait(self, transfer: Transfer) -> None:
        """Make the transfer's result available to what follows on the compute stream."""

    def progress(self) -> int:
        """How many marks the device has passed: a sign of life that costs next to nothing."""

    def complete(self, transfer: Transfer) -> bool:
        """Whether it has ended; False also where that cannot be told at present. Asked by another thread."""

    def forget(self, marks: Iterable[Mark]) -> None:
        """A step begins, and nobody asks any more for these marks of the one before."""

    def barrier(self) -> None:
        """What follows on the compute stream comes after all collectives so far: DHelix's barrier."""

    def lead(self) -> None:
        """Let the host get ahead: what it issues next, the device does without waiting for the host."""

    def delay(self, ns: float) -> None:
        """Let what follows on the compute stream begin so much later."""

    def nanoseconds(self, mark: Mark) -> int:
        """A mark as nanoseconds since some fixed point; waits for the device if need be."""

    def epoch_ns(self) -> int:
        """The wall clock at the fixed point that `nanoseconds` counts from."""

    def close(self) -> None:
        """End helper threads."""
