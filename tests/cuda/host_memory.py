"""What is the host's own on the model of the machine, where a CPU's memory stands for the device's, too.

The host's are tensors that are made without saying where, copies to it, and what is computed of these alone:
the host does that itself, at once (stream `HOST`). It waits for a copy by ``cpu()``, and for no other one.
What it reads as numbers (``tolist``, ``numpy``) is noted, as it may decide what is issued next.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    from tests.cuda.log import RankLog

HOST: Final = 0
"""The number that stands for a rank's host among its streams."""
_FACTORIES = ("full", "empty", "zeros", "ones", "arange", "tensor")
_READS = ("tolist", "numpy")


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The same memory."""
    return torch.tensor([], dtype=torch.uint8).set_(storage)


def restored(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """None if the memory was given back."""
    storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return storage


@contextmanager
def told_apart(log_here: Callable[[], "RankLog | None"]) -> Iterator[None]:
    """While it lasts, ranks' logs are told which calls are the host's.

    log_here: the log of the thread that asks; None on a thread that is no rank's. A mode for torch's
    functions would see the same calls and also every look at a shape, which takes longer than the operators.
    """

    def made(function: Callable[..., Tensor], *args: Any, **named: Any) -> Tensor:
        log = log_here()
        if log is None or named.get("device") is not None:
            return function(*args, **named)
        with log.on_host():
            return function(*args, **named)

    def cpu(function: Callable[..., Tensor], x: Tensor, *args: Any, **named: Any) -> Tensor:
        log = log_here()
        return function(x, *args, **named) if log is None or log.is_host(x) else _brought(log, x)

    def read(function: Callable[..., Any], x: Tensor, *args: Any, **named: Any) -> Any:
        if (log := log_here()) is not None:
            x = x if log.is_host(x) else _brought(log, x)
            log.read(x)
        return function(x, *args, **named)

    def brackets(owner: Any, name: str, around: Callable[..., Any]) -> Any:
        function = getattr(owner, name)
        return patch.object(owner, name, lambda *args, **named: around(function, *args, **named))

    with ExitStack() as patches:
        for name in _FACTORIES:
            patches.enter_context(brackets(torch, name, made))
        patches.enter_context(brackets(Tensor, "cpu", cpu))
        for name in _READS:
            patches.enter_context(brackets(Tensor, name, read))
        yield


def _brought(log: "RankLog", x: Tensor) -> Tensor:
    """A copy of what is on the device; the host waits for it."""
    with log.on_host():
        copy = torch.empty(x.shape, dtype=x.dtype)
    copy.copy_(x)
    log.current().synchronize()
    return copy
