"""Tokens of training steps, read by a thread while the step before runs: which ones is known beforehand."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Read = TypeVar("Read")


class ReadingAhead(Generic[Read]):
    """Calls ``read(step)`` one step ahead."""

    def __init__(self, read: Callable[[int], Read]) -> None:
        self._read = read
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reading")
        self._next: tuple[int, Future[Read]] | None = None

    def of(self, step: int) -> Read:
        """What ``read(step)`` gives, or raises; begins to read the next step's."""
        ahead, self._next = self._next, None
        found = ahead[1].result() if ahead is not None and ahead[0] == step else self._read(step)
        self._next = step + 1, self._thread.submit(self._read, step + 1)
        return found

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
