"""The reading side of training data: order of samples, windows across shards, refusal of damaged folders."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.actors.stage.data.mixture import open_splits
from braid.actors.stage.data.sample_order import sample_ids
from braid.actors.stage.data.token_files import DataIndex, TokenShard, TokenShards, read_index
from braid.actors.stage.files.reading import UnreadableError
from tests.architecture.test_imports import loaded_after


def write_data(
    folder: Path, train: list[np.ndarray], validation: list[np.ndarray] | None = None, dtype: str = "uint16"
) -> DataIndex:
    """Write a data set as `braid.jobs.data.prepare` would, with the given shards."""

    def shard(name: str, ids: np.ndarray) -> TokenShard:
        content, tokens = ids.astype(dtype).tobytes(), len(ids)
        (folder / name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        return TokenShard(file=name, tokens=tokens, bytes_of_text=3 * tokens, documents=1, sha256=digest)

    splits = {
        split: tuple(shard(f"{split}-{number:05d}.bin", ids) for number, ids in enumerate(arrays))
        for split, arrays in (("train", train), ("validation", validation or []))
    }
    texts: dict[str, Any] = {"tokenizer": "bytes", "tokenizer_fingerprint": "0", "request": "0"}
    numbers = {"vocabulary": 257, "end_of_document": 256, "documents_skipped": 0, "documents_empty": 0}
    index = DataIndex(dtype=dtype, splits=splits, parameters={}, sources=(), **texts, **numbers)
    (folder / "index.json").write_text(index.to_json())
    return index


def counting(*lengths: int) -> list[np.ndarray]:
    """Shards of the given lengths whose tokens count on through all of them."""
    return np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])


# Order of samples.


@given(seed=st.integers(-(2**70), 2**70), samples=st.integers(1, 3000), epoch=st.integers(0, 2**50))
def test_any_epoch_is_a_permutation(seed: int, samples: int, epoch: int) -> None:
    ids = sample_ids(seed, samples, epoch * samples, samples)
    assert np.array_equal(np.sort(ids), np.arange(samples))


@given(
    samples=st.integers(1, 2**62),
    start=st.integers(0, 2**62),
    first=st.integers(0, 40),
    count=st.integers(0, 40),
)
def test_order_does_not_depend_on_how_it_is_asked_for(
    samples: int, start: int, first: int, count: int
) -> None:
    whole = sample_ids(7, samples, start, first + count)
    assert np.array_equal(whole[first:], sample_ids(7, samples, start + first, count))
    assert ((whole >= 0) & (whole < samples)).all()


def test_the_order_is_pinned() -> None:
    """A changed order would make runs that resume repeat and skip samples."""
    assert sample_ids(0, 10, 0, 20).tolist() == [3, 9, 0, 8, 4, 1, 7, 2, 5, 6, 7, 0, 1, 5, 9, 3, 2, 8, 4, 6]
    large = sample_ids(1234, 10**12, 5 * 10**12 - 2, 4)
    assert large.tolist() == [35674520411, 472059767871, 435074830390, 17976056268]


# Windows.


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    sequence=st.integers(1, 40),
    dtype=st.sampled_from(["uint16", "uint32"]),
    data=st.data(),
)
def test_windows_are_those_of_the_joined_shards(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    sequence: int,
    dtype: str,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("data")
    write_data(folder, counting(*lengths), dtype=dtype)
    if sum(lengths) < sequence + 1:
        with pytest.raises(ValueError, match=f"has {sum(lengths)} tokens"):
            TokenShards.open(folder, "train", sequence)
        return
    shards = TokenShards.open(folder, "train", sequence)
    assert shards.samples == (sum(lengths) - 1) // sequence
    ids = data.draw(st.lists(st.integers(0, shards.samples - 1), max_size=20))
    windows = shards.tokens_at(np.array(ids, dtype=np.int64))
    assert windows.dtype == np.int64
    joined = np.arange(sum(lengths))
    naive = [joined[i * sequence : i * sequence + sequence + 1] for i in ids]
    assert np.array_equal(windows, np.array(naive).reshape(len(ids), sequence + 1))


@pytest.mark.parametrize("sample", [-1, 8])
def test_a_sample_outside_is_refused(tmp_path: Path, sample: int) -> None:
    write_data(tmp_path, counting(33))
    with pytest.raises(IndexError, match=f"samples {sample} to {sample} of 8"):
        open_splits(tmp_path, 4)[0].tokens_at(np.array([sample]))


def test_bytes_are_those_of_the_tokens(tmp_path: Path) -> None:
    index = write_data(tmp_path, counting(10, 20), counting(7))
    assert index.bytes_of(np.array([1, 2])) is None, "a data set of before, which does not say it"
    edit(tmp_path, token_bytes=[*range(256), 0])
    tokens = np.array([[3, 256, 5], [0, 3, 255]])
    assert read_index(tmp_path).bytes_of(tokens) == 3 + 0 + 5 + 0 + 3 + 255


@pytest.mark.parametrize(
    ("most", "ids"), [(1, [0]), (2, [0, 5]), (3, [0, 3, 7]), (4, [0, 2, 5, 8]), (11, [*range(11)])]
)
def test_samples_are_spread_over_the_split(tmp_path: Path, most: int, ids: list[int]) -> None:
    write_data(tmp_path, counting(20, 25))  # 11 samples of 4
    shards = TokenShards.open(tmp_path, "train", 4)
    assert shards.spread(most).tolist() == ids
    assert shards.spread(11 + most).tolist() == [*range(11)], "more than there are: all of them, once"


def test_the_fingerprint_is_that_of_the_tokens(tmp_path: Path) -> None:
    index = write_data(tmp_path, counting(10, 20))
    assert read_index(tmp_path) == index
    elsewhere = dataclasses.replace(index, request="1", sources=(("/a", 1, 2),), parameters={"a": 1})
    assert elsewhere.fingerprint == index.fingerprint
    assert dataclasses.replace(index, vocabulary=300).fingerprint != index.fingerprint
    assert write_data(tmp_path, counting(11, 19)).fingerprint != index.fingerprint


# Refusals.


def edit(folder: Path, **entries: object) -> None:
    path = folder / "index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def edit_shard(folder: Path, **entries: object) -> None:
    splits = json.loads((folder / "index.json").read_text())["splits"]
    splits["train"][0].update(entries)
    edit(folder, splits=splits)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "index.json").unlink(), "cannot read index.json.*`braid prepare`"),
        (lambda d: (d / "index.json").write_text("{"), "is not JSON; prepare it again"),
        (lambda d: (d / "index.json").write_text("[" * 100_000), "is not JSON; prepare it again"),
        (lambda d: (d / "index.json").write_text("[]"), "not of the format braid-tokens"),
        (lambda d: edit(d, format="npm"), "not of the format braid-tokens"),
        (lambda d: edit(d, version=2), "has version 2, this Braid reads 1; prepare it again"),
        (lambda d: edit(d, dtype="float64"), "damaged .dtype: Input should be 'uint16' or 'uint32'"),
        (lambda d: edit(d, token_bytes=[1] * 256), "damaged .token_bytes has 256 entries, the vocabulary 25"),
        (lambda d: edit(d, splits={}), "damaged .splits are"),
        (lambda d: edit_shard(d, tokens=-10), r"damaged .splits\.train\.0\.tokens: "),
        (lambda d: edit_shard(d, file="../train-00000.bin"), "damaged .shard '../train-00000.bin'"),
        (lambda d: (d / "train-00000.bin").unlink(), "train-00000.bin: No such file.*prepare it again"),
        (lambda d: (d / "train-00000.bin").write_bytes(b"12"), "train-00000.bin has 2 bytes, not 66"),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    write_data(tmp_path, counting(33))
    damage(tmp_path)
    with pytest.raises((ValueError, UnreadableError), match=message) as fault:
        TokenShards.open(tmp_path, "train", 4)
    assert str(tmp_path) in str(fault.value)
    assert "\n" not in str(fault.value)


def test_a_split_that_is_too_short_is_refused(tmp_path: Path) -> None:
    write_data(tmp_path, counting(33), counting(4))
    train = "'train' has 33 tokens, one sample of sequence 33 needs 34; add text"
    validation = r"'validation' has 4 tokens, .* needs 5; .*data.validation_fraction"
    for split, sequence, says in (("train", 33, train), ("validation", 4, validation)):
        with pytest.raises(ValueError, match=says):
            TokenShards.open(tmp_path, split, sequence)


def test_reading_needs_neither_ray_nor_pyarrow() -> None:
    assert not loaded_after("import braid.actors.stage.data.token_files") & {"ray", "pyarrow", "torch"}
