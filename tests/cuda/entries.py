"""What is noted of a rank on the model of the machine (`tests.cuda.machine`)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from tests.cuda.host_memory import restored

if TYPE_CHECKING:
    from tests.cuda.communicators import Shared

LISTS = (list, tuple)
GARBAGE = 0.125
"""What an abort leaves: it looks like a number."""


@contextmanager
def unnoted() -> Iterator[None]:
    """What the model itself does with tensors is nobody's work."""
    with _disable_current_modes():
        yield


def mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """A value with other things in place of those of a kind in its lists, tuples and dictionaries.

    `torch.utils._pytree` took a third of the model's time.
    """
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, LISTS):
        return type(value)([mapped(one, kind, change) for one in value])
    if isinstance(value, dict):
        return {name: mapped(one, kind, change) for name, one in value.items()}
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a value, in lists, tuples and dictionaries too."""
    found: list[Tensor] = []
    _add_tensors(value, found)
    return found


def _add_tensors(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, LISTS):
        for one in value:
            _add_tensors(one, found)
    elif isinstance(value, dict):
        for one in value.values():
            _add_tensors(one, found)


class View(NamedTuple):
    """A tensor as a window on memory."""

    memory: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """In elements."""

    @property
    def extent(self) -> tuple[int, int]:
        """First byte, and the one behind the last."""
        item = self.dtype.itemsize
        if 0 in self.size:
            return self.offset * item, self.offset * item
        last = self.offset + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return self.offset * item, (last + 1) * item

    def within(self, memory: Tensor) -> Tensor:
        """The tensor, where its memory lies in these bytes."""
        usable = memory[: memory.numel() // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
        return torch.as_strided(usable, self.size, self.stride, usable.storage_offset() + self.offset)


@dataclass(frozen=True)
class Made:
    """Memory was allocated for use on a stream."""

    memory: int
    stream: int
    nbytes: int


@dataclass(frozen=True)
class Freed:
    """Memory went back to the pool of the stream that it was allocated on."""

    memory: int


@dataclass
class Operator:
    """An operator of torch; ``arguments`` has views for tensors."""

    stream: int
    function: Any
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    reads: tuple[View, ...]
    writes: tuple[View, ...]
    results: tuple[View, ...]
    """What it returned in memory of its own."""
    host: Any = None
    """What the host read; the host waits for that."""

    @property
    def name(self) -> str:
        """As torch calls it."""
        return str(self.function)

    @property
    def touches(self) -> bool:
        """Whether it reads or writes memory; a view does not."""
        return bool(self.results or self.writes or self.host is not None)


@dataclass(frozen=True)
class Kernel:
    """A rank's part of a collective or of messages, on its communicator's stream."""

    stream: int
    call: "Call"
    reads: tuple[View, ...]
    writes: tuple[View, ...]

    @property
    def name(self) -> str:
        """Kind, communicator and number."""
        return f"{self.call.kind} {self.call.number} of {self.call.of.name}"


@dataclass(frozen=True)
class Recorded:
    """An event was recorded on a stream."""

    event: int
    stream: int


@dataclass(frozen=True)
class Waited:
    """A stream waits for an event."""

    stream: int
    event: int


@dataclass(frozen=True)
class HostWaited:
    """The host waited for an event."""

    event: int


Entry = Made | Freed | Operator | Kernel | Recorded | Waited | HostWaited


@dataclass(eq=False)
class Call:
    """A rank's use of a communicator."""

    of: "Shared"
    kind: str
    number: int
    """Among the calls of its communicator on this rank."""
    shape: tuple[Any, ...]
    """What must be equal on all members: dtype and elements; of messages, those of each."""
    peers: tuple[tuple[str, int, int], ...] = ()
    """Of messages: "send" or "receive", the other rank's number, the number among those of the pair."""
    captured: bool = False
    """Whether a graph does it."""
    done: bool = False
    outputs: tuple["Target", ...] = ()

    def spoil(self) -> None:
        """It was aborted."""
        self.done = True
        with unnoted():
            for y in (one.tensor() for one in self.outputs):
                if y is not None:
                    y.fill_(GARBAGE)


class Target:
    """What a kernel will write to: whether that is kept until then is not for the model to see to."""

    def __init__(self, x: Tensor) -> None:
        self._storage = StorageWeakRef(x.untyped_storage())
        self._view = x.dtype, x.storage_offset(), tuple(x.shape), tuple(x.stride())

    def tensor(self) -> Tensor | None:
        """None if its memory was given back."""
        if (storage := restored(self._storage)) is None:
            return None
        dtype, offset, shape, stride = self._view
        return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
