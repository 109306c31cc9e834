"""Mixtures: exact shares, epochs of every set, an order that depends on seed and position alone; refusals."""

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.actors.stage.data.mixture import (
    BLOCK,
    MIXTURE_FILE,
    MixedSet,
    Mixture,
    open_splits,
    read_mixture,
    seed_of_set,
    shares,
    write_mixture,
)
from braid.actors.stage.data.sample_order import sample_ids
from braid.actors.stage.data.token_files import TokenShards
from braid.actors.stage.files.reading import UnreadableError
from tests.actors.test_data import edit, write_data

Weights = st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=6)


def mixed(folder: Path, weights: list[float], lengths: list[int], held_out: int = 0) -> Path:
    """Write a mixture; set k has ``lengths[k]`` samples of one token, whose ids tell set and sample."""
    sets = []
    for k, (weight, length) in enumerate(zip(weights, lengths, strict=True)):
        part = folder / f"set{k}"
        part.mkdir(parents=True)
        tokens = np.arange(length + 1) + 10_000 * k
        write_data(part, [tokens], [tokens[: held_out + 1]] if held_out else None)
        sets.append(MixedSet(f"set{k}", str(part), weight))
    (folder / MIXTURE_FILE).write_text(write_mixture(sets))
    return folder


def opened(folder: Path) -> Mixture:
    return open_splits(folder, 1)[0]


@given(weights=Weights, total=st.integers(1, 2 * BLOCK))
def test_shares_add_up_and_are_nearest(weights: list[float], total: int) -> None:
    found = shares(weights, total)
    assert sum(found) == max(total, len(weights))
    assert min(found) >= 1
    whole = sum(map(Fraction, weights))
    exact = [Fraction(weight) / whole * total for weight in weights]
    if min(exact) >= 1:
        assert all(abs(part - quota) < 1 for part, quota in zip(found, exact, strict=True))
    assert shares([2 * weight for weight in weights], total) == found


def test_shares_are_pinned() -> None:
    """Changed shares would make runs that resume take other samples."""
    assert shares([0.7, 0.2, 0.1], BLOCK) == [45875, 13107, 6554]
    assert shares([1, 1e-9, 1e-9], BLOCK) == [BLOCK - 2, 1, 1]
    assert shares([1, 1, 1], 64) == [22, 21, 21]
    assert shares([1, 1, 1], 2) == [1, 1, 1]


@settings(max_examples=12)
@given(
    seed=st.integers(-(2**70), 2**70),
    block=st.integers(0, 2**40),
    parts=st.lists(st.tuples(st.floats(1e-6, 1.0), st.integers(1, 9_000)), min_size=1, max_size=4),
)
def test_every_block_has_its_shares_and_every_set_its_own_epochs(
    tmp_path_factory: pytest.TempPathFactory, seed: int, block: int, parts: list[tuple[float, int]]
) -> None:
    weights, lengths = map(list, zip(*parts, strict=True))
    found = opened(mixed(tmp_path_factory.mktemp("mixture"), weights, lengths))
    ids = found.order(seed, block * BLOCK, BLOCK)
    sets = found.sets_of(ids)
    assert np.bincount(sets, minlength=len(parts)).tolist() == shares(weights, BLOCK)
    for k, (share, length) in enumerate(zip(shares(weights, BLOCK), lengths, strict=True)):
        own = ids[sets == k] - found.starts[k]
        expected = sample_ids(seed_of_set(seed, f"set{k}"), length, block * share, share)
        assert np.array_equal(np.sort(own), np.sort(expected)), "the set's own next positions, each once"


@settings(max_examples=20)
@given(start=st.integers(0, 2**45), first=st.integers(0, 40), count=st.integers(0, 40))
def test_order_does_not_depend_on_how_it_is_asked_for(
    tmp_path_factory: pytest.TempPathFactory, start: int, first: int, count: int
) -> None:
    found = opened(mixed(tmp_path_factory.mktemp("mixture"), [0.5, 0.2, 0.3], [100, 7, 2000]))
    near = start // BLOCK * BLOCK + BLOCK - 20  # over the border of a block
    for begin in (start, near):
        whole = found.order(7, begin, first + count)
        assert np.array_equal(whole[first:], found.order(7, begin + first, count))


def test_the_order_is_pinned(tmp_path: Path) -> None:
    """A changed order would make runs that resume repeat and skip samples."""
    found = opened(mixed(tmp_path, [0.7, 0.3], [50, 1000]))
    assert found.order(0, 0, 12).tolist() == PINNED[:12]
    assert found.order(3, 10**9, 4).tolist() == PINNED[12:]


def test_another_weight_name_or_text_is_another_fingerprint(tmp_path: Path) -> None:
    marks = {opened(mixed(tmp_path / str(n), list(w), [9, 8])).fingerprint for n, w in enumerate(WEIGHTS)}
    assert len(marks) == 2, "0.7 to 0.3 is 7 to 3"
    marks.add(opened(mixed(tmp_path / "text", [7, 3], [9, 7])).fingerprint)
    renamed = tmp_path / "0" / MIXTURE_FILE
    renamed.write_text(renamed.read_text().replace('"set1"', '"other"'))
    marks.add(opened(tmp_path / "0").fingerprint)
    assert len(marks) == 4


WEIGHTS = [(7, 3), (0.7, 0.3), (0.6, 0.4)]
PINNED = [995, 306, 23, 46, 36, 49, 43, 32, 17, 3, 7, 36, 9, 224, 1, 31]


def test_windows_come_from_the_right_set(tmp_path: Path) -> None:
    found = opened(mixed(tmp_path, [1, 1, 1], [5, 1, 4]))
    ids = np.array([9, 0, 5, 6, 0, 4])
    assert found.tokens_at(ids)[:, 0].tolist() == [20_003, 0, 10_000, 20_000, 0, 4]
    assert found.tokens_at(ids[:0]).shape == (0, 2)
    for wrong in (-1, 10):
        with pytest.raises(IndexError, match=r"of 10$"):
            found.tokens_at(np.array([0, wrong]))


def test_validation_is_divided_by_weight(tmp_path: Path) -> None:
    folder = mixed(tmp_path, [2, 1, 1], [90, 90, 90], held_out=20)
    _, validation = open_splits(folder, 1, ["set0", "set2"])
    assert validation is not None
    assert validation.names == ("set0", "set2")
    ids = validation.spread(12)
    assert validation.sets_of(ids).tolist() == [0] * 8 + [1] * 4
    assert (ids[8:] - 20).tolist() == TokenShards.open(tmp_path / "set2", "validation", 1).spread(4).tolist()
    assert len(validation.spread(1000)) == 40, "all that there are"
    assert len(validation.spread(1)) == 2, "at least one of each"
    assert open_splits(folder, 1)[1] is None


def _changed(folder: Path, **entries: object) -> None:
    path = folder / MIXTURE_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / MIXTURE_FILE).write_text("{"), "mixture.json is not JSON; start the run again"),
        (lambda d: _changed(d, version=2), "has version 2, this Braid reads 1"),
        (lambda d: _changed(d, sets=[]), "names no set"),
        (lambda d: _changed(d, sets=[{"name": "a"}]), "damaged .sets.0.directory: "),
        (lambda d: (d / "set1" / "index.json").unlink(), "set1: cannot read index.json"),
        (lambda d: (d / "set1" / "train-00000.bin").unlink(), "train-00000.bin: No such file"),
        (
            lambda d: edit(d / "set1", tokenizer_fingerprint="1"),
            "'set0' and 'set1' have different tokenizers",
        ),
    ],
)
def test_a_damaged_mixture_is_refused(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    mixed(tmp_path, [1, 1], [9, 9])
    damage(tmp_path)
    with pytest.raises((ValueError, UnreadableError), match=message) as fault:
        open_splits(tmp_path, 1)
    assert "\n" not in str(fault.value)


def test_a_set_that_is_too_short_is_named(tmp_path: Path) -> None:
    mixed(tmp_path, [1, 1], [9, 3])
    assert [one.weight for one in read_mixture(tmp_path)] == [1, 1]
    with pytest.raises(ValueError, match=r"^data.mixture, set 'set1': .* has 4 tokens"):
        open_splits(tmp_path, 5)
