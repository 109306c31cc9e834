"""Records the spans of one step: marks in the executor, then records to stream, and overlap numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from braid.actors.stage.run.streams import Mark, Streams, Transfer
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.model.operators import Kind
from braid.scheduling.schedule.operations import Direction, Pass, Strand
from braid.scheduling.trace.arrays import IntArray
from braid.scheduling.trace.batches import RECORD, Labels, Records
from braid.scheduling.trace.numbers import numbers_of_records
from braid.scheduling.trace.spans import DIRECTIONS, KINDS, STRANDS, Label, OverlapNumbers

_BLOCK = Label(operator="block", stream=Stream.COMPUTE)
_PAIRED = Label(operator="paired block", stream=Stream.COMPUTE)
OPERATOR, _SINGLE_BLOCK, _PAIRED_BLOCK, _WAITING = map(
    KINDS.index, ("operator", "block", "paired block", "waiting")
)
ALL, SOME, NEIGHBOURS = range(3)
"""Which ranks must have issued a collective before it can end: all members (`ALL`), members that exchange
data (`SOME`), or a rank and its two neighbours on the axis (`NEIGHBOURS`)."""
_MEETING = {Kind.ALL_TO_ALL.value: SOME, Kind.SEND_RECEIVE.value: NEIGHBOURS}
MarkedSpan = tuple[Label, Pass | None, int, Mark, Mark]
"""A span: its label, the pass that names its block, its kind (index in `KINDS`), begin and end."""
Rows = tuple[MarkedSpan, ...]
"""Spans that a recorder has given away."""
Exchange = Callable[[str, IntArray], IntArray]
"""Function of an axis and this rank's array (n, 4): the arrays of all its ranks, (ranks, n, 4)."""
_STRAND = {strand: STRANDS.index(strand.value) for strand in Strand}
_DIRECTION = {
    Direction.FORWARD: DIRECTIONS.index("forward"),
    Direction.BACKWARD: DIRECTIONS.index("backward"),
}


class Recorder:
    """Collects marks while a step runs, and makes records (`RECORD`) of the marks when the step is over.

    Steps run the same operators of the same blocks in the same order, so, nearly always, only the times of a
    step's records differ from the previous step's records.
    """

    def __init__(
        self, streams: Streams, solo_ns: Mapping[str, int] | None = None, *, recording: bool = True
    ) -> None:
        self._streams, self._solo_ns = streams, solo_ns or {}
        self._blocks: list[MarkedSpan] = []
        self._compute: list[MarkedSpan] = []
        self._transfers: list[tuple[Label, Pass | None, Transfer]] = []
        self._given: Rows = ()
        self._ahead_ns = 0
        self._epoch_ns = streams.epoch_ns()
        """Wall-clock time, in nanoseconds, of the fixed point that the step's marks count from."""
        self._progress = 0
        """Progress at the previous call of `pulse`."""
        self._asking = ""
        """Axis along which this rank is exchanging times with other ranks; empty if it is not."""
        self.recording = recording
        """Whether spans are recorded; may change between steps."""
        self._numbers: dict[int, int] = {}
        """Numbers of labels, by the labels' ``id``; `_kept` keeps the labels alive."""
        self._kept: list[Label] = []
        self._labels: list[Label] = []
        """All labels recorded so far, by number, with solo times where these are known."""
        self._table = Labels()
        self._ran: tuple[Any, ...] = ()
        self._timeless: Records = np.zeros(0, RECORD)
        """Labels, blocks and kinds of the newest step's spans, and its records without times."""
        self._along: dict[str, IntArray] = {}
        """Indices of the newest step's records that are collectives, by axis."""
        self._met: dict[str, IntArray] = {}
        """Times of these collectives over all members, by axis (see the function `_met`)."""
        self._fullest_bytes = 0
        """Bytes that the newest step's collectives sent between nodes: for each, those of the member that
        sent most, added up."""

    def set_clock(self, ahead_ns: int) -> None:
        """Set by how many nanoseconds this host's wall clock is ahead of the clock that spans refer to."""
        self._ahead_ns = ahead_ns
        self._epoch_ns = self._streams.epoch_ns() - ahead_ns

    def mark(self) -> Mark:
        """Return a mark of the present time; None if spans are not recorded."""
        return self._streams.mark() if self.recording else None

    def compute(self, label: Label, block: Pass | None, begin: Mark, end: Mark) -> None:
        if self.recording:
            self._compute.append((label, block, OPERATOR, begin, end))

    def transfer(self, label: Label, block: Pass | None, transfer: Transfer) -> None:
        """Record that a transfer was issued; its end is read when the step is over."""
        if self.recording:
            self._transfers.append((label, block, transfer))

    def collectives(self) -> dict[str, list[tuple[int, int, int, int]]]:
        """Return the collectives of the step so far, by axis, in the order of issue. Each is (time of issue,
        time of end, in nanoseconds of the wall clock; bytes that this rank has sent to other nodes; who
        meets, see `ALL`).

        Return none for a step that a graph replays: its marks may not have advanced (`StepGraph`).
        """
        at = self._streams.nanoseconds
        found: dict[str, list[tuple[int, int, int, int]]] = {}
        for label, _, one in self._transfers if not self._given else ():
            if label.axis:
                times = self._epoch_ns + at(one.begin), self._epoch_ns + at(one.end)
                row = *times, self._sent(label, one), _MEETING.get(label.kind, 0)
                found.setdefault(label.axis, []).append(row)
        return found

    @staticmethod
    def _sent(label: Label, one: Transfer) -> int:
        if label.stream is not Stream.INTER:
            return 0
        return label.bytes if one.sent is None else one.sent

    def pulse(self) -> tuple[int, str]:
        """Return the progress so far, and, if it is the same as at the previous call, the transfer that has
        not ended.

        Another thread calls this, at any point of a step.
        """
        before, self._progress = self._progress, self._streams.progress()
        return self._progress, self._under_way() if before == self._progress else ""

    def _under_way(self) -> str:
        """Return the name of the oldest transfer that has not ended; empty if there is none."""
        if axis := self._asking:
            return f"peers {axis}"
        for label, block, transfer in list(self._transfers):
            if not self._streams.complete(transfer):
                return label.operator if block is None else f"{label.operator} of {block}"
        return ""

    def block(self, paired: bool, block: Pass, begin: Mark, end: Mark) -> None:
        """Record that a block ran. ``block``: its first pass; ``paired``: whether it has several."""
        if self.recording:
            label, kind = (_PAIRED, _PAIRED_BLOCK) if paired else (_BLOCK, _SINGLE_BLOCK)
            self._blocks.append((label, block, kind, begin, end))

    def clear(self) -> None:
        """Begin another step: forget the spans, marks and times of the previous step."""
        self._epoch_ns, self._asking = self._streams.epoch_ns() - self._ahead_ns, ""
        spans = (mark for rows in (self._compute, self._blocks) for row in rows for mark in row[3:])
        transfers = (mark for _, _, one in self._transfers for mark in (one.begin, one.end))
        self._streams.forget(chain(spans, transfers))
        self._blocks.clear()
        self._compute.clear()
        self._transfers.clear()
        self._given = ()
        self._met, self._fullest_bytes = {}, 0

    def take(self) -> Rows:
        """Return the spans so far, which this recorder and its streams forget; `give` adds them again."""
        rows = tuple(self._marked())
        self._compute, self._transfers, self._blocks, self._given = [], [], [], ()
        return rows

    def give(self, rows: Rows) -> None:
        """Add spans that a graph replays; their marks belong to the graph."""
        self._given = rows

    @property
    def count(self) -> int:
        """Number of spans of the step so far, without blocks."""
        given = sum(kind == OPERATOR for _, _, kind, _, _ in self._given)
        return given + len(self._compute) + len(self._transfers)

    def _marked(self) -> list[MarkedSpan]:
        """Return all spans: compute operators, transfers, blocks."""
        transfers = ((label, block, OPERATOR, one.begin, one.end) for label, block, one in self._transfers)
        return [*self._given, *self._compute, *transfers, *self._blocks]

    def meet(self, rank: int, exchange: Exchange) -> None:
        """Learn when the other members of the step's collectives issued them, and when the collectives ended
        there.

        All ranks call this at the same point of a step, when its collectives have ended. ``rank``: this
        rank's number.
        """
        if not self.recording:
            return
        messages = ((label, one) for label, _, one in self._transfers if not label.axis)
        self._fullest_bytes = sum(self._sent(label, message) for label, message in messages)
        for axis, rows in sorted(self.collectives().items()):
            self._asking = axis
            told = exchange(axis, np.array([(rank, 0, 0, 0), *rows], np.int64))
            self._asking = ""
            ranks, members = told[:, 0, 0], _on_one_clock(told[:, 1:])
            own = int(np.flatnonzero(ranks == rank)[0])
            beside = [*{(own + step) % len(ranks): None for step in (-1, 0, 1)}]
            shifts = members[own, :, 3] == NEIGHBOURS
            near, far = _met(ranks[beside], members[beside]), _met(ranks, members)
            self._met[axis] = np.where(shifts, near, far)
            self._fullest_bytes += int(members[:, :, 2].max(0).sum())

    @property
    def labels(self) -> Labels:
        """Labels by the numbers that records contain."""
        if len(self._table) < len(self._labels):
            self._table = Labels(self._labels)
        return self._table

    def records(self) -> Records:
        """Return the step's records: compute operators, transfers, blocks, waiting; times are of the wall
        clock.

        After `meet` a collective is a transfer from the last member's issue to the last member's end,
        preceded by a record of waiting from this rank's issue to the last member's issue.
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
        # A transfer that the previous step started counts from this step's begin; it may have ended earlier.
        np.maximum(found["start_ns"], found["end_ns"], out=found["end_ns"])
        waits = [_as_met(found, self._along[axis], met) for axis, met in self._met.items()]
        return np.concatenate([found, *waits]) if waits else found

    def numbers(self, records: Records) -> OverlapNumbers:
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
    """Shift the times of ranks (m, n, 4) that contradict each other, since clocks of hosts and devices drift.

    A collective of kind `ALL` ends on no member before every other member has issued it. This bounds by how
    much each clock may be ahead of the first member's clock; a shift of zero is preferred, and if it is
    impossible, the middle of the bounds is used. Collectives that the previous step began are ignored, since
    they may have ended before this step.
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


def _met(ranks: IntArray, members: IntArray) -> IntArray:
    """Combine n collectives as seen by m members (m, n, 4) into an array (3, n); ``ranks`` (m,): the members'
    numbers.

    Rows of the result: time at which the last member issued each collective; time at which it ended on the
    last member (nanoseconds of the wall clock); rank that issued it last.
    """
    issued = members[:, :, 0]
    begins = issued.max(0)
    return np.stack([begins, np.maximum(begins, members[:, :, 1].max(0)), ranks[issued.argmax(0)]])


def _as_met(found: Records, rows: IntArray, met: IntArray) -> Records:
    """Set the times of collectives (indices ``rows``) to those over all members; return the waiting."""
    issued, ended, last = met
    rows = rows[: len(issued)]
    waits = found[rows]
    waits["kind"], waits["end_ns"], waits["peer"] = _WAITING, issued, last
    found["start_ns"][rows], found["end_ns"][rows] = issued, ended
    return waits[waits["start_ns"] < waits["end_ns"]]
