"""Who does the work of a preparation: this machine's cores; `prepare_ray` has a cluster's tasks."""

import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
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
