"""A step's spans as records, to be streamed, and the numbers made of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from braid.actors.stage.streams import Streams
from braid.actors.stage.telemetry import OPERATOR, Recorder
from braid.scheduling.operators import Stream
from braid.scheduling.schedule import Direction, Pass, Strand
from braid.scheduling.span_batches import RECORD, Records
from braid.scheduling.trace import DIRECTIONS, KINDS, STRANDS, Label, OverlapNumbers
from braid.scheduling.trace_arrays import IntArray, overlap_numbers

_STRAND = {strand: STRANDS.index(strand.value) for strand in Strand}
_DIRECTION = {
    Direction.FORWARD: DIRECTIONS.index("forward"),
    Direction.BACKWARD: DIRECTIONS.index("backward"),
}


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
        self.labels: list[Label] = []
        """All labels that were ever met, by number, with the solo times that are known."""
        self._ran: tuple[Any, ...] = ()
        self._timeless: Records = np.zeros(0, RECORD)
        """Labels, blocks and kinds of the newest step's spans, and its records but for their times."""
        self._solo = np.zeros(0, np.int64)
        self._streams_of = np.zeros(0, object)

    def records(self, step: int) -> Records:
        """The step's records: compute operators, transfers, blocks; times are of the wall clock."""
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
        found["step"] = step
        return found

    def numbers(self, records: Records) -> OverlapNumbers:
        """What overlap came to in a step with these records."""
        is_block = records["kind"] != OPERATOR
        blocks, operators = records[is_block], records[~is_block]
        if len(self._solo) < len(self.labels):
            known = (-1 if label.solo_ns is None else label.solo_ns for label in self.labels)
            self._solo = np.fromiter(known, np.int64, len(self.labels))
            self._streams_of = np.array([label.stream for label in self.labels], object)
        ran_on = self._streams_of[operators["label"]] if len(operators) else np.zeros(0, object)
        compute = operators[ran_on == Stream.COMPUTE]
        return overlap_numbers(
            _intervals(compute),
            self._solo[compute["label"]],
            [_intervals(operators[ran_on == link]) for link in (Stream.INTRA, Stream.INTER)],
            _intervals(blocks),
            blocks["kind"] == KINDS.index("paired block"),
        )

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
        return found

    def _number(self, label: Label) -> int:
        found = self._numbers.get(id(label))
        if found is None:
            found = self._numbers[id(label)] = len(self.labels)
            self._kept.append(label)
            self.labels.append(replace(label, solo_ns=self._solo_ns.get(label.key)))
        return found


def _intervals(records: Records) -> IntArray:
    return np.stack([records["start_ns"], records["end_ns"]], axis=1)
