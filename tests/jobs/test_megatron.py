"""Megatron's pairs of files: tokens as they are, document by document; refusals of damaged files."""

import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from braid.actors.stage.data.token_files import read_index
from braid.jobs.data import corpus
from braid.jobs.data.megatron import TokenPair
from tests.jobs.corpora import prepared, request_of, stored_ids, train_tokenizer

CODES = {"u1": 1, "i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<u2": 8}
END = 256
Documents = Sequence[Sequence[np.ndarray]]


def write_pair(stem: Path, documents: Documents, dtype: str = "<u2", version: int = 1) -> Path:
    """Write documents, each of one or more sequences of token ids, as Megatron's preprocessing does."""
    sequences = [np.asarray(one, dtype) for document in documents for one in document]
    stem.with_suffix(".bin").write_bytes(b"".join(one.tobytes() for one in sequences))
    sizes = np.array([len(one) for one in sequences], "<i4")
    ends = np.cumsum(sizes, dtype="<i8") * np.dtype(dtype).itemsize
    bounds = np.cumsum([0, *map(len, documents)]).astype("<i8")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", version, CODES[dtype], len(sizes), len(bounds))
    pointers = ends - sizes * np.dtype(dtype).itemsize
    stem.with_suffix(".idx").write_bytes(head + sizes.tobytes() + pointers.tobytes() + bounds.tobytes())
    return stem


def drawn(seed: int, documents: int = 200, most: int = 127) -> list[list[np.ndarray]]:
    """Documents of one to three sequences; every second one ends with the end token."""
    rng = np.random.default_rng(seed)
    found = [
        [rng.integers(0, most, rng.integers(0, 90)) for _ in range(rng.integers(1, 4))]
        for _ in range(documents)
    ]
    for document in found[::2]:
        document[-1] = np.append(document[-1], END if most > 127 else most - 1)
    return found


def with_ends(documents: Documents) -> list[np.ndarray]:
    whole = [np.concatenate(document) for document in documents]
    return [one if one[-1] == END else np.append(one, END) for one in whole if len(one)]


@pytest.mark.parametrize("dtype", CODES)
def test_documents_are_copied_in_order(dtype: str, tmp_path: Path) -> None:
    wide = np.iinfo(dtype).max >= END
    documents = drawn(CODES[dtype], most=END if wide else 127)
    write_pair(tmp_path / "text_document", documents, dtype)
    done = prepared(tmp_path / "out", tmp_path / "text_document", format="megatron", validation_fraction=0)
    expected = with_ends(documents)
    assert np.array_equal(stored_ids(tmp_path / "out", "train"), np.concatenate(expected))
    assert done.documents == len(expected)
    assert done.index.documents_empty == len(documents) - len(expected)


def test_validation_has_whole_documents_and_items_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = drawn(5, 400)
    write_pair(tmp_path / "a", documents)
    options = {"format": "megatron", "validation_fraction": 0.2}
    for size, name in ((1 << 20, "one"), (1_000, "many")):
        monkeypatch.setattr(corpus, "_SMALLEST_ITEM_BYTES", size)
        monkeypatch.setattr(corpus, "_LARGEST_ITEM_BYTES", size)
        for given in ("a", "a.bin", "a.idx", "*", "*.bin"):  # one pair, however it is named
            request = request_of(tmp_path / given, **options)
            assert [Path(source.path).name for source in request.sources] == ["a.bin", "a.idx"]
        assert len(request.items()) == 1 if name == "one" else len(request.items()) > 20
        prepared(tmp_path / name, tmp_path / "a", **options)
    for split in ("train", "validation"):
        one, many = (stored_ids(tmp_path / name, split) for name in ("one", "many"))
        assert np.array_equal(one, many)
    found = [part.tolist() for split in ("train", "validation") for part in parts_of(tmp_path / "one", split)]
    assert sorted(found) == sorted(document.tolist() for document in with_ends(documents))
    assert read_index(tmp_path / "one").token_bytes == (), "nobody knows the text"
    share = read_index(tmp_path / "one").tokens("validation") / sum(map(len, with_ends(documents)))
    assert 0.1 < share < 0.3


def parts_of(folder: Path, split: str) -> list[np.ndarray]:
    ids = stored_ids(folder, split)
    return [part for part in np.split(ids, np.flatnonzero(ids == END) + 1) if len(part)]


def test_one_document_gives_its_tail_to_validation(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [[np.arange(100)]])
    prepared(tmp_path / "out", tmp_path / "a", format="megatron", validation_fraction=0.2)
    assert stored_ids(tmp_path / "out", "validation").tolist() == [*range(81, 100), END]


def test_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(tmp_path / "t.json", ["<s>", "</s>"])
    write_pair(tmp_path / "a", [[np.array([5, 6, 1])], [np.array([7])]])
    options = {"format": "megatron", "validation_fraction": 0, "tokenizer": str(tokenizer)}
    prepared(tmp_path / "out", tmp_path / "a", **options)
    assert stored_ids(tmp_path / "out", "train").tolist() == [5, 6, 1, 7, 1]


def edited(folder: Path, at: int, content: bytes) -> None:
    path = folder / "a.idx"
    before = path.read_bytes()
    path.write_bytes(before[:at] + content + before[at + len(content) :])


def cut_short(path: Path, less: int) -> None:
    path.write_bytes(path.read_bytes()[:-less])


SIZES, POINTERS, BOUNDS = 34, 34 + 3 * 4, 34 + 3 * 12


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda d: (d / "a.idx").unlink(), "data.files: .*a.idx' finds no file"),
        (lambda d: (d / "a.bin").unlink(), "data.files: .*a.bin' finds no file"),
        (lambda d: (d / "a.idx").write_bytes(b""), "it does not begin as Megatron's index"),
        (lambda d: (d / "a.idx").write_bytes(b"MMIDIDX\x00\x00\x01"), "it does not begin as Megatron's"),
        (lambda d: edited(d, 9, b"\x02"), "it has version 2, this Braid reads 1"),
        (lambda d: edited(d, 17, b"\x07"), "its tokens have the dtype code 7, known are "),
        (lambda d: edited(d, 18, b"\xff" * 8), "it is cut short: 18446744073709551615 sequences"),
        (lambda d: cut_short(d / "a.idx", 8), "it is cut short: 3 sequences, 3 document bounds"),
        (lambda d: cut_short(d / "a.bin", 2), "a.bin' is not readable .it has 14 bytes, and .* needs 16"),
        (lambda d: cut_short(d / "a.bin", 1), "a.bin' is not readable .it has 15 bytes"),
        (lambda d: edited(d, SIZES, b"\xff" * 4), "a sequence has an impossible size or place"),
        (lambda d: edited(d, POINTERS, b"\x01"), "a sequence has an impossible size or place"),
        (lambda d: edited(d, BOUNDS + 16, b"\x02"), "its documents are not all of its 3 sequences"),
        (
            lambda d: write_pair(d / "a", [[np.array([3, 257])]]),
            "257 tokens, and document 0 of .* has token 257",
        ),
        (lambda d: write_pair(d / "a", [[np.array([3, -1])]], "<i4"), "has token -1; set data.tokenizer"),
        (lambda d: write_pair(d / "a", [[np.zeros(0)]]), "data.files: 2 file.s. hold no text"),
    ],
)
def test_a_pair_that_is_damaged_is_refused(
    damage: Callable[[Path], object], says: str, tmp_path: Path
) -> None:
    write_pair(tmp_path / "a", [[np.arange(3), np.arange(2)], [np.arange(3)]])
    damage(tmp_path)
    with pytest.raises(ValueError, match=says) as fault:
        prepared(tmp_path / "out", tmp_path / "a", format="megatron")
    assert "\n" not in str(fault.value)
    assert not (tmp_path / "out").exists()


def test_half_a_pair_and_urls_are_refused(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [[np.arange(3)]])
    with pytest.raises(ValueError, match=r"a.idx' has no partner '.*a.bin'; add or exclude both"):
        prepared(tmp_path / "out", tmp_path / "a", format="megatron", exclude=["*.bin"])
    with pytest.raises(ValueError, match=r"data.files: 'memory://a.bin'"):
        prepared(tmp_path / "out", "memory://a", format="megatron")


def test_sequences_may_lie_anywhere(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [[np.array([1, 2]), np.array([3])], [np.array([4, 5])]])
    edited(tmp_path, POINTERS, struct.pack("<qqq", 6, 4, 0))
    pair = TokenPair.open(str(tmp_path / "a.idx"))
    assert [pair.document(number).tolist() for number in range(2)] == [[4, 5, 3], [1, 2]]
