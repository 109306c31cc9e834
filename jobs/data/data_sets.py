"""Decides which data set a run trains on: the one it began with, an existing one, or a new one.

A resumed run keeps its tokens, which ``runs/NAME/data.json`` names, whatever has become of their source
files. Only ``braid prepare`` replaces a data set.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from braid.actors.config import Config
from braid.actors.controller.records.run_records import Incident
from braid.actors.stage.data.token_files import read_index
from braid.actors.stage.files.reading import UnreadableError
from braid.jobs.data.corpus import MissingSourcesError
from braid.jobs.data.executors import Executor
from braid.jobs.data.identity import DataRequest
from braid.jobs.data.prepare import Preparation, Prepared, prepare
from braid.jobs.training.remarks import on_data

RECORD = "data.json"
"""File in a run's directory that names the data set's folder and the identity of its tokens."""
_NAMED = 3
"""Most files that a message names."""

Show = Callable[[Prepared | Preparation | Incident], None]


def data_record(prepared: Prepared) -> str:
    content = {"directory": str(prepared.output), "fingerprint": prepared.index.fingerprint}
    return json.dumps(content, indent=1)


def check_data(config: Config) -> None:
    """Raise `ValueError` if a run could not have data: neither the files nor tokens made of them exist."""
    try:
        DataRequest.of(config)
    except MissingSourcesError:
        if _known(config) is None:
            raise


def prepare_data(
    config: Config, executor: Executor, show: Show, *, resume: bool = False, renew: bool = False
) -> Prepared:
    """Return the data set that a run trains on; create it if it does not exist.

    ``resume``: continue with the run's data set. ``renew``: replace the content of ``data.directory`` if its
    source files changed. Raise `ValueError` for faults that the user can correct.
    """

    def warn(text: str) -> None:
        show(Incident(kind="data", text=text, step=0))

    prepared = _prepared(config, executor, show, warn, resume=resume, renew=renew)
    prepared = replace(prepared, output=prepared.output.resolve())
    show(prepared)
    for text in on_data(config, prepared):
        warn(text)
    return prepared


def _prepared(
    config: Config, executor: Executor, show: Show, warn: Callable[[str], None], *, resume: bool, renew: bool
) -> Prepared:
    known = _known(config)
    try:
        request = DataRequest.of(config)
    except MissingSourcesError as missing:
        if known is None or renew:
            raise
        what = str(missing).partition(";")[0]
        warn(f"{what}; the run has the tokens that were made before, in {known.output}")
        return known
    output, others = config.data.directory, iter(list[Prepared]())
    if known is not None and resume:
        output = known.output
        if not request.fits(known.index, executor):
            there = f"the run goes on with the tokens that it began with, in {output}"
            warn(f"data.files changed ({_changed(request, known)}); {there}")
            return known
    elif output is None:
        output = config.runs / "data" / request.digest[:16]
        others = _whole([output, *_folders(output.parent)])
    elif not renew:
        others = _whole([output])
    before: Prepared | None = None
    paths = {source.path for source in request.sources}
    for other in others:
        if request.fits(other.index, executor):  # it was made of the same files, or of copies
            return prepare(request, other.output, executor, show)
        shared = paths & {path for path, *_ in other.index.sources}
        if config.data.directory is not None or (shared and request.suits(other.index)):
            before = other
    if before is not None:
        changed = _changed(request, before)
        if config.data.directory is not None:  # a run may be training on them
            why = f"data.files changed since ({changed})" if changed else "with other settings in data"
            raise ValueError(
                f"data.directory={str(output)!r} holds tokens that were made before: {why}; replace them "
                f"with `braid prepare`, or name another data.directory"
            )
        warn(f"data.files changed ({changed}); tokens of before stay in {before.output}")
    return prepare(request, output, executor, show)


def _changed(request: DataRequest, data_set: Prepared) -> str:
    """Return the names of files that have changed since a data set was made."""
    paths = request.changed(data_set.index)
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return ", ".join(paths[:_NAMED]) + more


def _known(config: Config) -> Prepared | None:
    """Return the suitable data set in ``data.directory`` or, if that is not set, the one that the run's
    record names; None if there is none."""
    request, fingerprint = DataRequest.without_files(config), None
    if config.data.directory is not None:
        folders = [config.data.directory]
    else:
        try:
            content = json.loads((config.run_directory / RECORD).read_text(encoding="utf-8"))
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
