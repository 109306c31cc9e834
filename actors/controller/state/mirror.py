"""Keeps second copies of checkpoints at any fsspec URL: object stores, other file systems.

Every run has a folder of its own there, ``URL/NAME/MARK``: runs that share a mirror, even under one name,
never see each other's files. Object stores cannot rename, so the manifest is the last file of a checkpoint to
be written: a folder without a manifest is no checkpoint. If the mirror is a directory, ranks can also write
to it themselves, and read in place.
"""

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from braid.actors.config import CheckpointConfig, ConfigError
from braid.actors.config.paths import file_system
from braid.actors.controller.state.manifest import (
    MANIFEST,
    CheckpointStore,
    Manifest,
    best_of,
    read_manifest,
    steps_named,
    to_be_removed,
)

_RUN_FILE = "run.json"
KEY = "checkpoint.mirror"


class MirrorError(ConfigError):
    """The mirror cannot be reached or used."""


@dataclass(frozen=True)
class RunIdentity:
    """Name and mark that distinguish a run from all others."""

    name: str
    mark: str
    """Random mark, drawn when the run begins; its manifests contain it."""
    replaces: tuple[str, ...] = ()
    """Marks of the runs of this name that this run replaces, as its user asked (``overwrite``)."""


def _open(url: str) -> tuple[Any, str]:
    files, root = file_system(KEY, url)
    files.invalidate_cache()  # others write there
    return files, root.rstrip("/")


@contextlib.contextmanager
def _using(url: str, what: str) -> Iterator[None]:
    """Raise `MirrorError`, whose message says ``what`` failed, for any error in the block: file systems raise
    errors of many types."""
    try:
        yield
    except MirrorError:
        raise
    except Exception as error:
        raise MirrorError(f"checkpoint.mirror={url!r}: {what}: {error}") from None


def mark_at(url: str, name: str) -> str:
    """Return the mark of the run of this name that has checkpoints at a mirror; empty if there is none.

    Raise `MirrorError` if there are several, none of which replaces the others, or the mirror does not
    answer.
    """
    files, root = _open(url)
    with _using(url, "it cannot be read"):
        begun = {
            str(path).rsplit("/", 2)[1]: json.loads(files.cat_file(path))
            for path in files.glob(f"{root}/{name}/*/{_RUN_FILE}")
        }
        saved = {str(path).rsplit("/", 3)[1] for path in files.glob(f"{root}/{name}/*/step-*/{MANIFEST}")}
        replaced = {mark for content in begun.values() for mark in content["replaces"]}
    marks = sorted((begun.keys() & saved) - replaced)
    if len(marks) > 1:
        raise MirrorError(
            f"checkpoint.mirror={url!r} has checkpoints of {len(marks)} runs named {name!r} "
            f"({', '.join(marks)}); write the mark of the one that is to go on into the file run-mark of the "
            f"run's directory"
        )
    return marks[0] if marks else ""


class Mirror:
    """The copies of one run's checkpoints at a URL."""

    def __init__(self, url: str, run: RunIdentity) -> None:
        from fsspec.implementations.local import LocalFileSystem

        self.url, self.run = url, run
        self._files, root = _open(url)
        self._root = f"{root}/{run.name}/{run.mark}"
        local = isinstance(self._files, LocalFileSystem)
        self.store = CheckpointStore(Path(self._root)) if local else None
        """The mirror as a directory, if it is a disk or a shared file system; else None."""

    def begin(self) -> None:
        """Write down which run the folder belongs to; call this before anything else is written there."""
        file = f"{self._root}/{_RUN_FILE}"
        with _using(self.url, f"{file} cannot be written"):
            if not self._files.exists(file):
                self._files.makedirs(self._root, exist_ok=True)
                self._files.pipe_file(file, json.dumps(asdict(self.run)).encode())

    def put(self, checkpoint: Path) -> None:
        """Copy a published checkpoint, its manifest last."""
        self.begin()
        target = f"{self._root}/{checkpoint.name}"
        manifest = read_manifest(checkpoint)
        self._check_own(manifest.run, checkpoint.name)
        with _using(self.url, f"{checkpoint.name} was not copied"):
            if self._files.exists(f"{target}/{MANIFEST}"):  # the step was saved before: do not mix both
                self.manifest(manifest.step)
                self._files.rm_file(f"{target}/{MANIFEST}")
            for name in [*sorted(manifest.files), MANIFEST]:
                copy = f"{target}/{name}"
                self._files.makedirs(copy.rsplit("/", 1)[0], exist_ok=True)
                self._files.put_file(str(checkpoint / name), copy)

    def steps(self) -> list[int]:
        """Return the steps of complete copies, oldest first."""
        with _using(self.url, "it cannot be read"):
            self._files.invalidate_cache()
            manifests = self._files.glob(f"{self._root}/step-*/{MANIFEST}")
        return steps_named(str(path).rsplit("/", 2)[1] for path in manifests)

    def collect(self, keep: int, keep_every: int, newest: int, *, keep_best: bool = False) -> None:
        """Remove old copies by the same rule as in the run's own directory; ``newest``: the step copied
        last."""
        steps = [step for step in self.steps() if step <= newest]
        old = to_be_removed(steps, keep, keep_every)
        best = best_of(map(self.manifest, steps)) if keep_best and old else None
        for step in (step for step in old if best is None or step != best.step):
            folder = f"{self._root}/step-{step}"
            with _using(self.url, f"{folder} cannot be removed"):
                self.manifest(step)
                self._files.rm_file(f"{folder}/{MANIFEST}")  # first: half a folder is no checkpoint
                self._files.rm(folder, recursive=True)

    def manifest(self, step: int) -> Manifest:
        """Read the manifest of a copy; raise `MirrorError` if the copy is another run's, or cannot be
        read."""
        with _using(self.url, f"step {step} cannot be copied"):
            manifest = Manifest.from_json(self._files.cat_file(f"{self._root}/step-{step}/{MANIFEST}"))
        self._check_own(manifest.run, f"step-{step}")
        return manifest

    def fetch(self, step: int, into: Path) -> None:
        """Copy a checkpoint back into the empty folder ``into``; it must still be verified."""
        with _using(self.url, f"step {step} cannot be copied"):
            for name in [*self.manifest(step).files, MANIFEST]:
                copy = (into / name).resolve()
                if not copy.is_relative_to(into.resolve()):
                    raise MirrorError(
                        f"checkpoint.mirror={self.url!r}: step {step} names a file {name!r} outside"
                    )
                copy.parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(f"{self._root}/step-{step}/{name}", str(copy))

    def _check_own(self, mark: Any, what: str) -> None:
        if mark != self.run.mark:
            raise MirrorError(f"checkpoint.mirror={self.url!r}: {what} is of another run and is left alone")


class Upload(NamedTuple):
    """A published checkpoint that is to be copied to the mirror."""

    step: int
    generation: int
    path: Path


class Uploads:
    """Copies checkpoints to the mirror one at a time, in a background thread. Of waiting copies, only the
    newest is made, and those of steps that are kept for ever, or as the best one."""

    def __init__(self, mirror: Mirror, keeping: CheckpointConfig) -> None:
        self._mirror, self._keeping = mirror, keeping
        self._waiting: list[Upload] = []
        self._under_way: list[Upload] = []
        self._failed: list[tuple[Upload, str]] = []
        self._changed = threading.Condition()
        self._closed = False
        threading.Thread(target=self._run, name="upload", daemon=True).start()

    def add(self, upload: Upload, best: int | None = None) -> None:
        """Queue a copy; ``best``: the step of the checkpoint that is kept for its validation loss."""
        every = self._keeping.keep_every
        with self._changed:
            kept = [copy for copy in self._waiting if copy.step == best or (every and copy.step % every == 0)]
            self._waiting = [*kept, upload]
            self._changed.notify_all()

    def in_use(self) -> set[int]:
        """Return steps whose checkpoints are still to be copied, and must not be removed."""
        with self._changed:
            return {upload.step for upload in (*self._waiting, *self._under_way)}

    def failed(self) -> list[tuple[Upload, str]]:
        """Return copies that have failed since the last call, each with the reason."""
        with self._changed:
            failed, self._failed = self._failed, []
        return failed

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all copies have been made or have failed, or ``timeout_s`` is over."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._waiting or self._under_way), timeout_s)

    def close(self) -> None:
        """End the thread; give up the copy under way."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                self._under_way = [upload] = [self._waiting.pop(0)]
            failed: list[tuple[Upload, str]] = []
            try:
                self._mirror.put(upload.path)
                keep, keep_every = self._keeping.keep, self._keeping.keep_every
                self._mirror.collect(keep, keep_every, upload.step, keep_best=self._keeping.keep_best)
            except (OSError, ValueError) as error:
                failed = [(upload, str(error))]
            with self._changed:
                self._under_way = []
                self._failed += failed
                self._changed.notify_all()
