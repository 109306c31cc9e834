"""What is the host's own on the model of the machine, where a CPU's memory stands for the device's, too.

The host's are tensors that are made without saying where, copies to it, and what is computed of these alone:
the host does that itself, at once (stream `HOST`). It waits for a copy by ``cpu()``, and for no other one.
What it reads as numbers (``tolist``, ``numpy``) is noted, as it may decide what is issued next.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from tests.cuda.log import RankLog

HOST: Final = 0
"""The number that stands for a rank's host among its streams."""
_FACTORIES = (torch.full, torch.empty, torch.zeros, torch.ones, torch.arange, torch.tensor)
_READS = (Tensor.tolist, Tensor.numpy)


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The same memory."""
    return torch.tensor([], dtype=torch.uint8).set_(storage)


def restored(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """None if the memory was given back."""
    storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return storage


class HostMemory(TorchFunctionMode):
    """Of one rank. Active beside its log it tells that which calls are the host's."""

    def __init__(self, log: "RankLog") -> None:
        super().__init__()
        self._log = log

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named, log = kwargs or {}, self._log
        if function in _FACTORIES and named.get("device") is None:
            with log.on_host():
                return function(*args, **named)
        if function is Tensor.cpu and not log.is_host(args[0]):
            return self._brought(args[0])
        if function in _READS:
            (x,) = args
            here = x if log.is_host(x) else self._brought(x)
            log.read(here)
            return function(here)
        return function(*args, **named)

    def _brought(self, x: Tensor) -> Tensor:
        """A copy of what is on the device; the host waits for it."""
        with self._log.on_host():
            copy = torch.empty(x.shape, dtype=x.dtype)
        copy.copy_(x)
        self._log.current().synchronize()
        return copy
