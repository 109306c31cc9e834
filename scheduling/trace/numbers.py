"""The numbers of overlap of one rank and step, from its records (docs/design.md, Numbers of overlap)."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.trace.arrays import IntArray, outside, overlap_numbers, union, without
from braid.scheduling.trace.batches import Batch, Labels, Records, apart
from braid.scheduling.trace.spans import KINDS, OverlapNumbers, PeerWait

_WAITS_TOLD: Final = 3
"""So many waits of a rank and step are told, the longest."""


@dataclass(frozen=True)
class Phases:
    """What a rank does in a step, and when; each disjoint intervals (n, 2) of nanoseconds, in order."""

    computing: IntArray
    moving: IntArray
    """With some transfer under way."""
    exposed: IntArray
    """With some transfer under way, and nothing computed."""
    waiting: IntArray
    """Nothing runs: a peer has not issued a collective yet."""

    @property
    def hidden(self) -> IntArray:
        return without(self.moving, self.exposed)


def phases(batch: Batch) -> Phases:
    """When a rank computes, communicates and waits in a step."""
    operators, _, waits = apart(batch.records)
    computes = batch.labels.streams[operators["label"]] == Stream.COMPUTE
    computing, moving = union(times_of(operators[computes])), union(times_of(operators[~computes]))
    waiting = without(times_of(waits), times_of(operators))
    return Phases(computing, moving, without(moving, computing), waiting)


def numbers_of_records(records: Records, labels: Labels) -> OverlapNumbers:
    """The numbers of one rank and step, from its records."""
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
    """Begins and ends (n, 2)."""
    return np.stack([records["start_ns"], records["end_ns"]], axis=1)


def _peer_waits(operators: Records, waits: Records, labels: Labels) -> tuple[PeerWait, ...]:
    """The longest waits by peer and operator, of time in which nothing ran."""
    whose, idle = outside(times_of(waits), times_of(operators))
    sums: Counter[tuple[int, str]] = Counter()
    for wait, ns in zip(waits[whose], (idle[:, 1] - idle[:, 0]).tolist(), strict=True):
        sums[int(wait["peer"]), labels[wait["label"]].operator] += ns
    return tuple(
        PeerWait(peer=peer, operator=name, ns=ns) for (peer, name), ns in sums.most_common(_WAITS_TOLD)
    )
