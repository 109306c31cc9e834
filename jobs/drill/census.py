"""Counts what a run holds on this machine, to detect leaks after many faults, and kills processes (Linux)."""

import contextlib
import os
import resource
import signal
from collections import Counter
from pathlib import Path


def census(*roots: int) -> dict[str, int]:
    """Count processes with all their descendants, and their threads, open files and sockets, and resident
    bytes; leave out a process that ends meanwhile."""
    held = Counter(processes=0)
    for process in family(*roots):
        folder = Path(f"/proc/{process}")
        with contextlib.suppress(OSError):
            held["threads"] += len(list((folder / "task").iterdir()))
            held["files"] += len(list((folder / "fd").iterdir()))
            held["bytes"] += int((folder / "statm").read_text().split()[1]) * resource.getpagesize()
            held["processes"] += 1
    return dict(held)


def family(*roots: int) -> list[int]:
    """Return the ids of processes and all their descendants."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            state, parent = (path / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(path.name))
    members = list(roots)
    for process in members:
        members += children.get(process, [])
    return members


def kill(*processes: int, signal_number: int = signal.SIGKILL) -> None:
    """Send a signal to all of these processes that still exist."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal_number)
