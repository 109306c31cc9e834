"""Queues that serve their tasks in order, each task after some others: when everything begins and ends."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

Task = TypeVar("Task", bound=Hashable)
Queue = TypeVar("Queue", bound=Hashable)


def run_in_order(
    queues: Mapping[Queue, Sequence[Task]],
    after: Callable[[Task], Iterable[Task]],
    ns: Callable[[Task], int],
) -> tuple[dict[Task, tuple[int, int]], dict[Queue, int]]:
    """When every task begins and ends if each queue serves its own in order, each after some others.

    Returns begin and end of each task, and the queues that cannot run to their end, with the place of the
    task that waits for ever.
    """
    times: dict[Task, tuple[int, int]] = {}
    places = dict.fromkeys(queues, 0)
    free = dict.fromkeys(queues, 0)
    moved = True
    while moved:
        moved = False
        for name, tasks in queues.items():
            while places[name] < len(tasks):
                task = tasks[places[name]]
                start = free[name]
                for other in after(task):
                    if other not in times:
                        break
                    start = max(start, times[other][1])
                else:
                    times[task] = (start, start + ns(task))
                    free[name] = times[task][1]
                    places[name] += 1
                    moved = True
                    continue
                break
    return times, {name: place for name, place in places.items() if place < len(queues[name])}
