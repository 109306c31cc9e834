"""Graphs on the model of the machine: what was captured, and what a replay of it is.

While a graph is captured nothing is done: what the rank issues becomes a list of actions. Operators do
compute, as their results are needed to go on, but memory that was there before gets its contents back.
A replay does the actions again on the graph's own memory, placed as an allocator places it that gives freed
memory away at once, and notes them as if they had been issued one by one.

CUDA's rules: streams take part that were made to wait for the capturing one, and it must have waited for all
of them in the end; events from outside cannot be waited for inside, nor those from inside outside; the host
reads nothing.

NCCL's rule: a communicator is given up only once no graph refers to it, and waits for that.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from tests.cuda.entries import Entry, Freed, Made, Operator, View, unnoted
from tests.cuda.host_memory import bytes_of
from tests.cuda.replay_memory import Placement, fresh, placed

if TYPE_CHECKING:
    from tests.cuda.communicators import MakeKernel, ModelGroup, Views
    from tests.cuda.log import Event, RankLog, Stream


class CaptureError(RuntimeError):
    """What CUDA refuses to capture."""


class Graph:
    """Of one rank."""

    def __init__(self, log: "RankLog", stream: "Stream") -> None:
        self.log, self.stream = log, stream
        self.entries: list[Entry] = []
        """Of memory: for its placement."""
        self.first: dict[int, Tensor] = {}
        self.refers_to: set[str] = set()
        """Names of communicators, until the graph is given up."""
        self._actions: list[Callable[[], object]] = []
        self._own: set[int] = set()
        self._outside: dict[int, Tensor] = {}
        """Memory that is not the graph's to place, as bytes: what was there before, and what outlives it."""
        self._before: dict[int, Tensor] = {}
        self._clocks: dict[int, dict[int, int]] = defaultdict(dict)
        """Per stream, how much of every stream's work it comes after."""
        self._of_events: dict[int, dict[int, int]] = {}
        self._placement: Placement | None = None

    # -- while it is captured --

    def add(self, stream: int | None, action: Callable[[], object]) -> None:
        """Something a replay does, perhaps on a stream."""
        self._actions.append(action)
        if stream is not None:
            if stream != self.stream.number and stream not in self._clocks:
                raise CaptureError("work on a stream that does not wait for the one that is captured")
            clock = self._clocks[stream]
            clock[stream] = clock.get(stream, 0) + 1

    def recorded(self, event: "Event", stream: "Stream") -> None:
        """An event on a stream that takes part."""
        self.add(stream.number, lambda: event.record_again(stream))
        if event.external:
            return
        self._of_events[event.number] = dict(self._clocks[stream.number])

    def waited(self, stream: "Stream", event: "Event") -> None:
        """A stream takes part once it waits for one that does."""
        if event.number not in self._of_events:
            raise CaptureError("a wait, inside a graph, for what is no point in it")
        mine = self._clocks[stream.number]
        for other, count in self._of_events[event.number].items():
            mine[other] = max(mine.get(other, 0), count)
        self.add(stream.number, lambda: stream.wait_again(event))

    def made(self, entry: Made) -> None:
        """Memory of the graph's own."""
        self._own.add(entry.memory)
        self.entries.append(entry)
        self._actions.append(lambda: self.log.note(entry))

    def freed(self, entry: Freed) -> bool:
        """Memory is given back, and overwritten, if it is the graph's own."""
        if entry.memory not in self._own:
            return False
        self.entries.append(entry)

        def again() -> None:
            assert self._placement is not None
            self.log.note(entry)
            with unnoted():
                self._placement.poison(entry.memory)()

        self._actions.append(again)
        return True

    def keep(self, memory: int, x: Tensor) -> None:
        """Memory of outside that is met: its contents will be as they are now."""
        if memory not in self._own and memory not in self._outside:
            with unnoted():
                whole = bytes_of(x.untyped_storage())
                self._outside[memory], self._before[memory] = whole, whole.clone()

    def kernel(self, group: "ModelGroup", kernel: "MakeKernel", current: "Stream", views: "Views") -> None:
        """A rank's part of a collective or of messages, issued from a stream."""

        def again() -> None:
            with unnoted():
                reads, writes = ([*map(self.tensor, side)] for side in views)
            group.run(kernel, current, views, reads, writes, captured=True)

        self.refers_to.add(group.shared.name)
        self.add(group.stream.number, again)

    def operator(self, stream: "Stream", entry: Operator) -> None:
        """An operator of torch."""
        if entry.host is not None:
            raise CaptureError(f"the host reads what {entry.name} returns")

        def again() -> None:
            self.log.settle(stream)
            self.log.note(entry)
            with unnoted():
                results = fresh(entry.function(*placed(self, entry.arguments), **placed(self, entry.named)))
                for target, out in zip(map(self.tensor, entry.results), results, strict=False):
                    target.copy_(out)

        self.add(entry.stream, again)

    def undo(self) -> None:
        """Nothing of it was done."""
        with unnoted():
            for memory, before in self._before.items():
                self._outside[memory].copy_(before)

    def end(self, alive: dict[int, Tensor]) -> None:
        """Place the graph's memory; ``alive``: what of it somebody still holds, as bytes."""
        own = self._clocks[self.stream.number]
        for stream, clock in self._clocks.items():
            if own.get(stream, 0) != clock.get(stream, 0):
                raise CaptureError("a stream that takes part was not waited for")
        self.undo()
        self._outside |= {memory: alive[memory] for memory in self._own & alive.keys()}
        with unnoted():
            self._placement = Placement(self)

    # -- afterwards --

    def replay(self) -> None:
        """Do everything, after what the current stream was given; what it is given next comes after that."""
        log = self.log
        begin, current = log.event(), log.current()
        begin.record(current)
        self.stream.wait_event(begin)
        for action in self._actions:
            action()
        end = log.event()
        end.record(self.stream)
        current.wait_event(end)

    def reset(self) -> None:
        """Given up: it refers to nothing. A replay that is under way ends."""
        self.refers_to.clear()

    def tensor(self, view: View) -> Tensor:
        """A view's tensor, in the graph's memory or outside."""
        if view.memory in self._outside:
            return view.within(self._outside[view.memory])
        assert self._placement is not None
        return self._placement.tensor(view)
