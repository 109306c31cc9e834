"""Folders for sockets: short, private, removed after whoever made them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from braid.actors.config import ConfigError
from braid.actors.controller.ranks import private_folders
from braid.actors.controller.ranks.private_folders import private_folder


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which to make others, after $TMPDIR."""
    place = tmp_path / "o"
    place.mkdir()
    monkeypatch.setattr(private_folders, "_OTHERS", (str(place),))
    monkeypatch.setattr(private_folders, "_LONGEST_SOCKET", len(str(place)) + 40)
    return place


def test_the_users_choice_comes_first(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (places.parent / "t").mkdir()
    monkeypatch.setenv("TMPDIR", str(places.parent / "t"))
    with private_folder(room=5) as folder:
        assert folder.parent == places.parent / "t"
        assert folder.stat().st_mode & 0o077 == 0
        assert folder.name.startswith(f"braid-{os.getpid()}-")
    assert not folder.exists()


@pytest.mark.parametrize("chosen", ["t" * 30, "missing", "file"])
def test_another_place_is_taken_where_the_choice_does_not_do(
    places: Path, monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    (places.parent / ("t" * 30)).mkdir()
    (places.parent / "file").touch()
    monkeypatch.setenv("TMPDIR", str(places.parent / chosen))
    with private_folder(room=5) as folder:
        assert folder.parent == places


def test_where_there_is_no_place(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(places.parent / "missing"))
    with pytest.raises(ConfigError) as refused, private_folder(room=20):
        pass
    text = str(refused.value)
    assert "\n" not in text
    assert f"{places} is too long a path for sockets" in text
    assert "set TMPDIR to a folder that can be written and whose path has at most" in text


def test_folders_of_the_dead_are_removed(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another process has the dead one's number; a living one's stays, whatever its number."""
    monkeypatch.delenv("TMPDIR", raising=False)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    unlocked, reused = places / f"braid-{ended.pid}-abcdefgh", places / f"braid-{os.getpid()}-abcdefgh"
    for folder in (unlocked, reused):
        folder.mkdir()
    (reused / ".lock").touch()
    (reused / "token").touch()
    for name in ("braid-other", "braid-spans", "something"):
        (places / name).mkdir()
    with private_folder(room=5) as living:
        renamed = living.rename(places / f"braid-{ended.pid}-12345678")
        with private_folder(room=5):
            assert not unlocked.exists()
            assert not reused.exists()
            assert renamed.exists()
    left = {path.name for path in places.glob("[bs]*")}
    assert left == {renamed.name, "braid-other", "braid-spans", "something"}


def test_a_link_is_not_followed(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    target = places.parent / "target"
    target.mkdir()
    (target / ".lock").write_text("mine")
    (places / "braid-4194304-abcdefgh").symlink_to(target)
    with private_folder(room=5):
        pass
    assert (target / ".lock").read_text() == "mine"


def test_processes_are_started_with_a_long_tmpdir(tmp_path: Path) -> None:
    """And nothing remains of multiprocessing's own folder."""
    long = tmp_path / ("t" * 80)
    long.mkdir()
    program = """
import multiprocessing, os
from braid.actors.controller.ranks.private_folders import shorten_multiprocessing
if __name__ == "__main__":
    shorten_multiprocessing()
    process = multiprocessing.get_context("forkserver").Process(target=os.getpid)
    process.start()
    process.join()
    print(process.exitcode)
"""
    script = tmp_path / "program.py"
    script.write_text(program)
    environment, command = {**os.environ, "TMPDIR": str(long)}, [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("0\n", "")
    assert list(long.iterdir()) == []
