"""Spans in batches: the compact form in which ranks stream them and run directories keep them.

A batch is one rank's records of some steps: a fixed head, a JSON header, and an array of `RECORD`, all under
one checksum. What is the same for every execution of an operator stands in its *label*, which is sent once
and then named by its number. Batches one after the other make a file, which
`braid.dashboards.trace_folder` reads.
"""

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from braid.scheduling.operators import Stream
from braid.scheduling.trace import KINDS, STRANDS, Label, Span

Records = NDArray[np.void]
"""(spans,) of `RECORD`."""

RECORD: Final = np.dtype(
    [
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
        ("label", "<u4"),
        ("step", "<i4"),
        ("peer", "<i4"),
        ("micro_batch", "<i2"),
        ("chunk", "<i2"),
        ("strand", "u1"),
        ("direction", "u1"),
        ("kind", "u1"),
        ("unused", "u1"),
    ]
)
"""36 bytes. Times are of the wall clock. A micro-batch or chunk of -1: it belongs to none. ``peer``: the
rank that was waited for; -1 where the kind is not waiting."""

_MAGIC: Final = b"BRAIDSP2"
_HEAD: Final = struct.Struct("<8sIII")
"""Magic, bytes of the header, bytes of the records, CRC-32 of both."""
_LARGEST: Final = 1 << 28
"""No header and no array is larger; a length beyond is damage."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Records of one rank, with the labels that are new in them."""

    rank: int
    generation: int
    sequence: int
    """Number of the batch in its rank and generation, from 0: a gap is a batch that was lost."""
    first_label: int = 0
    """Number of the first of `labels`."""
    labels: tuple[Label, ...] = ()
    records: Records = field(default_factory=lambda: np.zeros(0, RECORD))
    dropped: int = 0
    """Spans that the rank has had to drop so far in this generation."""
    every: int = 1
    """Spans of every so many steps are recorded."""

    def encode(self) -> bytes:
        """The batch as bytes."""
        header = {
            "rank": self.rank,
            "generation": self.generation,
            "sequence": self.sequence,
            "first_label": self.first_label,
            "labels": [_label_fields(label) for label in self.labels],
            "dropped": self.dropped,
            "every": self.every,
        }
        text = json.dumps(header, separators=(",", ":")).encode()
        body = np.ascontiguousarray(self.records, RECORD).tobytes()
        check = zlib.crc32(body, zlib.crc32(text))
        return _HEAD.pack(_MAGIC, len(text), len(body), check) + text + body


def decode(data: bytes | memoryview) -> Iterator[tuple[Batch, int]]:
    """The batches in some bytes, each with the place behind it; an unfinished last one is left out.

    `ValueError` for bytes that are no batch or damaged.
    """
    place = 0
    while len(data) - place >= _HEAD.size:
        magic, header, body, check = _HEAD.unpack_from(data, place)
        if magic != _MAGIC and magic.startswith(_MAGIC[:7]):
            raise ValueError("the spans were written by another version of Braid, and cannot be read")
        if magic != _MAGIC or header > _LARGEST or body > _LARGEST or body % RECORD.itemsize:
            raise ValueError(f"byte {place} is not the begin of a batch of spans")
        end = place + _HEAD.size + header + body
        if end > len(data):
            return
        middle = place + _HEAD.size + header
        if zlib.crc32(data[place + _HEAD.size : end]) != check:
            raise ValueError(f"the batch of spans at byte {place} is damaged: its checksum differs")
        yield _batch(json.loads(bytes(data[place + _HEAD.size : middle])), data[middle:end]), end
        place = end


def _batch(header: dict[str, Any], body: bytes | memoryview) -> Batch:
    labels = tuple(Label(**{**fields, "stream": Stream(fields["stream"])}) for fields in header.pop("labels"))
    return Batch(**header, labels=labels, records=np.frombuffer(body, RECORD))


_DEFAULTS = {known.name: known.default for known in fields(Label)}


def _label_fields(label: Label) -> dict[str, Any]:
    """Fields that are not what they are by default. Without `asdict`, which takes twelve times as long."""
    return {name: value for name, default in _DEFAULTS.items() if (value := getattr(label, name)) != default}


def apart(records: Records) -> tuple[Records, Records, Records]:
    """A step's operators, its blocks, and its waiting."""
    kinds = records["kind"]
    operators, waits = kinds == KINDS.index("operator"), kinds == KINDS.index("waiting")
    return records[operators], records[~(operators | waits)], records[waits]


def span_of(rank: int, record: np.void, label: Label) -> Span:
    """A record with its label as the span that simulator and runtime share."""
    return Span(
        rank=rank,
        step=int(record["step"]),
        strand=STRANDS[record["strand"]],
        micro_batch=int(record["micro_batch"]),
        chunk=int(record["chunk"]),
        layer=label.layer,
        operator=label.operator,
        stream=Stream(label.stream),
        start_ns=int(record["start_ns"]),
        end_ns=int(record["end_ns"]),
        bytes=label.bytes,
        flops=label.flops,
    )


def concatenated(arrays: Sequence[Records]) -> Records:
    """Arrays of records as one."""
    return np.concatenate([np.zeros(0, RECORD), *arrays])
