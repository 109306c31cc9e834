"""Copies of checkpoints at a URL: whole ones only, and nothing outside their folder."""

import json
import shutil
import sys
import uuid
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.actors.config import Config, ConfigError, parse_config
from braid.actors.config.paths import check_protocol
from braid.actors.controller.state.checkpoint_stores import Homes, begun_mark
from braid.actors.controller.state.manifest import (
    MANIFEST,
    CheckpointError,
    CheckpointStore,
    Manifest,
    verify,
)
from braid.actors.controller.state.mirror import KEY, Mirror, MirrorError, RunIdentity
from tests.actors import saved

pytestmark = pytest.mark.slow


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place that nobody else uses."""
    place = f"{uuid.uuid4()}/copies"
    return f"memory://{place}" if request.param == "memory" else f"file://{tmp_path}/{place}"


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


RUN = RunIdentity("ours", "a1")
SILENT = Mock(side_effect=TimeoutError("no answer"))


def mirror_of(url: str, run: RunIdentity = RUN) -> Mirror:
    return Mirror(url, run)


def publish(store: CheckpointStore, step: int, content: bytes | None = None, run: str = RUN.mark) -> Path:
    return saved.publish(store, step, content, run=run)


def found(store: CheckpointStore, mirror: Mirror) -> tuple[Path, Manifest, list[str]]:
    """The newest good one, as a run with ranks finds it."""
    one = Homes(store, mirror, mirror.run.mark).newest_good(verify)
    return Path(one.path), one.manifest, list(one.notes)


def place_of(url: str) -> tuple[Any, str]:
    """The file system, and this run's folder there."""
    files, root = fsspec.core.url_to_fs(url)
    return files, f"{root}/{RUN.name}/{RUN.mark}"


def put_there(url: str, checkpoint: Path, name: str) -> None:
    """By somebody else than the mirror."""
    files, root = place_of(url)
    files.makedirs(f"{root}/{name}", exist_ok=True)
    for file in checkpoint.iterdir():
        files.pipe_file(f"{root}/{name}/{file.name}", file.read_bytes())


def test_old_copies_are_removed_by_the_same_rule(url: str, store: CheckpointStore) -> None:
    mirror = mirror_of(url)
    for step in (4, 5, 6, 7, 9):
        mirror.put(publish(store, step))
    mirror.collect(keep=2, keep_every=3, newest=7)
    assert mirror.steps() == [6, 7, 9], "9 is of a future that the run fell back from"
    files, root = place_of(url)
    names = sorted(str(path).rsplit("/", 1)[1] for path in files.ls(root, detail=False))
    assert names == ["run.json", "step-6", "step-7", "step-9"]


@pytest.mark.parametrize("copied", [0, 2])
def test_half_copies_do_not_count(url: str, store: CheckpointStore, copied: int, monkeypatch: Any) -> None:
    """The mirror goes away after so many files, also when the step is copied there for the second time."""
    mirror = mirror_of(url)
    mirror.put(publish(store, 5))
    mirror.put(publish(store, 9, b"first"))
    assert mirror.steps() == [5, 9]
    files, _ = place_of(url)
    put, left = type(files).put_file, [copied]

    def failing(self: Any, *arguments: Any, **options: Any) -> Any:
        if not left[0]:
            raise TimeoutError("the store does not answer")
        left[0] -= 1
        return put(self, *arguments, **options)

    again = [publish(store, 9, b"second"), publish(store, 12)]
    with monkeypatch.context() as patch:
        patch.setattr(type(files), "put_file", failing)
        for path in again:
            with pytest.raises(MirrorError, match=r"checkpoint.mirror=.* does not answer"):
                mirror.put(path)
            left[0] = copied
    assert mirror.steps() == [5]
    for path in again:
        mirror.put(path)
    assert mirror.steps() == [5, 9, 12]


@given(
    here=st.dictionaries(st.integers(1, 4), st.booleans()),
    there=st.dictionaries(st.integers(1, 4), st.booleans()),
)
def test_of_all_good_ones_the_newest_and_the_own_one_before_a_copy(
    tmp_path_factory: pytest.TempPathFactory, here: dict[int, bool], there: dict[int, bool]
) -> None:
    """Steps, and whether each is good: whatever is damaged where."""
    folder = tmp_path_factory.mktemp("homes")
    store, other = CheckpointStore(folder / "own"), CheckpointStore(folder / "other")
    url = f"file://{folder}/mirror"
    mirror = mirror_of(url)
    for step in there:
        mirror.put(publish(other, step))
    for step in here:
        publish(store, step)
    copies = folder / "mirror" / RUN.name / RUN.mark
    for places, root in ((here, store.directory), (there, copies)):
        for step, good in places.items():
            if not good:
                (root / f"step-{step}" / ".metadata").write_bytes(b"damaged")
    homes = Homes(store, mirror, RUN.mark)
    assert homes.steps() == sorted({*here, *there})
    good = [step for step in homes.steps() if here.get(step) or there.get(step)]
    if not good:
        with pytest.raises(CheckpointError, match="left" if here or there else "start without resume=True"):
            homes.newest_good(verify)
        return
    path, manifest, notes = found(store, mirror)
    expected = store.directory if here.get(good[-1]) else copies
    assert (path, manifest.step) == (expected / f"step-{good[-1]}", good[-1])
    newer = sum(step > good[-1] for places in (here, there) for step in places)
    assert " ".join(notes).count("has 7 bytes instead of 1000") >= newer


def test_what_another_run_put_into_a_runs_folder_is_refused_and_left_alone(url: str, tmp_path: Path) -> None:
    store, mirror = CheckpointStore(tmp_path / "ours"), mirror_of(url)
    foreign = CheckpointStore(tmp_path / "foreign")
    publish(foreign, 90, run="b2")
    with pytest.raises(MirrorError, match="step-90 is of another run and is left alone"):
        mirror.put(foreign.directory / "step-90")
    for path in (publish(foreign, 5, run="b2"), foreign.directory / "step-90"):
        put_there(url, path, path.name)
    empty = CheckpointStore(tmp_path / "empty")
    empty.directory.mkdir()
    with pytest.raises(CheckpointError, match="step-90 is of another run"):
        found(empty, mirror)
    assert not list(empty.directory.iterdir())
    for step in (5, 6, 7):
        path = publish(store, step)
        odd = pytest.raises(MirrorError, match="step-5 is of another run")
        with odd if step == 5 else nullcontext():
            mirror.put(path)
    with pytest.raises(MirrorError, match="step-5 is of another run"):
        mirror.collect(keep=1, keep_every=0, newest=7)
    assert mirror.steps() == [5, 6, 7, 90]


def config_of(tmp_path: Path, url: str, name: str = RUN.name) -> Config:
    return parse_config({"name": name, "runs": str(tmp_path / "runs"), "checkpoint": {"mirror": url}})


def test_who_a_run_is_stands_in_its_directory_and_in_its_mirror(url: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, url)
    assert begun_mark(config) == ""
    store = CheckpointStore(config.run_directory / "checkpoints")
    mirror_of(url).begin()
    assert begun_mark(config) == "", "nothing is saved yet"
    mirror_of(url).put(publish(store, 5))
    mirror_of(url, RunIdentity("theirs", "c3")).put(publish(CheckpointStore(tmp_path / "x"), 9, run="c3"))
    assert begun_mark(config) == RUN.mark
    (config.run_directory / "run-mark").write_text("d4\nb2")
    assert begun_mark(config) == "d4"
    shutil.rmtree(config.run_directory)
    assert begun_mark(config) == RUN.mark
    assert Homes.of(config, RUN).begun()


def test_of_runs_of_one_name_the_one_that_was_not_replaced_goes_on(url: str, tmp_path: Path) -> None:
    config, store = config_of(tmp_path, url), CheckpointStore(tmp_path / "store")
    for run in (RUN, RunIdentity(RUN.name, "b2", ("a1",)), RunIdentity(RUN.name, "c3", ("b2", "a1"))):
        mirror_of(url, run).put(publish(store, 5, run=run.mark))
        assert begun_mark(config) == run.mark
    mirror_of(url, RunIdentity(RUN.name, "d4")).put(publish(store, 5, run="d4"))
    with pytest.raises(ConfigError, match=r"checkpoints of 2 runs named 'ours' \(c3, d4\); write the mark"):
        begun_mark(config)


def test_a_run_does_not_begin_anew_because_its_mirror_does_not_answer(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, url)
    monkeypatch.setattr(type(place_of(url)[0]), "glob", SILENT)
    with pytest.raises(MirrorError, match="cannot be read: no answer"):
        begun_mark(config)
    with pytest.raises(MirrorError, match="cannot be read: no answer"):
        Homes.of(config, RUN).begun()


def test_a_mirror_that_does_not_answer_does_not_matter_where_the_own_one_is_good(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = mirror_of(f"memory://{uuid.uuid4()}")
    path = publish(store, 5)
    monkeypatch.setattr(mirror._files, "glob", SILENT)
    best, _, notes = found(store, mirror)
    assert best == path
    assert "cannot be read: no answer" in notes[0]


def test_a_copy_under_another_steps_name_is_refused(url: str, store: CheckpointStore, tmp_path: Path) -> None:
    mirror = mirror_of(url)
    path = publish(store, 5)
    mirror.put(path)
    put_there(url, path, "step-50")
    _, manifest, [told] = found(CheckpointStore(tmp_path / "another"), mirror)
    assert "says step 5; it was renamed" in told
    assert told.endswith(f"step 5 is {'read' if url.startswith('file:') else 'fetched'} from {url}")
    assert manifest.step == 5


@pytest.mark.parametrize("name", ["../escaped", "a/../../escaped", "/tmp/../{outside}/escaped"])
def test_names_that_lead_out_are_refused(url: str, store: CheckpointStore, tmp_path: Path, name: str) -> None:
    mirror = mirror_of(url)
    path = publish(store, 5)
    mirror.put(path)
    files, root = place_of(url)
    name = name.format(outside=tmp_path)
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"] = {name: manifest["files"][".metadata"]}
    files.pipe_file(f"{root}/step-5/{MANIFEST}", json.dumps(manifest).encode())
    files.pipe_file(f"{root}/escaped", b"evil")
    (tmp_path / "inside").mkdir()
    with pytest.raises(MirrorError, match=r"names a file .*escaped' outside"):
        mirror.fetch(5, tmp_path / "inside")
    assert not list(tmp_path.glob("escaped"))
    assert not list((tmp_path / "inside").iterdir())


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    says = r"^checkpoint.mirror='s3://b/run': .*s3fs.*'braid\[object-stores\]'$"
    with pytest.raises(ConfigError, match=says):
        mirror_of("s3://b/run")
    check_protocol(KEY, "s3://b/run")  # the nodes may have it
