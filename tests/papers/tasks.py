"""Work on streams that serve it in a given order, and how long all of it takes."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.schedule import timeline
from braid.scheduling.trace.spans import Interval


@dataclass(frozen=True, kw_only=True)
class Task:
    """Work on one stream; it starts when its stream is free and all of ``after`` have ended."""

    name: str
    stream: Stream
    ns: int
    after: tuple[str, ...] = ()


def run_in_order(tasks: Iterable[Task]) -> dict[str, Interval]:
    """When every task runs if each stream serves its tasks in the order given.

    Raises `ValueError` where the orders of the streams wait for each other, or for a task that is missing.
    """
    queues: dict[Stream, list[str]] = defaultdict(list)
    named: dict[str, Task] = {}
    for task in tasks:
        assert task.name not in named, f"two tasks are called {task.name}"
        named[task.name] = task
        queues[task.stream].append(task.name)
    times, stuck = timeline.run_in_order(queues, lambda name: named[name].after, lambda name: named[name].ns)
    if stuck:
        heads = [named[queues[stream][place]] for stream, place in stuck.items()]
        waits = "; ".join(f"{h.name} for {', '.join(o for o in h.after if o not in times)}" for h in heads)
        raise ValueError(f"static order cannot run: {waits}; put what is waited for first")
    return times


def makespan_ns(times: Mapping[str, Interval]) -> int:
    """When the last task ends."""
    return max((end for _, end in times.values()), default=0)
