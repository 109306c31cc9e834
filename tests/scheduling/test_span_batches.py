"""Batches of spans: what was written is read back, by others too; a torn stream up to there; no damage."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.trace.batches import (
    RECORD,
    Batch,
    Labels,
    Records,
    batches_of,
    decode,
    encode_all,
    head,
    read_batches,
)
from braid.scheduling.trace.spans import Label
from tests.scheduling.test_trace import _span
from tests.spans import spans_of

LABELS = st.builds(
    Label,
    operator=st.text(max_size=20),
    stream=st.sampled_from(Stream),
    layer=st.integers(-1, 100),
    bytes=st.integers(0, 2**40),
    flops=st.integers(0, 2**50),
    shapes=st.text(max_size=20),
    key=st.text(max_size=20),
    solo_ns=st.none() | st.integers(1, 2**40),
)


def made_up(count: int, seed: int) -> Records:
    """Records with everything drawn."""
    draw = np.random.default_rng(seed)
    records = np.zeros(count, RECORD)
    for name in RECORD.names or ():
        limits = np.iinfo(RECORD[name])
        records[name] = draw.integers(limits.min, limits.max, count, RECORD[name], endpoint=True)
    return records


def told(batch: Batch) -> tuple[Any, ...]:
    """What a batch says: arrays make dataclasses incomparable."""
    return {**vars(batch), "records": 0, "labels": 0}, batch.records.tobytes(), batch.labels.all


@given(
    st.lists(st.tuples(st.integers(0, 50), st.lists(LABELS, max_size=4)), max_size=5), st.integers(0, 2**31)
)
@settings(max_examples=60, deadline=None)
def test_what_was_written_is_read_back(sizes: list[tuple[int, list[Label]]], seed: int) -> None:
    batches = [
        Batch(
            rank=seed % 999,
            step=seed % 1000 + n,
            generation=1 + seed % 7,
            sequence=n,
            dropped=seed,
            every=1 + seed % 64,
            labels=Labels(labels),
            records=made_up(count, seed + n),
        )
        for n, (count, labels) in enumerate(sizes)
    ]
    data = encode_all(batches)
    found = list(decode(data))
    assert [told(batch) for batch, _ in found] == [told(batch) for batch in batches]
    ends = [end for _, end in found]
    assert ends[-1:] in ([], [len(data)])
    cut = seed % len(data)  # what is not there yet is left for later
    assert [end for _, end in decode(data[:cut])] == [end for end in ends if end <= cut]
    if ends:  # a reader may begin with any batch
        assert [told(batch) for batch, _ in decode(data[ends[0] :])] == [told(one) for one in batches[1:]]
    table = pa.ipc.open_stream(data).read_all()
    assert [len(row) for row in table["spans"]] == [count for count, _ in sizes]


def test_what_is_no_batch_is_refused(tmp_path: Path) -> None:
    batch = Batch(rank=1, step=0, labels=Labels([Label(operator="qkv", stream=Stream.COMPUTE)]))
    data = bytearray(batch.encode())
    data[len(data) // 2] ^= 255
    other = pa.schema([("rank", pa.int64())]).serialize().to_pybytes()
    for wrong, message in (
        (b"PK\x03\x04" + bytes(60), "byte 0 is not the begin of a batch"),
        (batch.encode() + b"GET / HTTP", f"byte {len(data)} is not the begin"),
        (b"\xff\xff\xff\xff" + bytes(60), "byte 0 is not the begin of a batch"),
        (other, "another version of Braid"),
        (bytes(data), "."),
    ):
        with pytest.raises(ValueError, match=message):
            list(decode(wrong))
    for content, message in ((b"{}" + bytes(8), "cannot be read: byte 0"), (head(), "holds no spans")):
        (tmp_path / "a.arrows").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_batches(tmp_path / "a.arrows")
    with pytest.raises(ValueError, match="No such file"):
        read_batches(tmp_path / "missing.arrows")


def test_a_simulated_step_becomes_a_batch_per_rank_and_the_same_spans_again() -> None:
    spans = [
        _span("qkv", 0, 10, Stream.COMPUTE),
        _span("gather", 10, 30, Stream.INTER),
        _span("qkv", 12, 40, Stream.COMPUTE),
        _span("qkv", 5, 9, Stream.COMPUTE, rank=3),
    ]
    batches = batches_of(spans)
    assert [(batch.rank, len(batch.labels), len(batch.records)) for batch in batches] == [
        (0, 2, 3),
        (3, 1, 1),
    ]
    assert spans_of(batches) == spans
