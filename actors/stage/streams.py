"""How collectives are issued, awaited and timed: what the executor needs of a device.

A rank has three streams: compute, intra-node, inter-node. A transfer's span begins when it is issued and ends
when it completes (docs/design.md, Numbers of overlap); a late wait must never look like hidden communication.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from braid.kernels.collectives.primitives import Launch, Work
from braid.scheduling.operators import Stream

Mark = Any
"""A point in time: nanoseconds on the host, an event on CUDA."""


@dataclass
class Transfer:
    """A collective or message under way.

    The recorder keeps transfers until the step is over, so those who wait must `take` the result: else every
    gathered tensor of the step would stay alive.
    """

    result: Any
    work: Work | None
    begin: Mark
    finish: Callable[[], object] | None = None
    """What the compute stream still has to do before the result may be read."""
    end: Mark = None
    issued: threading.Event | None = None
    done: threading.Event | None = None
    error: BaseException | None = None

    def take(self) -> Any:
        """The result, once `Streams.wait` has returned; the transfer lets go of it."""
        result, finish = self.result, self.finish
        self.result = self.work = self.finish = None
        self.issued = self.done = None
        if finish is not None:
            finish()
        return result


class Streams(Protocol):
    """What the executor needs of a device."""

    marks: int
    """How many marks were taken so far: a sign of life that costs next to nothing."""

    def mark(self) -> Mark:
        """Now, on the compute stream."""

    def start(self, stream: Stream, launch: Launch, *, awaited_next: bool, lane: str = "") -> Transfer:
        """Issue a transfer. ``awaited_next``: nothing runs before its `wait`.

        Transfers of one stream and lane complete in the order of their issue; messages between stages have
        lanes of their own, since a send that waits for its receiver must hold up nothing else.
        """

    def wait(self, transfer: Transfer) -> None:
        """Make the transfer's result available to what follows on the compute stream."""

    def synchronise(self) -> None:
        """Wait on the host until everything that was issued has finished: a barrier between segments."""

    def nanoseconds(self, mark: Mark) -> int:
        """A mark as nanoseconds since some fixed point; waits for the device if need be."""

    def epoch_ns(self) -> int:
        """The wall clock at the fixed point that `nanoseconds` counts from."""

    def close(self) -> None:
        """End helper threads."""


def device_streams(device: torch.device) -> Streams:
    """The streams for a device."""
    if device.type == "cuda":
        from braid.actors.stage.cuda_streams import CudaStreams

        return CudaStreams(device)
    from braid.actors.stage.gloo_streams import HostStreams

    return HostStreams()
