"""Spans of one step as the executor records them. Needs no NumPy: `step_records` does."""

from itertools import chain

from braid.actors.stage.run.streams import Mark, Streams, Transfer
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.model.operators import Kind
from braid.scheduling.schedule.operations import Pass
from braid.scheduling.trace.spans import KINDS, Label

_BLOCK = Label(operator="block", stream=Stream.COMPUTE)
_PAIRED = Label(operator="paired block", stream=Stream.COMPUTE)
OPERATOR, _SINGLE_BLOCK, _PAIRED_BLOCK = map(KINDS.index, ("operator", "block", "paired block"))
ALL, SOME, NEIGHBOURS = range(3)
"""Who has to have issued a collective before it ends: all members, those that send each other something, or
each rank with its two neighbours on the axis."""
_MEETING = {Kind.ALL_TO_ALL.value: SOME, Kind.SEND_RECEIVE.value: NEIGHBOURS}
MarkedSpan = tuple[Label, Pass | None, int, Mark, Mark]
"""A span: what ran, for which block, its kind (a place in `KINDS`), begin and end."""
Rows = tuple[MarkedSpan, ...]
"""Spans that are no longer a recorder's."""


class Recorder:
    """Collects marks while a step runs, and makes spans of them when it is over."""

    def __init__(self, streams: Streams, *, recording: bool = True) -> None:
        self._streams = streams
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
        """The axis along which other ranks are asked what they have seen of the step (`StepRecorder`)."""
        self.recording = recording
        """Whether spans are kept; may change between steps."""

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
        """Forget the step's spans and marks; another one begins."""
        self._epoch_ns, self._asking = self._streams.epoch_ns() - self._ahead_ns, ""
        spans = (mark for rows in (self._compute, self._blocks) for row in rows for mark in row[3:])
        transfers = (mark for _, _, one in self._transfers for mark in (one.begin, one.end))
        self._streams.forget(chain(spans, transfers))
        self._blocks.clear()
        self._compute.clear()
        self._transfers.clear()
        self._given = ()

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
