"""Streams on GPUs: NCCL on side streams, ordered by events."""

import time

import torch

from braid.actors.stage.streams import Mark, Transfer
from braid.kernels.collectives.primitives import Launch
from braid.scheduling.operators import Stream


class CudaStreams:
    """NCCL: transfers run on side streams, ordered against compute by events; the host never waits.

    All memory is allocated on the compute stream. A transfer's input is freed only after `wait`, so the
    allocator needs no further record of the side stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._compute = torch.cuda.current_stream(device)
        self.marks = 0
        self._origin_ns = 0
        self._device = device
        self._side: dict[tuple[Stream, str], torch.cuda.Stream] = {}
        torch.cuda.synchronize(device)
        self._origin, self._epoch_ns = self.mark(), time.time_ns()

    def mark(self) -> torch.cuda.Event:
        """An event on the compute stream."""
        self.marks += 1
        return _record(self._compute)

    def start(self, stream: Stream, launch: Launch, *, awaited_next: bool, lane: str = "") -> Transfer:
        """Issue on the lane's side stream, after what compute has done so far."""
        if (stream, lane) not in self._side:
            self._side[stream, lane] = torch.cuda.Stream(self._device)
        side = self._side[stream, lane]
        side.wait_stream(self._compute)
        begin = _record(side)
        with torch.cuda.stream(side):
            work = launch.issue()
            work.wait()  # the side stream waits for NCCL's own; the host does not
        return Transfer(result=launch.result, work=work, begin=begin, finish=launch.finish, end=_record(side))

    def wait(self, transfer: Transfer) -> None:
        """Let the compute stream wait for the transfer."""
        self._compute.wait_event(transfer.end)

    def synchronise(self) -> None:
        """What the barrier of DHelix is (its section 5)."""
        torch.cuda.synchronize(self._device)

    def nanoseconds(self, mark: Mark) -> int:
        """Nanoseconds since the streams were made; waits for the event.

        CUDA counts in single-precision milliseconds, which after a minute are exact to four microseconds. So
        the origin moves along, and marks within seconds of each other have exact distances.
        """
        mark.synchronize()
        passed_ns = self._origin_ns + int(self._origin.elapsed_time(mark) * 1e6)
        if passed_ns > self._origin_ns + _FAR_NS:
            self._origin, self._origin_ns = mark, passed_ns
        return passed_ns

    def epoch_ns(self) -> int:
        """The first event's time on the wall clock."""
        return self._epoch_ns

    def close(self) -> None:
        """Nothing to end."""


_FAR_NS = 1_000_000_000
"""Marks that are so much later than the origin become the origin."""


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event
