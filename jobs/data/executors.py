"""Who does the work of a preparation: this machine's cores, or tasks of a Ray cluster."""

import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from typing import Any, TypeVar

from braid.actors.controller.ranks.cpus import whole_cpus

T = TypeVar("T")
R = TypeVar("R")
Executor = Callable[[Callable[[Any], Any], Sequence[Any]], Iterator[Any]]
"""Applies a function to every item, in any order, anywhere; `map` is the simplest one."""


def local_map(function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Executor on this machine's cores: one process each, none for a single item."""
    if len(items) <= 1:
        yield from map(function, items)
        return
    workers = min(len(items), whole_cpus())
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent) as pool:
        yield from pool.map(function, items)  # leaving it early cancels what has not begun


def _end_with_parent() -> None:
    """Without this, workers of a parent that was killed wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def ray_map(function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Executor on the Ray cluster that this process has joined: a task of one CPU for every item.

    Two tasks for every CPU of the cluster are submitted at a time; results come as they are ready. What a
    task raises is raised here as it was. Leaving the iterator early cancels what is running.
    """
    import ray
    from ray.exceptions import RayTaskError

    assert ray.is_initialized(), "ray_map needs ray.init() first; it starts no cluster of its own"
    most = max(2, int(2 * ray.cluster_resources().get("CPU", 1)))
    task: Any = ray.remote(num_cpus=1)(lambda item: function(item))
    waiting, running = iter(items), list[Any]()
    try:
        while running := [*running, *map(task.remote, islice(waiting, most - len(running)))]:
            (ready,), running = ray.wait(running)
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
