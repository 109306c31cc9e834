"""A step's spans as records, to be streamed, and the numbers made of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from braid.actors.stage.measure.telemetry import ALL, NEIGHBOURS, Recorder
from braid.actors.stage.run.streams import Streams
from braid.scheduling.schedule.operations import Direction, Pass, Strand
from braid.scheduling.trace.arrays import IntArray
from braid.scheduling.trace.batches import RECORD, Labels, Records
from braid.scheduling.trace.numbers import numbers_of_records
from braid.scheduling.trace.spans import DIRECTIONS, KINDS, STRANDS, Label, OverlapNumbers

_STRAND = {strand: STRANDS.index(strand.value) for strand in Strand}
_DIRECTION = {
    Direction.FORWARD: DIRECTIONS.index("forward"),
    Direction.BACKWARD: DIRECTIONS.index("backward"),
}


_WAITING: Final = KINDS.index("waiting")
Exchange = Callable[[str, IntArray], IntArray]
"""Takes an axis and an array (n, 4) of this rank, returns those of all ranks along the axis (ranks, n, 4)."""


@dataclass(frozen=True)
class _Met:
    """Collectives of one axis, n of them, as all their members have seen them."""

    issued: IntArray
    """(n,) when the last member had issued each; nanoseconds of the wall clock."""
    ended: IntArray
    """(n,) when the last member's had ended."""
    last: IntArray
    """(n,) ranks that were the last to issue them."""


class StepRecorder(Recorder):
    """A recorder whose steps become arrays of `RECORD`.

    Steps run the same operators of the same blocks in the same order, so all but the times of a step's
    records is that of the step before, nearly always.
    """

    def __init__(
        self, streams: Streams, solo_ns: Mapping[str, int] | None = None, *, recording: bool = True
    ) -> None:
        super().__init__(streams, recording=recording)
        self._solo_ns = solo_ns or {}
        self._numbers: dict[int, int] = {}
        """Of labels, by their identity; `_kept` keeps them alive."""
        self._kept: list[Label] = []
        self._labels: list[Label] = []
        """All labels that were ever met, by number, with the solo times that are known."""
        self._table = Labels()
        self._ran: tuple[Any, ...] = ()
        self._timeless: Records = np.zeros(0, RECORD)
        """Labels, blocks and kinds of the newest step's spans, and its records but for their times."""
        self._along: dict[str, IntArray] = {}
        """Rows of the newest step that are collectives, by axis."""
        self._met: dict[str, _Met] = {}
        self._fullest_bytes = 0
        """Of the newest step's collectives, what their members sent that had most to send, summed up."""

    def meet(self, rank: int, exchange: Exchange) -> None:
        """Learn when the other members of the step's collectives issued them, and when theirs had ended.

        All ranks call this at the same point of a step, when its collectives have ended. rank: this one.
        """
        if not self.recording:
            return
        self._fullest_bytes = self.messages_bytes()
        for axis, rows in sorted(self.collectives().items()):
            self._asking = axis
            told = exchange(axis, np.array([(rank, 0, 0, 0), *rows], np.int64))
            self._asking = ""
            ranks, members = told[:, 0, 0], _on_one_clock(told[:, 1:])
            own = int(np.flatnonzero(ranks == rank)[0])
            all_of = _met(ranks, members)
            beside = [*{(own + step) % len(ranks): None for step in (-1, 0, 1)}]
            near, shifts = _met(ranks[beside], members[beside]), members[own, :, 3] == NEIGHBOURS
            self._met[axis] = _Met(
                np.where(shifts, near.issued, all_of.issued),
                np.where(shifts, near.ended, all_of.ended),
                np.where(shifts, near.last, all_of.last),
            )
            self._fullest_bytes += int(members[:, :, 2].max(0).sum())

    def clear(self) -> None:
        """Forget the step's spans and marks, and what other ranks told of them."""
        super().clear()
        self._met, self._fullest_bytes = {}, 0

    @property
    def labels(self) -> Labels:
        """What the records so far name by number."""
        if len(self._table) < len(self._labels):
            self._table = Labels(self._labels)
        return self._table

    def records(self) -> Records:
        """The step's records: compute operators, transfers, blocks, waiting; times are of the wall clock.

        After `meet` a collective is a transfer from its last member's issue to its last member's end, and
        waiting from this rank's own issue until then.
        """
        rows = self._marked()
        if not rows:
            return np.zeros(0, RECORD)
        labels, blocks, kinds, begins, ends = zip(*rows, strict=True)
        if (ran := (labels, blocks, kinds)) != self._ran:
            self._ran, self._timeless = ran, self._without_times(labels, blocks, kinds)
        found = self._timeless.copy()
        epoch, at = self._epoch_ns, self._streams.nanoseconds
        found["start_ns"] = np.array([*map(at, begins)], np.int64) + epoch
        found["end_ns"] = np.array([*map(at, ends)], np.int64) + epoch
        # What the step before has started counts from this one's begin on; it may have ended by then.
        np.maximum(found["start_ns"], found["end_ns"], out=found["end_ns"])
        waits = [_as_met(found, self._along[axis], met) for axis, met in self._met.items()]
        return np.concatenate([found, *waits]) if waits else found

    def numbers(self, records: Records) -> OverlapNumbers:
        """What overlap came to in a step with these records."""
        return replace(numbers_of_records(records, self.labels), fullest_bytes=self._fullest_bytes)

    def _without_times(
        self, labels: Sequence[Label], blocks: Sequence[Pass | None], kinds: Sequence[int]
    ) -> Records:
        found = np.zeros(len(labels), RECORD)
        found["label"] = [self._number(label) for label in labels]
        found["kind"] = kinds
        found["micro_batch"] = [-1 if block is None else block.micro_batch for block in blocks]
        found["chunk"] = [-1 if block is None else block.chunk for block in blocks]
        found["strand"] = [0 if block is None else _STRAND[block.strand] for block in blocks]
        found["direction"] = [0 if block is None else _DIRECTION[block.direction] for block in blocks]
        found["peer"] = -1
        axes = np.array([label.axis for label in labels], object)
        self._along = {axis: np.flatnonzero(axes == axis) for axis in sorted({*axes} - {""})}
        return found

    def _number(self, label: Label) -> int:
        found = self._numbers.get(id(label))
        if found is None:
            found = self._numbers[id(label)] = len(self._labels)
            self._kept.append(label)
            self._labels.append(replace(label, solo_ns=self._solo_ns.get(label.key)))
        return found


def _on_one_clock(members: IntArray) -> IntArray:
    """Times of ranks (m, n, 4), moved where they contradict each other: clocks of hosts and devices drift.

    A collective of `ALL` ends on no member before another one has issued it. That bounds by how much each
    clock may be ahead of the first member's; where none at all is not possible, it is taken to be the middle
    of what is. What the step before has begun, and may have ended before this one, says nothing.
    """
    says = (members[:, :, 3] == ALL).all(0) & (members[:, :, 1] > members[:, :, 0]).all(0)
    if not says.any():
        return members
    issued, ended = members[:, says, 0], members[:, says, 1]
    least = (issued[0] - ended).max(1)
    most = (ended[0] - issued).min(1)
    moved = np.where((least <= 0) & (most >= 0), 0, (least + most) // 2)
    found = members.copy()
    found[:, :, :2] += moved[:, None, None]
    return found


def _met(ranks: IntArray, members: IntArray) -> _Met:
    """Collectives as some members (m, n, 4) have seen them; ranks (m,): their numbers."""
    issued = members[:, :, 0]
    begins = issued.max(0)
    return _Met(begins, np.maximum(begins, members[:, :, 1].max(0)), ranks[issued.argmax(0)])


def _as_met(found: Records, rows: IntArray, met: _Met) -> Records:
    """Give collectives (rows of ``found``) the times of all their members; returns what was waiting."""
    rows = rows[: len(met.issued)]
    waits = found[rows]
    waits["kind"], waits["end_ns"], waits["peer"] = _WAITING, met.issued, met.last
    found["start_ns"][rows], found["end_ns"][rows] = met.issued, met.ended
    return waits[waits["start_ns"] < waits["end_ns"]]
