"""Faults put into the real classes, one at a time: the model counts only if it finds every one.

Each is what somebody could write, or forget. A mutant names the case that shows it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from braid.actors.stage import assembly, step_graph
from braid.actors.stage.cuda_streams import CudaStreams
from braid.actors.stage.executor import Executor
from braid.actors.stage.gradients import GradientBuckets
from braid.actors.stage.gradients import _Bucket as _Gradients
from braid.actors.stage.host_state import HostState
from braid.actors.stage.membership import Membership
from braid.actors.stage.mesh import Mesh
from braid.actors.stage.optimizer import Optimizer, Update
from braid.actors.stage.streams import Transfer
from braid.actors.stage.weights import ShardedWeights
from braid.kernels.collectives.communicator import Communicator, Pairs
from braid.kernels.collectives.primitives import Launch
from braid.scheduling.code import Body, Code, Compute, Node, Operation, Release, Start, Wait
from braid.scheduling.code import Update as UpdateOf
from braid.scheduling.operators import Stream
from braid.scheduling.schedule import Gather, Reduce
from tests.cuda.communicators import ModelGroup, Work
from tests.cuda.steps import Case

PAIRED = Case(schedule="braid:w", tp=2, micro_batches=2)
PLAIN = Case(schedule="megatron", tp=2, micro_batches=2)
STAGES = Case(schedule="megatron", pp=2, micro_batches=3)
REPLICAS = Case(schedule="braid:w", dp=2, micro_batches=2)


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A fault and where it shows."""

    name: str
    apply: Callable[[], AbstractContextManager[Any]]
    case: Case = PLAIN


MUTANTS: list[Mutant] = []


def mutant(
    name: str, case: Case = PLAIN
) -> Callable[[Callable[[], AbstractContextManager[Any]]], Callable[[], AbstractContextManager[Any]]]:
    """Register a fault."""

    def register(apply: Callable[[], AbstractContextManager[Any]]) -> Callable[[], Any]:
        MUTANTS.append(Mutant(name=name, apply=apply, case=case))
        return apply

    return register


def _started(
    streams: CudaStreams,
    stream: Stream,
    launch: Launch,
    lane: str,
    *,
    waits_for_compute: bool = True,
    waits_for_work: bool = True,
    ends_late: bool = True,
    keeps: bool = True,
    inside: bool = True,
    own_lane: bool = True,
) -> Transfer:
    """`CudaStreams.start`, with parts of it left out."""
    key = (stream, lane) if own_lane else (stream, "one for all")
    if key not in streams._side:
        streams._side[key] = streams._accelerator.stream(), streams._accelerator.event()
    side, _ = streams._side[key]
    if waits_for_compute:
        side.wait_event(streams._record(streams._compute))
    begin = streams._record(side)
    early = streams._record(side)
    where = streams._accelerator.on(side) if inside else streams._accelerator.on(streams._compute)
    with where:
        work = launch.issue()
        if waits_for_work:
            work.wait()
    end = streams._record(side) if ends_late else early
    streams._ends[key] = end
    kept = launch if keeps else Launch(launch.result, _nothing, launch.finish)
    return Transfer(launch=kept, work=work if keeps else None, begin=begin, end=end, arrival=end)


def _nothing() -> Any:
    raise AssertionError("issued twice")


def _starting(**left_out: bool) -> AbstractContextManager[Any]:
    def start(
        self: CudaStreams, stream: Stream, launch: Launch, *, awaited_next: bool, lane: str = ""
    ) -> Transfer:
        return _started(self, stream, launch, lane, **left_out)

    return patch.object(CudaStreams, "start", start)


# -- streams and events --------------------------------------------------------------------------------------


@mutant("a side stream does not wait for compute")
def _() -> AbstractContextManager[Any]:
    return _starting(waits_for_compute=False)


@mutant("a message does not wait for the compute that it carries", STAGES)
def _() -> AbstractContextManager[Any]:
    return _starting(waits_for_compute=False)


@mutant("a sum of gradients does not wait for the backward pass", REPLICAS)
def _() -> AbstractContextManager[Any]:
    return _starting(waits_for_compute=False)


@mutant("the side stream does not wait for the communicator's")
def _() -> AbstractContextManager[Any]:
    return _starting(waits_for_work=False)


@mutant("the end of a transfer is recorded before it is issued")
def _() -> AbstractContextManager[Any]:
    return _starting(ends_late=False)


@mutant("compute does not wait for transfers")
def _() -> AbstractContextManager[Any]:
    return patch.object(CudaStreams, "wait", lambda self, transfer: None)


@mutant("compute does not wait for messages", STAGES)
def _() -> AbstractContextManager[Any]:
    return patch.object(CudaStreams, "wait", lambda self, transfer: None)


@mutant("compute waits for the begin of a transfer")
def _() -> AbstractContextManager[Any]:
    return patch.object(CudaStreams, "wait", lambda self, transfer: self._compute.wait_event(transfer.begin))


@mutant("another stream waits for the transfer")
def _() -> AbstractContextManager[Any]:
    def wait(self: CudaStreams, transfer: Transfer) -> None:
        self._accelerator.stream().wait_event(transfer.end)

    return patch.object(CudaStreams, "wait", wait)


@mutant("every second wait is left out", PAIRED)
def _() -> AbstractContextManager[Any]:
    count = [0]
    whole = CudaStreams.wait

    def wait(self: CudaStreams, transfer: Transfer) -> None:
        count[0] += 1
        if count[0] % 2:
            whole(self, transfer)

    return patch.object(CudaStreams, "wait", wait)


@mutant("a message is put behind all others, sends and receives alike", replace(STAGES, micro_batches=4))
def _() -> AbstractContextManager[Any]:
    return _starting(own_lane=False)


# -- lifetimes -----------------------------------------------------------------------------------------------


@mutant("the contiguous copy that is sent lives as long as its launch")
def _() -> AbstractContextManager[Any]:
    """Of a tensor whose rows do not follow each other, which a layer of a user's own may hand on."""
    whole = Communicator.all_gather

    def all_gather(self: Communicator, x: Tensor) -> Launch:
        return whole(self, x.t().contiguous().t())

    return _both(_starting(keeps=False), patch.object(Communicator, "all_gather", all_gather))


@mutant("a message's memory is given back when it is issued", STAGES)
def _() -> AbstractContextManager[Any]:
    sent = Executor._send

    def send(self: Executor, *arguments: Any) -> Any:
        run = sent(self, *arguments)

        def issue(frames: Any, passes: Any) -> None:
            run(frames, passes)
            for transfer in self._sending.values():
                transfer.launch = replace(transfer.launch, result=None, issue=_nothing)
            frames[0][arguments[1]] = None

        return issue

    return patch.object(Executor, "_send", send)


@mutant("a gather reads memory that is given back at once")
def _() -> AbstractContextManager[Any]:
    whole = Communicator.all_gather

    def all_gather(self: Communicator, x: Tensor) -> Launch:
        launch = whole(self, x.clone())
        issue = launch.issue
        box = [issue]
        return Launch(launch.result, lambda: box.pop()())

    return patch.object(Communicator, "all_gather", all_gather)


@mutant("a received message is used before it is taken", STAGES)
def _() -> AbstractContextManager[Any]:
    def received(self: Executor, frame: Any, register: int) -> None:
        frame[register] = frame[register].take()

    return patch.object(Executor, "_received", received)


# -- communicators -------------------------------------------------------------------------------------------


def _on_rank_one(name: str, change: Callable[..., Any]) -> AbstractContextManager[Any]:
    whole = getattr(ModelGroup, name)

    def call(self: ModelGroup, *arguments: Any) -> Any:
        if self.log.rank == 1:
            return change(self, whole, *arguments)
        return whole(self, *arguments)

    return patch.object(ModelGroup, name, call)


@mutant("one rank leaves a gather out")
def _() -> AbstractContextManager[Any]:
    _left_out[0] = 0
    return _on_rank_one("all_gather", _skipping)


_left_out = [0]


def _skipping(self: ModelGroup, whole: Any, *arguments: Any) -> Any:
    _left_out[0] += 1
    if _left_out[0] == 3:
        end = self.log.event()
        end.record(self.log.current())
        return Work(self.log, end, [])
    return whole(self, *arguments)


@mutant("one rank leaves a sum of gradients out", REPLICAS)
def _() -> AbstractContextManager[Any]:
    _left_out[0] = 2
    return _on_rank_one("all_reduce", _skipping)


@mutant("one rank leaves a message out", STAGES)
def _() -> AbstractContextManager[Any]:
    _left_out[0] = 0
    return _on_rank_one("messages", _skipping)


@mutant("one rank adds up where others scatter")
def _() -> AbstractContextManager[Any]:
    def change(self: ModelGroup, whole: Any, y: Tensor, x: Tensor) -> Any:
        return self.all_reduce(x)

    return _on_rank_one("reduce_scatter", change)


@mutant("one rank gathers fewer tokens")
def _() -> AbstractContextManager[Any]:
    def change(self: ModelGroup, whole: Any, y: Tensor, x: Tensor) -> Any:
        return whole(self, y[:-2], x[:-1])

    return _on_rank_one("all_gather", change)


@mutant("one rank gathers another dtype")
def _() -> AbstractContextManager[Any]:
    def change(self: ModelGroup, whole: Any, y: Tensor, x: Tensor) -> Any:
        return whole(self, y, x.to(torch.float64))

    return _on_rank_one("all_gather", change)


@mutant("two sums are swapped on one rank", replace(REPLICAS, pp=2, micro_batches=4))
def _() -> AbstractContextManager[Any]:
    whole = GradientBuckets.start
    held: dict[int, Any] = {}

    def start(self: GradientBuckets, reduce: Any) -> None:
        if self._mesh.rank != 1 or reduce.axis != "dp":
            whole(self, reduce)
        elif id(self) not in held:
            held[id(self)] = reduce
        else:
            whole(self, reduce)
            if held[id(self)] is not None:
                whole(self, held[id(self)])
                held[id(self)] = None

    def wait(self: GradientBuckets, reduce: Any) -> None:
        if held.get(id(self)) == reduce:
            whole(self, reduce)
            held[id(self)] = None
        waited(self, reduce)

    waited = GradientBuckets.wait
    return _both(patch.object(GradientBuckets, "start", start), patch.object(GradientBuckets, "wait", wait))


@mutant("two gathers are swapped on one rank", PAIRED)
def _() -> AbstractContextManager[Any]:
    """The paired strands of a rank go in the other order: the shapes are equal, the values are not."""
    whole = Executor.run

    def run(self: Executor, batches: Any, *more: Any) -> Any:
        if self._mesh.rank == 1:
            batches = list(reversed(batches))
        return whole(self, batches, *more)

    return patch.object(Executor, "run", run)


@mutant("a message goes to the stage on the other side", replace(STAGES, pp=3))
def _() -> AbstractContextManager[Any]:
    def change(self: ModelGroup, whole: Any, sends: Any, receives: Any) -> Any:
        return whole(self, [(x, 2 - peer) for x, peer in sends], receives)

    return _on_rank_one("messages", change)


@mutant("a rank uses its connections for the first time in an order of its own", replace(STAGES, pp=3))
def _() -> AbstractContextManager[Any]:
    whole = Pairs.warm_up

    def warm_up(self: Pairs) -> None:
        if self.rank != 0:
            whole(self)
        for other in sorted(self.pairs, reverse=True) if self.rank == 0 else ():
            self.pairs[other].warm_up()

    return patch.object(Pairs, "warm_up", warm_up)


@mutant("a rank uses the communicator of another axis", replace(PLAIN, dp=2))
def _() -> AbstractContextManager[Any]:
    whole = Mesh.shared

    def shared(self: Mesh, axis: str) -> Any:
        return whole(self, "tp" if axis == "dp" and self.rank == 1 else axis)

    return patch.object(Mesh, "shared", shared)


# -- the end of a step ---------------------------------------------------------------------------------------


@mutant("sums of gradients are not awaited", REPLICAS)
def _() -> AbstractContextManager[Any]:
    def wait(self: GradientBuckets, reduce: Any) -> None:
        for transfer in self._pending.pop(reduce):
            transfer.take()

    return patch.object(GradientBuckets, "wait", wait)


def _starts_gather(operation: Operation) -> bool:
    return isinstance(operation, Start) and isinstance(operation.what, Gather)


def _updates(operation: Operation) -> bool:
    return isinstance(operation, Compute) and isinstance(operation.what, UpdateOf)


def _relinked(change: Callable[[list[Operation]], list[Operation]]) -> AbstractContextManager[Any]:
    """Code as a linker would make it that does this to every stretch, behind all validation."""
    whole = assembly.linked

    def relinked(*arguments: Any) -> Code:
        code = whole(*arguments)
        stages = [
            tuple(replace(one, body=Body(tuple(change(list(one.operations))))) for one in stage)
            for stage in code.stages
        ]
        return replace(code, stages=tuple(stages))

    return patch.object(assembly, "linked", relinked)


_Which = Callable[[Operation], bool]


def _earlier(operations: list[Operation], moved: _Which, over: _Which) -> list[Operation]:
    """With every operation of a kind before the nearest one of another kind that it stood behind."""
    found: list[Operation] = []
    for one in operations:
        at = len(found)
        if moved(one):
            at = max((n for n, other in enumerate(found) if over(other)), default=at)
        found.insert(at, one)
    return found


def _later(operations: list[Operation], moved: _Which, over: _Which) -> list[Operation]:
    """With every operation of a kind behind the nearest one of another kind that it stood before."""
    return _earlier(operations[::-1], moved, over)[::-1]


def _starts_sum(one: Operation, axis: str = "dp") -> bool:
    return isinstance(one, Start) and isinstance(one.what, Reduce) and one.what.axis == axis


def _waits_for_gather(one: Operation) -> bool:
    return isinstance(one, Wait) and isinstance(one.what, Gather)


def _computes(one: Operation) -> bool:
    return isinstance(one, Compute)


def _adds(one: Operation) -> bool:
    return isinstance(one, Compute) and isinstance(one.what, Node) and one.what.operator.adds_gradients


BUCKETS = Case(schedule="ddp", dp=2, micro_batches=2)
"""Gradients are summed bucket by bucket in the last backward pass."""


@mutant("gradients of a bucket are summed before they are final", BUCKETS)
def _() -> AbstractContextManager[Any]:
    return _relinked(lambda operations: sorted(operations, key=lambda one: not _starts_sum(one)))


@mutant("sums of two buckets are swapped on one rank", BUCKETS)
def _() -> AbstractContextManager[Any]:
    whole = GradientBuckets._summed

    def summed(self: GradientBuckets, reduce: Any) -> Any:
        swapped = reduce.bucket in (1, 2) and self._mesh.rank == 1
        return whole(self, replace(reduce, bucket=3 - reduce.bucket) if swapped else reduce)

    return patch.object(GradientBuckets, "_summed", summed)


@mutant("the sum of one bucket is not awaited", BUCKETS)
def _() -> AbstractContextManager[Any]:
    whole = GradientBuckets.wait

    def wait(self: GradientBuckets, reduce: Any) -> None:
        if reduce.bucket != 0:
            whole(self, reduce)

    return patch.object(GradientBuckets, "wait", wait)


SHARDED = Case(schedule="ddp", dp=2, zero=1, micro_batches=2, steps=2)
"""Every rank updates a share of each bucket, and gathers the others' in the next step."""


@mutant("parameters are used before they are gathered", SHARDED)
def _() -> AbstractContextManager[Any]:
    return _relinked(lambda operations: sorted(operations, key=_waits_for_gather))


@mutant("two buckets are gathered in another order on one rank", SHARDED)
def _() -> AbstractContextManager[Any]:
    whole = ShardedWeights.start

    def start(self: ShardedWeights, gather: Any) -> None:
        swapped = gather.bucket in (1, 2) and self._mesh.rank == 1
        whole(self, replace(gather, bucket=3 - gather.bucket) if swapped else gather)

    return patch.object(ShardedWeights, "start", start)


@mutant("the scattered sum of a bucket is not awaited", SHARDED)
def _() -> AbstractContextManager[Any]:
    whole = GradientBuckets.wait

    def wait(self: GradientBuckets, reduce: Any) -> None:
        if reduce.bucket != 0:
            whole(self, reduce)

    return patch.object(GradientBuckets, "wait", wait)


SUMS = Case(schedule="ddp", dp=2, zero=2, least=4096, micro_batches=2, steps=2)
"""Gradients have memory for a while: every backward pass leaves a share of each bucket's."""


@mutant("a scatter starts before the last operator adds to its bucket", SUMS)
def _() -> AbstractContextManager[Any]:
    return _relinked(lambda operations: _earlier(operations, _starts_sum, _adds))


@mutant("a share is added before its scatter has ended", SUMS)
def _() -> AbstractContextManager[Any]:
    whole = GradientBuckets.wait

    def wait(self: GradientBuckets, reduce: Any) -> None:
        if reduce.bucket is None:
            whole(self, reduce)
            return
        for bucket in self._of(reduce):
            bucket.share.add_(bucket.plan.own(bucket.whole()))
        for transfer in self._pending.pop(reduce):
            self._streams.wait(transfer)
            transfer.take()
        for bucket in self._of(reduce):
            bucket.release()

    return patch.object(GradientBuckets, "wait", wait)


@mutant("gradients are let go of when their scatter was issued", SUMS)
def _() -> AbstractContextManager[Any]:
    """It leaves the share elsewhere, so that only the memory is wrong."""
    started, waited = GradientBuckets.start, GradientBuckets.wait

    def start(self: GradientBuckets, reduce: Any) -> None:
        if reduce.bucket is None:
            started(self, reduce)
            return
        pending = self._pending[reduce] = []
        for bucket in self._of(reduce):
            share = torch.empty_like(bucket.share)
            launch = self._mesh.shared(reduce.axis).reduce_scatter(bucket.whole(), into=share)
            stream = self._mesh.stream(reduce.axis)
            transfer = self._streams.start(stream, launch, awaited_next=False, lane="data")
            transfer.launch, transfer.work = Launch(share, _nothing), None
            pending.append(transfer)
            bucket.release()

    def wait(self: GradientBuckets, reduce: Any) -> None:
        if reduce.bucket is None:
            waited(self, reduce)
            return
        for bucket, transfer in zip(self._of(reduce), self._pending.pop(reduce), strict=True):
            self._streams.wait(transfer)
            bucket.share.add_(transfer.take())

    return _both(patch.object(GradientBuckets, "start", start), patch.object(GradientBuckets, "wait", wait))


@mutant("rounded gradients are put back before their sum is there", replace(SUMS, rounded=True))
def _() -> AbstractContextManager[Any]:
    launched = GradientBuckets._launch_rounded

    def launch_rounded(self: GradientBuckets, *arguments: Any) -> Any:
        sent, launch = launched(self, *arguments)

        def issue() -> Any:
            work = launch.issue()
            assert launch.finish is not None
            launch.finish()
            return work

        return sent, replace(launch, issue=issue, finish=None)

    return patch.object(GradientBuckets, "_launch_rounded", launch_rounded)


@mutant("gradients are rounded on a stream that waits for nothing", replace(REPLICAS, rounded=True))
def _() -> AbstractContextManager[Any]:
    launched = GradientBuckets._launch_rounded

    def launch_rounded(self: GradientBuckets, *arguments: Any) -> Any:
        accelerator: Any = self._streams._accelerator  # type: ignore[attr-defined]
        sent, launch = launched(self, *arguments)
        with accelerator.on(accelerator.stream()):
            sent.copy_(arguments[2])
        return sent, launch

    return patch.object(GradientBuckets, "_launch_rounded", launch_rounded)


@mutant("gradients begin with what was in their memory", SUMS)
def _() -> AbstractContextManager[Any]:
    def allocate(self: _Gradients) -> None:
        self.buffer = self.share.new_empty(self.plan.elements)
        for parameter, view in self.plan.lay(self.buffer):
            parameter.gradient = view

    return patch.object(_Gradients, "allocate", allocate)


@mutant(
    "shares are summed over replicas before they are there",
    Case(schedule="ddp", dp=4, zero=2, shards=2, micro_batches=2),
)
def _() -> AbstractContextManager[Any]:
    def scattered(one: Operation) -> bool:
        return isinstance(one, Wait) and isinstance(one.what, Reduce) and one.what.axis == "dp"

    def replicated(one: Operation) -> bool:
        return _starts_sum(one, "replica")

    return _relinked(lambda operations: _earlier(operations, replicated, scattered))


PASSING = replace(SUMS, zero=3)
"""And parameters are whole for a while."""


@mutant("a bucket is let go of before the last operator that reads it", PASSING)
def _() -> AbstractContextManager[Any]:
    def releases(one: Operation) -> bool:
        return isinstance(one, Release)

    return _relinked(lambda operations: _earlier(operations, releases, _computes))


@mutant("a gather is waited for behind the first operator that reads its bucket", PASSING)
def _() -> AbstractContextManager[Any]:
    return _relinked(lambda operations: _later(operations, _waits_for_gather, _computes))


@mutant("a bucket's memory is given back while it is gathered", PASSING)
def _() -> AbstractContextManager[Any]:
    started, waited = ShardedWeights.start, ShardedWeights.wait

    def start(self: ShardedWeights, gather: Any) -> None:
        started(self, gather)
        for bucket, transfer in zip(self._of(gather), self._pending[gather], strict=True):
            transfer.launch, transfer.work = Launch(bucket.own, _nothing), None
            bucket.release()

    def wait(self: ShardedWeights, gather: Any) -> None:
        waited(self, gather)
        for bucket in self._of(gather):
            bucket.make()

    return _both(patch.object(ShardedWeights, "start", start), patch.object(ShardedWeights, "wait", wait))


@mutant("what is gathered lies in memory of another stream than its readers'", PASSING)
def _() -> AbstractContextManager[Any]:
    whole = ShardedWeights.start
    streams: dict[Any, Any] = {}

    def start(self: ShardedWeights, gather: Any) -> None:
        log = self._streams._accelerator
        if log not in streams:
            streams[log] = log.stream()
        with log.on(streams[log]):
            whole(self, gather)

    return patch.object(ShardedWeights, "start", start)


@mutant("the norm is read before its squares are summed", PLAIN)
def _() -> AbstractContextManager[Any]:
    def wait(self: GradientBuckets, reduce: Any) -> None:
        for transfer in self._pending.pop(reduce):
            if reduce.chunk is not None:
                self._streams.wait(transfer)
            transfer.take()

    return patch.object(GradientBuckets, "wait", wait)


@mutant("the update runs on a stream of its own that waits for nothing")
def _() -> AbstractContextManager[Any]:
    whole = Update.step

    def step(self: Update) -> None:
        log = _log_of(self._optimizer)
        with log.on(log.stream()):
            whole(self)

    return patch.object(Update, "step", step)


@mutant("the next step does not wait for an update on a stream of its own", replace(PLAIN, steps=2))
def _() -> AbstractContextManager[Any]:
    whole = Optimizer.step

    def step(self: Optimizer, *arguments: Any) -> Any:
        log = _log_of(self)
        side = log.stream()
        done = log.event()
        done.record(log.current())
        side.wait_event(done)
        with log.on(side):
            return whole(self, *arguments)

    return patch.object(Optimizer, "step", step)


@mutant("gradients are cleared beside the update", PLAIN)
def _() -> AbstractContextManager[Any]:
    whole = GradientBuckets.zero

    def zero(self: GradientBuckets, *arguments: Any) -> None:
        log = self._streams._accelerator
        with log.on(log.stream()):
            whole(self, *arguments)

    return patch.object(GradientBuckets, "zero", zero)


def _log_of(optimizer: Optimizer) -> Any:
    return optimizer._gradients._streams._accelerator


COPIED = replace(PLAIN, steps=2, copies=True)


@mutant("an update does not wait for the copy of the state before it", COPIED)
def _() -> AbstractContextManager[Any]:
    return patch.object(Optimizer, "_let_readers_end", lambda self: None)


@mutant("a copy of the state does not wait for the update", COPIED)
def _() -> AbstractContextManager[Any]:
    whole = Optimizer.read_beside

    def read_beside(self: Optimizer, read: Any) -> Any:
        log = _log_of(self)
        with patch.object(log, "current", log.stream):
            return whole(self, read)

    return patch.object(Optimizer, "read_beside", read_beside)


@mutant("a copy of the state is read before it is there", COPIED)
def _() -> AbstractContextManager[Any]:
    return patch.object(HostState, "flat", property(lambda self: self.memory))


# -- graphs --------------------------------------------------------------------------------------------------


@mutant(
    "a graph reads the tokens of the step that it was captured in",
    Case(schedule="megatron", micro_batches=2, steps=4, graph=True),
)
def _() -> AbstractContextManager[Any]:
    return patch.object(
        step_graph, "_tensors", lambda batch: _Unwritable({} if batch is None else vars(batch))
    )


class _Unwritable(dict[str, Any]):
    """Tensors that are copied from, and not to."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name).clone()


@mutant("compute waits, in a graph, for the mark of a transfer's end", replace(PAIRED, steps=3, graph=True))
def _() -> AbstractContextManager[Any]:
    def wait(self: CudaStreams, transfer: Transfer) -> None:
        self._compute.wait_event(transfer.end)

    return patch.object(CudaStreams, "wait", wait)


UNIFORM = replace(PAIRED, steps=4, graph=True)


def _each_for_itself(name: str, unlike: Callable[..., Any]) -> AbstractContextManager[Any]:
    """No rank hears of others, and rank 1 has its own way with a method."""
    whole, init = getattr(step_graph.StepGraph, name), step_graph.StepGraph.__init__

    def call(self: step_graph.StepGraph, *arguments: Any) -> Any:
        return (unlike if _rank_of(self) == 1 else whole)(self, *arguments)

    def alone(self: step_graph.StepGraph, *arguments: Any, **named: Any) -> None:
        init(self, *arguments, **{**named, "gather": step_graph._alone})

    return _both(
        patch.object(step_graph.StepGraph, name, call), patch.object(step_graph.StepGraph, "__init__", alone)
    )


def _rank_of(graph: step_graph.StepGraph) -> int:
    log: Any = graph._streams._accelerator
    return int(log.rank)


@mutant("every rank decides by itself whether to capture", UNIFORM)
def _() -> AbstractContextManager[Any]:
    return _each_for_itself("_wants", lambda self: False)


@mutant("a rank that could not capture goes on without its graph, others with theirs", UNIFORM)
def _() -> AbstractContextManager[Any]:
    def capture(self: step_graph.StepGraph, *arguments: Any) -> None:
        self._wanted = False

    return _each_for_itself("_capture", capture)


@mutant("groups are given up before the graph that refers to them", UNIFORM)
def _() -> AbstractContextManager[Any]:
    whole = Membership.leave

    def leave(self: Membership) -> None:
        self._destroy()
        whole(self)

    return patch.object(Membership, "leave", leave)


@mutant("a graph that is captured anew is not given up", replace(UNIFORM, steps=5))
def _() -> AbstractContextManager[Any]:
    """As happens when spans are switched on or off."""
    whole = step_graph._shape
    number = iter(range(1 << 30))

    def release(self: step_graph.StepGraph) -> None:
        self._kept = None

    return _both(
        patch.object(step_graph.StepGraph, "_release", release),
        patch.object(step_graph, "_shape", lambda batch: (next(number), whole(batch))),
    )


@contextmanager
def _both(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with contexts[0], contexts[1]:
        yield
