"""What linked code asks for between its operators: sums of gradients, gathers of parameters."""

from collections.abc import Sequence

from torch import Tensor

from braid.actors.stage.gradients import GradientBuckets
from braid.actors.stage.weights import ShardedWeights
from braid.scheduling.schedule import Gather, Reduce


def passing(weights: ShardedWeights, gradients: GradientBuckets) -> list[Tensor]:
    """What is there for a while: whole buckets where ranks hold shares, rounded copies of gradients."""
    gathered = [one.whole for one in weights.buckets if one.passes]
    added = [one.buffer for one in gradients.buckets if not one.lasting]
    rounded = gradients.rounded.values()
    return [tensor for tensor in (*gathered, *added, *rounded) if tensor is not None]


class Sharing:
    """All that passes need of an update (`braid.actors.stage.executor.Updating`), which itself is none."""

    def __init__(self, weights: ShardedWeights, gradients: GradientBuckets | None = None) -> None:
        """``gradients``: None for code without backward passes."""
        self._weights, self._sums = weights, gradients

    @property
    def _gradients(self) -> GradientBuckets:
        assert self._sums is not None
        return self._sums

    def start(self, transfer: Reduce | Gather) -> None:
        """Begin to sum gradients or to gather parameters."""
        if isinstance(transfer, Gather):
            self._weights.start(transfer)
        else:
            self._gradients.start(transfer)

    def wait(self, transfer: Reduce | Gather) -> None:
        """Finish that."""
        if isinstance(transfer, Gather):
            self._weights.wait(transfer)
        else:
            self._gradients.wait(transfer)

    def allocate(self, reduce: Reduce) -> None:
        """Make memory for a bucket's gradients."""
        self._gradients.allocate(reduce)

    def release(self, gather: Gather) -> None:
        """Let go of a bucket's parameters."""
        self._weights.release(gather)

    def norm(self) -> None:
        """There is no update."""

    def step(self) -> None:
        """There is no update."""

    def clip(self) -> None:
        """There is no update."""

    def update(self, chunk: int, bucket: int) -> None:
        """There is no update."""

    def prefetch(self, gathers: Sequence[Gather]) -> None:
        """Begin to gather what is used first, unless the step before has."""
        for gather in gathers:
            self._weights.start(gather)

    def settle(self) -> None:
        """Wait for all gathers that have begun."""
        self._weights.settle()
