"""Computes the overlap numbers of one rank and step from its records (docs/design.md, Numbers of overlap)."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.trace.arrays import IntArray, outside, overlap_numbers, union, without
from braid.scheduling.trace.batches import Batch, Labels, Records, apart
from braid.scheduling.trace.spans import KINDS, OverlapNumbers, PeerWait

_WAITS_TOLD: Final = 3
"""Number of waits, the longest ones, that are reported for a rank and step."""


@dataclass(frozen=True)
class Phases:
    """Times of a rank's activities in a step; each is an array of disjoint intervals (n, 2) in nanoseconds,
    in order."""

    computing: IntArray
    moving: IntArray
    """Times with some transfer under way."""
    exposed: IntArray
    """Times with some transfer under way but no computation."""
    waiting: IntArray
    """Times in which nothing runs, because a peer has not issued a collective yet."""

    @property
    def hidden(self) -> IntArray:
        return without(self.moving, self.exposed)


def phases(batch: Batch) -> Phases:
    """Find out when a rank computes, communicates and waits in a step."""
    operators, _, waits = apart(batch.records)
    computes = batch.labels.streams[operators["label"]] == Stream.COMPUTE
    computing, moving = union(times_of(operators[computes])), union(times_of(operators[~computes]))
    waiting = without(times_of(waits), times_of(operators))
    return Phases(computing, moving, without(moving, computing), waiting)


def numbers_of_records(records: Records, labels: Labels) -> OverlapNumbers:
    """Compute the overlap numbers of one rank and step from its records."""
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
    return replace(numbers, peer_waits=_peer_waits(operators, waits, labels))


def times_of(records: Records) -> IntArray:
    """Return begins and ends of records as an array (n, 2)."""
    return np.stack([records["start_ns"], records["end_ns"]], axis=1)


def _peer_waits(operators: Records, waits: Records, labels: Labels) -> tuple[PeerWait, ...]:
    """Return the longest waits by peer and operator, counting only time in which nothing ran."""
    whose, idle = outside(times_of(waits), times_of(operators))
    sums: Counter[tuple[int, str]] = Counter()
    for wait, ns in zip(waits[whose], (idle[:, 1] - idle[:, 0]).tolist(), strict=True):
        sums[int(wait["peer"]), labels[wait["label"]].operator] += ns
    return tuple(
        PeerWait(peer=peer, operator=name, ns=ns) for (peer, name), ns in sums.most_common(_WAITS_TOLD)
    )
