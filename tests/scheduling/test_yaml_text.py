"""YAML means what people take it for, and what is written means the same to readers of the older version."""

import datetime
from typing import Any

import pytest
import yaml

from braid.scheduling.text.yaml_text import parse_yaml, write_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("No", "No"),
        ("true", True),
        ("2026-11-23", "2026-11-23"),
        ("1:30", "1:30"),
        ("010", 10),
        ("0x1f", 31),
        ("1e-3", 1e-3),
        ("-.inf", -float("inf")),
        ("~", None),
        ("'123'", "123"),
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


@pytest.mark.parametrize(
    ("text", "key", "lines"),
    [
        ("train: {lr: 3e-4}\nname: a\ntrain: {steps: 5}\n", "train", (1, 3)),
        ("train:\n  lr: 3e-4\n  steps: 5\n  lr: 1e-3\n", "lr", (2, 4)),
        ("a: [1, {b: 1, c: 2, b: 3}]\n", "b", (1, 1)),
        ("a: &x {b: 1}\nc: {d: *x, d: 2}\n", "d", (2, 2)),
    ],
)
def test_a_key_that_stands_twice_is_refused_with_both_lines(
    text: str, key: str, lines: tuple[int, int]
) -> None:
    told = (
        f"a.yaml is not valid YAML: '{key}' stands in line {lines[0]} and again in line {lines[1]}; keep one"
    )
    with pytest.raises(ValueError, match=told):
        parse_yaml(text, "a.yaml")


def test_what_is_merged_may_be_overridden() -> None:
    text = "base: &b {lr: 1, steps: 2}\nfirst: &f {<<: *b, lr: 3}\nsecond: {<<: *f, steps: 4}\nthird: *f\n"
    assert parse_yaml(text, "a.yaml") == {
        "base": {"lr": 1, "steps": 2},
        "first": {"lr": 3, "steps": 2},
        "second": {"lr": 3, "steps": 4},
        "third": {"lr": 3, "steps": 2},
    }
    assert parse_yaml("1: a\n'1': b\n", "a.yaml") == {1: "a", "1": "b"}
    assert parse_yaml("", "a.yaml") is None
