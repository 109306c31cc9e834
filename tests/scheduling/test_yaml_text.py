"""YAML means what people take it for, and what is written means the same to readers of the older version."""

import datetime
from typing import Any

import pytest
import yaml

from braid.scheduling.yaml_text import parse_yaml, write_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("yes", "yes"),
        ("No", "No"),
        ("true", True),
        ("False", False),
        ("2026-11-23", "2026-11-23"),
        ("1:30", "1:30"),
        ("010", 10),
        ("0o17", 15),
        ("0x1f", 31),
        ("-3", -3),
        ("1e-3", 1e-3),
        ("32e9", 32e9),
        (".5", 0.5),
        ("-.inf", -float("inf")),
        ("~", None),
        ("", None),
        ("'123'", "123"),
        ("1.2.3", "1.2.3"),
    ],
)
def test_scalars(text: str, value: Any) -> None:
    found = parse_yaml(f"key: {text}", "file")["key"]
    assert (found, type(found)) == (value, type(value))


def test_sections_that_are_merged() -> None:
    assert parse_yaml("a: &a {x: 1}\nb:\n  <<: *a\n  y: 2", "file")["b"] == {"x": 1, "y": 2}


def test_what_is_written_is_read_again() -> None:
    texts = ["off", "1e3", "010", "0o17", "2026-11-23", "1:30", "~", "", "true", "1_000", "=", "<<", "123"]
    content = [*texts, 1e-5, 1e16, 7, True, None, "plain"]
    assert parse_yaml(write_yaml(content), "file") == content
    assert yaml.safe_load(write_yaml(content)) == content, "and by readers of YAML 1.1"
    assert yaml.safe_load("2026-11-23") == datetime.date(2026, 11, 23)


@pytest.mark.parametrize("text", ["a: [1", "a: !!python/object:os.system {}", "'" * 3])
def test_what_is_no_yaml(text: str) -> None:
    with pytest.raises(ValueError, match=r"^file is not valid YAML: "):
        parse_yaml(text, "file")
