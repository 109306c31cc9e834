"""Files of a run that grow with it are read and cut from their ends."""

import errno
import io
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from braid.actors.config import ConfigError
from braid.actors.controller.records import json_lines
from braid.actors.controller.records import run_records as records
from braid.actors.controller.records.json_lines import last_line, read_lines
from braid.actors.controller.records.reporting import build_report
from braid.actors.controller.records.run_records import RunDirectory
from braid.actors.controller.records.step_record import StepRecord, read_metrics
from braid.actors.controller.steps import StepClock
from tests.end_to_end.runs import small_config

ODD = st.sampled_from(["", "7", "[]", "{", '"x"', "nonsense {}", "\\u00e9"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(max_size=30), max_size=12), st.data())
def test_the_last_line_is_read_and_a_file_is_cut_before_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str], data: st.DataObject
) -> None:
    monkeypatch.setattr(json_lines, "_CHUNK_BYTES", data.draw(st.integers(1, 50), label="chunk"))
    steps = sorted(data.draw(st.lists(st.integers(1, 9), min_size=len(texts), max_size=len(texts))))
    lines = [json.dumps({"step": step, "text": text}) for step, text in zip(steps, texts, strict=True)]
    last = data.draw(st.sampled_from(["", '{"step": 0', *lines]), label="a line that was cut short")
    path = tmp_path / "lines.jsonl"
    odd = data.draw(st.lists(ODD, max_size=4), label="lines that say nothing")
    path.write_text("".join(f"{line}\n" for line in [*lines, *odd]))
    assert last_line(path) == (json.loads(lines[-1]) if lines else {})
    path.write_text("".join(f"{line}\n" for line in lines) + last)
    assert last_line(path) == (json.loads(lines[-1]) if lines else {})
    first = data.draw(st.integers(0, 11), label="cut before")
    json_lines.cut_off(path, first)
    kept = [line for line, step in zip(lines, steps, strict=True) if step < first]
    assert path.read_text() == "".join(f"{line}\n" for line in kept)


def a_record(step: int, **changes: Any) -> StepRecord:
    same = ("loss", "grad_norm", "lr", "seconds", "communication_seconds", "exposed_seconds")
    none = ("launch_gap_seconds", "bubble_seconds", "waiting_seconds")
    numbers: dict[str, Any] = {**dict.fromkeys(same, float(step)), **dict.fromkeys(none, 0.0)}
    numbers |= {"hidden_fraction": 1.0, "slowdown_seconds": None, "exposed_by_axis": {}}
    return StepRecord(**{"step": step, "tokens": 8, "peak_bytes": (1, 2), **numbers, **changes})


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    """Of a new run."""
    made = RunDirectory(small_config(tmp_path), resume=False, overwrite=False)
    yield made
    made.close()


def test_steps_that_run_again_are_dropped(tmp_path: Path) -> None:
    """By the controller that ran them and by the next one; what it remembers is what the file says."""
    config = small_config(tmp_path)

    def append(directory: RunDirectory, steps: range, generation: int) -> None:
        for step in steps:
            directory.append(a_record(step, generation=generation), {"step": step})

    directory = RunDirectory(config, resume=False, overwrite=False)
    assert directory.rewind(1) == []
    append(directory, range(1, 8), 1)
    assert [record.step for record in directory.rewind(5)] == [1, 2, 3, 4]
    append(directory, range(5, 7), 2)
    directory.note("started", 0, 2, "again")
    directory.close()

    directory = RunDirectory(config, resume=True, overwrite=False)
    failure: Any = directory.unfinished()
    assert failure.step == 6
    assert directory.last_generation == 2
    directory.note("saved", 4, 1, "told late, of ranks that are gone")
    assert directory.last_generation == 2
    found = directory.rewind(6)
    assert [(record.step, record.generation) for record in found] == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2)]
    append(directory, range(6, 7), 3)
    assert [line["step"] for line in read_lines(directory.path / "ranks.jsonl")] == [1, 2, 3, 4, 5, 6]
    kept = directory.rewind(7)
    assert list(map(asdict, kept)) == list(map(asdict, read_metrics(directory.metrics)))
    directory.note("finished", 6, 3, "complete")
    assert directory.unfinished() is None
    directory.close()


def test_records_of_older_runs_are_read(directory: RunDirectory) -> None:
    """Lines that were written before some fields were."""
    directory.append(a_record(1), {"step": 1})
    line = json.loads(directory.metrics.read_text())
    for name in ("waiting_seconds", "exposed_by_axis", "validation_loss"):
        line.pop(name, None)
    directory.metrics.write_text(json.dumps(line) + "\n")
    (found,) = directory.rewind(2)
    assert (found.waiting_seconds, found.exposed_by_axis, found.validation_loss) == (0.0, {}, None)


def test_of_a_long_run_only_the_newest_records_are_kept(directory: RunDirectory) -> None:
    """And the report counts all of them, from the file."""
    for step in range(1, 5 * records.WINDOW):
        directory.append(a_record(step), {"step": step})
    newest = directory.rewind(4 * records.WINDOW + 1)
    assert [record.step for record in newest] == list(range(3 * records.WINDOW + 1, 4 * records.WINDOW + 1))
    assert len(list(directory.records())) == 4 * records.WINDOW
    held = [value for value in vars(directory).values() if isinstance(value, list | dict) and len(value) > 5]
    assert held == []


def test_tokens_per_second_are_of_the_wall_clock(tmp_path: Path) -> None:
    """Two tokens a second while it steps, one if all that lies between counts."""
    config = small_config(tmp_path)
    lines = [
        a_record(step, seconds=4.0, wall_seconds=8.0, between_seconds={"save": 3.5}, peak_bytes=(step,))
        for step in range(1, 4)
    ]
    assert lines[0].tokens_per_s == 1.0
    report = build_report(iter(lines), config, complete=True)
    assert report["tokens_per_s"] == 1.0
    quiet = [a_record(1, communication_seconds=0.0, exposed_seconds=0.0)]
    overlap = build_report(quiet, config, complete=True)["overlap"]
    assert overlap["hidden_fraction"] is None, "nothing was there to hide"
    assert type(report["layout"]["placement"]) is str
    assert [step["wall_seconds"] for step in report["steps"]] == [8.0] * 3
    assert report["memory"]["peak_bytes"] == [3]
    old = a_record(1, seconds=4.0)
    assert old.tokens_per_s == 2.0, "a record from before there was a wall clock"


def strict(text: str) -> Any:
    """What any reader of JSON makes of it: none of NaN and infinities."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_no_number_is_null_in_files_and_nan_in_records(tmp_path: Path, directory: RunDirectory) -> None:
    held_out = {"validation_loss": math.nan, "validation_bits_per_byte": math.nan}
    skipped = a_record(2, loss=math.nan, grad_norm=math.inf, **held_out, between_seconds={"validation": 1.0})
    first = a_record(
        1, validation_loss=2.0, validation_bits_per_byte=3.0, between_seconds={"validation": 1.0}
    )
    for record in (first, skipped, a_record(3)):
        directory.append(record, {"step": record.step, "seconds": [math.nan, 1.0]})
    directory.note("guard", 2, 1, "skipped", loss=math.nan)
    back = list(directory.records())
    report = build_report(iter(back), small_config(tmp_path), complete=True)
    assert directory.write_report(report) == ""
    for name in ("metrics.jsonl", "ranks.jsonl", "events.jsonl"):
        for line in (directory.path / name).read_text().splitlines():
            strict(line)
    lines = [strict(line) for line in directory.metrics.read_text().splitlines()]
    assert "experts" not in lines[0], "of a model without any"
    assert [(line["loss"], line["grad_norm"]) for line in lines] == [(1.0, 1.0), (None, None), (3.0, 3.0)]
    assert math.isnan(back[1].loss)
    assert math.isnan(back[1].grad_norm)
    assert replace(back[1], loss=2.0, grad_norm=2.0) == a_record(2, between_seconds={"validation": 1.0})
    written = strict((directory.path / "report.json").read_text())
    assert [step["loss"] for step in written["steps"]] == [1.0, None, 3.0]
    assert written["validation"] == {"loss": None, "bits_per_byte": None}, "the last one was no number"


def test_the_clock_says_what_lay_between_two_steps() -> None:
    now = SimpleNamespace(now=100.0)
    clock = StepClock(lambda: now.now)
    with clock.part("save"):
        now.now += 2.0
    now.now += 5.5
    assert clock.step_ends(1) == (7.5, {"save": 2.0})
    with clock.part("nodes"), clock.part("records"):
        now.now += 0.5
    with clock.part("records"):
        now.now += 1.0
    now.now += 1.0
    assert clock.step_ends(2) == (2.5, {"nodes": 0.5, "records": 1.5})


def test_what_a_failure_lost_belongs_to_the_next_step() -> None:
    now = SimpleNamespace(now=100.0)
    clock = StepClock(lambda: now.now)
    clock.goes_on(4)  # resumed: of the time before, this process knows nothing
    for step in (5, 6, 7):
        now.now += 3.0
        assert clock.step_ends(step)[0] == 3.0
    with clock.part("save"):
        now.now += 10.0
    clock.goes_on(5)
    now.now += 1.0
    assert clock.step_ends(6) == (17.0, {})
    clock.goes_on(4)
    now.now += 2.0
    assert clock.step_ends(5)[0] == 2.0, "no step of this process"


def full_disk(monkeypatch: pytest.MonkeyPatch, written: list[int]) -> None:
    """Every attempt to write is noted, with its size, and fails."""

    class Full(io.BytesIO):
        def write(self, data: object) -> int:
            written.append(len(bytes(data)))  # type: ignore[call-overload]
            raise OSError(errno.ENOSPC, "No space left on device")

    real = Path.open

    def opened(self: Path, mode: str = "r", *arguments: object, **named: object) -> object:
        if mode != "ab":
            return real(self, mode, *arguments, **named)  # type: ignore[call-overload]
        self.touch()
        return Full()

    monkeypatch.setattr(Path, "open", opened)


def test_a_full_disk_is_tried_after_pauses_and_lines_are_bounded(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(records.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(json_lines, "_WAITING_BYTES", 40_000)
    attempts: list[int] = []
    with monkeypatch.context() as patch:
        full_disk(patch, attempts)
        for step in range(2000):
            now[0] += 0.1  # 200 s: pauses of 0.5, 1, 2, ... 60 s
            directory.note("step", step, 1, "text")
    assert 8 <= len(attempts) <= 11
    assert max(attempts) <= 40_000
    assert "No space left" in directory.trouble
    now[0] += 61.0
    directory.note("step", 2000, 1, "text")
    lines = read_lines(directory.path / "events.jsonl")
    assert [line["step"] for line in lines] == list(range(2001 - len(lines), 2001))
    assert 100 < len(lines) < 2001


def test_what_waits_is_written_at_the_end(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        full_disk(patch, [])
        directory.note("step", 1, 1, "text")
    directory.close()
    assert [line["step"] for line in read_lines(directory.path / "events.jsonl")] == [1]


def test_folders_that_cannot_be_written_are_the_users(tmp_path: Path, directory: RunDirectory) -> None:
    (tmp_path / "file").touch()
    config = small_config(tmp_path).model_copy(update={"runs": tmp_path / "file" / "runs"})
    with pytest.raises(ConfigError, match=r"file/runs.* cannot be written: Not a directory; .* with runs="):
        RunDirectory(config, resume=False, overwrite=False)
    (directory.path / "ranks.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"ranks\.jsonl cannot be written: Is a directory"):
        directory.rewind(1)
