"""Checkpoints as folders: a crash anywhere leaves a good one, and none is kept or removed by mistake."""

import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.actors.controller.state.checkpoint_stores import Homes
from braid.actors.controller.state.manifest import (
    MANIFEST,
    CheckpointError,
    CheckpointStore,
    to_be_removed,
    verify,
)
from tests.actors import saved
from tests.actors.saved import flip, keeps
from tests.scheduling.cases import LLAMA

_CRASHED = 42
LOSES = pytest.mark.parametrize("loses", [False, True], ids=["all is written", "only what was synced"])


def publish(store: CheckpointStore, step: int, content: str) -> Path:
    return saved.publish(store, step, f"state {content}".encode())


def newest(store: CheckpointStore) -> tuple[int, str]:
    """Step and content of what would be loaded."""
    found = Homes(store, None, "").newest_good(verify)
    path, ours = Path(found.path), found.manifest
    assert verify(path) == ours
    assert path.name == f"step-{ours.step}"
    return ours.step, (path / ".metadata").read_text().removeprefix("state ")


CHANGES = ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "write")
"""C functions that change the file system."""


def stamp(file: Path | int) -> tuple[int, int, int]:
    """What tells a file that was made durable from one that was written later."""
    status = os.stat(file)
    return status.st_ino, status.st_size, status.st_mtime_ns


def crashed(action: Callable[[], object], root: Path, at: int, loses: bool) -> bool:
    """Do something in a process that crashes before its n-th change; False if it got through. ``loses``: what
    was not made durable is lost."""
    child = os.fork()
    if child == 0:
        code, left, sync, durable = 1, at, os.fsync, {stamp(path) for path in root.rglob("*")}

        def fsync(handle: int) -> None:
            sync(handle)
            durable.add(stamp(handle))

        def look(frame: object, event: str, function: Any) -> None:
            nonlocal left
            left -= event == "c_call" and function.__name__ in CHANGES
            if left < 0:
                sys.setprofile(None)
                for path in root.rglob("*") if loses else ():
                    if path.is_file() and stamp(path) not in durable:
                        os.truncate(path, path.stat().st_size // 2)
                os._exit(_CRASHED)

        try:
            os.fsync = fsync  # type: ignore[assignment]
            sys.setprofile(look)
            action()
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, _CRASHED)
    return code == _CRASHED


@LOSES
@pytest.mark.parametrize("again", [False, True], ids=["a newer step", "the same step again"])
@pytest.mark.slow
def test_a_crash_anywhere_in_a_save_leaves_a_good_one(tmp_path: Path, again: bool, loses: bool) -> None:
    draw = random.Random()
    step, before = (9, (9, "old")) if again else (12, (9, "old"))
    found, at, through = [], 0, False
    while not through:
        store = CheckpointStore(tmp_path / f"at-{at}" / "checkpoints")
        publish(store, 5, "oldest")
        publish(store, 9, "old")

        def save(store: CheckpointStore = store, content: str = "new") -> None:
            publish(store, step, content)
            store.directory.with_name("published").touch()
            store.collect(keep=2, newest=step)

        through = not crashed(save, store.directory, at, loses)
        found.append(newest(store))
        if store.directory.with_name("published").exists():
            assert found[-1] == (step, "new"), "what is published is durable"
        # Another crash while the run that goes on saves the same; then it gets through.
        crashed(lambda: save(content="newer"), store.directory, draw.randrange(40), loses)
        assert newest(store) in (before, (step, "new"), (step, "newer"))
        save(content="last")
        assert newest(store) == (step, "last")
        last = [5, 9] if again else [9, 12]
        names = {f"step-{number}" for number in last}
        assert {path.name for path in store.directory.iterdir() if "partial" not in path.name} == names
        at += 1
    assert found[0] == before
    assert found[-1] == (step, "new")
    assert set(found) == {before, (step, "new")}
    assert found == sorted(found, key=lambda one: one == (step, "new")), "never back to the old one"
    assert at > 15, "a save has more steps than that"


@LOSES
@pytest.mark.slow
def test_a_crash_anywhere_while_old_ones_are_removed(tmp_path: Path, loses: bool) -> None:
    at, through = 0, False
    while not through:
        store = CheckpointStore(tmp_path / f"at-{at}" / "checkpoints")
        for step in (3, 4, 8, 9, 10):
            publish(store, step, str(step))
        saved.written(store, 11)
        through = not crashed(lambda: store.collect(1, 4), store.directory, at, loses)  # noqa: B023
        assert newest(store) == (10, "10")
        for step in store.steps():
            assert verify(store.directory / f"step-{step}").step == step, "what has a name is whole"
        assert {4, 8, 10} <= set(store.steps())
        store.collect(1, 4)
        assert store.steps() == [4, 8, 10]
        assert {path.name for path in store.directory.iterdir()} == {"step-4", "step-8", "step-10"}
        at += 1
    assert at > 5


STEPS = st.sets(st.integers(0, 60), max_size=12).map(sorted)


@given(STEPS, st.integers(1, 5), st.integers(0, 7))
def test_what_is_kept(steps: list[int], keep: int, keep_every: int) -> None:
    gone = to_be_removed(steps, keep, keep_every)
    left = [step for step in steps if step not in gone]
    newest_ones = sorted(steps, reverse=True)[:keep]
    for step in steps:
        wanted = step in newest_ones or (keep_every > 0 and step % keep_every == 0)
        assert (step in left) == wanted
    assert gone == sorted(gone)


def test_damaged_ones_beyond_the_newest_good_one_do_not_count(tmp_path: Path) -> None:
    """The run fell back from step 10 to 5; its next checkpoint must not go for the damaged one's sake."""
    store = CheckpointStore(tmp_path)
    publish(store, 5, "five")
    flip(publish(store, 10, "ten") / "__1_0.distcp")
    assert newest(store) == (5, "five")
    publish(store, 7, "seven")
    store.collect(keep=1, newest=7)
    assert store.steps() == [7, 10]
    assert newest(store) == (7, "seven")
    publish(store, 10, "ten again")
    store.collect(keep=1, newest=10)
    assert newest(store) == (10, "ten again")
    assert store.steps() == [10]


@given(st.data())
def test_any_flipped_byte_and_any_torn_file_is_found(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    store = CheckpointStore(tmp_path_factory.mktemp("damaged"))
    publish(store, 1, "old")
    path = publish(store, 2, "new")
    file = data.draw(st.sampled_from(sorted(p for p in path.iterdir() if p.name != MANIFEST)))
    if data.draw(st.booleans()):
        flip(file, data.draw(st.integers(0, file.stat().st_size - 1)))
    else:
        os.truncate(file, data.draw(st.integers(0, file.stat().st_size - 1)))
    with pytest.raises(CheckpointError, match=file.name):
        verify(path)
    found = Homes(store, None, "").newest_good(verify)
    assert found.manifest.step == 1
    assert [file.name in complaint for complaint in found.notes] == [True]


@pytest.mark.parametrize(
    "change",
    [
        {"files": {".metadata": 7}},
        {"files": {"../step-1/.metadata": [12, "0" * 64]}},
        {"step": "2"},
        {"step": 1},
        {"version": 99},
        {"surplus": 1},
        "[" * 100_000,
    ],
    ids=str,
)
def test_a_manifest_that_was_tampered_with_is_refused(tmp_path: Path, change: Any) -> None:
    store = CheckpointStore(tmp_path)
    publish(store, 1, "old")
    file = publish(store, 2, "new") / MANIFEST
    content = json.loads(file.read_text())
    file.write_text(change if isinstance(change, str) else json.dumps({**content, **change}))
    found = Homes(store, None, "").newest_good(verify)
    assert found.manifest.step == 1
    assert len(found.notes) == 1
    assert str(tmp_path / "step-2") in found.notes[0]
    flip(Path(found.path) / ".metadata")
    with pytest.raises(CheckpointError, match="no older checkpoint is left"):
        Homes(store, None, "").newest_good(verify)


def test_a_checkpoint_of_other_kinds_of_layers_is_refused(tmp_path: Path) -> None:
    """One from before there were patterns has layers of one kind, as they were then."""
    store = CheckpointStore(tmp_path)
    other = replace(LLAMA, pattern="layer wide")
    later = ("pattern", "rotary_scaling", "qkv_bias", "head_norm")
    later += ("projection_bias", "head_bias", "layer_norm", "mixer_jitter")
    before = {key: value for key, value in asdict(LLAMA).items() if key not in later}
    homes = Homes(store, None, "")
    for step, shape, fits, odd in ((1, asdict(other), other, LLAMA), (2, before, LLAMA, other)):
        saved.publish(store, step, shape=shape)
        assert homes.newest_of(fits).manifest.step == step
        says = rf"with pattern={fits.pattern}, the configuration says model.pattern={odd.pattern}; set it"
        with pytest.raises(CheckpointError, match=says):
            homes.newest_of(odd)


def test_a_run_may_go_on_with_another_regularisation(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    saved.publish(store, 1, shape=asdict(LLAMA))
    other = replace(LLAMA, dropout=0.1, label_smoothing=0.1, logit_z_loss=1e-4, documents=True)
    assert Homes(store, None, "").newest_of(other).manifest.step == 1


def test_a_step_is_saved_again_though_its_older_save_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    publish(store, 4, "before")
    keeps(monkeypatch, "step-4.tmp-old", "step-4.tmp-old1")
    publish(store, 4, "after")
    publish(store, 4, "at last")
    assert newest(store) == (4, "at last")
    assert len(store.trouble) == 2
