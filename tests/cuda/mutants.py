"""Faults put into the real classes, one at a time: the model counts only if it finds every one.

Each is what somebody could write, or forget. A mutant names the case that shows it.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from braid.actors.stage.rank.groups import Mesh
from braid.actors.stage.rank.membership import Membership
from braid.actors.stage.run import step_graph
from braid.actors.stage.run.bindings import Binder
from braid.actors.stage.run.cuda_streams import CudaStreams
from braid.actors.stage.run.executor import Executor
from braid.actors.stage.run.step_graph import StepGraph
from braid.actors.stage.state.bucket import Bucket, FlatMemory
from braid.actors.stage.state.buckets import RankBuckets
from braid.actors.stage.state.optimizer import Optimizer
from braid.kernels.collectives.communicator import Communicator, Pairs
from braid.kernels.collectives.primitives import Launch
from braid.kernels.operators.expert_rows import ExpertRows
from braid.scheduling.schedule.operations import Compute, Gather, Reduce, Release, Start, Wait
from tests.cuda.altered import (
    Altered,
    adds,
    all_of,
    altered,
    call_left_out,
    earlier,
    elsewhere,
    from_a_copy,
    is_a,
    left_out,
    on_rank_one,
    relinked,
    starting,
    swapped,
    unawaited,
)
from tests.cuda.communicators import ModelGroup
from tests.cuda.machine import here
from tests.cuda.steps import Case, faults, left

PLAIN = Case(schedule="megatron", tp=2, micro_batches=2)
PAIRED = Case(schedule="braid:w", tp=2, micro_batches=2)
STAGES = Case(schedule="megatron", pp=2, micro_batches=3)
BUCKETS = Case(schedule="ddp", dp=2, micro_batches=2)
"""Gradients are summed bucket by bucket in the last backward pass."""
SHARDED = replace(BUCKETS, zero=1, steps=2)
"""Every rank updates a share of each bucket, and gathers the others' in the next step."""
SUMS = replace(SHARDED, zero=2, least=4096)
"""Gradients have memory for a while: every backward pass leaves a share of each bucket's."""
PASSING = replace(SUMS, zero=3)
"""And parameters are whole for a while."""
COPIED = replace(PLAIN, steps=2, copies=True)
GRAPH = replace(PAIRED, steps=4, graph=True)
RING = Case(schedule="megatron", cp=4, ring=True, micro_batches=2)
EXPERTS = Case(schedule="expert_overlap", dp=2, ep=2, micro_batches=2)


class Mutant(NamedTuple):
    """A fault and where it shows."""

    name: str
    case: Case
    apply: Callable[[], Altered]


# -- faults that take more than a line -----------------------------------------------------------------------


def _first_used_in_own_order() -> Altered:
    def warm_up(whole: Any, own: Pairs) -> None:
        if own.rank != 0:
            whole(own)
        for other in sorted(own.pairs, reverse=True) if own.rank == 0 else ():
            own.pairs[other].warm_up()

    return altered(Pairs, "warm_up", warm_up)


def _unfilled() -> Altered:
    return altered(FlatMemory, "make", lambda whole, own, zeros=False: whole(own))


def _received_where_it_is_sent_from() -> Altered:
    def shift(_: Any, own: Communicator, x: Tensor, by: int) -> Launch:
        to, source = (own.rank + by) % own.size, (own.rank - by) % own.size
        return Launch(x, lambda: own.group.messages([(x, to)], [(x, source)]))

    return altered(Communicator, "shift", shift)


def _rows_read_before_they_have_come() -> Altered:
    def forward(own: ExpertRows, counts: Tensor) -> Any:
        there = torch.empty(counts.shape, dtype=counts.dtype).copy_(counts, non_blocking=True)
        return own._extents(there.view(own.tp, own.ep, own.experts))

    return patch.object(ExpertRows, "forward", forward)


def _copied_beside_the_update() -> Altered:
    def read_beside(whole: Any, own: Optimizer, read: Any) -> Any:
        with patch.object(here.log, "current", here.log.stream):
            return whole(own, read)

    return altered(Optimizer, "read_beside", read_beside)


class _Unwritable(dict[str, Any]):
    """Tensors that are copied from, and not to."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name).clone()


def _each_for_itself(name: str, unlike: Callable[..., Any]) -> Altered:
    """No rank hears of others, and rank 1 has its own way with a method of graphs."""
    return all_of(
        on_rank_one(StepGraph, name, unlike),
        altered(
            StepGraph,
            "__init__",
            lambda whole, *given, **named: whole(*given, **{**named, "gather": step_graph._alone}),
        ),
    )


def _captured_anew_and_not_given_up() -> Altered:
    """As happens when spans are switched on or off."""
    number = count()
    return all_of(
        patch.object(StepGraph, "_release", lambda own: setattr(own, "_kept", None)),
        altered(step_graph, "_shape", lambda whole, batch: (next(number), whole(batch))),
    )


def _over_cp(wait: Any) -> bool:
    """Whether a collective brings keys and values."""
    return bool(wait.what.operator.axis == "cp")


# -- all of them ---------------------------------------------------------------------------------------------

_FAULTS: dict[Case, dict[str, Callable[[], Altered]]] = {
    PLAIN: {
        "compute does not wait for transfers": lambda: left_out(CudaStreams, "wait"),
        "one rank leaves a gather out": lambda: call_left_out("all_gather", 3),
        "a side stream does not wait for compute": lambda: starting("wait for compute"),
        "the side stream does not wait for the communicator's": lambda: starting("wait for work"),
        "the end of a transfer is recorded before it is issued": lambda: starting("late end"),
        "a gather reads memory that is given back at once": lambda: from_a_copy("all_gather"),
        "one rank adds up where others scatter": lambda: on_rank_one(
            ModelGroup, "reduce_scatter", lambda _, own, y, x: own.all_reduce(x)
        ),
        "gradients are cleared beside the update": lambda: elsewhere(RankBuckets, "zero"),
    },
    replace(STAGES, micro_batches=4): {
        "a message is put behind all others, sends and receives alike": lambda: starting("own lane"),
    },
    STAGES: {
        "a received message is used before it is taken": lambda: altered(
            Executor, "_received", lambda _, own, frame, at: frame.__setitem__(at, frame[at].take())
        ),
    },
    RING: {
        "keys are attended to before they have come around": lambda: unawaited(Binder, _over_cp),
        "keys are received where they are sent from": _received_where_it_is_sent_from,
    },
    EXPERTS: {
        "the host reads how many rows there are before that has come": _rows_read_before_they_have_come,
    },
    replace(STAGES, pp=3): {
        "a rank uses its connections for the first time in an order of its own": _first_used_in_own_order,
    },
    replace(PLAIN, dp=2): {
        "a rank uses the communicator of another axis": lambda: on_rank_one(
            Mesh, "line", lambda whole, own, axis: whole(own, "tp" if axis == "dp" else axis)
        ),
    },
    BUCKETS: {
        "sums of two buckets are swapped on one rank": lambda: on_rank_one(
            RankBuckets, "_launches", lambda whole, own, what, along: whole(own, swapped(what), along)
        ),
    },
    SUMS: {
        "a scatter starts before its bucket is final": lambda: earlier(is_a(Start, Reduce, "dp"), adds),
        "a share is added before its scatter has ended": lambda: unawaited(
            RankBuckets, lambda what: isinstance(what, Reduce) and what.bucket is not None
        ),
        "gradients begin with what was in their memory": _unfilled,
    },
    Case(schedule="ddp", dp=4, zero=2, shards=2, micro_batches=2): {
        "shares are summed over replicas before they are there": lambda: earlier(
            is_a(Start, Reduce, "replica"), is_a(Wait, Reduce, "dp")
        ),
    },
    SHARDED: {
        "parameters are used too early": lambda: relinked(
            lambda found: sorted(found, key=is_a(Wait, Gather))
        ),
    },
    PASSING: {
        "a bucket is let go of before its last reader": lambda: earlier(is_a(Release), is_a(Compute)),
        "what is gathered lies in another stream's memory": lambda: elsewhere(Bucket, "gather"),
    },
    replace(PLAIN, steps=2): {
        "the next step does not wait for an update": lambda: elsewhere(Optimizer, "step", after=True),
    },
    COPIED: {
        "an update does not wait for a copy of the state": lambda: left_out(Optimizer, "_let_readers_end"),
        "a copy of the state does not wait for the update": _copied_beside_the_update,
    },
    Case(schedule="megatron", micro_batches=2, steps=4, graph=True): {
        "a graph reads the tokens of the step that it was captured in": lambda: altered(
            step_graph, "_tensors", lambda whole, batch: _Unwritable(whole(batch))
        ),
    },
    replace(PAIRED, steps=3, graph=True): {
        "compute waits, in a graph, for the mark of a transfer's end": lambda: altered(
            CudaStreams, "wait", lambda _, own, one: own._compute.wait_event(one.end)
        ),
    },
    GRAPH: {
        "every rank decides by itself to capture": lambda: _each_for_itself("_wants", lambda *_: False),
        "a rank that could not capture goes on without its graph, others with theirs": lambda: (
            _each_for_itself("_capture", lambda _, own, *__: setattr(own, "_wanted", False))
        ),
        "groups are given up before the graph that refers to them": lambda: altered(
            Membership, "leave", lambda whole, own: (own._destroy(), whole(own))
        ),
    },
    replace(GRAPH, steps=5): {
        "a graph that is captured anew is not given up": _captured_anew_and_not_given_up,
    },
}
MUTANTS = [Mutant(name, case, apply) for case, faults in _FAULTS.items() for name, apply in faults.items()]


@cache
def left_without_faults(case: Case) -> dict[Any, Any]:
    """The same of a case that shows a mutant: whole, it has no fault, or every mutant would be found."""
    wanted = left(case)
    assert faults(case, range(0 if case.graph else 3), wanted) == []
    return wanted


def faults_of_mutant(mutant: Mutant) -> list[str]:
    """What is said of a mutant; AssertionError where that is no fault of the runtime's."""
    expected = left_without_faults(mutant.case)
    with mutant.apply():
        found = faults(mutant.case, range(30), expected)
    broken = ("TypeError", "AttributeError", "NameError", "AssertionError")
    assert not any(fault.startswith(broken) for fault in found), f"the mutant itself is broken: {found}"
    return found
