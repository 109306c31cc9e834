"""Saves of a run as the controller drives them: what is waited for, what is due, what is told."""

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from braid.actors.config import parse_config
from braid.actors.controller.records.json_lines import read_lines
from braid.actors.controller.records.run_records import CheckpointSaved, Incident, RunDirectory
from braid.actors.controller.state import saving
from braid.actors.controller.state.checkpoint_stores import Homes
from braid.actors.controller.state.manifest import disk_is_full
from braid.actors.controller.state.mirror import Mirror
from braid.actors.controller.state.recovery import cost_of_a_failure
from braid.actors.controller.state.saving import Saver
from braid.actors.stage.files import digests as stage_digests
from braid.actors.stage.rank.interface import Rank
from braid.actors.stage.rank.messages import Written
from tests.actors.saved import digests, keeps
from tests.end_to_end.runs import small_config

SECONDS = 40.0
"""What takes longer has waited for something that never comes."""


@dataclass
class Ranks:
    """One rank that writes at once, or when it may, or when it is waited for."""

    may_write: bool = True
    failures: list[str] = field(default_factory=list)
    again: list[bool] = field(default_factory=list)
    """Of all saves in the background that were begun: whether of the state of the one before."""
    _folder: Path = Path()

    def call_all(self, method: Any, *arguments: Any) -> list[Any]:
        if method in (Rank.begin_save, Rank.save):
            self.again.append(method is Rank.begin_save and arguments[2])
            self._folder = Path(arguments[0])
            (self._folder / ".metadata").write_bytes(b"table")
            (self._folder / "__0_0.distcp").write_bytes(b"state" * 100)
            return [self._written()] if method is Rank.save else [None]
        assert method is Rank.save_finished
        return [self._written() if self.may_write or arguments[0] else None]

    def _written(self) -> Written:
        if self.failures:
            return Written(failure=self.failures.pop(0))
        return Written(files=digests(self._folder))


class Run:
    """A run's saver and what it told."""

    def __init__(self, tmp_path: Path, **keeping: Any) -> None:
        config = small_config(tmp_path / "runs", checkpoint=keeping, train={"validate_every": 1})
        self.directory = RunDirectory(config, resume=False, overwrite=False)
        self.homes = Homes.of(config, self.directory.identity)
        self.saver = Saver(self.homes, self.directory, config.checkpoint)
        self.ranks: Any = Ranks()
        self.saver.goes_on(0, self.ranks, 1, {"layout": {}, "data": {}, "shape": {}})
        self.told: list[CheckpointSaved | Incident] = []

    def step(self, step: int) -> None:
        self.told += self.saver.step_done(step)

    def steps(self, first: int, last: int, clock: list[float] | None = None, each: float = 0.0) -> None:
        """Steps, one after the other, and the end of what they have begun."""
        for step in range(first, last + 1):
            if clock is not None:
                clock[0] += each
            self.step(step)
        self.finish()

    def begin(self, step: int) -> None:
        self.told += self.saver.begin(step)

    def write(self) -> None:
        """What was begun is published here, while its copy may be on its way."""
        self.told += self.saver.finish()

    def finish(self) -> None:
        self.write()
        self.told += self.saver.settle()

    def save(self, *steps: int) -> None:
        """From the begin to the end, each."""
        for step in steps:
            self.begin(step)
            self.finish()

    @property
    def mirrored(self) -> list[int]:
        assert self.homes.mirror is not None
        return self.homes.mirror.steps()

    @property
    def incidents(self) -> list[Incident]:
        return [event for event in self.told if isinstance(event, Incident)]

    @property
    def saved(self) -> list[int]:
        return [event.step for event in self.told if isinstance(event, CheckpointSaved)]

    def close(self) -> None:
        self.saver.close()
        self.directory.close()


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a run that keeps checkpoints so; it is closed with the test."""
    runs: list[Run] = []

    def made(**keeping: Any) -> Run:
        runs.append(Run(tmp_path, **keeping))
        return runs[-1]

    yield made
    for run in runs:
        run.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which a test sets."""
    now = [5000.0]
    monkeypatch.setattr(saving.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Copies to the mirror wait for it."""
    may = threading.Event()
    put = Mirror.put

    def slowly(self: Mirror, checkpoint: Path) -> None:
        assert may.wait(SECONDS)
        put(self, checkpoint)

    monkeypatch.setattr(Mirror, "put", slowly)
    yield may
    may.set()


@pytest.fixture
def mirrored(start: Start) -> Run:
    return start(every=1, keep=1, mirror=f"memory://{uuid.uuid4()}/copies")


@pytest.mark.parametrize(("bound", "beside"), [(2, 0), (3, 1)])
def test_training_waits_rather_than_risk_more_steps(start: Start, bound: int, beside: int) -> None:
    """Saves that end only when they are waited for: so many steps are done beside each of them."""
    run = start(every=2, lose_at_most=bound)
    run.ranks.may_write = False
    for step in range(1, 7):
        run.step(step)
        assert step - (run.saved[-1] if run.saved else 0) < bound
        assert (2 in run.saved) == (step >= 2 + beside)


def test_a_save_waits_for_the_one_before_it(start: Start) -> None:
    run = start(every=1, keep=2)
    run.ranks.may_write = False
    for step in range(1, 7):
        run.step(step)
        assert run.saved == list(range(1, step))
    run.finish()
    assert run.saved == [1, 2, 3, 4, 5, 6]
    names = sorted(path.name for path in run.homes.store.directory.iterdir())
    assert names == ["step-5", "step-6"]


@pytest.mark.parametrize("asynchronous", [True, False], ids=["in the background", "at once"])
@pytest.mark.parametrize("times", [2, 3])
def test_a_save_is_tried_thrice_with_the_same_state(start: Start, times: int, asynchronous: bool) -> None:
    run = start(every=3, asynchronous=asynchronous)
    run.ranks.failures = ["rank 0: [Errno 5] Input/output error"] * times
    run.steps(1, 6)
    assert run.saved == [3, 6][times - 2 :]
    told = [event.text for event in run.incidents]
    ends = ["it is tried again", "it is tried again", "training goes on"][:times]
    assert len(told) == times
    for text, end in zip(told, ends, strict=True):
        assert text.startswith("the checkpoint of step 3 failed (rank 0: [Errno 5] Input/output error)")
        assert text.endswith(end)
    assert run.ranks.again == [False, *([asynchronous] * 2), False]
    kinds = [line["kind"] for line in read_lines(run.directory.path / "events.jsonl")]
    assert kinds.count("save-failed") == times


def test_neither_training_nor_recovery_waits_for_the_mirror(mirrored: Run, gate: threading.Event) -> None:
    for step in (1, 2, 3):
        mirrored.begin(step)
    mirrored.write()
    assert mirrored.saved == [1, 2, 3], "published, while the first one is on its way still"
    mirrored.begin(4)
    mirrored.saver.abandon()
    assert mirrored.mirrored == []
    gate.set()
    mirrored.finish()
    assert mirrored.mirrored == [3], "what was overtaken while it waited is left out"
    assert mirrored.homes.store.steps()[-1] == 3


def test_what_is_on_its_way_to_the_mirror_is_not_removed(mirrored: Run, gate: threading.Event) -> None:
    mirrored.begin(1)
    mirrored.write()
    while not mirrored.saver._uploads.in_use():  # type: ignore[union-attr]
        time.sleep(0.01)
    mirrored.begin(2)
    mirrored.write()
    assert mirrored.homes.store.steps() == [1, 2], "1 is read, though one is enough to keep"
    gate.set()
    mirrored.finish()
    mirrored.save(3)
    assert mirrored.homes.store.steps() == [3]


def test_a_failing_mirror_is_told_and_changes_nothing(mirrored: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=OSError("no room in the bucket"))
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", full)
        mirrored.save(1)
    mirrored.save(2)
    assert mirrored.saved == [1, 2]
    (told,) = mirrored.incidents
    assert "step-1 was not copied: no room in the bucket" in told.text
    lines = read_lines(mirrored.directory.path / "events.jsonl")
    assert [line["generation"] for line in lines if line["kind"] == "save-failed"] == [1]
    assert mirrored.mirrored == [2]


def test_abandoned_saves_are_published_if_they_are_whole_and_removed_if_not(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(every=1, keep=5)
    may, publish = threading.Event(), saving.CheckpointStore.publish

    def slowly(*arguments: Any, **named: Any) -> Path:
        assert may.wait(SECONDS)
        return publish(*arguments, **named)

    monkeypatch.setattr(saving.CheckpointStore, "publish", slowly)
    run.begin(1)
    run.told += run.saver.look()  # written: it is being published
    run.saver.abandon()
    run.ranks.may_write = False
    run.begin(2)
    run.saver.abandon()
    assert run.saved == []
    may.set()
    run.saver._publisher.shutdown()
    run.told += run.saver.look()
    assert run.saved == [1]
    assert [path.name for path in run.homes.store.directory.glob("step-*")] == ["step-1"]


def test_a_late_publication_leaves_what_later_ranks_write(start: Start) -> None:
    run = start(every=1, keep=1)
    run.begin(1)
    later = run.homes.store.begin(2, generation=2)
    run.finish()
    assert later.is_dir()
    run.homes.store.collect(keep=1, generation=2)
    assert not later.exists()


def test_checkpoints_are_due_by_time_where_no_steps_are_given(start: Start, clock: list[float]) -> None:
    run = start()
    run.steps(1, 40, clock, 60.0)
    assert run.saved == [16, 32], "every 15 minutes"


@pytest.mark.parametrize(
    ("keeping", "seconds", "words"),
    [
        ({}, 900.0, "a failure costs at most 15 minutes of training"),
        ({"every_s": 0}, 0.0, "a failure costs everything of training"),
        ({"every": 10, "every_s": 60}, 60.0, "at most 10 steps or 1 minutes, whichever is less of training"),
        ({"copies_every": 1}, 900.0, "a lost rank costs the step under way"),
        ({"copies_every": 5, "every_s": 0}, 0.0, "at most 5 steps (checkpoint.copies_every), all ranks"),
    ],
)
def test_what_a_failure_costs_is_told(keeping: dict[str, Any], seconds: float, words: str) -> None:
    config = parse_config({"checkpoint": keeping})
    assert config.checkpoint.seconds_between == seconds
    assert words in cost_of_a_failure(config)


def test_a_used_up_quota_is_a_full_disk(tmp_path: Path) -> None:
    assert disk_is_full(tmp_path, OSError(122, "Disk quota exceeded"))
    assert not disk_is_full(tmp_path / "gone", "rank 0: [Errno 116] Stale file handle")


def test_a_disk_that_stays_full_is_told_of_after_pauses_that_grow(start: Start, clock: list[float]) -> None:
    run = start(every=1)
    full = "rank 0: [Errno 122] Disk quota exceeded"
    run.ranks.failures = [full] * 190
    run.steps(1, 190, clock, 7.0)
    told = [event.step for event in run.incidents]
    assert 3 <= len(told) <= 6
    assert run.incidents[0].text == "the checkpoint of step 1 does not fit on the disk; training goes on"
    assert not any(run.ranks.again), "it is not tried again at once"
    gaps = [after - before for before, after in pairwise(told)]
    assert gaps == sorted(gaps)
    run.steps(191, 193)
    assert run.saved
    run.ranks.failures = [full]
    run.steps(194, 194)
    assert run.incidents[-1].step == 194, "full once more, after a save that fitted"


def test_after_a_save_that_failed_the_next_one_is_due_soon(start: Start, clock: list[float]) -> None:
    run = start(every=1000)
    run.ranks.failures = ["rank 0: [Errno 5] Input/output error"] * 3
    run.steps(1000, 1019, clock, 7.0)
    assert run.saved == [1012], "a minute after the third try, not a thousand steps"


def test_the_controller_reads_no_checkpoint(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks hash what they write and verify what is there, each its share; here that would take hours."""
    hashed = Mock(side_effect=AssertionError("the controller hashes"))
    run = start(every=1)
    with monkeypatch.context() as patch:
        patch.setattr(stage_digests, "_sha256", hashed)
        run.save(1)
        assert run.saved == [1]
        path = Path(run.homes.newest_good().path)
        asked: list[Path] = []
        run.homes.newest_good(asked.append)
        assert asked == [path], "ranks are asked"
    assert [stage_digests.damage_in_share(path, rank, 2) for rank in range(2)] == [None, None]
    for name in (".metadata", "__0_0.distcp"):
        good = (path / name).read_bytes()
        (path / name).write_bytes(good[:-1] + b"?")
        found = [stage_digests.damage_in_share(path, rank, 2) for rank in range(2)]
        assert [text for text in found if text] == [f"the checksum of file {name} is wrong"], "one share"
        (path / name).write_bytes(good)


def test_a_removal_that_fails_is_told_once_tried_again_and_is_no_failed_save(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS keeps what somebody has open: the new checkpoints are as good as ever, and older ones go."""
    run = start(every=1, keep=1)
    keeps(monkeypatch, "step-1.tmp-old", "step-2.tmp-old")
    run.save(1, 2, 3, 4)
    assert run.saved == [1, 2, 3, 4]
    texts = [event.text for event in run.incidents]
    busy = ".tmp-old/.nfs01 cannot be removed: Device or resource busy; it is tried again"
    assert [text.rpartition("/step-")[2] for text in texts] == [f"1{busy}", f"2{busy}"]
    assert run.homes.store.steps() == [4], "what is removed half-way has no checkpoint's name"
    monkeypatch.undo()
    run.save(5)
    assert sorted(path.name for path in run.homes.store.directory.iterdir()) == ["step-5"]


def test_a_save_that_nobody_will_finish_is_removed_at_the_end(start: Start) -> None:
    run = start(every=1)
    run.ranks.may_write = False
    run.begin(1)
    folder = run.homes.store.directory
    assert [path.name for path in folder.iterdir()] == ["step-1.tmp-1"]
    run.close()
    assert list(folder.iterdir()) == []
