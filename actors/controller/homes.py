"""Where the checkpoints of a run are: in its own directory and, if it has one, in its mirror."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from braid.actors.controller.manifest import CheckpointError, CheckpointStore, Manifest, verify_named
from braid.actors.controller.mirror import Mirror, MirrorError
from braid.scheduling.spec import ModelShape


@dataclass(frozen=True)
class Found:
    """A good checkpoint, and what was wrong with newer ones."""

    path: str
    manifest: Manifest
    notes: tuple[str, ...] = ()

    def check_data(self, here: dict[str, Any]) -> None:
        """`CheckpointError` if other samples would come next than in the run that wrote it."""
        if odd := [key for key in here if self.manifest.data.get(key) != here[key]]:
            raise CheckpointError(
                f"checkpoint {self.path} was trained with {odd[0]}={self.manifest.data.get(odd[0])!r}, "
                f"this run has {here[odd[0]]!r}; the sample order would change"
            )


class Homes:
    """All places that a run can go on from."""

    def __init__(self, store: CheckpointStore, mirror: Mirror | None, run: str) -> None:
        """run: its mark (`RunDirectory.mark`); what the mirror has of other runs is left alone."""
        self.store, self.mirror, self.run = store, mirror, run

    @property
    def spare(self) -> CheckpointStore | None:
        """Another disk to write to, where there is no room in the run's own directory."""
        return self.mirror.store if self.mirror is not None else None

    def steps(self) -> list[int]:
        """Steps of this run's checkpoints, good or not, without asking another machine; oldest first."""
        found = set(self.store.steps())
        if (spare := self.spare) is not None:
            found |= {step for step in spare.steps() if self.run in ("", spare.run_of(step))}
        return sorted(found)

    def newest_of(self, shape: ModelShape) -> Found:
        """The newest good checkpoint; `CheckpointError` if there is none, or it is of another model."""
        path, manifest, notes = self.newest_good()
        ours = asdict(shape)
        if manifest.shape != ours:
            odd = next(key for key in ours if manifest.shape.get(key) != ours[key])
            raise CheckpointError(
                f"checkpoint {path} is of a model with {odd}={manifest.shape.get(odd)}, "
                f"the configuration says {odd}={ours[odd]}"
            )
        return Found(str(path), manifest, tuple(notes))

    def newest_good(self) -> tuple[Path, Manifest, list[str]]:
        """The newest checkpoint that matches its manifest, and what there is to tell of it.

        `CheckpointError` if there is none. Of the same step the run's own is taken, else the mirror's.
        """
        complaints: list[str] = []
        self.store.undo_replacements()
        here, there = set(self.store.steps()), self._copies(complaints)
        for step in sorted(here | there, reverse=True):
            if step in here:
                try:
                    path = self.store.directory / f"step-{step}"
                    manifest = verify_named(path)
                except CheckpointError as error:
                    complaints.append(str(error))
                else:
                    return path, manifest, [f"{text}; falling back to step {step}" for text in complaints]
            if step in there and self.mirror is not None:
                try:
                    path, manifest = self.mirror.bring(step, self.store, self.run)
                except (CheckpointError, MirrorError, OSError) as error:
                    complaints.append(str(error))
                else:
                    return path, manifest, ["; ".join([*complaints, self._brought(step)])]
        nowhere = f"no older checkpoint is left to fall back to; there is none in {self._places()}"
        if complaints:
            raise CheckpointError("; ".join([*complaints, nowhere]))
        raise CheckpointError(f"there is no checkpoint in {self._places()}; start without --resume")

    def _copies(self, complaints: list[str]) -> set[int]:
        try:
            return set(self.mirror.steps()) if self.mirror is not None else set()
        except MirrorError as error:
            complaints.append(str(error))
            return set()

    def _brought(self, step: int) -> str:
        assert self.mirror is not None
        return f"step {step} is {'fetched' if self.spare is None else 'read'} from {self.mirror.url}"

    def _places(self) -> str:
        places = [str(self.store.directory)] + ([self.mirror.url] if self.mirror is not None else [])
        return " or ".join(places)
