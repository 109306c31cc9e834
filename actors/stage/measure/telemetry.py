"""Spans of one step as the executor records them, as records to be streamed, and the numbers made of them."""

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
"""Who has to have issued a collective before it ends: all members, those that send each other something, or
each rank with its two neighbours on the axis."""
_MEETING = {Kind.ALL_TO_ALL.value: SOME, Kind.SEND_RECEIVE.value: NEIGHBOURS}
MarkedSpan = tuple[Label, Pass | None, int, Mark, Mark]
"""A span: what ran, for which block, its kind (a place in `KINDS`), begin and end."""
Rows = tuple[MarkedSpan, ...]
"""Spans that are no longer a recorder's."""
Exchange = Callable[[str, IntArray], IntArray]
"""Takes an axis and an array (n, 4) of this rank, returns those of all ranks along the axis (ranks, n, 4)."""
_STRAND = {strand: STRANDS.index(strand.value) for strand in Strand}
_DIRECTION = {
    Direction.FORWARD: DIRECTIONS.index("forward"),
    Direction.BACKWARD: DIRECTIONS.index("backward"),
}


class Recorder:
    """Collects marks while a step runs, and makes records (`RECORD`) of them when it is over.

    Steps run the same operators of the same blocks in the same order, so all but the times of a step's
    records is that of the step before, nearly always.
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
        """On that clock, the fixed point that the step's marks count from."""
        self._progress = 0
        """When `pulse` was called last."""
        self._asking = ""
        """The axis along which other ranks are asked what they have seen of the step."""
        self.recording = recording
        """Whether spans are kept; may change between steps."""
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
        self._met: dict[str, IntArray] = {}
        """What became of them, by axis (`_met`)."""
        self._fullest_bytes = 0
        """Of the newest step's collectives, what their members sent that had most to send, summed up."""

    def set_clock(self, ahead_ns: int) -> None:
        """By how much this host's wall clock is ahead of the one that spans are told by."""
        self._ahead_ns = ahead_ns
        self._epoch_ns = self._streams.epoch_ns() - ahead_ns

    def mark(self) -> Mark:
        """Now, if spans are kept."""
        return self._streams.mark() if self.recording else None

    def compute(self, label: Label, block: Pass | None, begin: Mark, end: Mark) -> None:
        """An operator ran on the compute stream."""
        if self.recording:
            self._compute.append((label, block, OPERATOR, begin, end))

    def transfer(self, label: Label, block: Pass | None, transfer: Transfer) -> None:
        """A transfer was issued; its end is read when the step is over."""
        if self.recording:
            self._transfers.append((label, block, transfer))

    def collectives(self) -> dict[str, list[tuple[int, int, int, int]]]:
        """Of the step so far, by axis, in the order of issue: when each was issued and ended, nanoseconds of
        the wall clock, the bytes that this rank has sent to other nodes, and who meets (`ALL`).

        None of a step that a graph repeats: its marks may stand still (`StepGraph`).
        """
        at = self._streams.nanoseconds
        found: dict[str, list[tuple[int, int, int, int]]] = {}
        for label, _, one in self._transfers if not self._given else ():
            if label.axis:
                times = self._epoch_ns + at(one.begin), self._epoch_ns + at(one.end)
                row = *times, self._sent(label, one), _MEETING.get(label.kind, 0)
                found.setdefault(label.axis, []).append(row)
        return found

    def messages_bytes(self) -> int:
        """What this rank has sent to other nodes in messages between stages, in the step so far."""
        return sum(self._sent(label, one) for label, _, one in self._transfers if not label.axis)

    @staticmethod
    def _sent(label: Label, one: Transfer) -> int:
        if label.stream is not Stream.INTER:
            return 0
        return label.bytes if one.sent is None else one.sent

    def pulse(self) -> tuple[int, str]:
        """What was done so far; and, if that was nothing since the last call, which transfer has not ended.

        Called by another thread, whatever the step is at.
        """
        before, self._progress = self._progress, self._streams.progress()
        return self._progress, self._under_way() if before == self._progress else ""

    def _under_way(self) -> str:
        """The oldest transfer that has not ended; empty if all have, or spans are not kept."""
        if axis := self._asking:
            return f"peers {axis}"
        for label, block, transfer in list(self._transfers):
            if not self._streams.complete(transfer):
                return label.operator if block is None else f"{label.operator} of {block}"
        return ""

    def block(self, paired: bool, block: Pass, begin: Mark, end: Mark) -> None:
        """A block ran; ``block`` is the first of its passes, ``paired`` whether it has several."""
        if self.recording:
            label, kind = (_PAIRED, _PAIRED_BLOCK) if paired else (_BLOCK, _SINGLE_BLOCK)
            self._blocks.append((label, block, kind, begin, end))

    def clear(self) -> None:
        """Forget the step's spans and marks, and what other ranks told of them; another step begins."""
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
        """The spans so far, for `give`: this recorder lets go of them, and of their marks."""
        rows = tuple(self._marked())
        self._compute, self._transfers, self._blocks, self._given = [], [], [], ()
        return rows

    def give(self, rows: Rows) -> None:
        """Spans that a graph repeats, with marks that are its own."""
        self._given = rows

    @property
    def count(self) -> int:
        """Spans of the step so far, without blocks."""
        given = sum(kind == OPERATOR for _, _, kind, _, _ in self._given)
        return given + len(self._compute) + len(self._transfers)

    def _marked(self) -> list[MarkedSpan]:
        """All spans: compute operators, transfers, blocks."""
        transfers = ((label, block, OPERATOR, one.begin, one.end) for label, block, one in self._transfers)
        return [*self._given, *self._compute, *transfers, *self._blocks]

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
            beside = [*{(own + step) % len(ranks): None for step in (-1, 0, 1)}]
            shifts = members[own, :, 3] == NEIGHBOURS
            near, far = _met(ranks[beside], members[beside]), _met(ranks, members)
            self._met[axis] = np.where(shifts, near, far)
            self._fullest_bytes += int(members[:, :, 2].max(0).sum())

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


def _met(ranks: IntArray, members: IntArray) -> IntArray:
    """Of n collectives (3, n), as some members (m, n, 4) have seen them; ranks (m,): their numbers.

    When the last member had issued each, and when the last one's had ended (nanoseconds of the wall clock);
    which rank was the last to issue it.
    """
    issued = members[:, :, 0]
    begins = issued.max(0)
    return np.stack([begins, np.maximum(begins, members[:, :, 1].max(0)), ranks[issued.argmax(0)]])


def _as_met(found: Records, rows: IntArray, met: IntArray) -> Records:
    """Give collectives (rows of ``found``) the times of all their members; returns what was waiting."""
    issued, ended, last = met
    rows = rows[: len(issued)]
    waits = found[rows]
    waits["kind"], waits["end_ns"], waits["peer"] = _WAITING, issued, last
    found["start_ns"][rows], found["end_ns"][rows] = issued, ended
    return waits[waits["start_ns"] < waits["end_ns"]]
