"""Profiles steps of a rank with `torch.profiler`, on request, and names Braid's operations in traces of other
tools."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from braid.scheduling.schedule.operations import Compute, Operation, Start, Wait, name_of

if TYPE_CHECKING:  # tests of GPUs run where pydantic is not installed
    from braid.actors.config import Config

FOLDER: Final = "profile"
_OF_NVTX: Final = "NVTX_INJECTION64_PATH"
"""Variable in which a tool that records NVTX ranges, such as ``nsys profile``, names its library."""
_MOST_EVENTS: Final = 1_000_000
"""Most allocations and releases in a memory snapshot."""

Bound = Callable[..., None]
Around = Callable[[Operation, Bound], Bound]
"""Function of an operation and the function that runs it; returns the function to run in its place."""


def named(ranges: Callable[[str], AbstractContextManager[Any]], operation: Operation, run: Bound) -> Bound:
    """Return a function that runs an operation inside a range with the operation's name in Braid's spans.

    Only what is computed, started and awaited has a range: `start NAME`, `wait NAME`.
    """
    match operation:
        case Compute(what):
            name = name_of(what)
        case Start(what) | Wait(what):
            name = f"{type(operation).__name__.lower()} {name_of(what)}"
        case _:
            return run

    def inside(*arguments: Any) -> None:
        with ranges(name):
            run(*arguments)

    return inside


class TorchProfile:
    """The profiler of one rank: records the wanted steps and writes them into the run's directory."""

    def __init__(
        self, config: "Config", rank: int, device: torch.device, environment: Mapping[str, str]
    ) -> None:
        """``environment``: shows whether a tool records NVTX ranges."""
        wanted = config.telemetry.profile
        self._steps = range(0)
        if wanted.steps is not None and rank in wanted.ranks:
            self._steps = range(wanted.steps[0], wanted.steps[1] + 1)
        self._file = config.run_directory / FOLDER / f"rank-{rank}"
        self._on_cuda = device.type == "cuda"
        self._profile: profile | None = None
        self._first = self._last = 0
        """First and last step that are recorded whole."""
        self.around: Around | None = None
        """What operations are run inside of; None if nothing records them."""
        if self._steps:
            self.around = partial(named, record_function)
        elif self._on_cuda and environment.get(_OF_NVTX):
            self.around = partial(named, torch.cuda.nvtx.range)

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Record a step (from 1) within the block, if it is wanted; write all when the last one is over."""
        if step not in self._steps:
            yield
            return
        if self._profile is None:
            self._begin(step)
        with record_function(f"step {step}"):
            yield
        self._last = step
        if step == self._steps[-1]:
            self.end()

    def _begin(self, step: int) -> None:
        activities = [ProfilerActivity.CPU]
        if self._on_cuda:
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS)
        self._first, self._profile = step, profile(activities=activities, record_shapes=True)
        self._profile.start()

    def end(self, *, broken: bool = False) -> None:
        """Write what was recorded, also if the run ends before the last wanted step; nothing if steps were
        ``broken`` off by a failure. A full disk is told in the rank's log alone."""
        if (recorded := self._profile) is None:
            return
        self._profile = None
        recorded.stop()
        try:
            if self._first <= self._last and not broken:
                self._write(recorded, f"steps-{self._first}-{self._last}")
        except (OSError, RuntimeError) as error:
            print(f"the profile of steps up to {self._last} cannot be written: {error}", file=sys.stderr)
        finally:
            if self._on_cuda:
                torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, recorded: profile, steps: str) -> None:
        """Write `rank-R.steps-A-B.json`, a Chrome trace, and on CUDA `rank-R.steps-A-B.memory.pickle`, for
        pytorch.org/memory_viz."""
        self._file.parent.mkdir(exist_ok=True)
        _written(self._file.with_name(f"{self._file.name}.{steps}.json"), recorded.export_chrome_trace)
        if self._on_cuda:
            snapshot = self._file.with_name(f"{self._file.name}.{steps}.memory.pickle")
            _written(snapshot, torch.cuda.memory._dump_snapshot)


def _written(path: Path, write: Callable[[str], None]) -> None:
    """Let ``write`` make a file, which has its name only when it is whole."""
    unfinished = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        write(str(unfinished))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
