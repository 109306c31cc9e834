"""Spans as Arrow IPC streams: the format in which ranks send them, and runs and simulations store them.

A stream is a schema and record batches of one row: a rank's spans of a step, and the labels that the spans
refer to by number. So a reader may begin with any batch, and a truncated file can be read up to the cut.
`pyarrow.ipc.open_stream` reads the files. pyarrow is imported on use, as that takes a while.
"""

import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.trace.spans import DIRECTIONS, KINDS, STRANDS, Label, Span

Records = NDArray[np.void]
"""Array (spans,) of dtype `RECORD`."""

RECORD: Final = np.dtype(
    [
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
        ("label", "<u4"),
        ("peer", "<i4"),
        ("micro_batch", "<i2"),
        ("chunk", "<i2"),
        ("strand", "u1"),
        ("direction", "u1"),
        ("kind", "u1"),
    ]
)
"""Times are wall-clock times; ``label``, ``strand``, ``direction`` and ``kind`` are indices into tables. A
micro-batch or chunk of -1 means that the span belongs to none. ``peer``: the rank that was waited for, else
-1."""

SUFFIX: Final = ".arrows"
_LARGEST: Final = 1 << 28
"""Most bytes of a batch's metadata: a larger length means damage."""


class Labels:
    """Labels to which records refer by number; also as arrays with an entry per label."""

    def __init__(self, labels: Iterable[Label] = ()) -> None:
        self.all = tuple(labels)
        self.streams = np.array([label.stream for label in self.all], object)
        self.axes = np.array([label.along for label in self.all], object)
        self.solo_ns = np.array([-1 if (ns := label.solo_ns) is None else ns for label in self.all], np.int64)
        """Solo times of operators; -1 if not known."""

    def __len__(self) -> int:
        return len(self.all)

    def __getitem__(self, number: int) -> Label:
        return self.all[number]

    @cached_property
    def column(self) -> Any:
        """The labels as a column cell of a batch."""
        import pyarrow as pa

        return pa.array([[vars(label) for label in self.all]], _schema().field("labels").type)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A rank's spans of one step."""

    rank: int
    step: int
    """Number of the step, from 0."""
    generation: int = 0
    sequence: int = 0
    """Number of the batch within its rank and generation, from 0: a gap means a lost batch."""
    dropped: int = 0
    """Number of spans that the rank has dropped so far in this generation."""
    every: int = 1
    """Interval in steps at which spans are recorded."""
    labels: Labels = field(default_factory=Labels)
    records: Records = field(default_factory=lambda: np.zeros(0, RECORD))

    def encode(self) -> bytes:
        """Encode the batch as an Arrow message; `head` must precede the first one of a stream."""
        import pyarrow as pa

        schema = _schema()
        columns = [np.ascontiguousarray(self.records[name]) for name in RECORD.fields or ()]
        spans = pa.StructArray.from_arrays([*map(pa.array, columns)], fields=list(_span_type()))
        row = [
            *(pa.array(np.array([getattr(self, name)], np.int64)) for name in _FACTS),
            self.labels.column,
            pa.ListArray.from_arrays(pa.array([0, len(spans)], pa.int32()), spans),
        ]
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
        stream = pa.ipc.new_stream(sink, schema, options=options)
        stream.write_batch(pa.record_batch(row, schema=schema))
        return bytes(memoryview(sink.getvalue())[len(head()) :])


_FACTS: Final = tuple(fact.name for fact in fields(Batch))[:-2]


@cache
def head() -> bytes:
    """Return the bytes with which a stream begins: its schema."""
    return bytes(_schema().serialize())


@cache
def _span_type() -> Any:
    import pyarrow as pa

    return pa.struct([(name, pa.from_numpy_dtype(RECORD[name])) for name in RECORD.names or ()])


@cache
def _schema() -> Any:
    import pyarrow as pa

    numbers = ("layer", "bytes", "flops", "solo_ns")
    names = [field.name for field in fields(Label)]
    label = [(name, pa.int64() if name in numbers else pa.string()) for name in names]
    lists = {"labels": pa.list_(pa.struct(label)), "spans": pa.list_(_span_type())}
    return pa.schema([*((name, pa.int64()) for name in _FACTS), *lists.items()])


def decode(data: bytes) -> Iterator[tuple[Batch, int]]:
    """Yield the batches in a part of a stream, each with its end position; skip an unfinished last batch.

    Raise `ValueError` for bytes that are no batch, are damaged, or come from another version of Braid.
    """
    import pyarrow as pa

    source, position = pa.BufferReader(data), 0
    while len(data) - position >= 8:
        mark, size = struct.unpack_from("<Ii", data, position)
        if mark != 0xFFFFFFFF or not 0 < size < _LARGEST:
            raise ValueError(f"byte {position} is not the begin of a batch of spans")
        if len(data) - position - 8 < size:
            return
        try:
            message = pa.ipc.read_message(source)
        except OSError:
            return  # the body is incomplete
        position = source.tell()
        if message.type == "schema":
            if pa.ipc.read_schema(message) != _schema():
                raise ValueError("the spans were written by another version of Braid, and cannot be read")
            continue
        try:
            row = pa.ipc.read_record_batch(message, _schema())
            row.validate(full=True)
            batch = _batch(row)
        except OSError as error:
            raise ValueError(f"a batch of spans is damaged: {error}") from None
        yield batch, position


def _batch(row: Any) -> Batch:
    spans = row.column("spans").flatten()
    records = np.empty(len(spans), RECORD)
    for number, name in enumerate(RECORD.names or ()):
        records[name] = spans.field(number).to_numpy()
    facts = {name: row.column(name)[0].as_py() for name in _FACTS}
    return Batch(**facts, labels=_labels(row.column("labels")), records=records)


_known: Final[deque[Labels]] = deque(maxlen=64)


def _labels(column: Any) -> Labels:
    """Decode labels, using a cache: most batches have the labels of the previous step, and of other ranks of
    a stage."""
    labels = next((known for known in _known if known.column.equals(column)), None)
    if labels is None:
        rows = column[0].as_py()
        labels = Labels(Label(**{**row, "stream": Stream(row["stream"])}) for row in rows)
        _known.appendleft(labels)
    return labels


def read_batches(path: Path) -> list[Batch]:
    """Read all batches of a file; raise `ValueError` if it cannot be read or has none."""
    try:
        batches = [batch for batch, _ in decode(path.read_bytes())]
    except (OSError, ValueError) as error:
        raise ValueError(f"trace {path} cannot be read: {error}") from None
    if not batches:
        raise ValueError(f"trace {path} holds no spans")
    return batches


def encode_all(batches: Iterable[Batch]) -> bytes:
    return b"".join([head(), *(batch.encode() for batch in batches)])


def batches_of(spans: Iterable[Span]) -> list[Batch]:
    """Convert a simulated step's spans to one batch per rank."""
    labels: dict[int, dict[Label, int]] = {}
    rows: dict[int, list[tuple[int, ...]]] = {}
    for span in spans:
        known = labels.setdefault(span.rank, {})
        shared = {name: getattr(span, name) for name in ("operator", "stream", "layer", "bytes", "flops")}
        number = known.setdefault(Label(**shared), len(known))
        strand, direction = STRANDS.index(span.strand), DIRECTIONS.index(span.direction)
        row = span.start_ns, span.end_ns, number, -1, span.micro_batch, span.chunk, strand, direction, 0
        rows.setdefault(span.rank, []).append(row)
    return [
        Batch(rank=rank, step=0, labels=Labels(labels[rank]), records=np.array(records_of_rank, RECORD))
        for rank, records_of_rank in rows.items()
    ]


def apart(records: Records) -> tuple[Records, Records, Records]:
    """Split a step's records into operators, blocks, and waiting."""
    kinds = records["kind"]
    operators, waits = kinds == KINDS.index("operator"), kinds == KINDS.index("waiting")
    return records[operators], records[~(operators | waits)], records[waits]


def begin_of(batches: Sequence[Batch]) -> int:
    """Return the begin of the first span in some batches; 0 without any."""
    return min((int(batch.records["start_ns"].min()) for batch in batches if len(batch.records)), default=0)
