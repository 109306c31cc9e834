"""Interface of a rank to the accelerator that it computes on: streams, events, and waiting.

The interface is small, so that classes which order work (`CudaStreams`) can run in tests on a simulated
machine that checks the order (tests/cuda).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, cast

import torch


class Event(Protocol):
    """A point in the work of a stream."""

    def record(self, stream: "DeviceStream") -> None:
        """Place the event behind all work that the stream has so far."""

    def query(self) -> bool:
        """Tell whether the device has passed the event."""

    def synchronize(self) -> None:
        """Let the host wait until the device has passed the event."""

    def elapsed_time(self, other: "Event") -> float:
        """Return the milliseconds from this event to another; the device has passed both."""


class DeviceStream(Protocol):
    """A queue of work that a device executes in order."""

    def wait_event(self, event: Event) -> None:
        """Let all later work of the stream wait for the event."""

    def synchronize(self) -> None:
        """Let the host wait until all work of the stream is done."""


class CapturedGraph(Protocol):
    """Work that was captured as a graph."""

    def replay(self) -> None:
        """Issue all captured work to the current stream, in one call; it uses the memory of the capture."""

    def reset(self) -> None:
        """Release the work and its references, such as communicators; a running replay completes."""


class Accelerator(Protocol):
    """A device with streams."""

    def current(self) -> DeviceStream:
        """Return the stream on which operators are launched."""

    def stream(self) -> DeviceStream:
        """Return a new stream, whose kernels take precedence over waiting kernels of normal streams."""

    def on(self, stream: DeviceStream) -> AbstractContextManager[object]:
        """Launch operators on a stream while the context lasts."""

    def event(self) -> Event:
        """Return a new event that records time."""

    def graph_event(self) -> Event:
        """Return an event that belongs to a graph if recorded during capture: each replay sets its time.

        The event orders no work.
        """

    def capture(self) -> AbstractContextManager[CapturedGraph]:
        """Capture this thread's work instead of executing it while the context lasts, on a new current
        stream.

        Streams that wait for the current stream are captured too; at the end it must have waited for all of
        them. Raise RuntimeError for work that cannot be captured, such as a value that the host reads.
        """

    def spin(self, ns: float) -> None:
        """Occupy the current stream, and hardly any of the device, for ``ns`` nanoseconds."""

    def synchronise(self) -> None:
        """Let the host wait until the device has finished all work."""


class CudaAccelerator:
    """A GPU, with events of `torch.cuda`: in graphs, only these measure time between each other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> DeviceStream:
        return cast(DeviceStream, torch.cuda.current_stream(self._device))

    def stream(self) -> DeviceStream:
        # of high priority: communication that waits behind compute hides nothing
        return cast(DeviceStream, torch.cuda.Stream(self._device, priority=-1))

    def on(self, stream: DeviceStream) -> AbstractContextManager[object]:
        return torch.cuda.stream(cast(torch.cuda.Stream, stream))

    def event(self) -> Event:
        return cast(Event, torch.cuda.Event(enable_timing=True))

    def graph_event(self) -> Event:
        return cast(Event, torch.cuda.Event(enable_timing=True, external=True))

    @contextmanager
    def capture(self) -> Iterator[CapturedGraph]:
        """Capture a CUDA graph with its own memory. Other threads (NCCL's, pulses) may use CUDA meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            yield graph

    def spin(self, ns: float) -> None:
        # at clocks up to 2 GHz, as CUDA 13 does not report the clock rate
        torch.cuda._sleep(int(2 * ns))

    def synchronise(self) -> None:
        torch.cuda.synchronize(self._device)


def accelerator_of(device: torch.device) -> Accelerator | None:
    """Return the accelerator of a rank; None for a CPU."""
    return CudaAccelerator(device) if device.type == "cuda" else None
