"""Copies of checkpoints at a URL: whole ones only, and nothing outside their folder."""

import json
import os
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.actors.config import ConfigError
from braid.actors.controller.homes import Homes
from braid.actors.controller.manifest import MANIFEST, CheckpointError, CheckpointStore, verify
from braid.actors.controller.mirror import Mirror, MirrorError

FACTS: dict[str, Any] = {"layout": {}, "data": {}, "shape": {}}


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place that nobody else uses."""
    place = f"{uuid.uuid4()}/copies"
    return f"memory://{place}" if request.param == "memory" else f"file://{tmp_path}/{place}"


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def publish(store: CheckpointStore, step: int, content: bytes | None = None, run: str = "") -> Path:
    folder = store.begin(step, 1)
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        (folder / name).write_bytes(content if content is not None else os.urandom(1000))
    return store.publish(folder, step=step, run=run, **FACTS)


def fetched(mirror: Mirror, step: int, into: Path) -> Path:
    into.mkdir()
    return mirror.fetch(step, into)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_there_and_back(url: str, store: CheckpointStore, tmp_path: Path) -> None:
    mirror = Mirror(url)
    assert mirror.steps() == []
    paths = {step: publish(store, step) for step in (5, 10, 100)}
    for path in paths.values():
        mirror.put(path)
    assert Mirror(url).steps() == [5, 10, 100]
    for step, path in paths.items():
        copy = fetched(mirror, step, tmp_path / f"copy-{step}")
        assert contents(copy) == contents(path)
        assert verify(copy).step == step


def test_old_copies_are_removed_by_the_same_rule(url: str, store: CheckpointStore) -> None:
    mirror = Mirror(url)
    for step in (4, 5, 6, 7, 9):
        mirror.put(publish(store, step))
    mirror.collect(keep=2, keep_every=3, newest=7)
    assert mirror.steps() == [6, 7, 9], "9 is of a future that the run fell back from"
    files, root = fsspec.core.url_to_fs(url)
    assert sorted(str(path).rsplit("/", 1)[1] for path in files.ls(root, detail=False)) == [
        "step-6",
        "step-7",
        "step-9",
    ]


@pytest.mark.parametrize("copied", [0, 1, 2, 3])
def test_half_a_copy_is_no_checkpoint(
    url: str, store: CheckpointStore, copied: int, monkeypatch: Any
) -> None:
    """The mirror goes away after so many files, also when the step is copied there for the second time."""
    mirror = Mirror(url)
    mirror.put(publish(store, 5))
    mirror.put(publish(store, 9, b"first"))
    assert mirror.steps() == [5, 9]
    files, _ = fsspec.core.url_to_fs(url)
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


def brought(url: str, step: int) -> str:
    return f"step {step} is {'read' if url.startswith('file:') else 'fetched'} from {url}"


def test_the_newest_good_one_is_found(url: str, store: CheckpointStore, tmp_path: Path) -> None:
    mirror = Mirror(url)
    paths = {step: publish(store, step) for step in (5, 10, 15)}
    for path in paths.values():
        mirror.put(path)
    files, root = fsspec.core.url_to_fs(url)
    files.pipe_file(f"{root}/step-15/__0_0.distcp", b"\0" * 1000)
    files.makedirs(f"{root}/step-20")
    files.pipe_file(f"{root}/step-20/{MANIFEST}", b"not JSON")
    empty = CheckpointStore(tmp_path / "another")
    empty.directory.mkdir()
    path, manifest, [told] = Homes(empty, mirror, "").newest_good()
    assert "step-20" in told or "step 20 cannot be copied" in told
    assert "checksum of file __0_0.distcp" in told
    assert told.endswith(brought(url, 10))
    assert (manifest.step, contents(path)) == (10, contents(paths[10]))
    here = sorted(path.name for path in empty.directory.iterdir())
    assert here == ([] if url.startswith("file:") else ["latest", "step-10"])


@given(
    here=st.dictionaries(st.integers(1, 6), st.booleans()),
    there=st.dictionaries(st.integers(1, 6), st.booleans()),
)
def test_of_all_good_ones_the_newest_and_the_own_one_before_a_copy(
    tmp_path_factory: pytest.TempPathFactory, here: dict[int, bool], there: dict[int, bool]
) -> None:
    """Steps, and whether each is good: whatever is damaged where."""
    folder = tmp_path_factory.mktemp("homes")
    store, other = CheckpointStore(folder / "own"), CheckpointStore(folder / "other")
    url = f"file://{folder}/mirror"
    mirror = Mirror(url)
    for step in there:
        mirror.put(publish(other, step))
    for step in here:
        publish(store, step)
    for places, root in ((here, store.directory), (there, folder / "mirror")):
        for step, good in places.items():
            if not good:
                (root / f"step-{step}" / ".metadata").write_bytes(b"damaged")
    homes = Homes(store, mirror, "")
    assert homes.steps() == sorted({*here, *there})
    good = [step for step in homes.steps() if here.get(step) or there.get(step)]
    if not good:
        with pytest.raises(
            CheckpointError, match="start without --resume" if not (here or there) else "left"
        ):
            homes.newest_good()
        return
    path, manifest, notes = homes.newest_good()
    expected = store.directory if here.get(good[-1]) else folder / "mirror"
    assert (path, manifest.step) == (expected / f"step-{good[-1]}", good[-1])
    newer = sum(step > good[-1] for places in (here, there) for step in places)
    assert " ".join(notes).count("has 7 bytes instead of 1000") >= newer


def test_copies_of_another_run_are_left_alone(url: str, store: CheckpointStore) -> None:
    """A run that replaces another of its name has the same mirror."""
    mirror = Mirror(url)
    old, mine = CheckpointStore(store.directory / "old"), CheckpointStore(store.directory / "mine")
    mirror.put(publish(old, 90, run="old"))
    mirror.put(publish(old, 5, run="old"))
    mine.directory.mkdir(parents=True)
    homes = Homes(mine, mirror, "mine")
    assert homes.steps() == []
    with pytest.raises(CheckpointError, match="step 90 is of another run"):
        homes.newest_good()
    assert not list(mine.directory.iterdir())
    path = publish(mine, 5, run="mine")
    mirror.put(path)
    assert homes.newest_good()[0] == path
    (path / ".metadata").write_bytes(b"damaged")
    assert homes.newest_good()[2][0].endswith(brought(url, 5))


def test_a_mirror_that_does_not_answer_does_not_matter_where_the_own_one_is_good(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = Mirror(f"memory://{uuid.uuid4()}")
    path = publish(store, 5)

    def silent(*_: Any, **__: Any) -> Any:
        raise TimeoutError("no answer")

    monkeypatch.setattr(mirror._files, "glob", silent)
    found, _, notes = Homes(store, mirror, "").newest_good()
    assert found == path
    assert "cannot be read: no answer" in notes[0]


def test_nothing_good_to_bring(url: str, store: CheckpointStore, tmp_path: Path) -> None:
    mirror = Mirror(url)
    with pytest.raises(CheckpointError, match=f"there is no checkpoint in .* or {url}"):
        Homes(store, mirror, "").newest_good()
    files, root = fsspec.core.url_to_fs(url)
    mirror.put(publish(store, 5))
    files.pipe_file(f"{root}/step-5/.metadata", b"other")
    empty = CheckpointStore(tmp_path / "another")
    empty.directory.mkdir()
    with pytest.raises(CheckpointError, match=r"\.metadata has 5 bytes"):
        Homes(empty, mirror, "").newest_good()
    assert not list(empty.directory.iterdir())


def test_a_copy_under_another_steps_name_is_refused(url: str, store: CheckpointStore, tmp_path: Path) -> None:
    mirror = Mirror(url)
    path = publish(store, 5)
    mirror.put(path)
    files, root = fsspec.core.url_to_fs(url)
    files.makedirs(f"{root}/step-50")
    for name, content in contents(path).items():
        files.pipe_file(f"{root}/step-50/{name}", content)
    _, manifest, [told] = Homes(CheckpointStore(tmp_path / "another"), mirror, "").newest_good()
    assert "says step 5; it was renamed" in told
    assert told.endswith(brought(url, 5))
    assert manifest.step == 5


@pytest.mark.parametrize("name", ["../escaped", "a/../../escaped", "/tmp/../{outside}/escaped"])
def test_names_that_lead_outside_are_refused(
    url: str, store: CheckpointStore, tmp_path: Path, name: str
) -> None:
    mirror = Mirror(url)
    path = publish(store, 5)
    mirror.put(path)
    files, root = fsspec.core.url_to_fs(url)
    name = name.format(outside=tmp_path)
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"] = {name: manifest["files"][".metadata"]}
    files.pipe_file(f"{root}/step-5/{MANIFEST}", json.dumps(manifest).encode())
    files.pipe_file(f"{root}/escaped", b"evil")
    with pytest.raises(MirrorError, match=r"names a file .*escaped' outside"):
        fetched(mirror, 5, tmp_path / "inside")
    assert not list(tmp_path.glob("escaped"))
    assert not list((tmp_path / "inside").iterdir())


@pytest.mark.parametrize("wrong", ["nosuch://bucket/run", "s4://x"])
def test_a_url_that_nothing_answers_to_names_the_key(wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"checkpoint.mirror='{wrong}': Protocol not known"):
        Mirror(wrong)
