"""A second home for checkpoints at any fsspec URL: object stores, other file systems.

Object stores cannot rename, so there the manifest is the last file to be written: a folder without one is no
checkpoint. A mirror that is a directory can also be written to by the ranks themselves, and read in place.
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
    CheckpointStore,
    Manifest,
    to_be_removed,
    verify_named,
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
            from fsspec.implementations.local import LocalFileSystem

            self._files, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError, OSError) as error:
            raise MirrorError(f"checkpoint.mirror={url!r}: {error}") from None
        self._root = str(root).rstrip("/")
        local = isinstance(self._files, LocalFileSystem)
        self.store = CheckpointStore(Path(self._root)) if local else None
        """The mirror as a directory, if it is one: another disk, or a shared file system."""

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

    def fetch(self, step: int, into: Path, run: str = "") -> Path:
        """Copy a checkpoint back, into an empty folder; nothing of it is to be believed before `verify`.

        run: of which it has to be; any, where that is not known.
        """
        source = f"{self._root}/step-{step}"
        try:
            manifest: dict[str, Any] = json.loads(self._files.cat_file(f"{source}/{MANIFEST}"))
            if run and manifest.get("run") != run:
                raise self._of_another_run(step)
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

    def bring(self, step: int, store: CheckpointStore, run: str = "") -> tuple[Path, Manifest]:
        """A good copy on this machine's file systems: in place, or brought into a run's own directory.

        `CheckpointError` or `MirrorError` if it is damaged, of another run, or cannot be had.
        """
        if self.store is not None:
            path = self.store.directory / f"step-{step}"
            manifest = verify_named(path)
            if run and manifest.run != run:
                raise self._of_another_run(step)
            return path, manifest
        folder = store.begin(step, 0)
        try:
            manifest = store.adopt(self.fetch(step, folder, run))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return store.directory / f"step-{step}", manifest

    def _of_another_run(self, step: int) -> MirrorError:
        return MirrorError(f"checkpoint.mirror={self.url!r}: step {step} is of another run")
