"""Saves checkpoints while a run trains: the ranks write them, a background thread here publishes them.

A save has two halves. The ranks copy their state to host memory, which is all that training waits for, write
it, hash it meanwhile and read it back; then the controller collects names and hashes of the files, renames
the checkpoint to its final name and removes old ones. Another thread copies it to the mirror later
(`mirror.Uploads`). A save that fails is tried again with the same state; if the run's disk is full, in the
mirror, if that is another disk. In any case training goes on. One save is under way at a time.
"""

import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from braid.actors.config import CheckpointConfig, Config
from braid.actors.controller.ranks.group import WorkerError, WorkerGroup
from braid.actors.controller.records.run_records import CheckpointSaved, Incident, RunDirectory
from braid.actors.controller.state.checkpoint_stores import Homes
from braid.actors.controller.state.manifest import CheckpointStore, disk_is_full
from braid.actors.controller.state.mirror import Upload, Uploads
from braid.actors.controller.state.recovery import newest_common, rank_names
from braid.actors.stage.rank.interface import Rank
from braid.actors.stage.rank.messages import CopiesHeld, Rendezvous, Rescue, Written
from braid.scheduling.schedule.states import ADAMW, OptimizerStates

_TRIES = 3
"""Most tries of one save; then training goes on until the next save is due."""
_UPLOAD_SECONDS = 60.0
"""Seconds to wait for a rescued checkpoint to reach the mirror, when the run ends by an error."""
_LATE_SECONDS = 30.0
"""Seconds to wait for publications under way, if the next action needs them."""
_AGAIN_SECONDS = 60.0
"""Seconds after a failed save until another is due, whatever the configuration says."""

Told = Iterator[CheckpointSaved | Incident]
"""Events to report about saves."""


@dataclass
class _Save:
    step: int
    generation: int
    facts: Mapping[str, Any]
    home: CheckpointStore
    begun: float = field(default_factory=time.perf_counter)
    folder: Path = Path()
    tries: int = 0
    stalled_s: float = 0.0
    published: "Future[Path] | None" = None


class Saver:
    def __init__(self, homes: Homes, directory: RunDirectory, keeping: CheckpointConfig) -> None:
        self._homes, self._directory, self._keeping = homes, directory, keeping
        self._publisher = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._uploads = Uploads(homes.mirror, keeping) if homes.mirror is not None else None
        self._group: WorkerGroup
        self._generation = 0
        self._facts: Mapping[str, Any] = {}
        self._save: _Save | None = None
        self._late: list[tuple[_Save, Future[Path]]] = []
        """Saves whose ranks have failed after writing all files; they are reported once published."""
        self.last_step: int | None = None
        """Step of this run's newest checkpoint."""
        self._validated: Mapping[int, float] = {}
        """Validation loss of the newest state, by its step; empty if that state was not validated."""
        self._lowest = math.inf
        """Lowest validation loss of this run's checkpoints."""
        self._asked = 0
        """Step for which a checkpoint was last requested, even if there was no room for it."""
        self._asked_at = time.monotonic()
        self._failed_at: float | None = None
        self._silent_until, self._silence_s = 0.0, _AGAIN_SECONDS
        """Time until which no further message about a full disk is shown, and the length of that pause, which
        grows."""
        self.why_not = ""
        """Why the last failed save failed."""
        self.published = False
        """Whether a checkpoint of this run has been published since this controller began."""
        self._rescued = False
        self._told_of: set[str] = set()
        """Messages about old checkpoints that were already shown."""

    def goes_on(self, done: int, group: WorkerGroup, generation: int, facts: Mapping[str, Any]) -> None:
        """Continue with the ranks of a generation from the state after ``done`` steps, which may have existed
        only in memory. ``facts``: the manifest's content beside the files (`manifest_facts`)."""
        self._group, self._generation, self._facts = group, generation, facts
        self.last_step = max((step for step in self._homes.steps() if step <= done), default=None)
        self._asked = self.last_step or 0
        best = self._homes.store.best(self._homes.run, done) if self._keeping.keep_best else None
        self._lowest = math.inf if best is None or best.validation_loss is None else best.validation_loss

    def step_done(self, step: int, validation_loss: float | None = None) -> Told:
        """Between two steps, check the save under way and begin a save that is due. ``validation_loss``: that
        of the state, if it was validated.

        Wait for it if the next step would exceed the number of steps that may be lost
        (``checkpoint.lose_at_most``).
        """
        finite = validation_loss is not None and math.isfinite(validation_loss)
        self._validated = {step: validation_loss} if validation_loss is not None and finite else {}
        yield from self.look()
        if self.due(step):
            yield from self.begin(step)
        most = self._keeping.lose_at_most
        if most is not None and self._save is not None and step + 1 - (self.last_step or 0) > most:
            yield from self.finish()

    @property
    def failing(self) -> bool:
        """Whether the newest save has failed."""
        return self._failed_at is not None

    def due(self, step: int) -> bool:
        """Return whether a checkpoint of this state is wanted: every so many steps, so many seconds after the
        last one, for the lowest validation loss so far, or to make up for a save that was lost.

        A save is lost, for example, with a failure after which the state is restored from copies in memory.
        """
        if step <= self._asked:
            return False
        if self._keeping.keep_best and self._validated.get(step, math.inf) < self._lowest:
            return True
        every, now = self._keeping.every, time.monotonic()
        if every and (step % every == 0 or step - self._asked > every):
            return True
        if self._failed_at is not None and now - self._failed_at > _AGAIN_SECONDS:
            return True
        seconds = self._keeping.seconds_between
        return seconds > 0 and now - self._asked_at > seconds

    def begin(self, step: int) -> Told:
        facts = {**self._facts, "validation_loss": self._validated.get(step)}
        save = _Save(step, self._generation, facts, self._homes.store)
        yield from self.finish()  # the save under way
        self._asked, self._asked_at, self._failed_at = step, time.monotonic(), None
        self._save = save
        yield from self._write(save)
        save.stalled_s = time.perf_counter() - save.begun

    def _write(self, save: _Save) -> Told:
        """Let the ranks write into a folder of this save; they copy their state at the first try."""
        save.tries += 1
        save.published = None
        try:
            save.folder = save.home.begin(save.step, save.generation)
        except OSError as error:
            yield from self._failed(save, error)
            return
        if self._keeping.asynchronous:
            self._group.call_all(Rank.begin_save, str(save.folder), save.step, save.tries > 1)
            return
        yield from self._written(save, self._group.call_all(Rank.save, str(save.folder), save.step))
        yield from self.finish()

    def _written(self, save: _Save, written: Sequence[Written | None]) -> Told:
        """Once all ranks are done, publish what they wrote; if one failed, handle the failed save."""
        parts = [part for part in written if part is not None]
        if len(parts) < len(written):
            return
        if failures := list(dict.fromkeys(part.failure for part in parts if part.failure)):
            yield from self._failed(save, "; ".join(failures))
        else:
            save.published = self._publisher.submit(self._publish, save, parts)

    def look(self, *, wait: bool = False) -> Told:
        """Check the progress of the save under way; a step passes between two checks."""
        yield from self._look_after_others()
        if (save := self._save) is None:
            return
        if save.published is None:
            yield from self._written(save, self._group.call_all(Rank.save_finished, wait))
        if save is self._save and save.published is not None and (wait or save.published.done()):
            try:
                path = save.published.result()
            except (OSError, ValueError) as error:
                yield from self._failed(save, error)
            else:
                self._save = None
                yield from self._told(save, path)

    def finish(self) -> Told:
        """Wait until no save is under way and yield what becomes of the last save; copies to the mirror may
        still be under way."""
        while self._save is not None:
            yield from self.look(wait=True)

    def settle(self) -> Told:
        """Wait until all copies have reached the mirror, at the end of a run."""
        if self._uploads is not None:
            self._uploads.wait()
        yield from self._look_after_others()

    def abandon(self) -> None:
        """Give up the save because the ranks have failed: publish it if they wrote all files, else remove it.

        Do not wait for either: recovery comes first.
        """
        save, self._save = self._save, None
        if save is not None and save.published is None:
            self._publisher.submit(shutil.rmtree, save.folder, ignore_errors=True)
        elif save is not None and save.published is not None:
            self._late.append((save, save.published))

    def late_ones(self) -> Told:
        """Wait until abandoned saves that were written whole are published, as the run may resume from them.
        That takes a moment, unless the disk hangs."""
        wait_for([published for _, published in self._late], _LATE_SECONDS)
        yield from self._look_after_others()

    def _look_after_others(self) -> Told:
        """Report late publications, copies that failed, and, once each, files that could not be removed."""
        for save, published in [late for late in self._late if late[1].done()]:
            self._late.remove((save, published))
            if published.exception() is None:
                yield from self._told(save, published.result())
            else:
                shutil.rmtree(save.folder, ignore_errors=True)
        for copy, trouble in self._uploads.failed() if self._uploads is not None else ():
            yield self._directory.note("save-failed", copy.step, copy.generation, trouble)
        for text in (text for home in self._homes.stores for text in [*home.trouble]):
            if text not in self._told_of:
                self._told_of.add(text)
                yield self._directory.note("telemetry", self.last_step or 0, 0, text, shown_as="failed")

    def rescue(self, group: WorkerGroup, config: Config, done: int, generation: int) -> Told:
        """Let surviving ranks write the newest state of all ranks that they hold, unless a checkpoint is as
        new.

        The run, in another layout or resumed by its user, then goes on from this state; if writing fails,
        from the newest checkpoint. ``done``: the number of recorded steps. Ranks that hold no state, such as
        ranks that have just been replaced, write nothing.
        """
        layout, left = config.layout(), group.left()
        try:
            held = dict(zip(left, group.call_some(left, Rank.copies_held), strict=True))
            nothing = CopiesHeld(own=(), partner=None, partners=())
            all_held = [held.get(rank, nothing) for rank in range(layout.ranks)]
            common = newest_common(all_held, layout.mesh, done)
            if common is None or common[0] <= (self.last_step or 0):
                return
            step, sources = common
            save = _Save(step, generation, self._facts, self._homes.store)
            yield from self._write_copies(group, save, sources, config.cluster.group_timeout_s)
            holders = rank_names(sorted(set(sources)))
            kind, text = "rescued", f"{holders} held the states of all ranks after step {step} in memory"
        except (WorkerError, ValueError, OSError) as error:
            kind, text = "failed", f"copies in memory could not be written as a checkpoint: {error}"
        yield self._directory.note(kind, done, generation, text)

    def _write_copies(
        self, group: WorkerGroup, save: _Save, sources: Sequence[int], timeout_s: float
    ) -> Told:
        """Let ``sources`` write the states that they hold, and publish them at once: in the run's own
        directory or, if that fails, in a mirror that is another disk. Raise the last error if both fail.
        """
        holders = sorted(set(sources))
        for save.home in self._homes.stores:
            try:
                save.folder = save.home.begin(save.step, save.generation)
                group.call_some(holders, Rank.leave)
                port = group.call(holders[0], Rank.open_store, timeout_s)
                address = group.addresses[holders[0]]
                plan = Rescue(
                    meeting=Rendezvous(address=address, port=port, generation=save.generation),
                    survivors=tuple(holders),
                    step=save.step,
                    sources=tuple(sources),
                )
                written = group.call_some(holders, Rank.rescue, str(save.folder), plan)
                if failures := [part.failure for part in written if part.failure]:
                    raise OSError("; ".join(failures))
                path = self._publish(save, written)
                break
            except (OSError, ValueError, WorkerError):
                if save.home is self._homes.stores[-1]:
                    raise
            finally:
                if save.folder.name:
                    shutil.rmtree(save.folder, ignore_errors=True)  # published, it has another name
        save.stalled_s = time.perf_counter() - save.begun
        self._rescued = True
        yield from self._told(save, path)

    def close(self) -> None:
        """End all saving: remove what the ranks have not written whole, and wait for publications."""
        self.abandon()
        self._publisher.shutdown()
        if self._uploads is not None:
            if self._rescued:  # a rescued checkpoint may have no other home tomorrow
                self._uploads.wait(_UPLOAD_SECONDS)
            self._uploads.close()

    def _publish(self, save: _Save, written: Sequence[Written]) -> Path:
        files = {name: digest for part in written for name, digest in part.files.items()}
        uploads = self._uploads if save.home is self._homes.store else None
        if uploads is None and self._homes.mirror is not None:
            self._homes.mirror.begin()
        run, keeping = self._homes.run, self._keeping
        path = save.home.publish(save.folder, files, step=save.step, run=run, **save.facts)
        best = save.home.best(run, save.step) if keeping.keep_best else None
        spared = {best.step} if best is not None else set[int]()
        if uploads is not None:
            uploads.add(Upload(save.step, save.generation, path), best.step if best is not None else None)
            spared |= uploads.in_use()
        save.home.collect(
            keeping.keep,
            keeping.keep_every,
            save.step,
            run=run,
            generation=save.generation,
            spared=spared,
        )
        return path

    def _told(self, save: _Save, path: Path) -> Told:
        self.last_step, self.published = save.step, True
        if (loss := save.facts.get("validation_loss")) is not None:
            self._lowest = min(self._lowest, loss)
        self._silent_until, self._silence_s = 0.0, _AGAIN_SECONDS
        seconds = time.perf_counter() - save.begun
        if not self._keeping.asynchronous:  # told before `begin` is over
            save.stalled_s = seconds
        text = f"{path.name} in {seconds:.1f} s, of which training waited {save.stalled_s:.2f} s"
        if save.home is not self._homes.store:
            text += f"; in {save.home.directory}, as the run's own disk is full"
        step, stalled_s = save.step, save.stalled_s
        self._directory.note("saved", step, save.generation, text, seconds=seconds, stalled_seconds=stalled_s)
        yield CheckpointSaved(step=step, path=str(path), seconds=seconds, stalled_seconds=stalled_s)

    def _failed(self, save: _Save, error: Exception | str) -> Told:
        """Try again, elsewhere if the disk is full; after `_TRIES` tries let training go on without the
        save."""
        full = disk_is_full(save.home.directory, error)
        shutil.rmtree(save.folder, ignore_errors=True)  # half a checkpoint only takes space
        spare, what = self._homes.stores[-1], f"the checkpoint of step {save.step}"
        if full and save.home is not spare:
            save.home = spare
            yield from self._write(save)
            return
        if not full and save.tries < _TRIES:
            text = f"{what} failed ({error}); it is tried again"
            yield self._directory.note("save-failed", save.step, save.generation, text)
            yield from self._write(save)
            return
        self._save, self._failed_at = None, time.monotonic()
        self.why_not = "does not fit on the disk" if full else f"failed ({error})"
        if full and self._failed_at < self._silent_until:
            return  # the full disk was reported before
        self._silent_until = self._failed_at + self._silence_s
        self._silence_s *= 2
        text = f"{what} {self.why_not}; training goes on"
        yield self._directory.note("save-failed", save.step, save.generation, text)


def manifest_facts(
    layout: Any, data: dict[str, Any], shape: Any, states: OptimizerStates = ADAMW
) -> dict[str, Any]:
    """Return what a checkpoint's manifest says beside its files."""
    return {"layout": asdict(layout), "data": data, "shape": asdict(shape), "states": asdict(states)}
