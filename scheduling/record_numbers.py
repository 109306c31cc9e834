"""The numbers of overlap of one rank and step, from its records (docs/design.md, Numbers of overlap)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from braid.scheduling.operators import Stream
from braid.scheduling.span_batches import Records, apart
from braid.scheduling.trace import KINDS, Label, OverlapNumbers, PeerWait
from braid.scheduling.trace_arrays import IntArray, overlap_numbers, union

_WAITS_TOLD: Final = 3
"""Of a rank and step, the longest."""


class Labels:
    """What records name by number, as arrays of one entry per label."""

    def __init__(self, labels: Sequence[Label]) -> None:
        solo = (-1 if label.solo_ns is None else label.solo_ns for label in labels)
        self.solo_ns = np.fromiter(solo, np.int64, len(labels))
        self.streams = _objects([label.stream for label in labels])
        self.axes = _objects([label.along for label in labels])
        self.names = [label.operator for label in labels]

    def __len__(self) -> int:
        return len(self.names)


def numbers_of_records(records: Records, labels: Labels) -> OverlapNumbers:
    """What overlap came to; records: of one rank and step, whose label is a place in ``labels``."""
    operators, blocks, waits = apart(records)
    streams, axes = labels.streams[operators["label"]], labels.axes[operators["label"]]
    compute = operators[streams == Stream.COMPUTE]
    numbers = overlap_numbers(
        times_of(compute),
        labels.solo_ns[compute["label"]],
        [times_of(operators[streams == link]) for link in (Stream.INTRA, Stream.INTER)],
        times_of(blocks),
        blocks["kind"] == KINDS.index("paired block"),
        times_of(waits),
        {axis: times_of(operators[axes == axis]) for axis in sorted({*axes} - {""})},
    )
    return replace(numbers, peer_waits=_peer_waits(union(times_of(operators)), waits, labels))


def times_of(records: Records) -> IntArray:
    """Begins and ends (n, 2)."""
    return np.stack([records["start_ns"], records["end_ns"]], axis=1)


def _peer_waits(busy: IntArray, waits: Records, labels: Labels) -> tuple[PeerWait, ...]:
    """The longest waits by peer and operator, of time in which nothing ran (busy: disjoint, in order)."""
    if not len(waits):
        return ()
    begins, ends = waits["start_ns"], waits["end_ns"]
    idle = ends - begins - (_covered_before(busy, ends) - _covered_before(busy, begins))
    sums: dict[tuple[int, str], int] = {}
    for peer, label, ns in zip(waits["peer"].tolist(), waits["label"].tolist(), idle.tolist(), strict=True):
        key = peer, labels.names[label]
        sums[key] = sums.get(key, 0) + ns
    longest = sorted(sums.items(), key=lambda one: -one[1])[:_WAITS_TOLD]
    return tuple(PeerWait(peer=peer, operator=name, ns=ns) for (peer, name), ns in longest if ns > 0)


def _covered_before(disjoint: IntArray, times: IntArray) -> IntArray:
    """How much of disjoint intervals (n, 2), which are in order, lies before each of some times (m,)."""
    if not len(disjoint):
        return np.zeros(len(times), np.int64)
    lengths = np.concatenate([[0], np.cumsum(disjoint[:, 1] - disjoint[:, 0])])
    begun = np.searchsorted(disjoint[:, 0], times, side="right")
    over = np.maximum(0, disjoint[np.maximum(begun - 1, 0), 1] - times)
    covered: IntArray = lengths[begun] - np.where(begun > 0, over, 0)
    return covered


def _objects(values: Sequence[Any]) -> NDArray[np.object_]:
    found = np.empty(len(values), object)
    found[:] = values
    return found
