"""``braid checkpoint``: what is shown, verified and written; damage and malice are refused by name."""

import contextlib
import errno
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import yaml
from safetensors import SafetensorError
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from braid.actors.controller.controller import Controller, RunOptions
from braid.actors.controller.planning import build_schedule
from braid.actors.controller.ranks.group import WorkerError
from braid.actors.controller.state.manifest import CheckpointStore, verify
from braid.actors.stage.rank.messages import RunPlan
from braid.actors.stage.state import exchange
from braid.jobs.commands.checkpoint import new_directory
from braid.scheduling.schedule.text import write
from tests.actors.saved import Marker, digests, flip
from tests.end_to_end.runs import KeptRanks, Run, run_layout
from tests.foreign_models import opened
from tests.in_process import Capture, Outcome, called, refused


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with checkpoints of steps 2 and 4, not to be changed."""
    checkpoints = {"every": 2, "keep": 9}
    return run_layout(tmp_path_factory.mktemp("runs"), data, 4, parallel={"tp": 2}, checkpoint=checkpoints)


@pytest.fixture
def run(trained: Run, tmp_path: Path) -> Path:
    """A copy of its directory, to damage."""
    return Path(shutil.copytree(trained.directory, tmp_path / "run"))


Command = Callable[..., Outcome]


@pytest.fixture
def command(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> Command:
    """``braid checkpoint ARGUMENTS`` in this process."""
    monkeypatch.setenv("COLUMNS", "300")
    return partial(called, capsys, "checkpoint")


def step(run: Path, number: int) -> Path:
    return run / "checkpoints" / f"step-{number}"


def weights(checkpoint: Path) -> Path:
    return min(checkpoint.glob("*.distcp"))


def republish(checkpoint: Path, **changes: Any) -> None:
    """Give a checkpoint that was tampered with a manifest that agrees, as a forger would."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").unlink()
    facts = {key: manifest[key] for key in ("step", "layout", "data", "shape", "run")} | changes
    aside = checkpoint.rename(checkpoint.parent / f"step-{facts['step']}.tmp-0")
    CheckpointStore(checkpoint.parent).publish(aside, digests(aside), **facts)
    verify(checkpoint)


def edit_manifest(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = checkpoint / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_list(run: Path, command: Command) -> None:
    shown = command("list", run)
    assert shown.code == 0
    head, *lines = shown.output.splitlines()
    assert head.split() == ["step", "size", "layout", "validation", "state"]
    rows = json.loads(command("list", run, "--json").output)
    for number, line, row in zip((2, 4), lines, rows, strict=True):
        assert line.split()[0] == str(number)
        assert "tp 2" in line
        assert line.rstrip().endswith("verified")
        size = sum(file.stat().st_size for file in step(run, number).iterdir())
        wanted = {"step": number, "size_bytes": size, "layout": "tp 2", "verified": True, "problem": None}
        wanted["best"] = number == 4  # the only one that was validated
        assert row.items() >= wanted.items()
    edit_manifest(step(run, 2), lambda content: content["layout"].update(late_layers=1))
    assert json.loads(command("list", run, "--json").output)[0]["layout"] == "tp 2", "of an earlier version"


def test_verify(run: Path, command: Command) -> None:
    good = command("verify", run)
    assert good.code == 0
    assert good.output.count("verified") == 2
    flip(step(run, 2) / ".metadata")
    refused(command("verify", step(run, 2)), ".metadata")
    assert command("verify", step(run, 4)).code == 0


def _renamed(checkpoint: Path) -> None:
    """An old checkpoint under a newer one's name."""
    shutil.rmtree(checkpoint)
    shutil.copytree(checkpoint.parent / "step-2", checkpoint)


def _linked(checkpoint: Path) -> None:
    """A file of the checkpoint moved out of it, and a link in its place: contents and checksum are right."""
    weights(checkpoint).rename(there := checkpoint.parent.parent / "moved")
    (checkpoint / "__0_0.distcp").symlink_to(there)


# Files that are torn and manifests that were tampered with: `tests.actors.test_manifest`.
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped bit": (lambda path: flip(weights(path)), "checksum of file __0_0.distcp"),
    "lost file": (lambda path: weights(path).unlink(), "__0_0.distcp is missing"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest"),
    "link to a file": (_linked, "__0_0.distcp is a link"),
    "link to a folder": (lambda path: (path / "more").symlink_to(path.parent / "step-2"), "more is a link"),
    "no model": (lambda path: edit_manifest(path, lambda content: content.update(shape={})), "shape"),
    "name of a file like markup": (lambda path: (path / "[red]x").write_bytes(b""), "[red]x"),
    "renamed": (_renamed, "step 2; it was renamed"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage(run: Path, command: Command, tmp_path: Path, damage: str) -> None:
    """Named by every command; export of the run falls back, aloud; of the checkpoint itself there is none."""
    act, says = DAMAGES[damage]
    act(step(run, 4))
    refused(command("verify", run), "step-4", says)
    row = json.loads(command("list", run, "--json").output)[1]
    assert says in row["problem"]
    assert not row["verified"]
    assert row["layout"] is None
    assert says in command("list", run).output
    refused(command("export", step(run, 4), tmp_path / "no"), "step-4", says)
    assert not (tmp_path / "no").exists()
    fallen = command("export", run, tmp_path / "model")
    assert fallen.code == 0, fallen
    assert says in fallen.errors
    assert "falling back to step 2" in fallen.errors
    opened(tmp_path / "model")


def test_a_checkpoint_that_goes_away_meanwhile(
    run: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run removes old ones while somebody reads them."""

    gone = FileNotFoundError(errno.ENOENT, "No such file or directory", str(weights(step(run, 2))))
    monkeypatch.setattr("braid.jobs.commands.checkpoint.verify", Mock(side_effect=gone))
    refused(command("verify", step(run, 2)), "step-2", "__0_0.distcp cannot be read")


def test_nothing_left_to_export(run: Path, command: Command, tmp_path: Path) -> None:
    for number in (2, 4):
        flip(weights(step(run, number)))
    refused(command("export", run, tmp_path / "model"), "step-2", "step-4", "checksum")
    assert os.listdir(tmp_path) == ["run"]


@contextlib.contextmanager
def _entries(checkpoint: Path) -> Iterator[Any]:
    """The table of contents, written anew with what is changed in the context."""
    content = pickle.loads((checkpoint / ".metadata").read_bytes())
    yield content
    (checkpoint / ".metadata").write_bytes(pickle.dumps(content))


def test_a_forged_table_of_contents_leads_nowhere(run: Path, command: Command, tmp_path: Path) -> None:
    with _entries(step(run, 4)) as content:
        for entry in content.storage_data.values():
            entry.relative_path = f"../step-2/{entry.relative_path}"
    republish(step(run, 4))
    refused(command("export", step(run, 4), tmp_path / "model"), ".metadata is refused", "'../step-2/__")


def _weights_that_run(checkpoint: Path, marker: Path) -> None:
    """Every tensor's bytes replaced by a pickle, as in a malicious ``.pt``."""
    evil = io.BytesIO()
    torch.save(Marker(marker), evil)

    for file in checkpoint.glob("*.distcp"):
        file.write_bytes(evil.getvalue())
    with _entries(checkpoint) as content:
        for entry in content.storage_data.values():
            entry.offset, entry.length = 0, evil.tell()


def _objects_that_run(checkpoint: Path, marker: Path) -> None:
    """Tensors declared to be objects, which torch unpickles without asking."""
    _weights_that_run(checkpoint, marker)
    with _entries(checkpoint) as content:
        content.state_dict_metadata.update(dict.fromkeys(content.state_dict_metadata, BytesStorageMetadata()))


FORGERIES: dict[str, tuple[Callable[[Path, Path], object], tuple[str, ...]]] = {
    "table of contents": (
        lambda path, marker: (path / ".metadata").write_bytes(pickle.dumps(Marker(marker))),
        (".metadata is refused", "mkdir"),
    ),
    "weights": (_weights_that_run, ("is refused", "mkdir")),
    "objects": (_objects_that_run, (".metadata is refused", "BytesStorageMetadata")),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_checkpoints_run_nothing(
    trained: Run, run: Path, data: Path, command: Command, tmp_path: Path, forgery: str
) -> None:
    """Neither in an export nor on the ranks, though every checksum agrees; and they would, unguarded."""
    forge, says = FORGERIES[forgery]
    marker = tmp_path / "ran"
    forge(step(run, 4), marker)
    republish(step(run, 4))
    refused(command("export", step(run, 4), tmp_path / "model"), *says)
    config = trained.config.model_copy(update={"runs": tmp_path, "name": "run"})
    schedule = write(build_schedule(config, trained.shape))
    plan = RunPlan(config=config, shape=trained.shape, schedule=schedule, data=str(data))
    with pytest.raises(WorkerError) as failure:
        list(Controller(plan, KeptRanks(config), RunOptions(resume=True, until=5)).run())
    assert failure.value.user_error
    for text in says:
        assert text in str(failure.value)
    assert not marker.exists()
    name = ".metadata" if forgery == "table of contents" else weights(step(run, 4)).name
    with contextlib.suppress(Exception):
        torch.load(step(run, 4) / name, weights_only=False)
    assert marker.exists(), "the file is harmless: too easy a test"


def test_a_table_of_contents_that_is_none(run: Path, command: Command, tmp_path: Path) -> None:
    for content in (b"", b"\x80", pickle.dumps({}), pickle.dumps(7)):
        (step(run, 4) / ".metadata").write_bytes(content)
        republish(step(run, 4))
        refused(command("export", step(run, 4), tmp_path / "model"), ".metadata is refused")


def test_targets_and_options_that_will_not_do(run: Path, command: Command, tmp_path: Path) -> None:
    target = tmp_path / "model"
    for make in (Path.mkdir, Path.touch, lambda path: path.symlink_to("/nowhere")):
        make(target)
        before = target.lstat()
        refused(command("export", run, target), str(target), "exists already")
        after = target.lstat()
        assert (after.st_ino, after.st_ctime_ns) == (before.st_ino, before.st_ctime_ns), "not written"
        assert {path.name for path in tmp_path.iterdir()} == {"run", "model"}
        target.rmdir() if make is Path.mkdir else target.unlink()
    refused(command("export", run, tmp_path / "no" / "model"), "does not exist")
    refused(command("export", run, target, "--dtype", "fp8"), "--dtype", "fp8", "fp32", "bf16")
    refused(command("export", run, target, "--max-file-gb", "0"), "--max-file-gb 0")
    assert os.listdir(tmp_path) == ["run"]


def test_sources_that_are_none(run: Path, command: Command, tmp_path: Path) -> None:
    for name, *more in (("list",), ("verify",), ("export", "model")):
        refused(command(name, tmp_path / "no", *more), f"there is no run {tmp_path}/no; there are {run}")
        refused(command(name, tmp_path, *more), f"{tmp_path} is neither a run nor a checkpoint")
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    refused(command("list", run), "no checkpoint")


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left"), SafetensorError("full")])
def test_a_write_that_fails_leaves_nothing(
    run: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    whole = exchange.save_file

    def fails(tensors: Any, path: Path, **options: Any) -> None:
        whole(tensors, path, **options)
        raise failure

    monkeypatch.setattr(exchange, "save_file", fails)
    refused(command("export", run, tmp_path / "model"), "cannot be written", str(failure.args[-1]))
    assert os.listdir(tmp_path) == ["run"]


def test_a_new_directory_appears_whole(tmp_path: Path) -> None:
    with new_directory(tmp_path / "new") as partial:
        (partial / "file").write_text("content")
        assert not (tmp_path / "new").exists()
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["new", "new/file"]


def test_models_that_have_no_form_elsewhere(run: Path, command: Command, tmp_path: Path) -> None:
    """GPT-2 groups no heads; sizes must be those of the parameters; own layers are nobody else's."""
    shape = json.loads((run / "model.json").read_text())
    for changes, says in (
        ({"family": "gpt"}, "model.kv_heads=2"),
        ({"hidden": 128}, "parameter embedding.weight has shape"),
        ({"layers": 5}, "parameter layers.4.attention_norm.weight has shape None"),
    ):
        republish(step(run, 4), shape={**shape, **changes})
        refused(command("export", run, tmp_path / "model"), says)
    republish(step(run, 4), shape=shape)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"]["layer"] = "package.module:Layer"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    refused(command("export", run, tmp_path / "model"), "model.layer='package.module:Layer'")
    assert os.listdir(tmp_path) == ["run"]
