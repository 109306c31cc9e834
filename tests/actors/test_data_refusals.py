"""Wrong keys of data, hub and mixture: one line with key, value and remedy; paths of sets."""

import re
from pathlib import Path
from typing import Any

import pytest

from braid.actors.config import ConfigError, load_config, parse_config
from braid.actors.config.paths import anchored, expanded
from braid.scheduling.text.yaml_text import parse_yaml

ROOT = Path(__file__).resolve().parents[2]
WEB = {"name": "web", "weight": 0.7, "files": ["a.txt"]}
CODE = {"name": "code", "weight": 0.3, "hub": {"id": "./code"}}
CASES: list[tuple[dict[str, Any], str]] = [
    (
        {"files": ["a"], "mixture": [WEB]},
        "data.files=['a'] does not go with data.mixture; leave data.files out",
    ),
    (
        {"files": ["a"], "hub": {"id": "x"}},
        "data.files=['a'] does not go with data.hub; leave data.files out",
    ),
    ({"hub": {"id": "x"}, "mixture": [WEB]}, "data.hub does not go with data.mixture; give it to a set"),
    ({"mixture": [WEB, WEB]}, "data.mixture has two sets with the name 'web'; rename one of them"),
    (
        {"mixture": [{"name": "x", "weight": 1}]},
        "data.mixture[0]: set 'x' has neither files nor hub; give one",
    ),
    (
        {"mixture": [{**WEB, "hub": {"id": "x"}}]},
        "data.mixture[0]: set 'web' has both files and hub; give one",
    ),
    ({"mixture": [{**WEB, "weight": 0}]}, "data.mixture[0].weight=0: must be a number > 0"),
    ({"mixture": [{**WEB, "weight": float("inf")}]}, "data.mixture[0].weight=inf: must be a number > 0"),
    ({"mixture": [{**WEB, "name": "a/b"}]}, "data.mixture[0].name='a/b': must be text like "),
    ({"mixture": [{"weight": 1, "files": ["a"]}]}, "data.mixture[0].name is missing; it must be text like "),
    ({"mixture": [{**WEB, "wieght": 1}]}, "'data.mixture[0].wieght'; did you mean 'data.mixture[0].weight'?"),
    ({"mixture": [{**WEB, "tokenizer": "x"}]}, "'data.mixture[0].tokenizer'; did you mean 'data.tokenizer'?"),
    ({"mixture": [{**WEB, "files": [1]}]}, "data.mixture[0].files[0]=1: must be text; write it in quotes"),
    ({"mixture": WEB}, "must be a list of mappings with name, weight, files, hub, "),
    ({"mixture": "web"}, "data.mixture='web': must be a list; write it in brackets"),
    ({"hub": "allenai/c4"}, "data.hub='allenai/c4': is a section of keys; write them as data.hub: {id: ...}"),
    ({"hub": {"subset": "en"}}, "data.hub.id is missing; it must be text"),
    ({"hub": {"id": "x", "splits": "a"}}, "unknown key 'data.hub.splits'; did you mean 'data.hub.split'?"),
    ({"hub": {"id": "x"}, "format": "jsonl"}, "data.format=jsonl is for files, and hub reads a column; set"),
    (
        {"mixture": [CODE], "format": "text"},
        "data.mixture, set 'code': format=text is for files, and hub reads",
    ),
    (
        {"hub": {"id": "x", "streaming": True, "split": "train[:1%]"}},
        "data.hub.split='train[:1%]' is a part of a split, which cannot be streamed; set hub.streaming",
    ),
]


@pytest.mark.parametrize(("data", "says"), CASES, ids=range(len(CASES)))
def test_wrong_keys_are_refused(data: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config({"data": data})
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_sets_inherit_what_they_leave_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORPUS", "/corpus")
    sets = [
        {
            **WEB,
            "files": ["$CORPUS/a", "python-stdlib", "s3://x/c"],
            "text_field": "body",
            "exclude": ["*.md"],
        },
        CODE,
    ]
    sets.append({"name": "named", "weight": 1, "hub": {"id": "allenai/c4"}, "validation_fraction": 0})
    whole = {"mixture": sets, "validation_fraction": 0.5, "directory": "tokens", "encoding_errors": "skip"}
    config = parse_config({"data": whole})
    file = tmp_path / "written.yaml"
    file.write_text(config.to_yaml())
    assert load_config(file).data == expanded(config).data
    found = anchored(expanded(config), Path("/here")).data.sets
    assert list(found) == ["web", "code", "named"]
    assert found["web"].files == ("/corpus/a", "python-stdlib", "s3://x/c")
    assert (found["web"].text_field, found["code"].text_field) == ("body", "text")
    assert (found["web"].exclude, found["code"].exclude) == (("*.md",), ())
    assert [one.validation_fraction for one in found.values()] == [0.5, 0.5, 0]
    assert {one.encoding_errors for one in found.values()} == {"skip"}
    assert [hub.id for one in found.values() if (hub := one.hub)] == ["/here/code", "allenai/c4"]
    assert found["web"].directory == Path("/here/tokens/web")
    assert found["web"].mixture == ()
    assert config.data.validates
    assert not parse_config({"data": {"validation_fraction": 0}}).data.validates


def test_examples_of_the_page_are_configurations() -> None:
    text = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```yaml\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert len(examples) >= 3
    for example in examples:
        parse_config(parse_yaml(example, "data.md"))
