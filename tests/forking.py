"""Processes of tests, forked from one that has imported torch: starting one anew takes seconds of a CPU."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Any

import torch.multiprocessing as mp

from braid.actors.controller.ranks.processes import PRELOADED


def fork_context() -> ForkServerContext:
    """What starts processes: ranks' fork server, as a process has only one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def run_forked(function: Callable[..., object], arguments: tuple[Any, ...], nprocs: int) -> None:
    """Call a function in so many processes, with a number first; raises what one of them raised."""
    fork_context()
    mp.start_processes(function, arguments, nprocs=nprocs, start_method="forkserver")
