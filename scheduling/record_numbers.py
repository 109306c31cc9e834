"""The numbers of overlap of one rank and step, from its records (docs/design.md, Numbers of overlap)."""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from braid.scheduling.operators import Stream
from braid.scheduling.span_batches import Labels, Records, apart
from braid.scheduling.trace import KINDS, OverlapNumbers, PeerWait
from braid.scheduling.trace_arrays import IntArray, overlap_numbers, union, without

_WAITS_TOLD: Final = 3
"""Of a rank and step, the longest."""


@dataclass(frozen=True)
class Phases:
    """What a rank does in a step, and when; each disjoint intervals (n, 2) in order."""

    computing: IntArray
    moving: IntArray
    """With some transfer under way."""
    exposed: IntArray
    """With some transfer under way, and nothing computed."""
    waiting: IntArray
    """Nothing runs: a peer has not issued a collective yet."""

    @property
    def hidden(self) -> IntArray:
        """With some transfer under way, and something computed."""
        return without(self.moving, self.exposed)


def phases(records: Records, labels: Labels) -> Phases:
    """When a rank computes, communicates and waits; records: of one rank and step."""
    operators, _, waits = apart(records)
    computes = labels.streams[operators["label"]] == Stream.COMPUTE
    computing, moving = union(times_of(operators[computes])), union(times_of(operators[~computes]))
    waiting = without(times_of(waits), times_of(operators))
    return Phases(computing, moving, without(moving, computing), waiting)


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
        key = peer, labels[label].operator
        sums[key] = sums.get(key, 0) + ns
    longest = sorted(sums.items(), key=lambda item: -item[1])[:_WAITS_TOLD]
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
