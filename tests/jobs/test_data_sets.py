"""Which tokens a run gets when files were touched, changed or deleted."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from braid.actors.config import Config, parse_config
from braid.actors.controller.records.run_records import Incident
from braid.actors.stage.data.mixture import read_mixture
from braid.jobs.data.data_sets import (
    RECORD,
    PreparedMixture,
    check_data,
    data_record,
    prepare_data,
)
from tests.jobs.corpora import contents, hidden

TWO = {"a": "first text", "b": "second text"}
Get = Callable[..., tuple[Any, list[str]]]


@pytest.fixture
def get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Get:
    """What a run in ``tmp_path`` trains on, and the warnings; it is written down as a run does it."""
    monkeypatch.chdir(tmp_path)

    def call(name: str = "run", *, data: dict[str, Any] | None = None, **how: bool) -> Any:
        events: list[Any] = []
        config = configured(name, data)
        prepared = prepare_data(config, map, events.append, **how)
        config.run_directory.mkdir(parents=True, exist_ok=True)
        (config.run_directory / RECORD).write_text(data_record(prepared))
        return prepared, [event.text for event in events if isinstance(event, Incident)]

    return call


def configured(name: str, data: dict[str, Any] | None = None) -> Config:
    files = {"files": ["corpus/*.txt"], "validation_fraction": 0.2, **(data or {})}
    train = {"global_batch": 1, "micro_batch": 1, "validation_samples": 1}
    return parse_config({"name": name, "data": files, "model": {"sequence": 1}, "train": train})


def write(folder: Path, **texts: str) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)


def sets(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "runs" / "data").iterdir() if path.name[0] != ".")


def test_files_that_are_as_they_were_are_not_read_again(get: Get, tmp_path: Path) -> None:
    write(tmp_path / "corpus", **TWO)
    first, _ = get()
    again, warnings = get("again")
    assert (again.output, again.reused, warnings) == (first.output, True, [])
    os.utime(tmp_path / "corpus" / "a.txt", ns=(0, 1))
    touched, warnings = get("touched")
    assert (touched.output != first.output, touched.reused, warnings) == (True, False, [])
    assert touched.index.fingerprint == first.index.fingerprint
    assert not hidden(tmp_path / "runs" / "data")


def test_what_changed_gets_a_folder_of_its_own(get: Get, tmp_path: Path) -> None:
    write(tmp_path / "corpus", **TWO)
    first, _ = get()
    before = contents(first.output)
    write(tmp_path / "corpus", b="SECOND text")  # of the same size
    new, warnings = get("second")
    assert (new.reused, warnings) == (False, [])
    assert len(sets(tmp_path)) == 2
    assert contents(first.output) == before
    resumed, (warning,) = get(resume=True)
    assert (resumed.output, resumed.reused) == (first.output, True)
    for part in ("data.files changed", "b.txt", "began with", str(first.output.relative_to(tmp_path))):
        assert part in warning
    assert "a.txt" not in warning


def test_tokens_are_enough(get: Get, tmp_path: Path) -> None:
    write(tmp_path / "corpus", **TWO)
    first, _ = get()
    shutil.rmtree(tmp_path / "corpus")
    for resume in (True, False):
        found, warnings = get(resume=resume)
        assert found.output == first.output
        (warning,) = warnings
        assert "finds no file" in warning
        assert str(first.output.relative_to(tmp_path)) in warning
    check_data(configured("run"))
    for name, data in (("another", {}), ("run", {"text_field": "body"})):
        with pytest.raises(ValueError, match=r"^data.files: 'corpus/\*.txt' finds no file"):
            get(name, data=data)
        with pytest.raises(ValueError, match="finds no file"):
            check_data(configured(name, data))
    (tmp_path / "runs").rename(tmp_path / "moved")
    config = configured("run").model_copy(update={"runs": tmp_path / "moved"})
    moved = prepare_data(config, map, lambda event: None, resume=True)
    assert moved.output == tmp_path / "moved" / "data" / first.output.name
    (moved.output / "index.json").unlink()
    with pytest.raises(ValueError, match="finds no file"):
        check_data(config)


def test_a_directory_that_was_given(get: Get, tmp_path: Path) -> None:
    write(tmp_path / "corpus", **TWO)
    data = {"directory": "tokens"}
    first, _ = get(data=data)
    before = contents(first.output)
    write(tmp_path / "corpus", b="another text", c="a third")
    with pytest.raises(ValueError, match=r"^data.directory=.*b.txt.*c.txt.*`braid prepare`"):
        get("second", data=data)
    assert contents(first.output) == before
    resumed, warnings = get(data=data, resume=True)
    assert (resumed.index.fingerprint, len(warnings)) == (first.index.fingerprint, 1)
    renewed, warnings = get("second", data=data, renew=True)
    assert (renewed.output, renewed.reused, warnings) == (first.output, False, [])
    assert renewed.index.fingerprint != first.index.fingerprint
    with pytest.raises(ValueError, match=r"^data.directory=.*other settings.*`braid prepare`"):
        get("second", data={**data, "validation_fraction": 0.5})
    shutil.rmtree(tmp_path / "corpus")
    assert get("third", data=data)[0].index.fingerprint == renewed.index.fingerprint
    with pytest.raises(ValueError, match="finds no file"):
        get("third", data=data, renew=True)


def test_sets_of_a_mixture_are_those_of_runs_on_them_alone(get: Get, tmp_path: Path) -> None:
    write(tmp_path / "corpus", **TWO)
    write(tmp_path / "more", c="third text", d="fourth text")
    alone, _ = get("alone", data={"files": ["more/*.txt"]})
    sets: list[dict[str, Any]] = [
        {"name": "own", "weight": 3, "files": ["corpus/*.txt"]},
        {"name": "known", "weight": 1, "files": ["more/*.txt"]},
    ]
    mixture = {"files": [], "mixture": sets}
    mixed, _ = get(data=mixture)
    assert isinstance(mixed, PreparedMixture)
    assert [(one.name, one.reused) for one in mixed.sets] == [("own", False), ("known", True)]
    assert mixed.sets[1].output == alone.output
    assert get("alone", data={"files": ["corpus/*.txt"]})[0].output == mixed.sets[0].output
    assert [one.name for one in read_mixture(mixed.output)] == ["own", "known"]
    again, _ = get("again", data=mixture)
    assert again.output == mixed.output
    heavier, _ = get("again", data={**mixture, "mixture": [{**sets[0], "weight": 9}, sets[1]]})
    assert heavier.output != mixed.output, "a run may be reading the first one"
    assert all(one.reused for one in heavier.sets)
    shutil.rmtree(tmp_path / "more")
    resumed, warnings = get(data=mixture, resume=True)
    assert resumed.output == mixed.output
    assert "known: data.files: 'more/*.txt' finds no file" in "".join(warnings)
    check_data(configured("run", mixture))
    for name in ("other", "alone"):
        with pytest.raises(
            ValueError, match=r"^data.mixture, set 'known': data.files: 'more/\*.txt' finds no"
        ):
            check_data(configured(name, mixture))
    with pytest.raises(ValueError, match=r"^data.mixture, set 'known': data.files"):
        check_data(configured("run", mixture), sources=True)


def test_a_directory_holds_the_sets_of_a_mixture(get: Get, tmp_path: Path) -> None:
    write(tmp_path / "corpus", **TWO)
    sets = [{"name": name, "weight": 1, "files": [f"corpus/{name}.txt"]} for name in ("a", "b")]
    mixed, warnings = get(data={"files": [], "mixture": sets, "directory": "tokens"})
    assert isinstance(mixed, PreparedMixture)
    assert [one.output for one in mixed.sets] == [tmp_path / "tokens" / "a", tmp_path / "tokens" / "b"]
    assert mixed.output.parent == tmp_path / "tokens"
    assert warnings == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^data.mixture, set 'a': data.directory: cannot write beside"):
        get("other", data={"files": [], "mixture": sets, "directory": "file"})
