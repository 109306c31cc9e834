"""Bytes and Hugging Face tokenizers."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from braid.jobs.data.prepare import prepare
from braid.jobs.data.tokenizer import BytesTokenizer, HuggingFaceTokenizer
from tests.jobs.corpora import DOCUMENTS, corpus_of, stored_ids, train_tokenizer, write_lines


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    tokenizer = BytesTokenizer()
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(np.append(ids.astype(np.int64), 256)) == text


@pytest.mark.parametrize(
    ("special", "end"),
    [(["</s>", "<|endoftext|>"], 1), (["<pad>", "<eos>"], 1), (["</s>"], 0), (["<pad>"], None)],
)
def test_the_end_of_document_of_a_tokenizer(special: list[str], end: int | None, tmp_path: Path) -> None:
    path = train_tokenizer(tmp_path / "tokenizer.json", special)
    tokenizer = HuggingFaceTokenizer(path)
    size = Backend.from_file(str(path)).get_vocab_size()
    assert tokenizer.end_of_document == (size if end is None else end)
    assert tokenizer.vocabulary == size + (end is None)
    # neither truncated nor padded, and a name of a special token in the text is text
    text = f"{DOCUMENTS[0] * 3} {special[0]} <|endoftext|> end"
    ids = tokenizer.encode(text)
    assert ids.max() < tokenizer.vocabulary
    assert tokenizer.end_of_document not in ids.tolist()
    assert tokenizer.decode(ids) == text


FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]
MERGES = [("▁", "w"), ("t", "h"), ("th", "e"), ("▁", "the")]


def test_bytes_of_tokens_add_up_to_those_of_the_text(tmp_path: Path) -> None:
    by_bytes = HuggingFaceTokenizer(train_tokenizer(tmp_path / "b.json", ["<|endoftext|>"]))
    words = ["</s>", "<unk>", *FALLBACK, *"▁thewas", *("".join(pair) for pair in MERGES)]
    vocabulary = {word: id for id, word in enumerate(words)}
    backend = Backend(models.BPE(vocabulary, MERGES, unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens(["</s>", "<unk>"])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1)]
    backend.decoder = decoders.Sequence(parts)
    backend.save(str(tmp_path / "p.json"))
    by_pieces = HuggingFaceTokenizer(tmp_path / "p.json")
    texts = {BytesTokenizer(): "Wo? 日本", by_bytes: DOCUMENTS[3], by_pieces: " the 日本  was\n\n theé"}
    for tokenizer, text in texts.items():
        table = np.array(tokenizer.token_bytes)
        assert len(table) == tokenizer.vocabulary
        assert table[tokenizer.end_of_document] == 0
        assert table[tokenizer.encode(text)].sum() == len(text.encode())
    the = vocabulary["▁the"]
    assert by_pieces.token_bytes[the] == 4
    assert the in by_pieces.encode(texts[by_pieces]).tolist()


def test_a_tokenizer_that_drops_text_has_no_bytes(tmp_path: Path) -> None:
    """What is written is counted: of words that it does not know, and of spaces, it keeps nothing."""
    path = write_lines(tmp_path / "a.jsonl", DOCUMENTS)
    backend = Backend(models.WordLevel({"document": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    small = tmp_path / "w.json"
    backend.save(str(small))
    kept = train_tokenizer(tmp_path / "b.json", ["</s>"])
    done = [
        prepare(corpus_of(path, tokenizer=str(file)), output=tmp_path / f"{file.stem}.out")
        for file in (small, kept)
    ]
    assert done[0].index.token_bytes == ()
    assert done[1].index.token_bytes == HuggingFaceTokenizer(kept).token_bytes


def test_large_vocabularies_take_32_bits(tmp_path: Path) -> None:
    vocabulary = {f"w{n}": n for n in range(70_000)} | {"[UNK]": 70_007}  # ids with a gap
    backend = Backend(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(tmp_path / "t.json"))
    path = write_lines(tmp_path / "a.jsonl", ["w1 w69999", "w65536 what"])
    done = prepare(
        corpus_of(path, tokenizer=str(tmp_path / "t.json"), validation_fraction=0), output=tmp_path / "out"
    )
    assert (done.index.dtype, done.index.vocabulary, done.index.end_of_document) == ("uint32", 70_009, 70_008)
    assert stored_ids(done.output, "train").tolist() == [1, 69_999, 70_008, 65_536, 70_007, 70_008]
