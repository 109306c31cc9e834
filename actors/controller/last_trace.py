"""The spans of a run's last step, from the files that its ranks streamed, however many ranks there are."""

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from braid.scheduling.span_batches import Batch, Records, concatenated, decode, span_of
from braid.scheduling.trace import KINDS, Label, Span

MOST_SPANS = 250_000
"""Of a trace: some 260 MB while it is written. Where ranks have more, as many ranks are taken as fit."""
_ASKED = 8
"""Ranks that are asked for the newest step."""
_NAME = re.compile(r"rank-(\d+)\.(\d+)\.spans")
_OPERATOR = KINDS.index("operator")


def last_trace(folder: Path, most: int = MOST_SPANS) -> list[Span]:
    """All operators of the newest step that was streamed, times from the first one's begin.

    Of ranks spread evenly over all of them, so that there are at most ``most``; of a first rank that has more
    alone, the first ones. One file is in memory at a time.
    """
    files = _files(folder)
    ranks = _spread(sorted(files))
    newest = max((step for rank in ranks[:_ASKED] for step in _steps(files[rank][-1])), default=None)
    if newest is None:
        return []
    found: list[Span] = []
    for rank in ranks:
        spans = _spans(rank, files[rank], newest, most)
        if found and len(found) + len(spans) > most:
            break
        found += spans
    begin = min((span.start_ns for span in found), default=0)
    moved = (replace(one, start_ns=one.start_ns - begin, end_ns=one.end_ns - begin) for one in found)
    return sorted(moved, key=lambda span: (span.rank, span.start_ns))


def _files(folder: Path) -> dict[int, list[Path]]:
    """Every rank's files, the oldest first."""
    found: dict[int, list[tuple[int, Path]]] = defaultdict(list)
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := _NAME.fullmatch(path.name):
            found[int(match[1])].append((int(match[2]), path))
    return {rank: [path for _, path in sorted(files)] for rank, files in found.items()}


def _spread(ranks: list[int]) -> list[int]:
    """In an order whose every beginning is spread over all: the first, the middle one, the quarters, ..."""
    bits = max(1, (len(ranks) - 1).bit_length())
    return [ranks[n] for n in sorted(range(len(ranks)), key=lambda n: int(f"{n:0{bits}b}"[::-1], 2))]


def _batches(path: Path) -> Iterator[Batch]:
    """The batches of a file, as far as it can be read."""
    with contextlib.suppress(OSError, ValueError):
        for batch, _ in decode(path.read_bytes()):
            yield batch


def _steps(path: Path) -> set[int]:
    return {int(step) for batch in _batches(path) for step in np.unique(batch.records["step"])}


def _spans(rank: int, files: list[Path], step: int, most: int) -> list[Span]:
    """A rank's operators of a step, which may have begun in the file before the newest one."""
    parts: list[tuple[Records, dict[int, Label]]] = []
    for path in reversed(files):
        labels: dict[int, Label] = {}
        records: list[Records] = []
        older = False
        for batch in _batches(path):
            labels.update(enumerate(batch.labels, start=batch.first_label))
            wanted = (batch.records["step"] == step) & (batch.records["kind"] == _OPERATOR)
            older = older or bool((batch.records["step"] < step).any())
            records.append(batch.records[wanted])
        parts.insert(0, (concatenated(records), labels))
        if older:
            break
    found: list[Span] = []
    for kept, labels in parts:
        found += [span_of(rank, one, labels[int(one["label"])]) for one in kept[: most - len(found)]]
    return found
