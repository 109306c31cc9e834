"""How long a device works on what it is given."""

from collections.abc import Callable
from time import perf_counter_ns
from typing import Protocol

import torch

_FLUSH_BYTES = 1 << 28
"""More than any second-level cache holds."""
_LEAD_CYCLES = 2_000_000
"""About a millisecond, in which the host issues what is timed: its launches are no part of the time."""


class Clock(Protocol):
    """Times what is called."""

    def ns(self, call: Callable[[], object]) -> int:
        """Nanoseconds of one call."""


class DeviceClock:
    """By events on a GPU, with cold caches and the host ahead; by the host's clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device) if self._cuda else None

    def ns(self, call: Callable[[], object]) -> int:
        """Nanoseconds of one call."""
        if self._flush is None:
            begin = perf_counter_ns()
            call()
            return perf_counter_ns() - begin
        self._flush.zero_()
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_LEAD_CYCLES)
        begin_event.record()
        call()
        end_event.record()
        end_event.synchronize()
        return round(begin_event.elapsed_time(end_event) * 1e6)
