"""A second home for checkpoints at any fsspec URL: object stores, other file systems.

Object stores cannot rename, so there the manifest is the last file to be written: a folder without one is no
checkpoint. A mirror is read only when the run's own directory has no good checkpoint.
"""

import difflib
import json
import shutil
from pathlib import Path
from typing import Any

from braid.actors.config import ConfigError
from braid.actors.controller.manifest import (
    MANIFEST,
    STEP_NAME,
    CheckpointError,
    CheckpointStore,
    Manifest,
    to_be_removed,
)


class MirrorError(ConfigError):
    """The mirror cannot be reached or used."""


def check_url(url: str) -> None:
    """`MirrorError` for a URL of a protocol that nobody knows; its package need not be on this machine."""
    import fsspec

    protocol = fsspec.utils.get_protocol(url)
    if protocol not in (known := fsspec.available_protocols()):
        near = difflib.get_close_matches(protocol, known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise MirrorError(f"checkpoint.mirror={url!r}: no file system is called {protocol!r}{hint}")


class Mirror:
    """Copies of checkpoints at a URL."""

    def __init__(self, url: str) -> None:
        """`MirrorError` if no file system answers to the URL."""
        self.url = url
        try:
            import fsspec

            self._files, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError, OSError) as error:
            raise MirrorError(f"checkpoint.mirror={url!r}: {error}") from None
        self._root = str(root).rstrip("/")

    def put(self, checkpoint: Path) -> None:
        """Copy a published checkpoint, its manifest last."""
        target = f"{self._root}/{checkpoint.name}"
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        try:
            if self._files.exists(f"{target}/{MANIFEST}"):  # the step was saved before: no mixture of both
                self._files.rm_file(f"{target}/{MANIFEST}")
            for name in [*sorted(manifest["files"]), MANIFEST]:
                place = f"{target}/{name}"
                self._files.makedirs(place.rsplit("/", 1)[0], exist_ok=True)
                self._files.put_file(str(checkpoint / name), place)
        except Exception as error:  # file systems raise what they like
            raise MirrorError(
                f"checkpoint.mirror={self.url!r}: {checkpoint.name} was not copied: {error}"
            ) from None

    def steps(self) -> list[int]:
        """Steps whose copies are whole, oldest first."""
        try:
            found = self._files.glob(f"{self._root}/step-*/{MANIFEST}")
        except Exception as error:
            raise MirrorError(f"checkpoint.mirror={self.url!r} cannot be read: {error}") from None
        names = [str(path).rsplit("/", 2)[1] for path in found]
        return sorted(int(match.group(1)) for name in names if (match := STEP_NAME.fullmatch(name)))

    def collect(self, keep: int, keep_every: int, newest: int) -> None:
        """Remove old copies by the same rule as in the run's own directory; ``newest`` was copied last."""
        steps = [step for step in self.steps() if step <= newest]
        for step in to_be_removed(steps, keep, keep_every):
            self._remove(f"{self._root}/step-{step}")

    def _remove(self, folder: str) -> None:
        try:
            self._files.rm_file(f"{folder}/{MANIFEST}")  # first: half a folder is no checkpoint
            self._files.rm(folder, recursive=True)
        except Exception as error:
            raise MirrorError(
                f"checkpoint.mirror={self.url!r}: {folder} cannot be removed: {error}"
            ) from None

    def fetch(self, step: int, into: Path) -> Path:
        """Copy a checkpoint back, into an empty folder; nothing of it is to be believed before `verify`."""
        source = f"{self._root}/step-{step}"
        try:
            manifest: dict[str, Any] = json.loads(self._files.cat_file(f"{source}/{MANIFEST}"))
            for name in [*manifest["files"], MANIFEST]:
                place = (into / name).resolve()
                if not place.is_relative_to(into.resolve()):
                    raise MirrorError(
                        f"checkpoint.mirror={self.url!r}: step {step} names a file {name!r} outside"
                    )
                place.parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(f"{source}/{name}", str(place))
        except MirrorError:
            raise
        except Exception as error:
            raise MirrorError(
                f"checkpoint.mirror={self.url!r}: step {step} cannot be copied: {error}"
            ) from None
        return into

    def fetch_newest(self, store: CheckpointStore) -> str:
        """Bring the newest good copy into a run's own directory; returns what to tell of it.

        `CheckpointError` if there is none.
        """
        complaints = []
        for step in reversed(self.steps()):
            folder = store.begin(step, 0)
            try:
                manifest = store.adopt(self.fetch(step, folder))
            except (CheckpointError, MirrorError) as error:
                complaints.append(str(error))
                shutil.rmtree(folder, ignore_errors=True)
            else:
                return "; ".join([*complaints, f"step {manifest.step} was fetched from {self.url}"])
        raise CheckpointError("; ".join([*complaints, f"there is no good checkpoint in {self.url}"]))


def newest_good(store: CheckpointStore, mirror: Mirror | None) -> tuple[Path, Manifest, list[str]]:
    """The newest good checkpoint of a run, from its mirror if need be, and what there is to tell of it.

    `CheckpointError` if there is none.
    """
    try:
        path, manifest, complaints = store.newest_verified()
    except CheckpointError as error:
        if mirror is None:
            raise
        try:
            told = f"{error}; {mirror.fetch_newest(store)}"
        except (CheckpointError, MirrorError) as trouble:
            raise CheckpointError(f"{error}; {trouble}") from None
        return *store.newest_verified()[:2], [told]
    return path, manifest, [f"{complaint}; falling back to step {manifest.step}" for complaint in complaints]
