"""How much memory a rank has needed: in a step, and since its process began."""

import contextlib
import resource
from pathlib import Path

import torch

from braid.actors.stage.rank.allocator import give_back_what_is_free

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_STEPS = 32
"""After so many the heap is tidied: what was given back has to be asked for again, which takes time."""
_RESET_PEAK = "5"
"""What Linux takes as: the largest resident size begins anew (proc(5))."""


class PeakMemory:
    """Bytes on a device: allocated ones on a GPU, resident ones of this process on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lifetime = 0
        self._steps = 0

    def begin(self) -> None:
        """A step begins. Where the system cannot forget what was before, `of_step` is of the lifetime."""
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
        """The most since `begin`."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        with contextlib.suppress(OSError):
            for line in _STATUS.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def of_lifetime(self) -> int:
        """The most since the process began, as far as this object has seen it."""
        return max(self._lifetime, self.of_step())
