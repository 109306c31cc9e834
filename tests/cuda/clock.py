"""A device with a clock: what the host issues takes the host a time, and the device another one.

One rank, one thread; operators compute at once, on tensors of the CPU. Nothing slows down beside anything
else: what a profiler measures here is known in advance, to the nanosecond.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cuda.communicators import Collectives, Work
from tests.cuda.entries import tensors_of

ISSUE_NS = 10_000
"""Of the host, for an operator, a collective or an event."""
KERNEL_NS, BYTES_PER_NS, FLOPS_PER_NS = 1_000, 64, 1024
"""Of the device: every kernel's first microsecond, and rates. Most kernels of a tiny model are shorter than
their issue, as those of a big one are on many ranks."""
GROUP_NS, GROUP_BYTES_PER_NS = 20_000, 1


@dataclass(eq=False)
class Stream:
    """Of the device."""

    device: "TimedDevice"
    end: float = 0.0
    """When it will have done all that it was given."""

    def wait_event(self, event: "Event") -> None:
        self.end = max(self.end, event.time)

    def synchronize(self) -> None:
        self.device.now = max(self.device.now, self.end)

    def give(self, ns: float) -> None:
        """Work, from when it is issued on."""
        self.end = max(self.end, self.device.now) + ns


@dataclass(eq=False)
class Event:
    """Of the device."""

    device: "TimedDevice"
    time: float = 0.0

    def record(self, stream: Stream) -> None:
        self.device.now += ISSUE_NS
        self.time = max(stream.end, self.device.now)

    def query(self) -> bool:
        return self.time <= self.device.now

    def synchronize(self) -> None:
        self.device.now = max(self.device.now, self.time)

    def elapsed_time(self, other: "Event") -> float:
        return (other.time - self.time) / 1e6


class TimedDevice(TorchDispatchMode):
    """What `braid.actors.stage.run.accelerator.Accelerator` is; active, it gives operators to streams.

    It also is, for `ModelGroups`, a machine of which one rank alone is there, and that rank's log.
    """

    rank = 0

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        """The host's clock, nanoseconds."""
        self.kernels: list[float] = []
        """How long every operator's took, in the order of issue."""
        self._current = [Stream(self)]

    def group(self, log: object, name: str, ranks: Sequence[int]) -> "TimedGroup":
        """This rank's end of a communicator."""
        return TimedGroup(self, len(ranks), list(ranks).index(self.rank))

    def gather(self, log: object, number: int, own: Any) -> list[Any]:
        """There is nobody else to ask."""
        return [own]

    def current(self) -> Stream:
        return self._current[-1]

    def stream(self) -> Stream:
        return Stream(self)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self._current.append(stream)
        yield
        self._current.pop()

    def event(self) -> Event:
        return Event(self)

    def spin(self, ns: float) -> None:
        self.now += ISSUE_NS
        self.current().give(ns)

    def synchronise(self) -> None:
        """The host waits for what it computes on; nothing else is asked for here."""
        self.current().synchronize()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        if function.is_view or function.name().startswith("aten::empty"):
            return out
        self.now += ISSUE_NS
        self.kernels.append(kernel_ns(function, args, out))
        self.current().give(self.kernels[-1])
        if function.name().startswith("aten::_local_scalar_dense"):
            self.current().synchronize()
        return out


def kernel_ns(function: Any, args: Any, out: Any) -> float:
    """What an operator takes the device."""
    tensors = tensors_of((args, out))
    ns = KERNEL_NS + sum(x.nbytes for x in tensors) / BYTES_PER_NS
    if function.name().startswith(("aten::mm", "aten::addmm")):
        a, b = (x for x in args if isinstance(x, Tensor)) if "addmm" not in function.name() else args[1:3]
        ns += 2 * a.shape[0] * a.shape[1] * b.shape[1] / FLOPS_PER_NS
    return ns


class TimedGroup(Collectives):
    """What `Communicator` asks of a library, where the other members are always there. No numbers move."""

    def __init__(self, device: TimedDevice, ranks: int, own: int) -> None:
        self._timed, self._stream, self._ranks, self.own = device, device.stream(), ranks, own

    def size(self) -> int:
        return self._ranks

    def _collective(self, kind: str, x: Tensor, y: Tensor) -> Work:
        return self._kernel(x.nbytes + y.nbytes if kind == "all_reduce" else max(x.nbytes, y.nbytes))

    def messages(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Work:
        """As one kernel."""
        return self._kernel(sum(x.nbytes for x, _ in (*sends, *receives)))

    def _kernel(self, size: int) -> Work:
        ready, end = Event(self._timed), Event(self._timed)
        ready.record(self._timed.current())
        self._stream.wait_event(ready)
        self._stream.give(group_ns(size))
        end.record(self._stream)
        return Work(self._timed, end)


def group_ns(size: int) -> float:
    """What a collective takes the device."""
    return GROUP_NS + size / GROUP_BYTES_PER_NS
