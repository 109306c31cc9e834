"""Conversations become tokens and masks as in `transformers`, and rows that keep them whole."""

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from braid.actors.config import DataConfig, parse_config
from braid.actors.stage.data.token_files import TokenShards
from braid.jobs.data.chat import ChatTemplate, Conversation, encode
from braid.jobs.data.corpus import FileRange
from braid.jobs.data.data_sets import prepare_data
from braid.jobs.data.documents import read_conversations
from braid.jobs.data.identity import DataRequest
from braid.jobs.data.prepare import Prepared, prepare
from braid.jobs.data.tokenizer import BytesTokenizer, load_tokenizer, tokenizer_of
from braid.jobs.training.beside_weights import FOLDER, keep
from braid.jobs.training.display import _about_tokens
from tests.in_process import Capture, called
from tests.jobs.corpora import DOCUMENTS, train_tokenizer

PLAIN = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{{ message.content | trim }}<|im_end|>{% else %}"
    "{{ message.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = PLAIN.replace(
    "{{ message.content | trim }}<|im_end|>{% else %}",
    "{% generation %}{{ message.content | trim }}<|im_end|>{% endgeneration %}{% else %}",
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>"]
LETTERS = [*"ab c\n", "naïve", "語", "🙂", " ", "<|im_end|>", "<|im_start|>user\n", "{{ x }}", "'\"<&>"]


def messages(drawn: random.Random) -> list[dict[str, str]]:
    """A conversation that holds spaces at its edges, special tokens and letters of several bytes."""
    found = [{"role": "system", "content": "Be kind."}] * drawn.randrange(2)
    for _ in range(drawn.randint(1, 3)):
        for role in ("user", "assistant"):
            found.append({"role": role, "content": "".join(drawn.choices(LETTERS, k=drawn.randrange(12)))})
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `save_pretrained` leaves of a tokenizer with a template."""
    path = tmp_path_factory.mktemp("tokenizer")
    file = train_tokenizer(path / "trained.json", SPECIAL, [*DOCUMENTS, "system user assistant\n"])
    tokens = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), chat_template=MARKED, **tokens)
    tokenizer.save_pretrained(path)
    file.unlink()
    return path


@pytest.mark.parametrize("source", [MARKED, PLAIN], ids=["marks", "prefixes"])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_tokens_and_masks_are_those_of_transformers(folder: Path, source: str, seed: int) -> None:
    """A template without marks counts the same and the line's end behind an answer."""
    told = messages(random.Random(seed))
    foreign, tokenizer = PreTrainedTokenizerFast.from_pretrained(folder), load_tokenizer(str(folder))
    found = foreign.apply_chat_template(
        told, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    template = ChatTemplate(source, "chat.jinja", ChatTemplate.of(DataConfig(), tokenizer).variables)
    encoded, counted = encode(tokenizer, template.render(Conversation(told, None, lambda: "here")))
    assert encoded.ids.tolist() == found["input_ids"]
    expected = np.array(found["assistant_masks"], bool)
    if source is PLAIN:
        behind = np.append(False, expected[:-1]) & ~expected
        expected |= behind
    assert counted.tolist() == expected.tolist()


OWN, THEIRS = "{{ messages[0].content }} own", "{{ messages[0].content }} theirs"
TURNS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"tokenizer_config.json": {"chat_template": THEIRS}}, THEIRS),
        ({"tokenizer_config.json": {"chat_template": [{"name": "tool", "template": OWN}]}}, None),
        ({"tokenizer_config.json": {"chat_template": [{"name": "default", "template": THEIRS}]}}, THEIRS),
        ({"chat_template.json": {"chat_template": THEIRS}, "tokenizer_config.json": {}}, THEIRS),
        ({"chat_template.jinja": THEIRS, "tokenizer_config.json": {"chat_template": OWN}}, THEIRS),
    ],
)
def test_templates_of_tokenizers(tmp_path: Path, files: dict[str, Any], expected: str | None) -> None:
    train_tokenizer(tmp_path / "tokenizer.json", ["</s>"], DOCUMENTS, 261)
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    tokenizer = load_tokenizer(str(tmp_path), "</s>")
    if expected is None:
        with pytest.raises(ValueError, match="needs a chat template"):
            ChatTemplate.of(DataConfig(), tokenizer)
    else:
        assert ChatTemplate.of(DataConfig(), tokenizer).source == expected


def test_exports_carry_the_template_and_the_end_of_answers(tmp_path: Path) -> None:
    """Of the configuration, whatever the tokenizer's says."""
    run = tmp_path / "run"
    run.mkdir()
    train_tokenizer(tmp_path / "tokenizer.json", ["</s>", "<|turn|>"], DOCUMENTS, 262)
    theirs = {"eos_token": "</s>", "chat_template": THEIRS}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(theirs))
    (tmp_path / "turns.jinja").write_text(TURNS)
    data = {"tokenizer": str(tmp_path), "files": ["talk.jsonl"], "format": "chat"}
    for more, text in (
        ({}, "hello theirs"),
        ({"chat_template": str(tmp_path / "turns.jinja")}, "user: hello<|turn|>\n"),
    ):
        config = parse_config({"data": {**data, **more}})
        keep(config, tokenizer_of(config), run)
        found = AutoTokenizer.from_pretrained(run / FOLDER)
        assert found.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == text
        ends = json.loads((run / FOLDER / "generation_config.json").read_text())["eos_token_id"]
        names = ["</s>", "<|turn|>"] if more else ["</s>"]
        assert found.convert_tokens_to_ids(names) == (ends if isinstance(ends, list) else [ends])


def test_bytes_know_the_end_and_their_letters() -> None:
    tokenizer = BytesTokenizer()
    encoded, spans = tokenizer.encode_rendered("é<|endoftext|>b<|endoftext|>")
    assert encoded.ids.tolist() == [0xC3, 0xA9, 256, 98, 256]
    assert spans.tolist() == [[0, 1], [0, 1], [1, 14], [14, 15], [15, 28]]
    assert tokenizer.decode(encoded.ids.tolist()) == "é<|endoftext|>b<|endoftext|>"
    assert tokenizer.decode([0xC3]) == "\ufffd"


# Rows.


SHORT = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


def chat(path: Path, told: list[Any], **data: Any) -> DataRequest:
    """The request for JSON lines of conversations, in bytes."""
    (path / "chat.jinja").write_text(SHORT)
    (path / "chat.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in told))
    keys = {"format": "chat", "chat_template": str(path / "chat.jinja"), "validation_fraction": 0.2, **data}
    files = data.get("files", [str(path / "chat.jsonl")])
    return DataRequest.of(
        parse_config({"data": {**keys, "files": files}, "model": {"sequence": 40}, "runs": str(path)})
    )


def exchange(*texts: str) -> list[dict[str, str]]:
    return [
        {"role": role, "content": text} for role, text in zip(("user", "assistant") * 9, texts, strict=False)
    ]


def documents_of(prepared: Prepared, split: str = "train") -> list[tuple[list[int], list[bool]]]:
    """Tokens and masks of all documents in rows, without padding, by the files alone."""
    found = []
    for shard in prepared.index.splits[split]:
        tokens = np.fromfile(prepared.output / shard.file, prepared.index.dtype)
        marks = np.fromfile(prepared.output / shard.beside("marks"), np.uint8)
        assert len(tokens) == len(marks) == shard.tokens
        for row, of_row in zip(
            tokens.reshape(-1, prepared.index.row_tokens),
            marks.reshape(-1, prepared.index.row_tokens),
            strict=True,
        ):
            edges = [*np.flatnonzero(of_row & 2).tolist(), len(row)]
            assert edges[0] == 0
            for begin, end in pairwise(edges):
                piece, counted = row[begin:end], (of_row[begin:end] & 1).astype(bool)
                if counted.any() or (piece != 256).any():
                    found.append((piece.tolist(), counted.tolist()))
    return found


@given(seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_conversations_are_whole_in_rows(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    drawn, path = random.Random(seed), tmp_path_factory.mktemp("chat")
    told = [
        exchange(*("x" * drawn.randint(1, 12) for _ in range(2 * drawn.randint(1, 3)))) for _ in range(60)
    ]
    request = chat(path, told)
    done = prepare(request, path / "out", map)
    template, tokenizer = request.template, BytesTokenizer()
    expected, long = [], 0
    for one in told:
        encoded, counted = encode(tokenizer, template.render(Conversation(one, None, str)))
        if len(encoded.ids) > 41:
            long += 1
        else:
            expected.append((encoded.ids.tolist(), counted.tolist()))
    found = documents_of(done) + documents_of(done, "validation")
    assert sorted(found) == sorted(expected)
    assert done.index.documents_long == long
    assert documents_of(done, "validation")
    index = done.index
    assert index.tokens_padded == sum(map(index.tokens, index.splits)) - sum(len(ids) for ids, _ in expected)
    shards = TokenShards.open(done.output, "train", 40)
    ids = np.arange(shards.samples)
    masks = shards.masks_at(ids)
    assert masks is not None
    assert shards.counts_at(ids).tolist() == masks.sum(1).tolist()
    assert (masks.sum(1) > 0).all(), "every row teaches something"


@given(seed=st.integers(0, 2**32), row=st.sampled_from([2, 3, 17, 64]))
@settings(max_examples=25, deadline=None)
def test_texts_are_whole_in_rows(tmp_path_factory: pytest.TempPathFactory, seed: int, row: int) -> None:
    """Every token but a document's first is predicted once; documents longer than a row go on in the next."""
    drawn, path = random.Random(seed), tmp_path_factory.mktemp("text")
    texts = ["".join(drawn.choices("abc", k=drawn.randint(1, 100))) for _ in range(30)]
    (path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = {"files": [str(path / "a.jsonl")], "packing": "whole", "validation_fraction": 0}
    request = DataRequest.of(parse_config({"data": data, "model": {"sequence": row - 1}}))
    done = prepare(request, path / "out", map)
    wanted = sorted([*text.encode(), 256] for text in texts)
    pieces = [ids for ids, _ in documents_of(done)]
    assert all(counted == [False] + [True] * (len(counted) - 1) for _, counted in documents_of(done))
    assert sorted(piece for piece in pieces if len(piece) < row and piece[-1] == 256) == sorted(
        piece
        for text in wanted
        for begin in [max(0, -(-(len(text) - row) // (row - 1)) * (row - 1))]
        if len(piece := text[begin:]) < row
    )
    predicted = sum(len(piece) - 1 for piece in pieces)
    assert predicted == sum(len(text) - 1 for text in wanted)
    assert int(TokenShards.open(done.output, "train", row - 1).counts.sum()) == predicted


def test_parquet_is_as_lines_are(tmp_path: Path) -> None:
    told = [exchange("hi", "x" * n) for n in range(20)]
    lines = prepare(chat(tmp_path, told), tmp_path / "lines", map)
    pq.write_table(pa.table({"messages": told}), tmp_path / "chat.parquet", row_group_size=3)
    rows = prepare(chat(tmp_path, told, files=[str(tmp_path / "chat.parquet")]), tmp_path / "rows", map)
    assert rows.index.fingerprint == lines.index.fingerprint


def test_what_a_conversation_needs_may_be_more(tmp_path: Path) -> None:
    """Tools reach the template, keys without a value do not, and half surrogates are replaced."""
    template = ChatTemplate("{{ messages[0] | tojson }}{{ tools | tojson }}", "t.jinja", ())
    request = chat(tmp_path, [], encoding_errors="replace")
    line = {"messages": [{"role": "user", "content": "é\ud800", "name": None}], "tools": [{"name": "f"}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(line))
    part = FileRange(str(tmp_path / "chat.jsonl"), "jsonl", 0, 10**6, 10**3)
    (conversation,) = read_conversations(part, request.data)
    assert conversation is not None
    assert template.render(conversation)[0] == '{"role": "user", "content": "é\ufffd"}[{"name": "f"}]'


def test_other_rows_are_another_data_set(tmp_path: Path) -> None:
    told = [exchange("hi", "x")]
    digests = {chat(tmp_path, told).digest}
    (tmp_path / "other.jinja").write_text(SHORT + " ")
    digests.add(chat(tmp_path, told, chat_template=str(tmp_path / "other.jinja")).digest)
    data = {"files": [str(tmp_path / "chat.jsonl")], "text_field": "messages"}
    for sequence, packing in ((20, "whole"), (40, "whole"), (40, "stream")):
        config = {"data": {**data, "packing": packing}, "model": {"sequence": sequence}}
        digests.add(DataRequest.of(parse_config(config)).digest)
    assert len(digests) == 5


def test_what_is_left_out_is_told(tmp_path: Path) -> None:
    told = [exchange("hi", "x" * n) for n in (1, 2, 3, 90)] + [exchange("alone")]
    request = chat(tmp_path, told)
    data = {"data": {**request.data.model_dump(exclude_unset=True), "validation_fraction": 0}}
    config = parse_config({**data, "model": {"sequence": 40}, "runs": str(tmp_path)})
    shown: list[Any] = []
    prepare_data(config, map, shown.append)
    (done,) = (event for event in shown if isinstance(event, Prepared))
    says = "2 conversations left out: 1 are longer than a row (raise model.sequence), 1 have no token"
    assert any(says in line for line in _about_tokens(done.index))


# braid data show.


def test_show(tmp_path: Path, capsys: Capture) -> None:
    chat(tmp_path, [exchange("hi", f"answer{n}", "so", "yes") for n in range(8)])
    (tmp_path / "run.yaml").write_text(
        f"runs: {tmp_path}\nmodel: {{sequence: 48}}\n"
        f"data: {{files: [{tmp_path}/chat.jsonl], format: chat, chat_template: {tmp_path}/chat.jinja}}\n"
    )
    shown = called(capsys, "data", "show", tmp_path / "run.yaml", "--samples", "1")
    assert shown.code == 0, shown.errors
    assert "[-uhi<|endoftext|>a-]answer" in shown.output
    assert "document 2 of 2: 22 tokens" in shown.output
    assert "5 of 49 tokens pad" in shown.output
    assert "whole in rows of 49 tokens" in shown.errors
    split = called(capsys, "data", "show", tmp_path / "run.yaml", "--split", "validation")
    assert split.output.count("sample ") == 1, "all there are"
    stream = tmp_path / "stream.yaml"
    (tmp_path / "a.txt").write_text("one\x1b[31m" * 40)
    stream.write_text(f"runs: {tmp_path}\nmodel: {{sequence: 8}}\ndata: {{files: [{tmp_path}/a.txt]}}\n")
    plain = called(capsys, "data", "show", stream, "--samples", "2").output
    assert "[-" not in plain
    assert r"\x1b[31m" in plain, "text does not change the terminal"
