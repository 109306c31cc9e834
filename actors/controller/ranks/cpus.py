"""Counts the CPUs and the memory that this process may use, within its control groups' limits (Linux)."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_MEMORY_LIMITS = ("memory.max", "memory.limit_in_bytes")
"""Names of the files with a group's memory limit, in versions 2 and 1 of control groups."""


def usable_cpus(root: Path = _ROOT) -> float:
    """Return the number of CPUs, or the share that a quota allows: 1.5 where one and a half may always be
    busy."""
    usable = float(len(os.sched_getaffinity(0)))
    for folder in _groups(root):
        words = _words(folder / "cpu.max")  # version 2
        if not words:
            words = [*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")]
        with contextlib.suppress(ValueError, ZeroDivisionError):  # "max", or no words
            quota, period = map(int, words)
            usable = min(usable, quota / period) if quota > 0 else usable
    return usable


def whole_cpus() -> int:
    """Return `usable_cpus` as a whole number, at least 1."""
    return max(1, int(usable_cpus()))


def throttled(root: Path = _ROOT) -> int:
    """Return how often a CPU quota has stopped the processes of this process's control groups so far."""
    counts = [_words(folder / "cpu.stat") for folder in _groups(root)]
    return sum(int(words[words.index("nr_throttled") + 1]) for words in counts if "nr_throttled" in words)


def memory_here(root: Path = _ROOT) -> int | None:
    """Return this machine's memory in bytes, or the control groups' lower limit; None if the system does not
    say."""
    words = _words(root / "proc/meminfo")
    if "MemTotal:" not in words:
        return None
    total = int(words[words.index("MemTotal:") + 1]) << 10
    limits = (_words(folder / name) for folder in _groups(root, "memory") for name in _MEMORY_LIMITS)
    return min([total, *(int(words[0]) for words in limits if words and words[0].isdigit())])


def _groups(root: Path, controller: str = "cpu") -> Iterator[Path]:
    """Yield the folders of the control groups that limit this process, each up to its root; both versions."""
    mounts = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number != "0" and controller not in controllers.split(","):
            continue
        tops = (mounts, mounts / "unified") if number == "0" else (mounts / controllers, mounts / controller)
        top = next((folder for folder in tops if folder.is_dir()), mounts)
        group = top / path.strip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(top))


def _text(path: Path) -> str:
    """Read a file as text; return an empty string if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8")
    return ""


def _words(path: Path) -> list[str]:
    return _text(path).split()
