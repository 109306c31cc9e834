"""Where a run's chat template comes from, and that its exports carry it."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from braid.actors.config import Config, ConfigError, parse_config
from braid.jobs.data.tokenizer import tokenizer_of
from braid.jobs.training.beside_weights import FOLDER, keep, template_of
from tests.jobs.corpora import DOCUMENTS, train_tokenizer

OWN, THEIRS = "{{ messages[0].content }} own", "{{ messages[0].content }} theirs"


def named(template: str | None, **data: Any) -> Config:
    """A configuration whose key ``data.chat_template`` has a value."""
    return parse_config({"data": data}).changed(data={"chat_template": template})


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"tokenizer_config.json": {"chat_template": THEIRS}}, THEIRS),
        ({"tokenizer_config.json": {"chat_template": [{"name": "tool", "template": OWN}]}}, None),
        (
            {"tokenizer_config.json": {"chat_template": [{"name": "default", "template": THEIRS}]}},
            THEIRS,
        ),
        ({"chat_template.json": {"chat_template": THEIRS}, "tokenizer_config.json": {}}, THEIRS),
        ({"chat_template.jinja": THEIRS, "tokenizer_config.json": {"chat_template": OWN}}, THEIRS),
    ],
)
def test_templates_of_tokenizers(tmp_path: Path, files: dict[str, Any], expected: str | None) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert template_of(parse_config({}), tmp_path) == expected
    assert template_of(named(None), tmp_path) == expected
    assert template_of(named(OWN), tmp_path) == OWN, "the configuration's comes first"
    assert template_of(named(OWN), None) == OWN
    assert template_of(parse_config({}), None) is None


def test_a_template_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text(OWN)
    assert template_of(named(str(tmp_path / "mine.jinja")), None) == OWN
    with pytest.raises(
        ConfigError, match=r"data\.chat_template='absent.jinja' cannot be read: .*No such file"
    ):
        template_of(named("absent.jinja"), None)


@pytest.mark.parametrize("tokenizer", ["bytes", "own"])
def test_exports_carry_the_template(tmp_path: Path, tokenizer: str) -> None:
    """Of the configuration, whatever the tokenizer's says."""
    run, place = tmp_path / "run", tmp_path / "tokenizer.json"
    run.mkdir()
    if tokenizer == "own":
        train_tokenizer(place, ["</s>"], DOCUMENTS, 261)
        theirs = {"eos_token": "</s>", "chat_template": THEIRS}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(theirs))
    data = {"tokenizer": "bytes" if tokenizer == "bytes" else str(place)}
    messages = [{"role": "user", "content": "hello"}]
    for template in (OWN, None) if tokenizer == "own" else (OWN,):
        config = named(template, **data)
        (run / FOLDER / "chat_template.jinja").unlink(missing_ok=True)
        keep(config, tokenizer_of(config), run)
        found = AutoTokenizer.from_pretrained(run / FOLDER)
        text = found.apply_chat_template(messages, tokenize=False)
        assert text == ("hello own" if template == OWN else "hello theirs")
