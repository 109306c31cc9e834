"""Spans of one step as the executor records them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from braid.actors.stage.streams import Mark, Streams, Transfer
from braid.scheduling.operators import Stream
from braid.scheduling.schedule import Block
from braid.scheduling.trace import Executed, Interval, OverlapNumbers, Span, overlap_numbers


@dataclass(frozen=True)
class SpanLabel:
    """What is known of an operator's spans before it runs."""

    operator: str
    stream: Stream
    layer: int = -1
    bytes: int = 0
    flops: int = 0
    key: str = ""
    """Its name in a profile."""


class Recorder:
    """Collects marks while a step runs and turns them into spans when it is over."""

    def __init__(self, streams: Streams, solo_ns: Mapping[str, int] | None = None) -> None:
        self._streams = streams
        self._solo_ns = solo_ns or {}
        self._blocks: list[tuple[bool, Mark, Mark]] = []
        self._compute: list[tuple[SpanLabel, Block | None, Mark, Mark]] = []
        self._transfers: list[tuple[SpanLabel, Block | None, Transfer]] = []

    def compute(self, label: SpanLabel, block: Block | None, begin: Mark, end: Mark) -> None:
        """An operator ran on the compute stream."""
        self._compute.append((label, block, begin, end))

    def transfer(self, label: SpanLabel, block: Block | None, transfer: Transfer) -> None:
        """A transfer was issued; its end is read when the step is over."""
        self._transfers.append((label, block, transfer))

    def block(self, paired: bool, begin: Mark, end: Mark) -> None:
        """A block, or a paired one, ran."""
        self._blocks.append((paired, begin, end))

    def clear(self) -> None:
        """Forget the step's spans."""
        self._blocks.clear()
        self._compute.clear()
        self._transfers.clear()

    def numbers(self) -> OverlapNumbers:
        """What overlap came to in the step."""
        at = self._streams.nanoseconds
        return overlap_numbers(
            [
                Executed(interval=(begin, end), solo_ns=self._solo_ns.get(label.key))
                for label, _, begin, end in self._intervals(compute=True)
            ],
            [(begin, end) for _, _, begin, end in self._intervals(compute=False)],
            [((at(begin), at(end)), paired) for paired, begin, end in self._blocks],
        )

    def spans(self, rank: int, step: int) -> list[Span]:
        """All spans of the step; times are of the wall clock, so that ranks can be set beside each other."""
        epoch = self._streams.epoch_ns()
        return [
            Span(
                rank=rank,
                step=step,
                strand=block.strand.value if block else "",
                micro_batch=block.micro_batch if block else -1,
                chunk=block.chunk if block else -1,
                layer=label.layer,
                operator=label.operator,
                stream=label.stream,
                start_ns=epoch + begin,
                end_ns=epoch + end,
                bytes=label.bytes,
                flops=label.flops,
            )
            for compute in (True, False)
            for label, block, begin, end in self._intervals(compute)
        ]

    @property
    def count(self) -> int:
        """Spans of the step so far."""
        return len(self._compute) + len(self._transfers)

    def _intervals(self, compute: bool) -> Iterator[tuple[SpanLabel, Block | None, *Interval]]:
        at = self._streams.nanoseconds
        if compute:
            for label, block, begin, end in self._compute:
                yield label, block, at(begin), at(end)
        else:
            for label, block, transfer in self._transfers:
                yield label, block, at(transfer.begin), at(transfer.end)


class NoRecorder(Recorder):
    """Records nothing (``telemetry.spans: false``)."""

    def compute(self, label: SpanLabel, block: Block | None, begin: Mark, end: Mark) -> None:
        """Nothing."""

    def transfer(self, label: SpanLabel, block: Block | None, transfer: Transfer) -> None:
        """Nothing."""

    def block(self, paired: bool, begin: Mark, end: Mark) -> None:
        """Nothing."""
