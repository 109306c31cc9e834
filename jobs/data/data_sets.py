"""Decides which data set a run trains on: the one it began with, an existing one, or a new one.

A resumed run keeps its tokens, which ``runs/NAME/data.json`` names, whatever has become of their source
files. Only ``braid prepare`` replaces a data set. The sets of a mixture are decided set by set.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from braid.actors.config import Config, ConfigError
from braid.actors.controller.records.run_records import Incident
from braid.actors.controller.state.manifest import write_durably
from braid.actors.stage.data.mixture import BLOCK, MIXTURE_FILE, MixedSet, shares, write_mixture
from braid.actors.stage.data.token_files import read_index
from braid.actors.stage.files.reading import UnreadableError
from braid.jobs.data.corpus import MissingSourcesError
from braid.jobs.data.executors import Executor
from braid.jobs.data.identity import DataRequest
from braid.jobs.data.prepare import Preparation, Prepared, prepare
from braid.jobs.output import listed
from braid.jobs.training.remarks import on_data, on_template

RECORD = "data.json"
"""File in a run's directory that names the data set's folder and the identity of its tokens."""

Show = Callable[[Prepared | Preparation | Incident], None]


@dataclass(frozen=True)
class PreparedMixture:
    """The data sets of a mixture, and the folder that names them."""

    output: Path
    sets: tuple[Prepared, ...]


def data_record(prepared: Prepared | PreparedMixture) -> str:
    return json.dumps(_record(prepared), indent=1)


def _record(prepared: Prepared | PreparedMixture) -> dict[str, Any]:
    if isinstance(prepared, PreparedMixture):
        return {"directory": str(prepared.output), "sets": {one.name: _record(one) for one in prepared.sets}}
    return {"directory": str(prepared.output), "fingerprint": prepared.index.fingerprint}


def check_data(config: Config, *, sources: bool = False) -> None:
    """Raise `ValueError` if a run could not have data: neither the files nor tokens made of them exist.
    ``sources``: the files must exist."""
    for name, own in _sets(config):
        with _of_set(name):
            try:
                DataRequest.of(own)
            except MissingSourcesError:
                if sources or _known(own, name) is None:
                    raise


def prepare_data(
    config: Config, executor: Executor, show: Show, *, resume: bool = False, renew: bool = False
) -> Prepared | PreparedMixture:
    """Return the data set that a run trains on, or the data sets of its mixture; create those that do not
    exist.

    ``resume``: continue with the run's data sets. ``renew``: replace the content of ``data.directory`` if its
    source files changed. Raise `ValueError` for faults that the user can correct.
    """
    found = []
    parts = shares([entry.weight for entry in config.data.mixture], BLOCK) if config.data.mixture else [BLOCK]
    for (name, own), share in zip(_sets(config), parts, strict=True):

        def warn(text: str, of: str = f"{name}: " if name else "") -> None:
            show(Incident(kind="data", text=f"{of}{text}", step=0))

        with _of_set(name):
            prepared = _prepared(own, name, executor, show, warn, resume=resume, renew=renew)
        found.append(replace(prepared, output=prepared.output.resolve(), name=name))
        show(found[-1])
        for text in (*on_template(own), *on_data(own, prepared, share / BLOCK)):
            warn(text)
    return _mixture(config, tuple(found)) if config.data.mixture else found[0]


def _sets(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield name and configuration of every set, as of a run on that set alone."""
    for name, data in config.data.sets.items():
        yield name, config.model_copy(update={"data": data})


@contextlib.contextmanager
def _of_set(name: str) -> Iterator[None]:
    """Prefix errors of the block with the name of a set of the mixture."""
    try:
        yield
    except ValueError as error:
        if not name:
            raise
        raise ConfigError(f"data.mixture, set {name!r}: {error}") from None


def _mixture(config: Config, found: tuple[Prepared, ...]) -> PreparedMixture:
    """Write which folders and weights a mixture has into a folder that never changes."""
    entries = zip(config.data.mixture, found, strict=True)
    text = write_mixture([MixedSet(entry.name, str(one.output), entry.weight) for entry, one in entries])
    parent = config.data.directory or config.runs / "data"
    folder = parent.resolve() / f"mixture-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / MIXTURE_FILE).exists():
            write_durably(folder / MIXTURE_FILE, text)
    except OSError as fault:
        raise ConfigError(
            f"data.mixture: cannot write {str(folder)!r} ({fault.strerror or fault}); make room, or name a "
            f"folder that can be written in data.directory"
        ) from None
    return PreparedMixture(folder, found)


def _prepared(
    config: Config,
    name: str,
    executor: Executor,
    show: Show,
    warn: Callable[[str], None],
    *,
    resume: bool,
    renew: bool,
) -> Prepared:
    known = _known(config, name)
    try:
        request = DataRequest.of(config)
    except MissingSourcesError as missing:
        if known is None or renew:
            raise
        what = str(missing).partition(";")[0]
        warn(f"{what}; the run has the tokens that were made before, in {known.output}")
        return known
    if known is not None and resume:
        if request.digest != known.index.request:
            there = f"the run goes on with the tokens that it began with, in {known.output}"
            warn(f"data.files changed ({_changed(request, known)}); {there}")
        return known
    output = config.data.directory
    for before in _whole([output]) if output is not None and not renew else ():
        if request.digest != before.index.request:  # a run may be training on these tokens
            changed = _changed(request, before)
            why = f"data.files changed since ({changed})" if changed else "with other settings in data"
            raise ValueError(
                f"data.directory={str(output)!r} holds tokens that were made before: {why}; replace them "
                f"with `braid prepare`, or name another data.directory"
            )
    return prepare(request, output or config.runs / "data" / request.digest[:16], executor, show)


def _changed(request: DataRequest, data_set: Prepared) -> str:
    """Return the names of files that have changed since a data set was made."""
    return listed(request.changed(data_set.index), most=3)


def _known(config: Config, name: str) -> Prepared | None:
    """Return the suitable data set in ``data.directory`` or, if that is not set, the one that the run's
    record names for the set ``name``; None if there is none."""
    request, fingerprint = DataRequest.without_files(config), None
    if config.data.directory is not None:
        folders = [config.data.directory]
    else:
        try:
            content = json.loads((config.run_directory / RECORD).read_text(encoding="utf-8"))
            content = content["sets"][name] if name else content
            first, fingerprint = Path(content["directory"]), str(content["fingerprint"])
        except (OSError, ValueError, TypeError, KeyError):
            return None
        folders = [first, *_folders(config.runs / "data")]  # they may have been moved together
    whole = (found for found in _whole(folders) if fingerprint in (None, found.index.fingerprint))
    return next((found for found in whole if request.suits(found.index)), None)


def _folders(parent: Path) -> list[Path]:
    return sorted(path.parent for path in parent.glob("[!.]*/index.json"))


def _whole(folders: Iterable[Path]) -> Iterator[Prepared]:
    """Yield the complete data sets among some folders."""
    for folder in folders:
        with contextlib.suppress(ValueError, UnreadableError):
            yield Prepared(folder, read_index(folder))
