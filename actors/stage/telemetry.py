"""Spans of one step as the executor records them. Needs no NumPy: `braid.actors.stage.step_records` does."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from braid.actors.stage.streams import Mark, Streams, Transfer
from braid.scheduling.operators import Stream
from braid.scheduling.schedule import Block, Direction, Strand
from braid.scheduling.trace import DIRECTIONS, KINDS, STRANDS, Label, Span

_STRAND = {strand: STRANDS.index(strand.value) for strand in Strand}
_DIRECTION = {
    Direction.FORWARD: DIRECTIONS.index("forward"),
    Direction.BACKWARD: DIRECTIONS.index("backward"),
}
_BLOCK = Label(operator="block", stream=Stream.COMPUTE)
_PAIRED = Label(operator="paired block", stream=Stream.COMPUTE)


class Recorder:
    """Collects marks while a step runs and turns them into records when it is over."""

    def __init__(
        self, streams: Streams, solo_ns: Mapping[str, int] | None = None, *, recording: bool = True
    ) -> None:
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
        self.recording = recording
        """Whether spans are kept; may change between steps."""

    def compute(self, label: Label, block: Block | None, begin: Mark, end: Mark) -> None:
        """An operator ran on the compute stream."""
        if self.recording:
            self._compute.append((label, block, begin, end))

    def transfer(self, label: Label, block: Block | None, transfer: Transfer) -> None:
        """A transfer was issued; its end is read when the step is over."""
        if self.recording:
            self._transfers.append((label, block, transfer))

    def block(self, paired: bool, block: Block, begin: Mark, end: Mark) -> None:
        """A block, or a paired one (then ``block`` is its forward pass), ran."""
        if self.recording:
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

    def spans(self, rank: int, step: int) -> list[Span]:
        """The step's operators as spans; times are of the wall clock."""
        epoch, found = self._streams.epoch_ns(), []
        for begin, end, number, micro_batch, chunk, strand, _, kind in self._rows():
            if KINDS[kind] == "operator":
                label = self.labels[number]
                found.append(
                    Span(
                        rank=rank,
                        step=step,
                        strand=STRANDS[strand],
                        micro_batch=micro_batch,
                        chunk=chunk,
                        layer=label.layer,
                        operator=label.operator,
                        stream=label.stream,
                        start_ns=epoch + begin,
                        end_ns=epoch + end,
                        bytes=label.bytes,
                        flops=label.flops,
                    )
                )
        return found

    def _rows(self) -> Iterator[tuple[int, int, int, int, int, int, int, int]]:
        """Begin, end, label, micro-batch, chunk, strand, direction and kind of every span."""
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


def _place(block: Block | None) -> tuple[int, int, int, int]:
    """Micro-batch, chunk, strand and direction."""
    if block is None:
        return -1, -1, 0, 0
    return block.micro_batch, block.chunk, _STRAND[block.strand], _DIRECTION[block.direction]
