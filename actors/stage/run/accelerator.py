"""What a rank asks of the accelerator it computes on: streams, events, and to wait.

One small interface, so that the classes which put work in order (`CudaStreams`) can run on a
model of the machine that checks what they do (tests/cuda), and on whatever accelerator torch knows.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, cast

import torch


class Event(Protocol):
    """A point in a stream's work."""

    def record(self, stream: "DeviceStream") -> None:
        """After what the stream was given so far."""

    def query(self) -> bool:
        """Whether it has been passed."""

    def synchronize(self) -> None:
        """Let the host wait until it has been passed."""

    def elapsed_time(self, other: "Event") -> float:
        """Milliseconds from this one to another; both have been passed."""


class DeviceStream(Protocol):
    """Work that a device does one after the other."""

    def wait_event(self, event: Event) -> None:
        """What the stream is given from now on comes after the event."""

    def synchronize(self) -> None:
        """Let the host wait until all that the stream was given is done."""


class CapturedGraph(Protocol):
    """Work that was captured."""

    def replay(self) -> None:
        """Give all of it to the current stream, in one call, on the memory that it was captured with."""

    def reset(self) -> None:
        """Release the work and its references, also to communicators; a replay under way still completes."""


class Accelerator(Protocol):
    """A device with streams."""

    def current(self) -> DeviceStream:
        """The stream that operators are given to."""

    def stream(self) -> DeviceStream:
        """A new one, whose kernels go before those of others that wait for a place on the device."""

    def on(self, stream: DeviceStream) -> AbstractContextManager[object]:
        """Give operators to a stream, as long as this lasts."""

    def event(self) -> Event:
        """A new one that tells the time."""

    def graph_event(self) -> Event:
        """One that is recorded, while a graph is captured, as part of the graph: each replay sets its time.

        It orders nothing.
        """

    def capture(self) -> AbstractContextManager[CapturedGraph]:
        """Meanwhile this thread's work is not done but captured, on a current stream of its own.

        Streams that were made to wait for it are captured, too; it must have waited for all of them in the
        end. Raises RuntimeError for what cannot be captured, such as a value that the host reads.
        """

    def spin(self, ns: float) -> None:
        """Occupy the current stream, and next to nothing of the device, for so many nanoseconds."""

    def synchronise(self) -> None:
        """Let the host wait until the device has done everything."""


class TorchAccelerator:
    """A device by PyTorch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> DeviceStream:
        """That of this thread."""
        return cast(DeviceStream, torch.accelerator.current_stream(self._device))

    def stream(self) -> DeviceStream:
        """Of high priority: communication that waits behind compute hides nothing."""
        return cast(DeviceStream, torch.Stream(device=self._device, priority=-1))

    def on(self, stream: DeviceStream) -> AbstractContextManager[object]:
        """For this thread."""
        return cast(AbstractContextManager[object], stream)

    def event(self) -> Event:
        """With a time."""
        return cast(Event, torch.Event(device=self._device, enable_timing=True))

    def graph_event(self) -> Event:
        """Other accelerators than CUDA's have none in torch."""
        raise RuntimeError(f"{self._device.type} has no events that are part of a graph")

    def capture(self) -> AbstractContextManager[CapturedGraph]:
        """Neither have they graphs."""
        raise RuntimeError(f"{self._device.type} has no graphs")

    def spin(self, ns: float) -> None:
        """Nor such a kernel: nothing."""

    def synchronise(self) -> None:
        """All streams."""
        torch.accelerator.synchronize(self._device)


class CudaAccelerator(TorchAccelerator):
    """A GPU. All streams and events are of `torch.cuda`: those of graphs are, and tell times to no others."""

    def current(self) -> DeviceStream:
        """That of this thread."""
        return cast(DeviceStream, torch.cuda.current_stream(self._device))

    def stream(self) -> DeviceStream:
        """Of high priority."""
        return cast(DeviceStream, torch.cuda.Stream(self._device, priority=-1))

    def on(self, stream: DeviceStream) -> AbstractContextManager[object]:
        """For this thread."""
        return torch.cuda.stream(cast(torch.cuda.Stream, stream))

    def event(self) -> Event:
        """With a time."""
        return cast(Event, torch.cuda.Event(enable_timing=True))

    def graph_event(self) -> Event:
        """CUDA's external events."""
        return cast(Event, torch.cuda.Event(enable_timing=True, external=True))

    @contextmanager
    def capture(self) -> Iterator[CapturedGraph]:
        """CUDA's, with memory of its own. Other threads, such as NCCL's and pulses, do as they like."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            yield graph

    def spin(self, ns: float) -> None:
        """At least; a clock of 2 GHz is assumed, as CUDA 13 no longer tells its rate."""
        torch.cuda._sleep(int(2 * ns))


def accelerator_of(device: torch.device) -> Accelerator | None:
    """That of a rank; a CPU is none."""
    if device.type == "cpu":
        return None
    return CudaAccelerator(device) if device.type == "cuda" else TorchAccelerator(device)
