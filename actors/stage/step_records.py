"""A step's spans as records, to be streamed, and the numbers made of them."""

from collections.abc import Mapping

import numpy as np

from braid.actors.stage.streams import Streams
from braid.actors.stage.telemetry import Recorder
from braid.scheduling.operators import Stream
from braid.scheduling.span_batches import RECORD, Records
from braid.scheduling.trace import KINDS, OverlapNumbers
from braid.scheduling.trace_arrays import IntArray, overlap_numbers


class StepRecorder(Recorder):
    """A recorder whose steps become arrays of `RECORD`."""

    def __init__(
        self, streams: Streams, solo_ns: Mapping[str, int] | None = None, *, recording: bool = True
    ) -> None:
        super().__init__(streams, solo_ns, recording=recording)
        self._solo = np.zeros(0, np.int64)
        self._computes = np.zeros(0, bool)

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


def _intervals(records: Records) -> IntArray:
    return np.stack([records["start_ns"], records["end_ns"]], axis=1)
