"""Which data set a run trains on: the one it began with, one that is there already, or a new one.

A run that goes on keeps its tokens, which ``runs/NAME/data.json`` names, whatever has become of the files
that they were made of. No data set is replaced but by ``braid prepare``.
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
from braid.jobs.data.executors import Executor
from braid.jobs.data.files import MissingSourcesError
from braid.jobs.data.identity import DataRequest, made_with
from braid.jobs.data.prepare import Preparation, Prepared, prepare
from braid.jobs.data.tokenizer import tokenizer_of
from braid.jobs.training.remarks import on_data

RECORD = "data.json"
"""In a run's directory: where its tokens are, and which they are."""
_NAMED = 3
"""At most so many files are named in a message."""

Show = Callable[[Prepared | Preparation | Incident], None]


def data_record(prepared: Prepared) -> str:
    content = {"directory": str(prepared.output), "fingerprint": prepared.index.fingerprint}
    return json.dumps(content, indent=1)


def check_data(config: Config) -> None:
    """`ValueError` if a run could not have data: neither the files nor tokens that were made of them."""
    try:
        DataRequest.of(config)
    except MissingSourcesError:
        if _known(config) is None:
            raise


def prepare_data(
    config: Config, executor: Executor, show: Show, *, resume: bool = False, renew: bool = False
) -> Prepared:
    """The tokens that a run trains on, made unless they are there.

    resume: go on with the tokens that the run has. renew: replace what is in ``data.directory``, if its files
    changed. `ValueError` for what the user can mend.
    """
    prepared = _prepared(config, executor, show, resume=resume, renew=renew)
    prepared = replace(prepared, output=prepared.output.resolve())
    show(prepared)
    for text in on_data(config, prepared):
        _warn(show, text)
    return prepared


def _prepared(config: Config, executor: Executor, show: Show, *, resume: bool, renew: bool) -> Prepared:
    known = _known(config)
    try:
        request = DataRequest.of(config)
    except MissingSourcesError as missing:
        if known is None or renew:
            raise
        what = str(missing).partition(";")[0]
        _warn(show, f"{what}; the run has the tokens that were made before, in {known.output}")
        return known
    if known is not None and resume:
        if request.fits(known.index, executor):
            return prepare(request, known.output, executor, show)
        there = f"the run goes on with the tokens that it began with, in {known.output}"
        _warn(show, f"data.files changed ({_changed(request, known)}); {there}")
        return known
    directory = config.data.directory
    if directory is None:
        directory = _place(config.runs / "data", request, executor, show)
    elif not renew:
        _check_unchanged(directory, request, executor)
    return prepare(request, directory, executor, show)


def _warn(show: Show, text: str) -> None:
    show(Incident(kind="data", text=text, step=0))


def _changed(request: DataRequest, data_set: Prepared) -> str:
    """Names of files that are not as they were when a data set was made."""
    paths = request.changed(data_set.index)
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return ", ".join(paths[:_NAMED]) + more


def _known(config: Config) -> Prepared | None:
    """What ``data.directory`` holds, or else what the run's own record names."""
    tokenizer, fingerprint = tokenizer_of(config), None
    if config.data.directory is not None:
        folders = [config.data.directory]
    else:
        try:
            content = json.loads((config.run_directory / RECORD).read_text(encoding="utf-8"))
            first, fingerprint = Path(content["directory"]), str(content["fingerprint"])
        except (OSError, ValueError, TypeError, KeyError):
            return None
        folders = [first, *_folders(config.runs / "data")]  # they may have been moved together
    for found in _whole(folders):
        if fingerprint in (None, found.index.fingerprint) and made_with(found.index, tokenizer, config.data):
            return found
    return None


def _folders(parent: Path) -> list[Path]:
    return sorted(path.parent for path in parent.glob("[!.]*/index.json"))


def _whole(folders: Iterable[Path]) -> Iterator[Prepared]:
    """The whole data sets in some folders."""
    for folder in folders:
        with contextlib.suppress(ValueError, UnreadableError):
            yield Prepared(folder, read_index(folder))


def _check_unchanged(directory: Path, request: DataRequest, executor: Executor) -> None:
    """Refuse to replace tokens of something else: a run may be training on them."""
    for found in _whole([directory]):
        if not request.fits(found.index, executor):
            changed = _changed(request, found)
            why = f"data.files changed since ({changed})" if changed else "with other settings in data"
            raise ValueError(
                f"data.directory={str(directory)!r} holds tokens that were made before: {why}; replace them "
                f"with `braid prepare`, or name another data.directory"
            )


def _place(parent: Path, request: DataRequest, executor: Executor, show: Show) -> Path:
    """The folder of tokens that were made of the same files or of copies, else a folder of a new name."""
    new = parent / request.digest[:16]
    changed: Prepared | None = None
    paths = {source.path for source in request.sources}
    for found in _whole([new, *_folders(parent)]):
        if request.fits(found.index, executor):
            return found.output
        shared = paths & {path for path, *_ in found.index.sources}
        if shared and made_with(found.index, request.tokenizer, request.data):
            changed = found
    if changed is not None:
        names = _changed(request, changed)
        _warn(show, f"data.files changed ({names}); tokens of before stay in {changed.output}")
    return new
