"""Published checkpoints on their way to the mirror, in a thread of their own: nobody waits for it."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from braid.actors.config import CheckpointConfig
from braid.actors.controller.mirror import Mirror


@dataclass(frozen=True)
class Trouble:
    """A checkpoint that did not arrive."""

    step: int
    generation: int
    text: str


@dataclass(frozen=True)
class _Copy:
    step: int
    generation: int
    path: Path


class Uploads:
    """Copies one checkpoint at a time. Of those that wait the newest one counts, and those kept for ever."""

    def __init__(self, mirror: Mirror, keeping: CheckpointConfig) -> None:
        self._mirror, self._keeping = mirror, keeping
        self._waiting: list[_Copy] = []
        self._under_way: _Copy | None = None
        self._trouble: list[Trouble] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
        self._thread.start()

    def add(self, step: int, generation: int, checkpoint: Path) -> None:
        """Copy a checkpoint when its turn comes."""
        every = self._keeping.keep_every
        with self._changed:
            self._waiting = [one for one in self._waiting if every and one.step % every == 0]
            self._waiting.append(_Copy(step, generation, checkpoint))
            self._changed.notify_all()

    def in_use(self) -> set[int]:
        """Steps whose checkpoints are still to be read."""
        with self._changed:
            return {one.step for one in (*self._waiting, self._under_way) if one is not None}

    def trouble(self) -> Iterator[Trouble]:
        """What went wrong since the last question."""
        with self._changed:
            told, self._trouble = self._trouble, []
        yield from told

    def wait(self, timeout_s: float | None = None) -> None:
        """Until all have arrived, or failed to, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and self._under_way is None, timeout_s)

    def close(self) -> None:
        """End the thread; what is still under way is given up."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                one = self._under_way = self._waiting.pop(0)
            try:
                self._mirror.put(one.path)
                self._mirror.collect(self._keeping.keep, self._keeping.keep_every, one.step)
                text = ""
            except (OSError, ValueError) as error:
                text = str(error)
            with self._changed:
                self._under_way = None
                if text:
                    self._trouble.append(Trouble(one.step, one.generation, text))
                self._changed.notify_all()
