"""Reads the spans that a run keeps in ``trace/``: a series of files per rank, growing while the run goes on.

``rank-00003.0007.arrows`` is the eighth file of rank 3. Each can be read alone: the oldest ones may vanish.
"""

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np

from braid.scheduling.trace.batches import SUFFIX, Batch, decode

_NAME: Final = re.compile(rf"rank-(\d{{5}})\.(\d{{4,}}){re.escape(SUFFIX)}")


@dataclass
class TraceFolder:
    """The traces of a run; `refresh` reads what has been written since. Keeps the last ``keep`` steps."""

    path: Path
    keep: int = 64
    ranks: dict[int, dict[int, Batch]] = field(default_factory=lambda: defaultdict(dict))
    """By rank and step, in order; a step counts from 0. Records are sorted by their begin."""
    damage: dict[int, str] = field(default_factory=dict)
    """By rank, why a file was not read to its end."""
    _read: dict[str, int] = field(default_factory=dict)
    """Bytes of every file that have been read."""

    @classmethod
    def of_run(cls, run: Path, keep: int = 64) -> "TraceFolder":
        """The spans in a run's directory, as far as they are written."""
        folder = cls(run / "trace", keep)
        folder.refresh()
        return folder

    def refresh(self) -> bool:
        """Read what is new; False if nothing is."""
        new = False
        for rank, path in self._files():
            done = end = self._read.get(path.name, 0)
            try:
                if path.stat().st_size <= done:
                    continue
                with path.open("rb") as file:
                    file.seek(done)
                    data = file.read()
            except OSError:
                continue  # rotated away in this moment
            try:
                for batch, place in decode(data):
                    self._take(self.ranks[rank], batch)
                    new, end = True, done + place
            except ValueError as error:
                self.damage[rank] = f"{path.name}: {error}"
                end = done + len(data)
            self._read[path.name] = end
        return new

    def _files(self) -> list[tuple[int, Path]]:
        """By rank, the oldest first: from number 9999 on, names do not stand in order."""
        found = []
        for path in self.path.glob("rank-*"):
            if (match := _NAME.fullmatch(path.name)) and path.is_file() and not path.is_symlink():
                found.append((int(match[1]), int(match[2]), path))
        return [(rank, path) for rank, _, path in sorted(found)]

    def _take(self, steps: dict[int, Batch], batch: Batch) -> None:
        # A generation may begin with an earlier step: earlier records of that step do not count.
        while steps and next(reversed(steps)) >= batch.step:
            steps.popitem()
        order = np.argsort(batch.records["start_ns"], kind="stable")
        steps[batch.step] = replace(batch, records=batch.records[order])
        if len(steps) > self.keep:
            del steps[next(iter(steps))]

    @property
    def steps(self) -> list[int]:
        """Steps of which some rank has records, in order."""
        return sorted({step for steps in self.ranks.values() for step in steps})

    @property
    def newest(self) -> int:
        """The last of `steps`. `ValueError` if no step has spans."""
        if not (steps := self.steps):
            raise ValueError(f"{self.path} holds no spans; train with telemetry.spans=true")
        return steps[-1]

    def step(self, step: int) -> list[Batch]:
        """A batch of every rank that has recorded a step, by rank."""
        return [steps[step] for _, steps in sorted(self.ranks.items()) if step in steps]
