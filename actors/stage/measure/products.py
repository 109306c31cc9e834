"""Matrix products for the profiler: computation at the same time as an operator, and work that warms up a
device.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from braid.actors.stage.run.streams import Streams
from braid.kernels.collectives.primitives import Launch
from braid.scheduling.mesh.cluster import Stream

_SIZES = {"cpu": 192}
_SIZE = 2048
"""Rows and columns of the matrices, on a CPU and on other devices: one product takes some 0.1 ms."""
_WARM_NS = 300_000_000
"""Nanoseconds that an idle device takes to raise its clock rate."""


class Products:
    """Computes matrix products on one rank."""

    def __init__(self, streams: Streams, device: torch.device, dtype: torch.dtype) -> None:
        self._streams = streams
        size = _SIZES.get(device.type, _SIZE)
        self._factor = torch.randn(size, size, dtype=dtype, device=device)
        # A new thread would compute with as many threads as the machine has CPUs, not with the rank's number.
        self._thread = ThreadPoolExecutor(1, "beside", torch.set_num_threads, (torch.get_num_threads(),))

    def multiply(self, times: int) -> None:
        """Compute ``times`` products on the compute stream."""
        self._multiply(times, torch.empty_like(self._factor))

    def aside(self, times: int) -> Callable[[], object]:
        """Compute products in another thread or on another stream; return a function that lets compute wait
        for their end.
        """
        product = torch.empty_like(self._factor)  # allocated and freed on the compute stream
        if not self._streams.asynchronous:
            return self._thread.submit(self._multiply, times, product).result

        def issue() -> _Ended:
            self._multiply(times, product)
            return _Ended()

        launch = Launch(product, issue)
        transfer = self._streams.start(Stream.COMPUTE, launch, awaited_next=False, lane="beside")

        def wait() -> None:
            self._streams.wait(transfer)
            transfer.take()

        return wait

    def warm_clock(self) -> None:
        """Raise the clock rate of a device that was idle; at a low rate compute would seem to take longer."""
        if not self._streams.asynchronous:
            return
        begin = self._streams.nanoseconds(self._streams.mark())
        while self._streams.nanoseconds(self._streams.mark()) < begin + _WARM_NS:
            self.multiply(100)

    def _multiply(self, times: int, product: Tensor) -> None:
        for _ in range(times):
            torch.mm(self._factor, self._factor, out=product)


class _Ended:
    """Work whose order streams ensure by themselves, so that nothing waits for it."""

    def wait(self) -> None:
        """Return at once."""
