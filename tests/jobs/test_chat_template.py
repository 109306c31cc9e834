"""Where a run's chat template comes from, and that its exports carry it."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from braid.actors.config import DataConfig, parse_config
from braid.jobs.data.chat import ChatTemplate
from braid.jobs.data.tokenizer import load_tokenizer, tokenizer_of
from braid.jobs.training.beside_weights import FOLDER, keep
from tests.jobs.corpora import DOCUMENTS, train_tokenizer

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
