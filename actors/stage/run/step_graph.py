"""Forward and backward passes of a step as one graph: captured once, then replayed in one call.

A host issues some hundred operators, events and collectives for every layer and micro-batch (docs/cuda.md,
What it costs the host); a device that computes few tokens waits for the host. The operations before the norm
are the same in every step: the same memory, in the same order. So after two steps they are captured, with all
streams and collectives; then the host only copies the tokens to the graph's memory.

Norm and update stay outside the graph: they depend on the step, and on numbers that the host reads.
"""

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from torch import Tensor

from braid.actors.stage.measure.telemetry import Recorder, Rows
from braid.actors.stage.run.cuda_streams import Captured, CudaStreams
from braid.actors.stage.run.micro_batch import MicroBatch
from braid.actors.stage.run.streams import Mark, Streams

_WARM_STEPS = 2
"""Steps before a capture: in the first, libraries make workspaces; the second is measured."""
_HOST_BOUND = 0.8
"""Least share of the passes' time that the host spends issuing them, for a graph to pay."""

_TOLD = 4
"""Greatest number of ranks that a warning names; there may be thousands."""

Batches = Sequence[MicroBatch | None]
Gather = Callable[[Any], Sequence[Any]]


def _alone(value: Any) -> Sequence[Any]:
    """Gather a value from a single rank."""
    return (value,)


class Passes(Protocol):
    """Runs the forward and backward passes of a step."""

    def passes(self, batches: Batches, loss_scale: float) -> list[Tensor]:
        """Run the passes; return the token losses of each micro-batch on this rank."""

    def drop(self) -> None:
        """Free the values of passes that were broken off."""


@dataclass(frozen=True)
class _CapturedPasses:
    """Captured passes, the conditions under which they are valid (``key``), and their static memory."""

    key: tuple[object, ...]
    captured: Captured
    batches: Batches
    losses: list[Tensor]
    rows: Rows


class StepGraph:
    """The graph of one rank. Either all ranks have one or none: NCCL requires that all or none capture a
    collective.

    The graph refers to communicators, and NCCL destroys no communicator that a graph still refers to. So the
    graph is dropped before the communicators are destroyed, possibly by another thread (`drop`).
    """

    def __init__(
        self, streams: CudaStreams, recorder: Recorder, *, always: bool, gather: Gather = _alone
    ) -> None:
        """``always``: capture even if the host is ahead of its device, and raise an error if capture fails.

        ``gather``: function that returns the values of all ranks, in rank order; all ranks call it together.
        """
        self._streams, self._recorder, self._always, self._gather = streams, recorder, always, gather
        self._kept: _CapturedPasses | None = None
        self._steps = 0
        self._measured: tuple[float, Mark, Mark] | None = None
        """Seconds in which the host issued the newest eager passes, and the marks around these."""
        self._wanted: bool | None = None
        self._lock = threading.Lock()
        """Guards ``_in_use``, ``_dropped`` and the release of the graph; never held for long."""
        self._in_use = self._dropped = False

    def run(self, runs: Passes, batches: Batches, loss_scale: float) -> list[Tensor]:
        """Run the passes, from a graph if possible; return the token losses of each micro-batch."""
        if not self._captures():
            return self._eagerly(runs, batches, loss_scale)
        with self._using():
            key = loss_scale, self._recorder.recording, *map(_shape, batches)
            if self._kept is None or self._kept.key != key:
                self._release()  # free the old graph's memory before the new capture
                self._kept = self._capture(runs, batches, loss_scale, key)
            if self._kept is not None:
                return self._replay(self._kept, batches)
        return runs.passes(batches, loss_scale)

    def drop(self) -> None:
        """Release the graph for good; callable from any thread. Later uses raise an error.

        If a thread is using the graph, that thread releases it afterwards. This does not take long: the
        thread never waits for the device, and waits for other ranks only in ``gather``.
        """
        with self._lock:
            self._dropped = True
            if not self._in_use:
                self._release()

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Reserve the graph for this thread; raise `RuntimeError` if it was dropped."""
        with self._lock:
            if self._dropped:
                raise RuntimeError("the graph was dropped, as its groups were given up")
            self._in_use = True
        try:
            yield
        finally:
            with self._lock:
                self._in_use = False
                if self._dropped:
                    self._release()

    def _release(self) -> None:
        if self._kept is not None:
            self._kept.captured.graph.reset()
            self._kept = None

    def _replay(self, captured_passes: _CapturedPasses, batches: Batches) -> list[Tensor]:
        for static, batch in zip(captured_passes.batches, batches, strict=True):
            for name, tensor in _tensors(batch).items():
                _tensors(static)[name].copy_(tensor)
        self._recorder.give(captured_passes.rows)
        self._streams.replay(captured_passes.captured)
        return captured_passes.losses

    def _captures(self) -> bool:
        """Tell whether passes are captured; all ranks decide this together, once, after the first steps."""
        if self._wanted is None and self._steps >= _WARM_STEPS:
            self._wanted = all(self._gather(self._wants()))
        return bool(self._wanted)

    def _wants(self) -> bool:
        """Tell whether the host is so slow that a graph pays."""
        if self._always:
            return True
        assert self._measured is not None
        issued_s, begin, end = self._measured
        passed_ns = self._streams.nanoseconds(end) - self._streams.nanoseconds(begin)
        return issued_s * 1e9 >= _HOST_BOUND * passed_ns

    def _eagerly(self, runs: Passes, batches: Batches, loss_scale: float) -> list[Tensor]:
        if self._wanted is not None:
            return runs.passes(batches, loss_scale)
        self._steps += 1
        begin, at = self._streams.mark(), time.perf_counter()
        losses = runs.passes(batches, loss_scale)
        self._measured = time.perf_counter() - at, begin, self._streams.mark()
        return losses

    def _capture(
        self, runs: Passes, batches: Batches, loss_scale: float, key: tuple[object, ...]
    ) -> _CapturedPasses | None:
        """Capture the passes. If a rank fails, raise (``always``), or return None and never try again."""
        static = [_copied(batch) for batch in batches]
        result, failure = None, ""
        try:
            with self._streams.capture() as captured:
                losses = runs.passes(static, loss_scale)
        except RuntimeError as error:
            self._recorder.take()
            runs.drop()
            failure = str(error) or type(error).__name__
        else:
            result = _CapturedPasses(key, captured, static, list(losses), self._recorder.take())
        try:
            failures = {rank: text for rank, text in enumerate(self._gather(failure)) if text}
        except BaseException:  # communication was broken off
            _give_up(result)
            raise
        if not failures:
            return result
        _give_up(result)
        reasons = "; ".join(f"rank {rank}: {text}" for rank, text in [*failures.items()][:_TOLD])
        if self._always:
            raise RuntimeError(f"overlap.cuda_graphs=true: {reasons}; set it to false")
        text = "steps are not captured as CUDA graphs, but issued one operator at a time on all ranks: "
        warnings.warn(text + reasons, stacklevel=2)
        self._wanted = False
        return None


def _give_up(passes: _CapturedPasses | None) -> None:
    if passes is not None:
        passes.captured.graph.reset()


def step_graph(
    streams: Streams,
    recorder: Recorder,
    wanted: bool | Literal["auto"],
    ranks: int = 1,
    gather: Gather = _alone,
) -> StepGraph | None:
    """Return the graph that ``overlap.cuda_graphs`` asks for, or None; raise ValueError for true on a CPU.

    "auto" gives None with more than one rank: NCCL's collectives in a graph have not been tried on two GPUs
    yet, nor between nodes, where the host takes part in collectives.
    """
    if isinstance(streams, CudaStreams) and (wanted is True or (wanted == "auto" and ranks == 1)):
        return StepGraph(streams, recorder, always=wanted is True, gather=gather)
    if wanted is True:
        raise ValueError("overlap.cuda_graphs=true: this rank computes on a CPU; use auto or false")
    return None


def _tensors(batch: MicroBatch | None) -> Mapping[str, Tensor]:
    """Return the tensors of a micro-batch, which a graph reads; batches with documents use no graph."""
    return (
        {} if batch is None else {k: value for k, value in vars(batch).items() if isinstance(value, Tensor)}
    )


def _shape(batch: MicroBatch | None) -> object:
    return tuple((name, tensor.shape) for name, tensor in _tensors(batch).items())


def _copied(batch: MicroBatch | None) -> MicroBatch | None:
    clones: dict[str, Any] = {name: tensor.clone() for name, tensor in _tensors(batch).items()}
    return batch and replace(batch, **clones)
