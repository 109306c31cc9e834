"""How many bytes of tensors an executor holds: for memory reports, not for the step itself."""

from collections.abc import Callable, Iterable, Iterator
from weakref import WeakKeyDictionary

from torch import Tensor

from braid.actors.stage.run.executor import Executor
from braid.actors.stage.run.streams import Transfer
from braid.kernels.operators.autograd import AutogradGraph
from braid.kernels.operators.operator import Saved
from braid.scheduling.schedule.operations import Operation

_KEPT_BY_GRAPHS: WeakKeyDictionary[AutogradGraph, list[Tensor]] = WeakKeyDictionary()
"""Autograd is asked once for each graph."""


def tensors_of(value: object) -> Iterator[Tensor]:
    """The tensors that a value keeps alive, in recorded graphs and transfers too."""
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
    """Bytes of all storages, each counted once."""
    storages = (tensor.untyped_storage() for tensor in tensors_of(values))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class MemoryMeter:
    """Notes the most bytes that an executor holds after any operation, before that frees anything.

    ``more``: what is held beside activations and messages.
    """

    def __init__(self, more: Callable[[], Iterable[Tensor]] = tuple) -> None:
        self._more = more
        self.executor: Executor | None = None
        self.peak_bytes = 0

    def __call__(self, operation: Operation) -> None:
        """An operation ran (`Executor` watch)."""
        assert self.executor is not None
        self.peak_bytes = max(self.peak_bytes, held_bytes(self.executor.held(), *self._more()))
