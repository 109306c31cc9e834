"""Bytes and Hugging Face tokenizers."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from braid.actors.config import ConfigError, parse_config
from braid.jobs.data.tokenizer import BytesTokenizer, Tokenizer, load_tokenizer, tokenizer_of
from braid.jobs.training.display import Display
from tests.foreign_models import random_model
from tests.jobs.corpora import DOCUMENTS, prepared, stored_ids, text_of, train_tokenizer, write_lines

TEXT = f"{DOCUMENTS[0] * 3} </s> <|endoftext|> <stop> end"


def word_level(path: Path, vocabulary: dict[str, int], special: list[str], **model: Any) -> Path:
    """Words between spaces, each a token."""
    backend = Backend(models.WordLevel(vocabulary, **model))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(special)
    backend.save(str(path))
    return path


def beside(path: Path, **files: Any) -> None:
    for name, content in files.items():
        path.with_name(f"{name}.json").write_text(json.dumps(content))


BOTH = ["</s>", "<stop>"]
NONE = {"tokenizer_config": {"eos_token": None}, "config": {"eos_token_id": None}}
TWO = {"generation_config": {"eos_token_id": [0, 1]}, "config": {"eos_token_id": 1}}
ENDS: list[tuple[list[str], dict[str, Any], str | None, str]] = [
    (["<pad>", "<eos>"], {}, None, "<eos>"),
    (["</s>"], NONE, None, "</s>"),
    (BOTH, {}, "<stop>", "<stop>"),
    (BOTH, {"tokenizer_config": {"eos_token": {"content": "<stop>"}}}, None, "<stop>"),
    (BOTH, {"special_tokens_map": {"eos_token": "<stop>"}}, None, "<stop>"),
    (BOTH, {"generation_config": {"eos_token_id": [1]}}, None, "<stop>"),
    (BOTH, TWO, None, "<stop>"),
]
NO_TOKEN = {"tokenizer_config": {"eos_token": "<end>"}}
REFUSED: list[tuple[list[str], dict[str, Any], str | None, str]] = [
    (["<stop>"], {}, None, r"no file beside '.*' says which token ends .*; set it to one, such as '<stop>'"),
    ([], {}, None, r"data.end_token: no file .*add_special_tokens"),
    (["</s>", "<eos>"], {}, None, r"no file beside .* set it to one, such as '</s>', '<eos>'"),
    (["</s>"], {}, "<end>", r"the configuration names '<end>', which is no token of '.*'; .* such as '</s>'"),
    (["</s>"], NO_TOKEN, None, r"tokenizer_config.json names '<end>', which is no"),
    (["</s>"], {"config": {"eos_token_id": 50_256}}, None, "config.json names 50256, which is"),
]


@pytest.mark.parametrize(("special", "files", "wanted", "end"), ENDS)
def test_the_end_of_documents(
    special: list[str], files: dict[str, Any], wanted: str | None, end: str, tmp_path: Path
) -> None:
    path = train_tokenizer(tmp_path / "tokenizer.json", special)
    beside(path, **files)
    tokenizer = load_tokenizer(str(tmp_path), wanted)
    backend = Backend.from_file(str(path))
    assert (tokenizer.end_token, tokenizer.end_of_document) == (end, special.index(end))
    assert tokenizer.vocabulary == backend.get_vocab_size()
    # neither truncated nor padded, and a name of a special token in the text is text
    encoded = tokenizer.encode(TEXT)
    assert not set(encoded.ids.tolist()) & set(range(len(special)))
    assert text_of(tokenizer, encoded.ids) == TEXT
    assert (encoded.lost, encoded.unknown) == (0, 0)


@pytest.mark.parametrize(("special", "files", "wanted", "says"), REFUSED)
def test_an_end_that_is_not_known_is_refused(
    special: list[str], files: dict[str, Any], wanted: str | None, says: str, tmp_path: Path
) -> None:
    path = train_tokenizer(tmp_path / "tokenizer.json", special)
    beside(path, **files)
    with pytest.raises(ValueError, match=says) as refused:
        load_tokenizer(str(path), wanted)
    assert "\n" not in str(refused.value)


def test_bytes_have_an_end_of_their_own() -> None:
    with pytest.raises(ValueError, match=r"data.end_token: '</s>' does not go with data.tokenizer=bytes"):
        load_tokenizer("bytes", "</s>")


def unmarked(folder: Path) -> Path:
    """An end that was added as an ordinary token."""
    backend = Backend.from_file(str(train_tokenizer(folder / "t.json", ["<pad>"])))
    backend.add_tokens(["</s>"])
    backend.save(str(folder / "t.json"))
    return folder / "t.json"


def words(folder: Path) -> Path:
    """An end that is a word like others."""
    vocabulary = dict.fromkeys(["</s>", "<pad>", "a", "</", "s>", "<p", "ad>", "[UNK]"])
    ids = {word: number for number, word in enumerate(vocabulary)}
    return word_level(folder / "t.json", ids, ["<pad>"], unk_token="[UNK]")


def pieces(folder: Path) -> Path:
    """Special tokens that are the best pieces of their characters, as in models of SentencePiece."""
    letters = [(letter, -5.0) for letter in "a <>/spd"]
    backend = Backend(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("<pad>", 0.0), *letters], 0))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["</s>", "<pad>"])
    backend.save(str(folder / "t.json"))
    return folder / "t.json"


@pytest.mark.parametrize("make", [unmarked, words, pieces])
def test_text_makes_no_special_token(make: Callable[[Path], Path], tmp_path: Path) -> None:
    """Whatever the vocabulary makes of such text elsewhere."""
    path = make(tmp_path)
    text = "a </s> a <pad> a </s> a"
    tokenizer = Tokenizer(path, "</s>")
    backend = Backend.from_file(str(path))
    special = {backend.token_to_id("</s>"), backend.token_to_id("<pad>")}
    assert special & set(backend.encode(text).ids), "elsewhere it does"
    ids = tokenizer.encode(text).ids
    assert not special & set(ids.tolist())
    if make is not words:  # which has no spaces
        assert text_of(tokenizer, ids) == text
    documents = write_lines(tmp_path / "a.jsonl", [text] * 5)
    options = {"tokenizer": str(path), "end_token": "</s>", "validation_fraction": 0}
    done = prepared(tmp_path / "out", documents, **options)
    ids = stored_ids(done.output, "train")
    assert int((ids == done.index.end_of_document).sum()) == done.documents == 5


@pytest.mark.parametrize(
    ("special", "text", "count"),
    [([], "a" * 95 + "é" * 5, "characters_lost"), (["[UNK]"], "a " * 95, "tokens_unknown")],
)
def test_what_has_no_token_is_told_and_refused(
    special: list[str], text: str, count: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if special:
        path = word_level(tmp_path / "t.json", {"a": 0, "[UNK]": 1}, ["</s>"], unk_token="[UNK]")
        good, bad = text + "b " * 5, text + "b " * 20
    else:
        backend = Backend(models.BPE({"a": 0}, []))
        backend.add_special_tokens(["</s>"])
        backend.save(str(path := tmp_path / "t.json"))
        good, bad = text, text + "é" * 10
    options = {"tokenizer": str(path), "validation_fraction": 0}
    done = prepared(tmp_path / "out", write_lines(tmp_path / "a.jsonl", [good]), **options)
    assert (getattr(done.index, count), done.index.end_token) == (5, "</s>")
    Display(Console(), live=False).show(done)
    shown = capsys.readouterr().out
    assert f"documents end with token {done.index.end_of_document}, '</s>'" in shown
    assert "warning 5 characters (5.00%) have no token" in shown or "warning 5 tokens (4.95%)" in shown
    too_many = r"data.tokenizer: '.*t.json' does not fit data.files: (15|20) of 1\d\d "
    with pytest.raises(ValueError, match=too_many):
        prepared(tmp_path / "refused", write_lines(tmp_path / "b.jsonl", [bad]), **options)
    assert not (tmp_path / "refused").exists()


def test_the_tokenizer_of_imported_weights_is_the_default(tmp_path: Path) -> None:
    random_model("llama", 0).save_pretrained(tmp_path)
    given = {"model": {"initial": str(tmp_path)}}
    says = r"data.tokenizer: model.initial='.*' has no tokenizer.json.*set data.tok"
    with pytest.raises(ConfigError, match=says):
        tokenizer_of(parse_config(given))
    train_tokenizer(tmp_path / "tokenizer.json", ["<|endoftext|>", "<eos>"])
    beside(tmp_path / "tokenizer.json", tokenizer_config={"eos_token": "<eos>"})
    found = tokenizer_of(parse_config(given))
    assert (found.name, found.end_token) == (str(tmp_path / "tokenizer.json"), "<eos>")
    assert tokenizer_of(parse_config({**given, "data": {"tokenizer": "bytes"}})).name == "bytes"
    assert tokenizer_of(parse_config({})).name == "bytes"
    missing = parse_config({"model": {"initial": str(tmp_path / "missing")}})
    with pytest.raises(ConfigError, match=r"model.initial='.*missing' does not exist"):
        tokenizer_of(missing)


FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]
MERGES = [("▁", "w"), ("t", "h"), ("th", "e"), ("▁", "the")]


def test_bytes_of_tokens_add_up_to_those_of_the_text(tmp_path: Path) -> None:
    by_bytes = Tokenizer(train_tokenizer(tmp_path / "b.json", ["<|endoftext|>"]))
    words = ["</s>", "<unk>", *FALLBACK, *"▁thewas", *("".join(pair) for pair in MERGES)]
    vocabulary = {word: id for id, word in enumerate(words)}
    backend = Backend(models.BPE(vocabulary, MERGES, unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens(["</s>", "<unk>"])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1)]
    backend.decoder = decoders.Sequence(parts)
    backend.save(str(tmp_path / "p.json"))
    by_pieces = Tokenizer(tmp_path / "p.json")
    texts = {BytesTokenizer(): "Wo? 日本", by_bytes: DOCUMENTS[3], by_pieces: " the 日本  was\n\n theé"}
    for tokenizer, text in texts.items():
        table = np.array(tokenizer.token_bytes)
        assert len(table) == tokenizer.vocabulary
        assert table[tokenizer.end_of_document] == 0
        assert table[tokenizer.encode(text).ids].sum() == len(text.encode())
    the = vocabulary["▁the"]
    assert by_pieces.token_bytes[the] == 4
    assert the in by_pieces.encode(texts[by_pieces]).ids.tolist()


def test_a_tokenizer_that_drops_text_has_no_bytes(tmp_path: Path) -> None:
    """What is written is counted: of some words it keeps nothing."""
    path = write_lines(tmp_path / "a.jsonl", DOCUMENTS)
    split = pre_tokenizers.Whitespace()
    counts = Counter(word for text in DOCUMENTS for word, _ in split.pre_tokenize_str(text))
    left_out = [word for word, count in counts.items() if count == 1][:30]
    words = ["[UNK]", *sorted(counts.keys() - {*left_out})]
    backend = Backend(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = split
    backend.add_special_tokens(["</s>"])
    small = tmp_path / "w.json"
    backend.save(str(small))
    kept = train_tokenizer(tmp_path / "b.json", ["</s>"])
    done = [prepared(tmp_path / f"{file.stem}.out", path, tokenizer=str(file)) for file in (small, kept)]
    assert done[0].index.token_bytes == ()
    assert done[1].index.token_bytes == Tokenizer(kept).token_bytes


def test_large_vocabularies_take_32_bits(tmp_path: Path) -> None:
    vocabulary = {f"w{n}": n for n in range(70_000)} | {"[UNK]": 70_007}  # ids with a gap
    file = word_level(tmp_path / "t.json", vocabulary, ["</s>"], unk_token="[UNK]")
    end = Backend.from_file(str(file)).token_to_id("</s>")
    path = write_lines(tmp_path / "a.jsonl", ["w1 " * 12 + "w69999", "w65536 what"])
    index = prepared(tmp_path / "out", path, tokenizer=str(file), validation_fraction=0).index
    assert (index.dtype, index.vocabulary, index.end_of_document) == ("uint32", max(end, 70_007) + 1, end)
    assert stored_ids(tmp_path / "out", "train").tolist() == [1] * 12 + [69_999, end, 65_536, 70_007, end]
