"""Finds a run's checkpoints: in its own directory and, if it has one, in its mirror."""

import contextlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from braid.actors.config import Config, TrainConfig
from braid.actors.controller.records.run_records import read_identity
from braid.actors.controller.state.manifest import CheckpointError, CheckpointStore, Manifest, inspect
from braid.actors.controller.state.mirror import Mirror, MirrorError, RunIdentity, mark_at
from braid.scheduling.model.shape import OF_TRAINING, ModelShape
from braid.scheduling.schedule.states import OptimizerStates
from braid.scheduling.text.records import to_mapping

_ANEW = "or begin a run with an export of this checkpoint as model.initial"
"""What to do where a run cannot go on as it is configured."""

Verify = Callable[[Path], None]
"""Reads all files of a checkpoint; raises `CheckpointError` if one is not as it was saved."""


class AwayError(CheckpointError):
    """No place has a checkpoint, or a place did not answer; a later try may succeed."""

    def __init__(self, what: str, remedy: str = "") -> None:
        """``what``: what is missing; ``remedy``: what to do where waiting does not help."""
        super().__init__(f"{what}; {remedy}" if remedy else what)
        self.what = what


@dataclass(frozen=True)
class Found:
    """A checkpoint to resume from, and notes about newer checkpoints that were damaged."""

    path: str
    manifest: Manifest
    notes: tuple[str, ...] = ()

    def check_states(self, train: TrainConfig) -> None:
        """Raise `CheckpointError` if the optimizer needs states that the checkpoint does not hold."""
        held = OptimizerStates(**self.manifest.states)
        remedy = _ANEW
        if held.kinds(matrix=True)[0] != train.states.kinds(matrix=True)[0]:
            raise CheckpointError(
                f"checkpoint {self.path} has the states of train.optimizer={held.optimizer}, this run has "
                f"train.optimizer={train.optimizer}; set it to {held.optimizer}, {remedy}"
            )
        if train.average and not held.average:
            raise CheckpointError(
                f"checkpoint {self.path} has no average of the weights, this run has train.average="
                f"{train.average:g}; set it to 0, {remedy}"
            )

    def check_data(self, here: dict[str, Any]) -> None:
        """Raise `CheckpointError` if other samples would come next than in the run that wrote the
        checkpoint."""
        if not (odd := [key for key in here if self.manifest.data.get(key) != here[key]]):
            return
        key, told = odd[0], self.manifest.data.get(odd[0])
        if key == "fingerprint":
            raise CheckpointError(
                f"checkpoint {self.path} was trained on other tokens than data prepares now (files, "
                f"tokenizer, templates, rows, or the sets of data.mixture and their weights), so that other "
                f"samples would come next; set data as it was, {_ANEW}"
            )
        raise CheckpointError(
            f"checkpoint {self.path} was trained with train.{key}={told!r}, this run has {here[key]!r}, so "
            f"that other samples would come next; set it to {told!r}, {_ANEW}"
        )


class Homes:
    """All places with checkpoints from which a run can resume."""

    def __init__(self, store: CheckpointStore, mirror: Mirror | None, run: str) -> None:
        """``run``: the mark that this run's checkpoints have."""
        self.store, self.mirror, self.run = store, mirror, run

    @classmethod
    def of(cls, config: Config, run: RunIdentity) -> "Homes":
        """Build the homes that a configuration names; raise `ConfigError` if the mirror's URL has no file
        system."""
        url = config.checkpoint.mirror
        mirror = Mirror(url, run) if url is not None else None
        store = CheckpointStore(config.run_directory / "checkpoints")
        return cls(store, mirror, run.mark)

    @property
    def stores(self) -> tuple[CheckpointStore, ...]:
        """Disks to write to: the run's own directory, then the mirror if it is a disk (used if the first is
        full)."""
        spare = self.mirror.store if self.mirror is not None else None
        return (self.store,) if spare is None else (self.store, spare)

    def steps(self) -> list[int]:
        """Return the steps of this run's checkpoints on disks of this machine, complete or not, oldest first.
        A folder that cannot be read counts as empty."""
        steps: set[int] = set()
        for store in self.stores:
            with contextlib.suppress(OSError):
                theirs = store is not self.store  # the mirror's folder is this run's alone
                steps |= {step for step in store.steps() if theirs or store.run_of(step) == self.run}
        return sorted(steps)

    def begun(self) -> bool:
        """Return whether any home has a checkpoint; raise `MirrorError` if the mirror does not answer."""
        return bool(self._here() or (self.mirror is not None and self.mirror.steps()))

    def _here(self) -> list[int]:
        """Return the steps in the run's own directory whose checkpoints are not known to be another run's."""
        return [step for step in self.store.steps() if self.store.run_of(step) in (self.run, None)]

    def newest_of(self, shape: ModelShape, verify: Verify | None = None) -> Found:
        """Return the newest good checkpoint; raise `CheckpointError` if there is none, or it is of another
        model.

        Without ``verify``, only manifests and file sizes are checked, and nothing is fetched.
        """
        newest = self.newest_good(verify)
        # Fields that older checkpoints lack have their defaults.
        usual = {entry.name: entry.default for entry in fields(shape) if entry.default is not MISSING}
        of_training = {name: getattr(shape, name) for name in OF_TRAINING}
        ours, theirs = to_mapping(shape), {**usual, **newest.manifest.shape, **of_training}
        if theirs != ours:
            odd = next(key for key in ours if theirs.get(key) != ours[key])
            which = " (data.tokenizer decides it)" if odd == "vocabulary" else ""
            raise CheckpointError(
                f"checkpoint {newest.path} is of a model with {odd}={theirs.get(odd)}, the configuration "
                f"says model.{odd}={ours[odd]}{which}; set it as it was, or begin a run of another name"
            )
        return newest

    def newest_good(self, verify: Verify | None = None) -> Found:
        """Return the newest undamaged checkpoint, with notes about damaged newer ones.

        Raise `CheckpointError` if there is none; `AwayError` if no home holds a checkpoint, or one is
        unreadable. If both places hold a good checkpoint of a step, the run's directory is preferred to the
        mirror.
        """
        complaints: list[str] = []
        here, there = set[int](), set[int]()
        try:
            self.store.undo_replacements()
            here = set(self._here())
        except OSError as error:
            complaints.append(f"{self.store.directory} cannot be read: {error.strerror}")
        try:
            there = set(self.mirror.steps()) if self.mirror is not None else set()
        except MirrorError as error:
            complaints.append(str(error))
        away = bool(complaints) or not (here or there)
        for step in sorted(here | there, reverse=True):
            for bring in [self._read] * (step in here) + [self._bring] * (step in there):
                try:
                    return bring(step, verify, complaints)
                except (CheckpointError, MirrorError, OSError) as error:
                    complaints.append(str(error))
        places = " or ".join([str(self.store.directory), *([self.mirror.url] if self.mirror else [])])
        if complaints:
            nowhere = f"no older checkpoint is left to fall back to; there is none in {places}"
            raise (AwayError if away else CheckpointError)("; ".join([*complaints, nowhere]))
        others = set(self.store.steps()) - here
        text = f"; step-{max(others)} there is another run's" if others else ""
        raise AwayError(f"there is no checkpoint in {places}{text}", "start without resume=True")

    def _read(self, step: int, verify: Verify | None, complaints: Sequence[str]) -> Found:
        path = self.store.directory / f"step-{step}"
        notes = tuple(f"{text}; falling back to step {step}" for text in complaints)
        return Found(str(path), _checked(path, verify), notes)

    def _bring(self, step: int, verify: Verify | None, complaints: Sequence[str]) -> Found:
        """Return the mirror's checkpoint of a step: read in place if the mirror is a folder, else fetched
        into the run's own directory (only if it is to be verified)."""
        mirror = self.mirror
        assert mirror is not None
        store = mirror.store
        manifest, place = mirror.manifest(step), f"{mirror.url}, step {step}"
        if store is not None:
            manifest, place = _checked(path := store.directory / f"step-{step}", verify), str(path)
        elif verify is not None:
            folder = self.store.begin(step, 0)
            try:
                mirror.fetch(step, folder)
                manifest = _checked(folder, verify)
                place = str(self.store.adopt(folder, manifest))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        note = f"step {step} is {'fetched' if store is None else 'read'} from {mirror.url}"
        return Found(place, manifest, ("; ".join([*complaints, note]),))


def _checked(path: Path, verify: Verify | None) -> Manifest:
    manifest = inspect(path)
    if verify is not None:
        verify(path)
    return manifest


def begun_mark(config: Config) -> str:
    """Return the mark of the run that a configuration names, wherever it is stored; empty if it is nowhere.

    The run's directory and its checkpoints hold the mark; if they are lost, the mirror is asked. Raise
    `MirrorError` if it does not answer: a run must not begin anew because nobody could be asked.
    """
    if (identity := read_identity(config.run_directory)) is not None:
        return identity.mark
    store = CheckpointStore(config.run_directory / "checkpoints")
    for step in reversed(store.steps()):
        if mark := store.run_of(step):
            return mark
    url = config.checkpoint.mirror
    return mark_at(url, config.name) if url is not None else ""
