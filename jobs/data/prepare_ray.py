"""The executor of `braid.jobs.data.prepare` that works as Ray tasks. The preparation's only import of ray."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import RayTaskError

T = TypeVar("T")
R = TypeVar("R")


def ray_map(function: Callable[[T], R], items: Sequence[T], in_flight: int | None = None) -> Iterator[R]:
    """Apply ``function`` to every item as a Ray task of one CPU; results come as they are ready.

    At most ``in_flight`` tasks are submitted at a time (default: two for every CPU of the cluster). What a
    task raises is raised here as it was. Leaving the iterator early cancels what is running.
    """
    assert ray.is_initialized(), "ray_map needs ray.init() first; it starts no cluster of its own"
    limit = in_flight or max(2, int(2 * ray.cluster_resources().get("CPU", 1)))
    task: Any = ray.remote(num_cpus=1)(lambda item: function(item))
    waiting = iter(items)
    running: list[Any] = []
    try:
        while True:
            for item in waiting:
                running.append(task.remote(item))
                if len(running) >= limit:
                    break
            if not running:
                return
            (ready, *_), _ = ray.wait(running)
            running.remove(ready)
            try:
                yield ray.get(ready)
            except RayTaskError as fault:
                # without Ray's copy of the remote traceback: a user's mistake is told in one line
                raise (fault.cause if isinstance(fault.cause, ValueError) else fault) from None
    finally:
        for left in running:
            ray.cancel(left)
        if running:
            ray.wait(running, num_returns=len(running), timeout=30)
