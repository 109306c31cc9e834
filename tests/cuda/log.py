"""One rank on the model of the machine: streams, events, memory, log (`tests.cuda.machine`)."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cuda.entries import (
    Call,
    Entry,
    Freed,
    HostWaited,
    Made,
    Operator,
    Recorded,
    View,
    Waited,
    mapped,
    tensors_of,
    unnoted,
)
from tests.cuda.graphs import Graph
from tests.cuda.host_memory import HOST, bytes_of, restored

if TYPE_CHECKING:
    from tests.cuda.machine import Machine


HOST_READS = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::item")


class LostError(Exception):
    """The rank's process has ended."""


@dataclass(eq=False)
class Stream:
    """Of one rank (`braid.actors.stage.run.accelerator.DeviceStream`)."""

    log: "RankLog"
    number: int
    pending: set[Call] = field(default_factory=set)
    """Calls that what it was given comes after, and whose results are not there yet."""

    def wait_event(self, event: "Event") -> None:
        if self.log.graph is not None:
            self.log.graph.waited(self, event)
            return
        if event.captured:
            raise RuntimeError("a wait, outside a graph, for an event of inside")
        self.wait_again(event)

    def wait_again(self, event: "Event") -> None:
        """For what it was recorded after last."""
        self.log.note(Waited(self.number, event.number))
        self.pending |= event.pending

    def synchronize(self) -> None:
        event = Event(self.log)
        event.record(self)
        event.synchronize()


class Event:
    """Of one rank (`braid.actors.stage.run.accelerator.Event`)."""

    def __init__(self, log: "RankLog", external: bool = False) -> None:
        """``external``: those of a graph that tell the time; they order nothing."""
        self.external = external
        self.log, self.number = log, log.next_number()
        self.pending: set[Call] = set()
        self.captured = False
        """Whether it was recorded in a graph, to order what is inside; such an event cannot be asked."""

    def record(self, stream: Stream) -> None:
        self.captured = self.log.graph is not None and not self.external
        if self.log.graph is not None:
            self.log.graph.recorded(self, stream)
        else:
            self.record_again(stream)

    def record_again(self, stream: Stream) -> None:
        """The same, not captured."""
        self.log.note(Recorded(self.number, stream.number))
        self.pending = set(stream.pending)

    def query(self) -> bool:
        """Whether what comes before is done."""
        return all(call.done for call in self.pending)

    def synchronize(self) -> None:
        if self.captured or self.log.graph is not None:
            raise RuntimeError("the host waits for an event of a graph")
        self.log.note(HostWaited(self.number))
        self.log.machine.until(lambda: self.query() or self.log.aborted, self.log)

    def elapsed_time(self, other: "Event") -> float:
        """There is no time."""
        return 0.0


@cache
def written_arguments(function: Any) -> tuple[tuple[int, str], ...]:
    """Number and name of the arguments that an operator of torch writes to."""
    arguments = enumerate(function._schema.arguments)
    return tuple(
        (n, one.name) for n, one in arguments if one.alias_info is not None and one.alias_info.is_write
    )


class RankLog(TorchDispatchMode):
    """One rank: its streams, its memory, its log. Active on the rank's thread it notes every operator."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; that guard takes a tenth of the time."""
        return False

    def __init__(self, machine: "Machine", rank: int) -> None:
        super().__init__()
        self.machine, self.rank = machine, rank
        self.entries: list[Entry] = []
        self.first: dict[int, Tensor] = {}
        """Contents, as bytes, of memory that was there before."""
        self.aborted = False
        self.interrupt: Callable[[], None] = self.abort
        """What the controller does to a rank that waits for one that is lost."""
        self.dies_at: int | None = None
        """The entry at which the rank is lost."""
        self.views = 0
        """Of tensors that were made, of which the log has no entry."""
        self._number = 0
        self.graph: Graph | None = None
        """What is captured at the moment."""
        self._graphs: list[Graph] = []
        self._known: dict[int, tuple[StorageWeakRef, int, object]] = {}
        """Memory that is alive, by a key not used again meanwhile, with what tells when it is gone."""
        self._gone: deque[int] = deque()
        """Keys of memory that was given back since somebody looked."""
        self._of_host: dict[int, StorageWeakRef] = {}
        """Memory that is the host's."""
        self._host, self._hosts_turn = Stream(self, HOST), False
        self.streams: list[Stream] = []
        self.compute = self.stream()
        self._current = [self.compute]

    # -- an accelerator (`braid.actors.stage.run.accelerator.Accelerator`) --

    def current(self) -> Stream:
        return self._current[-1]

    def stream(self) -> Stream:
        self.streams.append(Stream(self, self.next_number()))
        return self.streams[-1]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def event(self) -> Event:
        return Event(self)

    def graph_event(self) -> Event:
        return Event(self, external=True)

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """What the rank issues goes to a graph."""
        self._collect()
        stream = self.stream()
        self.graph = graph = Graph(self, stream)
        try:
            with self.on(stream):
                yield graph
            self._collect()
            held = {memory: restored(reference) for reference, memory, _ in self._known.values()}
            with unnoted():
                graph.end({memory: bytes_of(one) for memory, one in held.items() if one is not None})
            self._graphs.append(graph)
        except BaseException:
            graph.undo()
            raise
        finally:
            self.graph = None

    def spin(self, ns: float) -> None:
        """Reads and writes nothing."""

    def synchronise(self) -> None:
        """The host waits for all streams."""
        for stream in list(self.streams):
            stream.synchronize()

    # -- the host (`tests.cuda.host_memory`) --

    def is_host(self, x: Tensor) -> bool:
        """Whether a tensor lies in the host's memory."""
        return self._is_hosts(x.untyped_storage())

    def _is_hosts(self, storage: torch.UntypedStorage) -> bool:
        reference = self._of_host.get(storage._cdata)
        return reference is not None and not reference.expired()

    def _take_for_host(self, storage: torch.UntypedStorage) -> None:
        self._of_host[storage._cdata] = StorageWeakRef(storage)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """What is made of nothing is the host's."""
        self._hosts_turn = True
        try:
            yield
        finally:
            self._hosts_turn = False

    def read(self, x: Tensor) -> None:
        """The host reads numbers from its own memory."""
        view = self.view(x)
        self.note(Operator(HOST, torch.ops.aten.clone.default, (view,), {}, (view,), (), (), x))

    def _stream_of(self, function: Any, tensors: Sequence[Tensor]) -> Stream:
        """Who does an operator: the host what is of its own memory alone; it may copy to and from others'."""
        if self._hosts_turn:
            for x in tensors:
                self._take_for_host(x.untyped_storage())
        hosts = [x for x in tensors if self.is_host(x)]
        if self._hosts_turn or (hosts and len(hosts) == len(tensors)):
            return self._host
        if any(x.dim() for x in hosts) and function is not torch.ops.aten.copy_.default:
            raise RuntimeError(f"{function}: some tensors are the device's and some the host's")
        return self.current()

    # -- what is noted --

    def begin(self) -> None:
        """Forget what was noted so far: what there is was there before."""
        self._collect()
        self.entries.clear()
        self.views = 0
        self.first.clear()
        self._known.clear()
        self._gone.clear()

    def next_number(self) -> int:
        """For a stream, an event, or memory."""
        self._number += 1
        return self._number

    def note(self, entry: Entry) -> None:
        """Append, after what was freed by now."""
        self._collect()
        self._append(entry)

    def _append(self, entry: Entry) -> None:
        self.entries.append(entry)
        if self.dies_at is not None and len(self.entries) > self.dies_at:
            raise LostError

    def abort(self) -> None:
        """End what waits in communicators; their outputs are garbage.

        NCCL comes back from it when no graph refers to them any more (`referred_to`).
        """
        self.aborted = True

    def destroy(self) -> None:
        """Give the communicators up; this thread waits for its graphs, and would for ever."""
        if names := self.referred_to():
            raise RuntimeError(f"rank {self.rank} gives up what its graphs refer to: {', '.join(names)}")

    def referred_to(self) -> list[str]:
        """Names of communicators that graphs refer to."""
        return sorted({name for graph in self._graphs for name in graph.refers_to})

    def _collect(self) -> None:
        while self._gone:
            key = self._gone.popleft()
            freed = Freed(self._known.pop(key)[1])
            if self.graph is None or not self.graph.freed(freed):
                self.entries.append(freed)

    def view(self, x: Tensor) -> View:
        """Of a tensor; memory that is met for the first time was there before."""
        return self._view(x, lambda memory, storage: self._was_there(memory, storage))

    def _view(self, x: Tensor, met: Callable[[int, torch.UntypedStorage], None]) -> View:
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            memory = self.next_number()
            told = weakref.ref(storage, lambda _: self._gone.append(key))
            self._known[key] = StorageWeakRef(storage), memory, told
            met(memory, storage)
        if self.graph is not None and not self._is_hosts(storage):
            self.graph.keep(self._known[key][1], x)
        return View(self._known[key][1], x.dtype, tuple(x.shape), x.stride(), x.storage_offset())

    def _was_there(self, memory: int, storage: torch.UntypedStorage) -> None:
        with unnoted():
            self.first[memory] = bytes_of(storage).clone()
        # At the begin: a transfer that is the first to meet it waits for nothing that was noted by now.
        stream = self._host if self._is_hosts(storage) else self.compute
        self.entries.insert(0, Made(memory, stream.number, storage.nbytes()))

    def _made(self, memory: int, storage: torch.UntypedStorage, stream: Stream) -> None:
        made = Made(memory, stream.number, storage.nbytes())
        if stream is self._host:
            self._take_for_host(storage)
        if self.graph is not None and stream is not self._host:
            self.graph.made(made)
        else:
            self.entries.append(made)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if function.is_view and not self._hosts_turn:
            self.views += 1  # touches no memory
            return function(*args, **named)
        stream = self._stream_of(function, tensors_of((args, named)))
        self.settle(stream)
        self._collect()
        reads: list[View] = []

        def read(x: Tensor) -> View:
            reads.append(self.view(x))
            return reads[-1]

        arguments, keywords = mapped(args, Tensor, read), mapped(named, Tensor, read)
        out = function(*args, **named)
        written = self._written(function, args, named)
        known = {one.memory for one in reads}
        made = [self._view(x, lambda key, memory: self._made(key, memory, stream)) for x in tensors_of(out)]
        results = [view for view in made if view.memory not in known]
        host = out if function.name().partition(".")[0] in HOST_READS else None
        entry = Operator(
            stream.number, function, arguments, keywords, tuple(reads), written, tuple(results), host
        )
        if self.graph is not None and stream is not self._host:
            self.graph.operator(stream, entry)
        else:
            self._append(entry)
        return out

    def _written(self, function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[View, ...]:
        found: list[View] = []
        for place, name in written_arguments(function):
            value = args[place] if place < len(args) else named.get(name)
            found += map(self.view, tensors_of(value))
        return tuple(found)

    def settle(self, stream: Stream) -> None:
        """Let the results be there of what a stream's next work comes after."""
        if stream.pending and any(not call.done for call in stream.pending):
            self.machine.until(lambda: self.aborted or all(call.done for call in stream.pending), self)
            for call in [one for one in stream.pending if not one.done]:
                call.spoil()
        stream.pending.clear()
