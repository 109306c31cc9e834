"""Faults in what layers exchange over cp and ep, registered with the others."""

from contextlib import AbstractContextManager
from dataclasses import replace
from threading import get_ident
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from braid.actors.stage.bindings import Binder
from braid.actors.stage.mesh import Mesh
from braid.kernels.collectives.communicator import Communicator
from braid.kernels.collectives.primitives import Extents, Launch
from braid.kernels.operators.expert_rows import ExpertRows
from braid.kernels.operators.permute import Permute, Regroup
from braid.scheduling.operators import Kind
from tests.cuda.mutants import _both, mutant
from tests.cuda.steps import Case

RING = Case(schedule="megatron", cp=4, ring=True, micro_batches=2)
GATHERED = Case(schedule="wavelet", cp=2, micro_batches=2)
EXPERTS = Case(schedule="expert_overlap", dp=2, ep=2, micro_batches=2)
CAPACITY = replace(EXPERTS, capacity=True)
BOTH = Case(schedule="megatron", dp=2, cp=2, ep=2, micro_batches=2)
CUT = Case(schedule="megatron", dp=2, ep=2, tp=2, micro_batches=2)
"""The width of experts is cut: ranks of tp bring different numbers of rows."""


# -- keys and values -----------------------------------------------------------------------------------------


def _taken_at_once(kind: Kind) -> AbstractContextManager[Any]:
    """Compute does not wait for one kind of collective over cp."""
    whole = Binder.wait

    def wait(self: Binder, operation: Any, frame: Any) -> Any:
        op = operation.what.operator
        if (op.kind, op.axis) != (kind, "cp"):
            return whole(self, operation, frame)
        with patch.object(self, "_streams", SimpleNamespace(wait=lambda transfer: None)):
            return whole(self, operation, frame)

    return patch.object(Binder, "wait", wait)


@mutant("keys are attended to before they have come around", RING)
def _() -> AbstractContextManager[Any]:
    return _taken_at_once(Kind.SEND_RECEIVE)


@mutant("keys are attended to before they are gathered", GATHERED)
def _() -> AbstractContextManager[Any]:
    return _taken_at_once(Kind.ALL_GATHER)


@mutant("keys are passed on by a stream that does not wait for them", RING)
def _() -> AbstractContextManager[Any]:
    whole = Communicator.shift

    def shift(self: Communicator, x: Tensor, by: int) -> Launch:
        launch, log = whole(self, x, by), self.group.log

        def issue() -> Any:
            with log.on(log.stream()):
                return launch.issue()

        return replace(launch, issue=issue)

    return patch.object(Communicator, "shift", shift)


@mutant("keys are received where they are sent from", RING)
def _() -> AbstractContextManager[Any]:
    def shift(self: Communicator, x: Tensor, by: int) -> Launch:
        to, source = (self.rank + by) % self.size, (self.rank - by) % self.size
        return Launch(x, lambda: self.group.messages([(x, to)], [(x, source)]))

    return patch.object(Communicator, "shift", shift)


@mutant("one rank passes keys the other way around", RING)
def _() -> AbstractContextManager[Any]:
    whole = Communicator.shift

    def shift(self: Communicator, x: Tensor, by: int) -> Launch:
        return whole(self, x, -by if self.rank == 1 else by)

    return patch.object(Communicator, "shift", shift)


def _given_back_at_once(name: str) -> AbstractContextManager[Any]:
    """What a collective reads lives until it is issued; only the memory is wrong."""
    whole = getattr(Communicator, name)

    def from_a_copy(self: Communicator, x: Tensor, how: Any) -> Launch:
        launches = [whole(self, x.clone(), how)]

        def issue() -> Any:
            launch = launches.pop()
            work = launch.issue()
            if launch.finish is not None:
                launch.finish()
            return work

        return Launch(launches[0].result, issue)

    return patch.object(Communicator, name, from_a_copy)


@mutant("keys that are passed on lie in memory that is given back at once", RING)
def _() -> AbstractContextManager[Any]:
    return _given_back_at_once("shift")


# -- rows of experts -----------------------------------------------------------------------------------------


@mutant("rows lie in memory that is given back while an all-to-all reads it", EXPERTS)
def _() -> AbstractContextManager[Any]:
    return _given_back_at_once("all_to_all")


@mutant("rows are put in order where others are on their way from", replace(EXPERTS, schedule="wavelet"))
def _() -> AbstractContextManager[Any]:
    """One strand's go to the experts, gradients of the other's come back."""
    forward, gradient = Permute.forward, Regroup.input_gradient
    memory: dict[int, Tensor] = {}

    def reused(rows: Tensor) -> tuple[Tensor]:
        count, width = rows.shape
        place = memory.setdefault(get_ident(), rows.new_empty(4 * count, width))  # a rank is a thread
        return (place[:count].copy_(rows),)

    def ordered(self: Permute, *given: Tensor) -> tuple[Tensor]:
        return reused(*forward(self, *given))

    def regrouped(self: Regroup, *given: Tensor) -> tuple[Tensor]:
        return reused(*gradient(self, *given))

    return _both(
        patch.object(Permute, "forward", ordered), patch.object(Regroup, "input_gradient", regrouped)
    )


@mutant("an all-to-all receives where it sends from", CAPACITY)
def _() -> AbstractContextManager[Any]:
    """Of every rank come as many rows as go there."""

    def all_to_all(self: Communicator, x: Tensor, extents: Extents) -> Launch:
        parts = x.split(extents.sends)
        return Launch(x, lambda: self._exchange(parts, parts))

    return patch.object(Communicator, "all_to_all", all_to_all)


@mutant("parts of an uneven sum are added before they have come", CUT)
def _() -> AbstractContextManager[Any]:
    whole = Communicator._scatter_rows

    def scatter_rows(self: Communicator, x: Tensor, shares: Any) -> Launch:
        launch = whole(self, x, shares)

        def issue() -> Any:
            work = launch.issue()
            assert launch.finish is not None
            launch.finish()
            return work

        return replace(launch, issue=issue, finish=None)

    return patch.object(Communicator, "_scatter_rows", scatter_rows)


@mutant("the host reads how many rows there are before that has come", EXPERTS)
def _() -> AbstractContextManager[Any]:
    def forward(self: ExpertRows, counts: Tensor) -> Any:
        here = torch.empty(counts.shape, dtype=counts.dtype).copy_(counts, non_blocking=True)
        return self._extents(here.view(self.tp, self.ep, self.experts))

    return patch.object(ExpertRows, "forward", forward)


@mutant("one rank sends as many rows as in the micro-batch before", EXPERTS)
def _() -> AbstractContextManager[Any]:
    whole = Communicator.all_to_all
    before: dict[Communicator, Extents] = {}

    def all_to_all(self: Communicator, x: Tensor, extents: Extents) -> Launch:
        if self.rank == 1:
            extents, before[self] = before.get(self, extents), extents
        return whole(self, x, extents)

    return patch.object(Communicator, "all_to_all", all_to_all)


@mutant("one rank sends rows on the communicator that keys take", BOTH)
def _() -> AbstractContextManager[Any]:
    whole = Mesh.line

    def line(self: Mesh, axis: str) -> Any:
        return whole(self, "cp" if axis == "ep" and self.rank == 1 else axis)

    return patch.object(Mesh, "line", line)
