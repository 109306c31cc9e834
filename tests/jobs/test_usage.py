"""Help of every command: an example that can be typed, and nothing heavy loaded."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

HELP = """
import contextlib, io, json, sys
import typer
from braid.jobs.cli import app, main

def commands(group, path):
    for name, one in group.commands.items():
        below = getattr(one, "commands", None)
        options = [text for parameter in one.params for text in parameter.opts]
        yield [*path, name], None if below else options, one.epilog or ""
        if below:
            yield from commands(one, [*path, name])

found = []
for path, options, epilog in commands(typer.main.get_command(app), []):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*path, "--help"])
    found.append([path, options, epilog, printed.getvalue()])
print(json.dumps([found, sorted({name.split(".")[0] for name in sys.modules})]))
"""


@pytest.fixture(scope="module")
def helps() -> Any:
    result = subprocess.run(
        [sys.executable, "-c", HELP], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return json.loads(result.stdout)


def test_help_loads_nothing_heavy(helps: Any) -> None:
    commands, loaded = helps
    assert len(commands) > 25
    assert not set(loaded) & {"numpy", "torch", "ray", "pyarrow", "tokenizers", "fsspec", "scipy", "aiohttp"}


def test_every_command_has_an_example_of_itself(helps: Any) -> None:
    for path, options, epilog, printed in helps[0]:
        if options is None:  # a group, with an example of one of its commands
            assert epilog.startswith(f"Example: braid {' '.join(path)} "), path
            continue
        words = shlex.split(epilog.removeprefix("Example: "))
        assert words[: len(path) + 1] == ["braid", *path], path
        assert {word for word in words if word.startswith("--")} <= set(options), path
        assert "Example: braid" in printed


def test_one_name_for_one_thing(helps: Any) -> None:
    usages = {
        tuple(path): " ".join(text.split()) for path, options, _, text in helps[0] if options is not None
    }
    for path in (["trace"], ["report"], ["logs"], ["dashboard"], ["checkpoint", "list"]):
        assert re.search(r"\[OPTIONS\] \{?RUN\}? ", usages[tuple(path)]), path
    for name in ("train", "prepare", "schedule", "profile", "drill", "submit", "kubernetes"):
        assert re.search(r"\[OPTIONS\] \{?CONFIG\}? ", usages[(name,)]), name
    assert "<ray|processes>" in usages[("train",)]
    assert "<fp32|bf16>" in usages[("checkpoint", "export")]
