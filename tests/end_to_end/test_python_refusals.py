"""What `braid.train` refuses, in the words of Python; public names."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import braid
from braid.actors.config import Config, ConfigError, parse_config
from braid.jobs.usage import as_options
from tests.end_to_end.command import ROOT
from tests.end_to_end.test_python import content


class Misspelt:
    def on_stepp(self, record: Any) -> None: ...


class NoMethod:
    on_step = 3


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"config": 3}, r"config=3 is a int; give a braid.Config, a mapping, or the path of a YAML file"),
    ({"config": "absent.yaml"}, r"configuration file absent.yaml does not exist"),
    (
        {"config": {"train": {"learning_rate": 1}}},
        r"unknown key 'train.learning_rate'; did you mean 'train.lr'",
    ),
    ({"resume": True, "overwrite": True}, r"resume=True and overwrite=True exclude each other"),
    ({"resume": "if begun"}, r"resume='if begun' must be True, False or 'if-begun'"),
    ({"overwrite": "yes"}, r"overwrite='yes' must be True or False"),
    ({"until": 0}, r"until=0 must be the number of a step"),
    ({"until": True}, r"until=True must be the number of a step"),
    ({"callbacks": Misspelt()}, r"callbacks=.* must be a list; write callbacks=\[\.\.\.\]"),
    ({"callbacks": [Misspelt()]}, r"callbacks\[0\]: Misspelt.on_stepp .*; did you mean 'on_step'"),
    (
        {"callbacks": [braid.Callback(), print]},
        r"callbacks\[1\] \(builtin_function_or_method\) has no method",
    ),
    (
        {"callbacks": [braid.Callback]},
        r"callbacks\[0\] is the class Callback; give an object of it, with \(\)",
    ),
    ({"callbacks": [NoMethod()]}, r"NoMethod.on_step must be a method"),
    ({"resume": True}, r"there is no run in .* to resume; start it without resume=True"),
]


@pytest.mark.parametrize(("arguments", "says"), REFUSED, ids=[says[:40] for _, says in REFUSED])
def test_wrong_arguments_start_nothing(tmp_path: Path, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        braid.train(**{"config": content(tmp_path), **arguments})
    assert "\n" not in str(caught.value)
    assert "--" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_a_run_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "runs" / "run").mkdir(parents=True)
    (tmp_path / "runs" / "run" / "config.yaml").write_text("{}")
    said = r"continue it with resume=True, choose another with name=\.\.\., or replace it with overwrite=True"
    with pytest.raises(ConfigError, match=said):
        braid.train(parse_config(content(tmp_path)))


def test_public_names_exist() -> None:
    for name in braid.__all__:
        assert getattr(braid, name) is not None
    assert isinstance(braid.Config(), Config)


def test_messages_name_arguments_and_the_command_line_names_options() -> None:
    said = "continue it with resume=True, choose another with name=..., or replace it with overwrite=True"
    told = "continue it with --resume, choose another with --set name=..., or replace it with --overwrite"
    assert as_options(said) == told
    assert as_options("override 'x' must be written key=value") == "--set 'x' must be written key=value"
    assert as_options("train.lr=3 and others=...") == "train.lr=3 and --set others=..."


@pytest.mark.parametrize(
    "folder", ["actors", "scheduling", "jobs/training", "jobs/data", "dashboards/frames.py"]
)
def test_no_message_to_python_names_an_option_of_a_command(folder: str) -> None:
    """Whole commands may stand in a message: ``braid profile --anew``."""
    files = [ROOT / folder] if folder.endswith(".py") else sorted((ROOT / folder).rglob("*.py"))
    for file in (file for file in files if file.name != "cli.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise | ast.Call | ast.Assign):
                for text in (part.value for part in ast.walk(node) if isinstance(part, ast.Constant)):
                    bare = re.sub(r"`[^`]*`|^ --rank $", "", str(text))
                    assert not re.search(r"(?<![\w-])--[a-z]", bare), f"{file}, line {node.lineno}: {text}"
