"""What tests wait for: something that becomes true, and processes that end."""

import time
from collections.abc import Callable
from pathlib import Path


def within(seconds: float, becomes_true: Callable[[], object], every: float = 0.02) -> bool:
    """Whether something is true before so much time is over."""
    deadline = time.monotonic() + seconds
    while not (found := becomes_true()) and time.monotonic() < deadline:
        time.sleep(every)
    return bool(found)


def alive(process: int) -> bool:
    """Whether it runs; one that has ended may wait for somebody to ask how."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
