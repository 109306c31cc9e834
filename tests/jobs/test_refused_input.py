"""Input that leads elsewhere or runs something, scripts that ranks would run again, names that are gone: one
line each. Other mistakes have a table in `tests/jobs/test_mistakes.py`."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from braid.actors.config import ConfigError, parse_config
from braid.actors.controller.records.run_records import RunDirectory
from braid.scheduling.generate.named import ScheduleName
from braid.scheduling.schedule.gone import GONE
from tests.in_process import Capture, called, refused
from tests.jobs.test_mistakes import FIRST, ROOT, SCHEDULE

TAGS = (
    "!!python/object/apply:os.mkdir ['ran']",
    "!!python/object/new:os.mkdir ['ran']",
    "!!python/name:os.mkdir",
)
"""What unsafe readers of YAML understand; the first two run something."""

READERS = (
    "train evil.yaml",
    "submit evil.yaml",
    "kubernetes evil.yaml --image x --claim y",
    "plan first.yaml --cluster evil.yaml",
    "simulate evil.yaml",
    "schedule first.yaml --set overlap.schedule=braid --set overlap.plan=evil.yaml",
)


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.usefixtures("here")
def test_yaml_tags_run_nothing(tag: str, capsys: Capture) -> None:
    """Wherever a file or an option of YAML is read."""
    Path("first.yaml").write_text(FIRST)
    Path("evil.yaml").write_text(f"name: {tag}\n")
    for call in READERS:
        refused(called(capsys, *call.split()), "YAML", "evil.yaml")
    refused(called(capsys, "train", "first.yaml", "--set", f"name={tag}"), "YAML", "--set")
    assert not Path("ran").exists()
    if tag in TAGS[:2]:
        yaml.unsafe_load(Path("evil.yaml").read_text())
        assert Path("ran").exists(), "the tag is harmless: too easy a test"


NAMES = ("../elsewhere", "..", ".", "a/b", "/etc", "-x", "", "a" * 65, "a b", "a\n", "a\x00b", "ä")


@pytest.mark.parametrize("command", ["train", "submit", "kubernetes"])
def test_names_that_lead_elsewhere(here: Path, command: str, capsys: Capture) -> None:
    for name in NAMES:
        Path("run.yaml").write_text(yaml.safe_dump({**yaml.safe_load(FIRST), "name": name}))
        options = ("--image", "x", "--claim", "y") if command == "kubernetes" else ()
        refused(called(capsys, command, "run.yaml", *options), f"name={name!r}")
        assert [path.name for path in here.iterdir()] == ["run.yaml"]


def test_a_run_that_is_a_link_elsewhere(tmp_path: Path) -> None:
    """A name that is good, but whose directory lies outside of ``runs``; nothing is written there."""
    (tmp_path / "runs").mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "runs" / "run").symlink_to(outside, target_is_directory=True)
    with pytest.raises(ConfigError, match=r"name='run' leads out of runs="):
        RunDirectory(parse_config({"runs": str(tmp_path / "runs")}), resume=False, overwrite=True)
    assert list(outside.iterdir()) == []


def _script(folder: Path, *lines: str) -> "subprocess.CompletedProcess[str]":
    (folder / "first.yaml").write_text(FIRST, encoding="utf-8")
    shutil.copy(ROOT / "LICENSE", folder / "corpus.txt")
    (folder / "script.py").write_text("\n".join([*lines, ""]), encoding="utf-8")
    command = [sys.executable, "script.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_script_that_its_ranks_would_run_again(tmp_path: Path) -> None:
    config = 'config = braid.load_config("first.yaml", ["cluster.launcher=processes", "train.steps=1"])'
    ended = _script(tmp_path, "import braid", "", config, "braid.train(config)")
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert "script.py, line 4: with cluster.launcher=processes every rank imports this script" in last
    assert 'below `if __name__ == "__main__":`' in last
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "start",
    [
        'if __name__ == "__main__":\n    check()',
        "def start():\n    check()\n\n\nif __name__ == '__main__':\n    start()",
    ],
)
def test_a_script_whose_ranks_do_not(tmp_path: Path, start: str) -> None:
    ended = _script(
        tmp_path, "from braid.jobs.training.refusals import check_script as check", start, "print('fine')"
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "fine\n"


# Names of schedules that earlier versions had, wherever a user may still have them.

OLD_PLAN = "braid_plan: 6\nsetting:\n  layout: {{placement: bidirectional}}\n  schedule: {}\n"
OLD_SCHEDULE = f"{SCHEDULE.replace('name f', 'name {}')}stage 0\n F0.0\n"
OLD_NAMES = [
    *(("train first.yaml --dry-run --set overlap.schedule={}", "", name) for name in GONE),
    ("simulate old.yaml", OLD_PLAN, "braid_w"),
    ("train first.yaml --dry-run --set overlap.schedule_file=old.yaml", OLD_SCHEDULE, "bidirectional"),
]
"""Calls, the file that holds the name, and the name."""


@pytest.mark.usefixtures("here")
def test_a_name_that_is_gone_is_refused_with_what_stands_in_its_place(capsys: Capture) -> None:
    Path("first.yaml").write_text(FIRST)
    shutil.copy(ROOT / "LICENSE", "corpus.txt")
    for call, content, name in OLD_NAMES:
        Path("old.yaml").write_text(content.format(name))
        (line,) = refused(called(capsys, *call.format(name).split()), repr(name)).splitlines()
        new = ScheduleName(*GONE[name])
        pipeline = f" with pipeline {new.pipeline}" if new.pipeline else ""
        assert line.endswith(f" is gone; use schedule {new.schedule}{pipeline}"), line
