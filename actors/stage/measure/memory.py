"""Memory of a rank: its peak in a step and since its process began, and the bytes that values hold."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from braid.actors.stage.rank.allocator import give_back_what_is_free
from braid.actors.stage.run.streams import Transfer
from braid.kernels.operators.autograd import AutogradGraph
from braid.kernels.operators.operator import Saved

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_STEPS = 32
"""Steps between returns of free heap memory to the kernel, after which memory is slow to allocate."""
_RESET_PEAK = "5"
"""Text that makes Linux reset the largest resident size (proc(5))."""
_KEPT_BY_GRAPHS: WeakKeyDictionary[AutogradGraph, list[Tensor]] = WeakKeyDictionary()
"""Tensors that autograd graphs keep alive, so that autograd is queried only once per graph."""


class PeakMemory:
    """Peak bytes of a device: allocated memory on a GPU, resident memory of this process on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lifetime = 0
        self._steps = 0

    def begin(self) -> None:
        """Begin a step. If the system cannot reset its peak, `of_step` returns the lifetime's peak."""
        self._lifetime = max(self._lifetime, self.of_step())
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._steps += 1
            if self._steps % _STEPS == 0:
                give_back_what_is_free()
            with contextlib.suppress(OSError):
                _CLEAR.write_text(_RESET_PEAK)

    def of_step(self) -> int:
        """Return the peak bytes since `begin`."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        with contextlib.suppress(OSError):
            for line in _STATUS.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def of_lifetime(self) -> int:
        """Return the peak bytes since the process began, as far as this object has observed them."""
        return max(self._lifetime, self.of_step())


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
        case list() | tuple():
            for element in value:
                yield from tensors_of(element)


def held_bytes(*values: object) -> int:
    """Return the bytes of all storages of the values' tensors, each storage counted once."""
    storages = (tensor.untyped_storage() for tensor in tensors_of(values))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
