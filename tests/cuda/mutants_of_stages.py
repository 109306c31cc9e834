"""Faults in stages of collectives (`braid.kernels.collectives.stages`), registered with the others."""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from braid.actors.stage import bindings, weights
from braid.actors.stage.gradients import GradientBuckets
from braid.actors.stage.weights import ShardedWeights
from braid.kernels.collectives.primitives import Launch, Line
from braid.kernels.collectives.stages import gather_stage
from tests.cuda.mutants import mutant
from tests.cuda.steps import Case

SHARED = Case(
    schedule="ddp",
    dp=4,
    zero=1,
    micro_batches=2,
    steps=2,
    partitions=("dp/reduce_scatter mesh 2x2 order 1,0", "dp/all_gather mesh 2x2 order 0,1"),
)
TENSOR = Case(
    schedule="megatron", tp=4, micro_batches=2, partitions=("tp/all_gather mesh 2x2 order 0,1 pieces 2",)
)


def _put_in_order_at_once(line: Line, x: Tensor, outer: int, into: Tensor | None = None) -> Launch:
    launch = gather_stage(line, x, outer, into)
    if outer == 1:
        return launch

    def issue() -> Any:
        work = launch.issue()
        assert launch.finish is not None
        launch.finish()
        return work

    return replace(launch, issue=issue, finish=None)


@mutant("rows of a stage are put in order before they are there", TENSOR)
def _() -> AbstractContextManager[Any]:
    return patch.object(bindings, "gather_stage", _put_in_order_at_once)


@mutant("a gathered bucket is put in order before it is there", SHARED)
def _() -> AbstractContextManager[Any]:
    return patch.object(weights, "gather_stage", _put_in_order_at_once)


@mutant("a stage of a sum begins before the one before it is there", SHARED)
def _() -> AbstractContextManager[Any]:
    whole = GradientBuckets.wait

    def wait(self: GradientBuckets, reduce: Any) -> None:
        if reduce.move is None or reduce.move.last:
            whole(self, reduce)
            return
        for transfer in self._pending.pop(reduce):
            transfer.take()

    return patch.object(GradientBuckets, "wait", wait)


@mutant("a stage of a gather begins before the one before it is there", SHARED)
def _() -> AbstractContextManager[Any]:
    whole = ShardedWeights.wait

    def wait(self: ShardedWeights, gather: Any) -> None:
        if gather.move is None or gather.move.last:
            whole(self, gather)
            return
        for _, transfer in self._pending.pop(gather, ()):
            transfer.take()

    return patch.object(ShardedWeights, "wait", wait)
