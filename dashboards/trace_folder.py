"""Reads the spans that a run keeps in ``trace/``: a series of files per rank, growing while the run goes on.

``rank-00003.0007.spans`` is the eighth file of rank 3. A file begins with all labels known at that time, so
the oldest ones may vanish (rotation) and the rest stays readable.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np

from braid.scheduling.span_batches import Batch, Records, concatenated, decode, span_of
from braid.scheduling.trace import KINDS, Label, Span

_NAME: Final = re.compile(r"rank-(\d{5})\.(\d{4,})\.spans")


@dataclass
class RankTrace:
    """What is known of one rank: its labels by number, and records by step, in the order of arrival."""

    labels: dict[int, Label] = field(default_factory=dict)
    steps: dict[int, list[Records]] = field(default_factory=dict)
    generation: int = 0
    first_label: int = 0
    """Number of the generation's first label."""
    dropped: int = 0
    every: int = 1
    begins_anew: bool = False
    """Whether no record of the present generation has come yet."""
    damage: str = ""
    """Why a file was not read to its end."""

    def records(self, step: int) -> Records:
        """All records of a step, sorted by their begin; empty if there are none."""
        found = concatenated(self.steps.get(step, []))
        return found[np.argsort(found["start_ns"], kind="stable")]


@dataclass
class TraceFolder:
    """The traces of a run; `refresh` reads what has been written since. Keeps the last ``keep`` steps."""

    path: Path
    keep: int = 64
    ranks: dict[int, RankTrace] = field(default_factory=lambda: defaultdict(RankTrace))
    _read: dict[str, int] = field(default_factory=dict)
    """Bytes of every file that have been read."""

    def refresh(self) -> bool:
        """Read what is new; True if there was something."""
        new = False
        for rank, path in self._files():
            done = self._read.get(path.name, 0)
            try:
                if path.stat().st_size <= done:
                    continue
                with path.open("rb") as file:
                    file.seek(done)
                    data = file.read()
            except OSError:
                continue  # rotated away in this moment
            trace = self.ranks[rank]
            end = 0
            try:
                for batch, place in decode(data):
                    end = place
                    self._take(trace, batch)
                    new = new or len(batch.records) > 0
            except ValueError as error:
                trace.damage = f"{path.name}: {error}"
                end = len(data)
            self._read[path.name] = done + end
        return new

    def _files(self) -> Iterator[tuple[int, Path]]:
        try:
            entries = sorted(self.path.iterdir())
        except OSError:
            return
        for path in entries:
            if (match := _NAME.fullmatch(path.name)) and path.is_file() and not path.is_symlink():
                yield int(match[1]), path

    def _take(self, trace: RankTrace, batch: Batch) -> None:
        if batch.generation != trace.generation:
            # Its labels count from 0 again: they follow those of the steps that stay.
            trace.first_label = max(trace.labels, default=-1) + 1
            trace.generation, trace.begins_anew = batch.generation, True
        trace.dropped, trace.every = batch.dropped, batch.every
        trace.labels.update(enumerate(batch.labels, start=trace.first_label + batch.first_label))
        records = batch.records.copy()
        records["label"] += np.uint32(trace.first_label)
        if not len(records):
            return
        if trace.begins_anew:
            # Maybe from an earlier step: what was recorded of it before does not count.
            first = int(records["step"].min())
            trace.steps = {step: kept for step, kept in trace.steps.items() if step < first}
            trace.begins_anew = False
        for step in np.unique(records["step"]):
            trace.steps.setdefault(int(step), []).append(records[records["step"] == step])
        for old in sorted(trace.steps)[: -self.keep]:
            del trace.steps[old]

    @property
    def steps(self) -> list[int]:
        """Steps of which some rank has records, in order; a step counts from 0."""
        return sorted({step for trace in self.ranks.values() for step in trace.steps})

    def spans(self, step: int) -> list[Span]:
        """All ranks' operators of a step (blocks are left out), times from the first one's begin."""
        found: list[Span] = []
        for rank, trace in sorted(self.ranks.items()):
            found += [
                span_of(rank, record, trace.labels[int(record["label"])])
                for record in trace.records(step)
                if KINDS[record["kind"]] == "operator"
            ]
        begin = min((span.start_ns for span in found), default=0)
        return [_moved(span, -begin) for span in found]


def _moved(span: Span, by_ns: int) -> Span:
    return replace(span, start_ns=span.start_ns + by_ns, end_ns=span.end_ns + by_ns)
