"""How methods of the real classes are altered within a context: mistakes that somebody could make."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from braid.actors.stage.rank import assembly
from braid.actors.stage.run.cuda_streams import CudaStreams
from braid.actors.stage.run.streams import Transfer
from braid.kernels.collectives.communicator import Communicator
from braid.kernels.collectives.primitives import Launch
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.schedule.code import Code
from braid.scheduling.schedule.operations import Compute, Node, Operation
from tests.cuda.communicators import ModelGroup, Work
from tests.cuda.machine import here

Altered = AbstractContextManager[Any]
Which = Callable[..., bool]


@contextmanager
def all_of(*contexts: Altered) -> Iterator[None]:
    """Several alterations."""
    with ExitStack() as stack:
        for one in contexts:
            stack.enter_context(one)
        yield


def altered(owner: Any, name: str, change: Callable[..., Any]) -> Altered:
    """A method that does ``change(whole, self, ...)`` instead; ``whole`` is what it did before."""
    whole = getattr(owner, name)
    return patch.object(owner, name, lambda *given, **named: change(whole, *given, **named))


def on_rank_one(owner: Any, name: str, change: Callable[..., Any]) -> Altered:
    """The same on rank 1 alone."""

    def call(whole: Any, *given: Any, **named: Any) -> Any:
        return change(whole, *given, **named) if here.log.rank == 1 else whole(*given, **named)

    return altered(owner, name, call)


def left_out(owner: Any, name: str, which: Which = lambda *_: True) -> Altered:
    """A method that does nothing where ``which(self, ...)`` says so."""
    return altered(owner, name, lambda whole, *given: None if which(*given) else whole(*given))


def elsewhere(owner: Any, name: str, *, after: bool = False) -> Altered:
    """A method on a new stream, which waits for nothing, or ``after`` what was issued before, and for which
    nothing waits."""

    def call(whole: Any, *given: Any, **named: Any) -> Any:
        log = here.log
        side, before = log.stream(), log.event()
        if after:
            before.record(log.current())
            side.wait_event(before)
        with log.on(side):
            return whole(*given, **named)

    return altered(owner, name, call)


# -- transfers -----------------------------------------------------------------------------------------------


def starting(without: str) -> Altered:
    """`CudaStreams.start`, with a part of it left out."""

    def start(own: CudaStreams, stream: Stream, launch: Launch, *, lane: str = "", **_: Any) -> Transfer:
        key = (stream, "one for all" if without == "own lane" else lane)
        if key not in own._side:
            own._side[key] = own._accelerator.stream(), own._accelerator.event()
        side, _ = own._side[key]
        if without != "wait for compute":
            side.wait_event(own._record(own._compute))
        begin, early = own._record(side), own._record(side)
        with own._accelerator.on(side):
            work = launch.issue()
            if without != "wait for work":
                work.wait()
        own._ends[key] = end = early if without == "late end" else own._record(side)
        return Transfer(launch=launch, work=work, begin=begin, end=end, arrival=end)

    return patch.object(CudaStreams, "start", start)


def from_a_copy(name: str) -> Altered:
    """A collective reads a copy of its input that lives until it is issued."""

    def call(whole: Any, own: Communicator, x: Tensor, *given: Any, **named: Any) -> Launch:
        launches = [whole(own, x.clone(), *given, **named)]

        def issue() -> Any:
            launch = launches.pop()
            work = launch.issue()
            if launch.finish is not None:
                launch.finish()
            return work

        return Launch(launches[0].result, issue)

    return altered(Communicator, name, call)


def call_left_out(name: str, number: int) -> Altered:
    """One call of a kind of kernel, that rank 1 does not make."""
    left = [number]

    def call(whole: Any, group: ModelGroup, *given: Any) -> Any:
        left[0] -= 1
        if left[0]:
            return whole(group, *given)
        end = group.log.event()
        end.record(group.log.current())
        return Work(group.log, end)

    return on_rank_one(ModelGroup, name, call)


def unawaited(owner: Any, which: Which) -> Altered:
    """Some sums of gradients, gathers of parameters or collectives of layers are taken and not waited for."""

    def wait(whole: Any, own: Any, what: Any, *given: Any) -> Any:
        without = patch.object(own, "_streams", SimpleNamespace(wait=lambda transfer: None))
        with without if which(what) else nullcontext():
            return whole(own, what, *given)

    return altered(owner, "wait", wait)


def swapped(what: Any) -> Any:
    """A sum or gather of bucket 1 for that of bucket 2."""
    return replace(what, bucket=3 - what.bucket) if what.bucket in (1, 2) else what


# -- code ----------------------------------------------------------------------------------------------------


def relinked(change: Callable[[list[Operation]], list[Operation]]) -> Altered:
    """Code as a linker would make it that does this to every stretch, behind all validation."""

    def linked(whole: Any, *given: Any) -> Code:
        code = whole(*given)
        stages = [
            tuple(one._replace(operations=tuple(change(list(one.operations)))) for one in stage)
            for stage in code.stages
        ]
        return replace(code, stages=tuple(stages))

    return altered(assembly, "linked", linked)


def earlier(moved: Which, over: Which) -> Altered:
    """Every operation of a kind before the nearest one of another kind that it stood behind."""

    def change(operations: list[Operation]) -> list[Operation]:
        found: list[Operation] = []
        for one in operations:
            at = len(found)
            if moved(one):
                at = max((n for n, other in enumerate(found) if over(other)), default=at)
            found.insert(at, one)
        return found

    return relinked(change)


def is_a(operation: Any, what: Any = object, axis: str = "") -> Which:
    """Whether an operation is of a kind: start, wait, of what, and along which axis."""
    return lambda one: (
        isinstance(one, operation)
        and isinstance(one.what, what)
        and axis in ("", getattr(one.what, "axis", ""))
    )


def adds(one: Operation) -> bool:
    """Whether an operation adds to gradients."""
    return isinstance(one, Compute) and isinstance(one.what, Node) and one.what.operator.adds_gradients
