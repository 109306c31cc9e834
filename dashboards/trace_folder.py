"""Reads the spans that a run keeps in ``trace/``: a series of files per rank, which grows during the run.

``rank-00003.0007.arrows`` is the eighth file of rank 3. Each file can be read alone, as the oldest ones may
be removed.
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
    """The traces of a run; `refresh` reads newly written spans. Keeps the last ``keep`` steps."""

    path: Path
    keep: int = 64
    ranks: dict[int, dict[int, Batch]] = field(default_factory=lambda: defaultdict(dict))
    """Batches by rank and step (from 0), in order; records are sorted by their begin."""
    damage: dict[int, str] = field(default_factory=dict)
    """Reason why a file was not read to its end, by rank."""
    _read: dict[str, int] = field(default_factory=dict)
    """Number of bytes that have been read, by file name."""

    @classmethod
    def of_run(cls, run: Path, keep: int = 64) -> "TraceFolder":
        """Read the spans written so far in a run's directory."""
        folder = cls(run / "trace", keep)
        folder.refresh()
        return folder

    def refresh(self) -> bool:
        """Read new spans; return False if there are none."""
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
                continue  # rotated away at this moment
            try:
                for batch, position in decode(data):
                    self._take(self.ranks[rank], batch)
                    new, end = True, done + position
            except ValueError as error:
                self.damage[rank] = f"{path.name}: {error}"
                end = done + len(data)
            self._read[path.name] = end
        return new

    def _files(self) -> list[tuple[int, Path]]:
        """Return the files by rank, the oldest first: from number 9999 on, names do not sort by number."""
        files = []
        for path in self.path.glob("rank-*"):
            if (match := _NAME.fullmatch(path.name)) and path.is_file() and not path.is_symlink():
                files.append((int(match[1]), int(match[2]), path))
        return [(rank, path) for rank, _, path in sorted(files)]

    def _take(self, steps: dict[int, Batch], batch: Batch) -> None:
        # A generation may begin with an earlier step: drop records from that step on.
        while steps and next(reversed(steps)) >= batch.step:
            steps.popitem()
        order = np.argsort(batch.records["start_ns"], kind="stable")
        steps[batch.step] = replace(batch, records=batch.records[order])
        if len(steps) > self.keep:
            del steps[next(iter(steps))]

    @property
    def steps(self) -> list[int]:
        """Steps for which some rank has records, in order."""
        return sorted({step for steps in self.ranks.values() for step in steps})

    @property
    def newest(self) -> int:
        """The last of `steps`. Raise `ValueError` if no step has spans."""
        if not (steps := self.steps):
            raise ValueError(f"{self.path} holds no spans; train with telemetry.spans=true")
        return steps[-1]

    def step(self, step: int) -> list[Batch]:
        """Return the batches of a step from all ranks that recorded it, in order of rank."""
        return [steps[step] for _, steps in sorted(self.ranks.items()) if step in steps]
