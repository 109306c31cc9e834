"""Counts the bytes of tensors that an executor holds: for memory reports, not for the step itself."""

from collections.abc import Callable, Iterable, Iterator
from weakref import WeakKeyDictionary

from torch import Tensor

from braid.actors.stage.run.executor import Executor
from braid.actors.stage.run.streams import Transfer
from braid.kernels.operators.autograd import AutogradGraph
from braid.kernels.operators.operator import Saved
from braid.scheduling.schedule.operations import Operation

_KEPT_BY_GRAPHS: WeakKeyDictionary[AutogradGraph, list[Tensor]] = WeakKeyDictionary()
"""Tensors that autograd graphs keep alive, so that autograd is queried only once per graph."""


def tensors_of(value: object) -> Iterator[Tensor]:
    """Yield the tensors that a value keeps alive, including tensors in recorded graphs and transfers."""
    match value:
        case Tensor():
            yield value
        case AutogradGraph():
            if value not in _KEPT_BY_GRAPHS:
                _KEPT_BY_GRAPHS[value] = list(value.tensors())
            yield from _KEPT_BY_GRAPHS[value]
        case Saved():
            yield from value.tensors()
        case Transfer():
            yield from tensors_of(None if value.launch is None else value.launch.result)
        case dict():
            yield from tensors_of([*value.values()])
        case list() | tuple():
            for element in value:
                yield from tensors_of(element)


def held_bytes(*values: object) -> int:
    """Return the bytes of all storages of the values' tensors, each storage counted once."""
    storages = (tensor.untyped_storage() for tensor in tensors_of(values))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class MemoryMeter:
    """Records the most bytes that an executor holds after any operation, before the operation frees anything.

    ``more``: function that returns further tensors to count, in addition to activations and messages.
    """

    def __init__(self, more: Callable[[], Iterable[Tensor]] = tuple) -> None:
        self._more = more
        self.executor: Executor | None = None
        self.peak_bytes = 0

    def __call__(self, operation: Operation) -> None:
        """Update the peak after an operation (`Executor` calls this as its ``watch``)."""
        assert self.executor is not None
        self.peak_bytes = max(self.peak_bytes, held_bytes(self.executor.held(), *self._more()))
