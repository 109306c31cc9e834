"""Counts the processes, files and memory that a run holds, to detect leaks after many faults (Linux)."""

import contextlib
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Census:
    """Counts over processes and all their descendants."""

    processes: int = 0
    threads: int = 0
    files: int = 0
    """Number of open files and sockets."""
    sockets: int = 0
    resident_bytes: int = 0


def census(*roots: int) -> Census:
    """Count what processes and their descendants hold now; leave out a process that ends meanwhile."""
    held = Census()
    for process in family(*roots):
        held.processes += 1
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{process}/status").read_text().splitlines()
            status = {key: value.split() for key, _, value in (line.partition(":") for line in lines)}
            held.threads += int(status["Threads"][0])
            held.resident_bytes += int(status.get("VmRSS", ["0"])[0]) * 1024
            for handle in Path(f"/proc/{process}/fd").iterdir():
                with contextlib.suppress(OSError):
                    held.sockets += str(handle.readlink()).startswith("socket:")
                    held.files += 1
    return held


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
