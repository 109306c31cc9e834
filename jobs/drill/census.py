"""What a run holds of the machine: to see, after many faults, that nothing has leaked (Linux)."""

import contextlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Census:
    """Counts over a process and all that it has started."""

    processes: int
    threads: int
    files: int
    """Open files and sockets."""
    sockets: int
    resident_bytes: int


def census(*roots: int) -> Census:
    """Count what processes and their descendants hold now; a process that ends meanwhile is left out."""
    found = family(*roots)
    files = [link for process in found for link in _links(process)]
    status = [_status(process) for process in found]
    return Census(
        processes=len(found),
        threads=sum(int(one.get("Threads", "0")) for one in status),
        files=len(files),
        sockets=sum(link.startswith("socket:") for link in files),
        resident_bytes=sum(int(one.get("VmRSS", "0 kB").split()[0]) * 1024 for one in status),
    )


def family(*roots: int) -> list[int]:
    """Processes and all their descendants."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            state, parent = (path / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(path.name))
    found, left = [], list(roots)
    while left:
        process = left.pop()
        found.append(process)
        left += children.get(process, [])
    return found


def _links(process: int) -> list[str]:
    links = []
    with contextlib.suppress(OSError):
        for handle in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):
                links.append(str(handle.readlink()))
    return links


def _status(process: int) -> dict[str, str]:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return {}
