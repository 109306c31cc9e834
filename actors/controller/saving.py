"""Checkpoints of a run while it trains: written by the ranks, published by a thread here, in the background.

A save has two halves. The ranks copy their state to host memory, which is all that training waits for, and
write it; then files are checksummed, published by one rename, read back and checked, old ones removed, and
the new one copied to the mirror. Where there is no room in the run's directory, the same state is written to
the mirror, if that is another disk. One save is under way at a time: the next one waits for it.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from braid.actors.config import CheckpointConfig
from braid.actors.controller.group import WorkerError, WorkerGroup
from braid.actors.controller.homes import Homes
from braid.actors.controller.manifest import CheckpointError, CheckpointStore, disk_is_full, verify
from braid.actors.controller.mirror import MirrorError
from braid.actors.controller.records import Incident, RunDirectory, Saved


@dataclass
class _Save:
    """One that is under way."""

    step: int
    generation: int
    facts: Mapping[str, Any]
    home: CheckpointStore
    folder: Path
    begun: float
    stalled_s: float = 0.0
    published: "Future[tuple[Path, str]] | None" = field(default=None)


class Saver:
    """Saves checkpoints of one run."""

    def __init__(
        self,
        homes: Homes,
        directory: RunDirectory,
        keeping: CheckpointConfig,
    ) -> None:
        self._homes, self._directory, self._keeping = homes, directory, keeping
        self._publisher = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._save: _Save | None = None
        self.last_step: int | None = None
        """Of the newest checkpoint of this run."""
        self._asked = 0
        """The step that a checkpoint was last asked of; there may have been no room for it."""

    def step_done(
        self, group: WorkerGroup, step: int, generation: int, facts: Mapping[str, Any]
    ) -> Iterator[Saved | Incident]:
        """What there is to do between two steps: look after the save under way, begin one that is due.

        Waits for it where the next step would be one too many to lose (``checkpoint.lose_at_most``).
        """
        yield from self.look(group)
        if self.due(step):
            yield from self.begin(group, step, generation, facts)
        most = self._keeping.lose_at_most
        if most is not None and self._save is not None and step + 1 - (self.last_step or 0) > most:
            yield from self.finish(group)

    def due(self, step: int) -> bool:
        """Whether a checkpoint is wanted of a state: at every so many steps, and where one was lost.

        That is so after a failure that copies in memory made up for: it also ended the save under way.
        """
        every = self._keeping.every
        return bool(every) and step > self._asked and (step % every == 0 or step - self._asked > every)

    def resumed(self, done: int) -> None:
        """The run goes on from the state after ``done`` steps, which may have been in memory alone."""
        self.last_step = max((step for step in self._homes.steps() if step <= done), default=None)
        self._asked = self.last_step or 0

    def begin(
        self, group: WorkerGroup, step: int, generation: int, facts: Mapping[str, Any]
    ) -> Iterator[Saved | Incident]:
        """Save the state after ``step`` steps. ``facts``: layout, data and shape, for the manifest."""
        begun = time.perf_counter()
        yield from self.finish(group)  # the one before
        self._asked = step
        home = self._homes.store
        save = self._save = _Save(step, generation, facts, home, home.begin(step, generation), begun)
        yield from self._write(group, save)
        save.stalled_s = time.perf_counter() - begun

    def _write(self, group: WorkerGroup, save: _Save) -> Iterator[Saved | Incident]:
        """Let the ranks write into the save's folder."""
        try:
            if self._keeping.asynchronous:
                again = save.home is not self._homes.store
                group.call_all("begin_save", str(save.folder), save.step, again)
            else:
                group.call_all("save", str(save.folder), save.step)
                self._publish(save)
                yield from self.finish(group)
        except WorkerError as error:
            yield from self._failed(group, error)

    def look(self, group: WorkerGroup, *, wait: bool = False) -> Iterator[Saved | Incident]:
        """See how the save under way gets on; a step passes between two looks."""
        save = self._save
        if save is None:
            return
        try:
            if save.published is None:
                if not all(group.call_all("save_finished", wait)):
                    return
                self._publish(save)
            assert save.published is not None
            if wait or save.published.done():
                published = save.published.result()
                self._save = None
                yield from self._told(save, *published)
        except (OSError, WorkerError) as error:
            yield from self._failed(group, error)

    def finish(self, group: WorkerGroup) -> Iterator[Saved | Incident]:
        """Wait until nothing is under way."""
        while self._save is not None:
            yield from self.look(group, wait=True)

    def abandon(self) -> Iterator[Saved | Incident]:
        """The ranks have failed: what they have written whole is still published, the rest is removed."""
        save, self._save = self._save, None
        if save is None:
            return
        if save.published is None:
            shutil.rmtree(save.folder, ignore_errors=True)
            return
        try:
            path, _ = save.published.result()
            yield from self._told(save, path, "")
        except (OSError, CheckpointError):
            shutil.rmtree(save.folder, ignore_errors=True)

    def rescue(
        self, step: int, generation: int, facts: Mapping[str, Any], write: Callable[[str], object]
    ) -> Iterator[Saved | Incident]:
        """Publish at once what ``write(folder)`` writes; raises what goes wrong with it."""
        home, begun = self._homes.store, time.perf_counter()
        save = _Save(step, generation, facts, home, home.begin(step, generation), begun)
        try:
            write(str(save.folder))
            published = self._publish_now(save)
        except Exception:
            shutil.rmtree(save.folder, ignore_errors=True)
            raise
        save.stalled_s = time.perf_counter() - begun
        yield from self._told(save, *published)

    def close(self) -> None:
        """Nothing is under way any more."""
        self._publisher.shutdown()

    def _publish(self, save: _Save) -> None:
        save.published = self._publisher.submit(self._publish_now, save)

    def _publish_now(self, save: _Save) -> tuple[Path, str]:
        """Returns the checkpoint, and what is wrong with its copy in the mirror, if anything is."""
        home, keeping, mirror = save.home, self._keeping, self._homes.mirror
        path = home.publish(save.folder, step=save.step, run=self._homes.run, **save.facts)
        verify(path)  # old ones go only after a good successor
        home.collect(keeping.keep, keeping.keep_every, save.step)
        if mirror is not None and home is self._homes.store:
            try:
                mirror.put(path)
                mirror.collect(keeping.keep, keeping.keep_every, save.step)
            except MirrorError as error:
                return path, str(error)
        return path, ""

    def _told(self, save: _Save, path: Path, trouble: str) -> Iterator[Saved | Incident]:
        self.last_step = save.step
        seconds = time.perf_counter() - save.begun
        if not self._keeping.asynchronous:  # told before `begin` is over
            save.stalled_s = seconds
        text = f"{path.name} in {seconds:.1f} s, of which training waited {save.stalled_s:.2f} s"
        if save.home is not self._homes.store:
            text += f"; in {save.home.directory}, as the run's own disk is full"
        self._directory.note(
            "saved", save.step, save.generation, text, seconds=seconds, stalled_seconds=save.stalled_s
        )
        yield Saved(step=save.step, path=str(path), seconds=seconds, stalled_seconds=save.stalled_s)
        if trouble:
            self._directory.note("telemetry", save.step, save.generation, trouble)
            yield Incident(kind="failed", text=trouble, step=save.step)

    def _failed(self, group: WorkerGroup, error: Exception) -> Iterator[Saved | Incident]:
        """A full disk is survived, and the mirror may have room; anything else is not ours to judge."""
        save, self._save = self._save, None
        assert save is not None
        full = disk_is_full(save.home.directory, error)
        shutil.rmtree(save.folder, ignore_errors=True)  # half a checkpoint only takes space
        if not full:
            raise error
        spare = self._homes.spare
        if spare is not None and save.home is not spare:
            self._save = save
            save.home, save.folder, save.published = spare, spare.begin(save.step, save.generation), None
            yield from self._write(group, save)
            return
        text = f"the checkpoint of step {save.step} does not fit on the disk; training goes on"
        self._directory.note("telemetry", save.step, save.generation, text)
        yield Incident(kind="failed", text=text, step=save.step)


def manifest_facts(layout: Any, data: dict[str, Any], shape: Any) -> dict[str, Any]:
    """What a checkpoint's manifest says beside its files."""
    return {"layout": asdict(layout), "data": data, "shape": asdict(shape)}
