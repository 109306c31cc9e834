"""Batches of spans: what was written is read back, and damage is found."""

import contextlib
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.scheduling.operators import Stream
from braid.scheduling.span_batches import RECORD, Batch, Records, decode, span_of
from braid.scheduling.trace import Label

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


def made_up(count: int, seed: int, labels: int = 1) -> Records:
    """Records with everything drawn."""
    draw = np.random.default_rng(seed)
    records = np.zeros(count, RECORD)
    records["start_ns"] = draw.integers(0, 2**60, count)
    records["end_ns"] = records["start_ns"] + draw.integers(0, 2**30, count)
    records["label"] = draw.integers(0, labels, count)
    records["step"] = draw.integers(0, 2**31 - 1, count)
    for name in ("micro_batch", "chunk"):
        records[name] = draw.integers(-1, 2**15 - 1, count)
    for name in ("strand", "direction", "kind"):
        records[name] = draw.integers(0, 3, count)
    return records


def same(one: Batch, other: Batch) -> bool:
    """Arrays make dataclasses incomparable."""
    return {**vars(one), "records": None} == {
        **vars(other),
        "records": None,
    } and one.records.tobytes() == other.records.tobytes()


@given(
    st.lists(st.tuples(st.integers(0, 50), st.lists(LABELS, max_size=4)), max_size=5), st.integers(0, 2**31)
)
@settings(max_examples=60, deadline=None)
def test_what_was_written_is_read_back(sizes: list[tuple[int, list[Label]]], seed: int) -> None:
    batches = [
        Batch(
            rank=seed % 999,
            generation=1 + seed % 7,
            sequence=n,
            first_label=seed % 5,
            labels=tuple(labels),
            records=made_up(count, seed + n),
            dropped=seed,
            every=1 + seed % 64,
        )
        for n, (count, labels) in enumerate(sizes)
    ]
    data = b"".join(batch.encode() for batch in batches)
    found = list(decode(data))
    assert all(same(one, other) for (one, _), other in zip(found, batches, strict=True))
    assert (found[-1][1] if found else 0) == len(data)
    if data:  # what is not there yet is left for later
        cut = seed % len(data)
        whole = [end for _, end in found if end <= cut]
        assert [end for _, end in decode(data[:cut])] == whole


@given(st.integers(1, 40), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_a_flipped_bit_is_found(count: int, seed: int) -> None:
    batch = Batch(rank=1, generation=1, sequence=0, labels=(_label(),), records=made_up(count, seed))
    data = bytearray(batch.encode())
    place = random.Random(seed).randrange(len(data) * 8)
    data[place // 8] ^= 1 << place % 8
    # Damaged lengths may also make the batch look unfinished: then nothing of it is read.
    with contextlib.suppress(ValueError):
        assert list(decode(bytes(data))) == []


def test_bytes_of_something_else_are_refused() -> None:
    with pytest.raises(ValueError, match="byte 0 is not the begin of a batch"):
        list(decode(b"PK\x03\x04" + bytes(60)))


def test_a_record_is_the_span_that_the_simulator_emits() -> None:
    records = made_up(1, 3)
    records[0] = (100, 250, 0, 7, -1, 3, 1, 2, 1, 0, 0)
    span = span_of(5, records[0], _label(bytes=64))
    expected: dict[str, Any] = {
        "rank": 5,
        "step": 7,
        "strand": "beta",
        "micro_batch": 3,
        "chunk": 1,
        "layer": 2,
        "operator": "qkv",
        "stream": Stream.COMPUTE,
        "start_ns": 100,
        "end_ns": 250,
        "bytes": 64,
        "flops": 0,
    }
    assert vars(span) == expected


def _label(**fields: Any) -> Label:
    return Label(**{"operator": "qkv", "stream": Stream.COMPUTE, "layer": 2, **fields})
