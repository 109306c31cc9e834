"""Executes the work of a preparation: on this machine's cores, or in tasks of a Ray cluster."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from braid.actors.controller.ranks.cpus import whole_cpus
from braid.actors.controller.ranks.parent import die_with

T = TypeVar("T")
R = TypeVar("R")
Executor = Callable[[Callable[[Any], Any], Sequence[Any]], Iterator[Any]]
"""Applies a function to every item, in any order, anywhere; `map` is the simplest one."""


def local_map(function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Apply a function on this machine's cores: one process per core, none for a single item."""
    if len(items) <= 1:
        yield from map(function, items)
        return
    workers = min(len(items), whole_cpus())
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    ends = partial(die_with, os.getpid())  # otherwise workers of a killed parent would wait for ever
    with ProcessPoolExecutor(workers, mp_context=context, initializer=ends) as pool:
        yield from pool.map(function, items)  # leaving it early cancels items that have not begun


def ray_map(function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Apply a function on the Ray cluster that this process has joined: one task of one CPU for every item.

    At most two tasks per CPU of the cluster are submitted at a time; results are yielded as they are ready. A
    task's exception is raised here unchanged. Leaving the iterator early cancels running tasks.
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
                # without Ray's copy of the remote traceback: a user's mistake is one line
                raise (fault.cause if isinstance(fault.cause, ValueError) else fault) from None
    finally:
        for left in running:
            ray.cancel(left)
        if running:
            ray.wait(running, num_returns=len(running), timeout=30)
