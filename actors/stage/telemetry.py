"""Spans of one step as the executor records them, and as a rank streams them."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from braid.actors.stage.streams import Mark, Streams, Transfer
from braid.scheduling.operators import Stream
from braid.scheduling.schedule import Block, Direction, Strand
from braid.scheduling.span_batches import DIRECTIONS, KINDS, RECORD, STRANDS, Label, Records, span_of
from braid.scheduling.trace import IntArray, OverlapNumbers, Span, overlap_numbers

_STRAND = {strand: STRANDS.index(strand.value) for strand in Strand}
_DIRECTION = {
    Direction.FORWARD: DIRECTIONS.index("forward"),
    Direction.BACKWARD: DIRECTIONS.index("backward"),
}
_BLOCK = Label(operator="block", stream=Stream.COMPUTE)
_PAIRED = Label(operator="paired block", stream=Stream.COMPUTE)


class Recorder:
    """Collects marks while a step runs and turns them into records when it is over."""

    def __init__(self, streams: Streams, solo_ns: Mapping[str, int] | None = None) -> None:
        self._streams = streams
        self._solo_ns = solo_ns or {}
        self._blocks: list[tuple[bool, Block, Mark, Mark]] = []
        self._compute: list[tuple[Label, Block | None, Mark, Mark]] = []
        self._transfers: list[tuple[Label, Block | None, Transfer]] = []
        self._numbers: dict[int, int] = {}
        """Of labels, by their identity; `_kept` keeps them alive."""
        self._kept: list[Label] = []
        self.labels: list[Label] = []
        """All labels that were ever met, by number, with the solo times that are known."""
        self._solo = np.zeros(0, np.int64)

    def compute(self, label: Label, block: Block | None, begin: Mark, end: Mark) -> None:
        """An operator ran on the compute stream."""
        self._compute.append((label, block, begin, end))

    def transfer(self, label: Label, block: Block | None, transfer: Transfer) -> None:
        """A transfer was issued; its end is read when the step is over."""
        self._transfers.append((label, block, transfer))

    def block(self, paired: bool, block: Block, begin: Mark, end: Mark) -> None:
        """A block, or a paired one (then ``block`` is its forward pass), ran."""
        self._blocks.append((paired, block, begin, end))

    def clear(self) -> None:
        """Forget the step's spans."""
        self._blocks.clear()
        self._compute.clear()
        self._transfers.clear()

    @property
    def count(self) -> int:
        """Spans of the step so far, without blocks."""
        return len(self._compute) + len(self._transfers)

    def records(self, step: int) -> Records:
        """The step's records: compute operators, transfers, blocks; times are of the wall clock."""
        rows = [*self._rows()]
        found = np.zeros(len(rows), RECORD)
        if rows:
            table = np.array(rows, np.int64)
            names = ("start_ns", "end_ns", "label", "micro_batch", "chunk", "strand", "direction", "kind")
            for column, name in enumerate(names):
                found[name] = table[:, column]
            epoch = self._streams.epoch_ns()
            found["start_ns"] += epoch
            found["end_ns"] += epoch
            found["step"] = step
        return found

    def spans(self, rank: int, step: int) -> list[Span]:
        """The step's operators as spans."""
        records = self.records(step)
        operators = records[records["kind"] == KINDS.index("operator")]
        return [span_of(rank, record, self.labels[record["label"]]) for record in operators]

    def numbers(self, records: Records) -> OverlapNumbers:
        """What overlap came to in a step with these records."""
        is_block = records["kind"] != KINDS.index("operator")
        blocks, operators = records[is_block], records[~is_block]
        if len(self._solo) < len(self.labels):
            known = (-1 if label.solo_ns is None else label.solo_ns for label in self.labels)
            self._solo = np.fromiter(known, np.int64, len(self.labels))
            self._computes = np.array([label.stream is Stream.COMPUTE for label in self.labels])
        computes = self._computes[operators["label"]] if len(operators) else np.zeros(0, bool)
        compute = operators[computes]
        return overlap_numbers(
            _intervals(compute),
            self._solo[compute["label"]],
            _intervals(operators[~computes]),
            _intervals(blocks),
            blocks["kind"] == KINDS.index("paired block"),
        )

    def _rows(self) -> Iterator[tuple[int, ...]]:
        at, number = self._streams.nanoseconds, self._number
        for label, block, begin, end in self._compute:
            yield at(begin), at(end), number(label), *_place(block), 0
        for label, block, transfer in self._transfers:
            yield at(transfer.begin), at(transfer.end), number(label), *_place(block), 0
        for paired, block, begin, end in self._blocks:
            yield at(begin), at(end), number(_PAIRED if paired else _BLOCK), *_place(block), 1 + paired

    def _number(self, label: Label) -> int:
        found = self._numbers.get(id(label))
        if found is None:
            found = self._numbers[id(label)] = len(self.labels)
            self._kept.append(label)
            self.labels.append(replace(label, solo_ns=self._solo_ns.get(label.key)))
        return found


def _intervals(records: Records) -> IntArray:
    return np.stack([records["start_ns"], records["end_ns"]], axis=1)


def _place(block: Block | None) -> tuple[int, int, int, int]:
    """Micro-batch, chunk, strand and direction."""
    if block is None:
        return -1, -1, 0, 0
    return block.micro_batch, block.chunk, _STRAND[block.strand], _DIRECTION[block.direction]


class NoRecorder(Recorder):
    """Records nothing (``telemetry.spans: false``)."""

    def compute(self, label: Label, block: Block | None, begin: Mark, end: Mark) -> None:
        """Nothing."""

    def transfer(self, label: Label, block: Block | None, transfer: Transfer) -> None:
        """Nothing."""

    def block(self, paired: bool, block: Block, begin: Mark, end: Mark) -> None:
        """Nothing."""
