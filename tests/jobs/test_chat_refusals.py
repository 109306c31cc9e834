"""What is wrong with conversations, templates and rows gets one line, before anything starts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from braid.actors.stage.data.token_files import TokenShards, read_index
from tests.in_process import Capture, called, refused

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<assistant>{% endif %}"
GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
CHAT = {"files": ["talk.jsonl"], "format": "chat", "chat_template": "chat.jinja", "validation_fraction": 0.1}


def user(**message: Any) -> dict[str, Any]:
    return {"messages": [message]}


WRONG: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    # lines, keys of data, template, and what the message says
    "no template": (GOOD, {"chat_template": None}, TEMPLATE, "data.tokenizer=bytes has none|Jinja file"),
    "absent": (GOOD, {"chat_template": "no.jinja"}, TEMPLATE, "cannot read 'no.jinja'|give a Jinja file"),
    "syntax": (GOOD, {}, "\n{% for %}", "chat.jinja is no Jinja template (line 2|repair it"),
    "stream": (GOOD, {"packing": "stream"}, TEMPLATE, "data.packing='stream'|data.format='chat'|whole"),
    "not chat": (
        GOOD,
        {"format": "jsonl"},
        TEMPLATE,
        "data.chat_template|data.format=chat, found 'jsonl'",
    ),
    "packing": (GOOD, {"packing": "hole"}, TEMPLATE, "data.packing='hole'|whole"),
    "no messages": ({"text": "a"}, {}, TEMPLATE, "talk.jsonl:1 has no list 'messages'|such as {"),
    "empty": ({"messages": []}, {}, TEMPLATE, "talk.jsonl:1 has no list 'messages'"),
    "a string": ({"messages": ["a"]}, {}, TEMPLATE, "talk.jsonl:1: message 0 is a string"),
    "no role": (user(content="a"), {}, TEMPLATE, "message 0 has 'content', and needs 'role' and 'content'"),
    "no content": (user(role="user", content=None), {}, TEMPLATE, "message 0 has 'role', and needs"),
    "a list": ([1], {}, TEMPLATE, "talk.jsonl:1 holds a list, not an object|data.format=chat takes"),
    "surrogate": (user(role="user", content="\ud800"), {}, TEMPLATE, "talk.jsonl:1 has half a surrogate"),
    "refuses": (GOOD, {}, "{{ raise_exception('roles') }}", "talk.jsonl:1 cannot be rendered|(roles)"),
    "undefined": (GOOD, {}, "{{ strftime_now('%d') }}", "'strftime_now' is undefined|data.chat_template"),
    "unsafe": (GOOD, {}, "{{ messages.__class__.__mro__ }}", "cannot be rendered by|unsafe"),
    "prefixes": (
        GOOD,
        {},
        TEMPLATE + "{{ messages | length }}" + PROMPT,
        "otherwise than the whole|generation",
    ),
    "long": ({"messages": [*GOOD["messages"] * 9]}, {}, TEMPLATE + PROMPT, "longer than the 33 tokens|raise"),
    "silent": (user(role="user", content="a"), {}, TEMPLATE, "1 conversations have no token of an assistant"),
}


def written(path: Path, lines: Any, data: dict[str, Any], template: str) -> Path:
    (path / "talk.jsonl").write_text(json.dumps(lines) + "\n")
    (path / "chat.jinja").write_text(template)
    kept = {key: value for key, value in {**CHAT, **data}.items() if value is not None}
    content = {"data": kept, "model": {"sequence": 32}, "cluster": {"launcher": "processes"}}
    (path / "run.yaml").write_text(json.dumps(content))
    return path / "run.yaml"


@pytest.mark.parametrize("wrong", WRONG)
def test_one_line(here: Path, capsys: Capture, wrong: str) -> None:
    lines, data, template, says = WRONG[wrong]
    said = refused(called(capsys, "prepare", written(here, lines, data, template)), *says.split("|"))
    assert said.count("\n") == 1, said
    assert not list(here.glob("runs/data/[!.]*")), "nothing is prepared"


def test_parquet_without_messages(here: Path, capsys: Capture) -> None:
    file = written(here, GOOD, {"files": ["talk.parquet"]}, TEMPLATE)
    for column in ("text", "messages"):
        pq.write_table(pa.table({column: ["a"]}), "talk.parquet")
        refused(called(capsys, "prepare", file), "no column 'messages' of lists")


def test_what_cannot_be_shown(here: Path, capsys: Capture) -> None:
    file = written(here, GOOD, {}, TEMPLATE + PROMPT)
    for options, *says in (
        ("--split validation --set data.validation_fraction=0", "--split validation", "holds no"),
        ("--split test", "'test'", "train"),
        ("--samples 0", "--samples", "1"),
    ):
        refused(called(capsys, "data", "show", file, *options.split()), *says)


def test_a_template_that_hides_prompts_is_remarked_on(here: Path, capsys: Capture) -> None:
    """Prepared all the same: one line says that the loss learns the role, too, and what to do."""
    marked = TEMPLATE.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    for template, told in ((TEMPLATE, 1), (TEMPLATE + PROMPT, 0), (marked, 0)):
        shown = called(capsys, "prepare", written(here, GOOD, {}, template))
        assert shown.code == 0, shown.errors
        remarks = [line for line in shown.output.splitlines() if "heeds add_generation_prompt" in line]
        assert len(remarks) == told
        assert all(
            "warning data.chat_template: chat.jinja" in line and "generation %}" in line for line in remarks
        )


def test_damaged_rows(here: Path, capsys: Capture) -> None:
    """Rows of another length, a file that is too short."""
    assert not called(capsys, "prepare", written(here, GOOD, {}, TEMPLATE + PROMPT)).code
    (folder,) = here.glob("runs/data/[!.]*")
    shards = TokenShards.open(folder, "train", 32)
    assert shards.counts_at(np.array([0])).tolist() == [2], "an answer and the line's end"
    with pytest.raises(ValueError, match=r"packed for model.sequence=32, not for 16; prepare it again"):
        TokenShards.open(folder, "train", 16)
    for file, size in (("train-00000.marks", 33), ("train-00000.counts", 4)):
        content = (folder / file).read_bytes()
        assert len(content) == size
        (folder / file).write_bytes(content[:-1])
        with pytest.raises(ValueError, match=rf"{file} has {size - 1} bytes, not {size}; prepare it again"):
            read_index(folder)
        (folder / file).write_bytes(content)
