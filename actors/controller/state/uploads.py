"""Published checkpoints on their way to the mirror, in a thread of their own: nobody waits for it."""

import threading
from dataclasses import dataclass, replace
from pathlib import Path

from braid.actors.config import CheckpointConfig
from braid.actors.controller.state.mirror import Mirror


@dataclass(frozen=True)
class Upload:
    """The copy of a checkpoint to the mirror."""

    step: int
    generation: int
    path: Path
    trouble: str = ""
    """Why the copy failed."""


class Uploads:
    """Copies one checkpoint at a time. Only the newest waiting checkpoint counts, and those kept for ever."""

    def __init__(self, mirror: Mirror, keeping: CheckpointConfig) -> None:
        self._mirror, self._keeping = mirror, keeping
        self._waiting: list[Upload] = []
        self._under_way: Upload | None = None
        self._failed: list[Upload] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
        self._thread.start()

    def add(self, step: int, generation: int, checkpoint: Path) -> None:
        every = self._keeping.keep_every
        with self._changed:
            self._waiting = [upload for upload in self._waiting if every and upload.step % every == 0]
            self._waiting.append(Upload(step, generation, checkpoint))
            self._changed.notify_all()

    def in_use(self) -> set[int]:
        """Steps whose checkpoints are still to be read."""
        with self._changed:
            return {upload.step for upload in (*self._waiting, self._under_way) if upload is not None}

    def failed(self) -> list[Upload]:
        """Copies that have failed since the last call."""
        with self._changed:
            failed, self._failed = self._failed, []
        return failed

    def wait(self, timeout_s: float | None = None) -> None:
        """Until all have arrived, or failed to, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and self._under_way is None, timeout_s)

    def close(self) -> None:
        """End the thread; the copy under way is given up."""
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
                upload = self._under_way = self._waiting.pop(0)
            try:
                self._mirror.put(upload.path)
                self._mirror.collect(self._keeping.keep, self._keeping.keep_every, upload.step)
                failed = []
            except (OSError, ValueError) as error:
                failed = [replace(upload, trouble=str(error))]
            with self._changed:
                self._under_way = None
                self._failed += failed
                self._changed.notify_all()
