"""Which data set a run trains on: the one it began with, one that is there already, or a new one.

A run that goes on keeps its tokens, which ``runs/NAME/data.json`` names, whatever has become of the files
that they were made of. No data set is replaced but by ``braid prepare``.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from braid.actors.config import Config
from braid.actors.controller.records import Incident
from braid.actors.stage.data import DataIndex, read_index
from braid.actors.stage.reading import UnreadableError
from braid.jobs.data.corpus import Corpus
from braid.jobs.data.executors import Executor
from braid.jobs.data.files import MissingSourcesError
from braid.jobs.data.prepare import Prepared, Progress, existing, prepare_if_needed
from braid.jobs.data.tokenizer import Tokenizer, tokenizer_of
from braid.jobs.identity import Request, made_with
from braid.jobs.remarks import on_data

RECORD = "data.json"
"""In a run's directory: where its tokens are, and which they are."""
_NAMED = 3
"""At most so many files are named in a message."""


def data_record(prepared: Prepared) -> str:
    """What `RECORD` holds."""
    return json.dumps(
        {"directory": str(prepared.output), "fingerprint": prepared.index.fingerprint}, indent=1
    )


def corpus_of(config: Config) -> Corpus:
    """The corpus that the configuration names."""
    data = config.data
    return Corpus(
        files=data.files,
        exclude=data.exclude,
        format=data.format,
        tokenizer=config.tokenizer,
        end_token=data.end_token,
        text_field=data.text_field,
        validation_fraction=data.validation_fraction,
        encoding_errors=data.encoding_errors,
    )


@dataclass(frozen=True)
class DataSet:
    """A whole data set that was made with the configuration's tokenizer and parameters."""

    directory: Path
    index: DataIndex


def check_data(config: Config) -> None:
    """`ValueError` if a run could not have data: neither the files nor tokens that were made of them."""
    corpus = corpus_of(config)
    try:
        Request.of(corpus)
    except MissingSourcesError:
        if _known(config, corpus, tokenizer_of(config)) is None:
            raise


def check_sources(config: Config) -> None:
    """`ValueError` if the files or the tokenizer that `braid prepare` reads are not there."""
    Request.of(corpus_of(config))


def prepare_data(
    config: Config,
    executor: Executor,
    show: Callable[[Prepared | Progress | Incident], None],
    *,
    resume: bool = False,
    renew: bool = False,
) -> Prepared:
    """The tokens that a run trains on, made unless they are there.

    resume: go on with those that the run has. renew: replace what is in ``data.directory``, if its files
    changed. Raises `ValueError` for what the user can mend.
    """
    corpus = corpus_of(config)
    known = _known(config, corpus, tokenizer_of(config))
    try:
        request = Request.of(corpus)
    except MissingSourcesError as missing:
        if known is None or renew:
            raise
        what = str(missing).partition(";")[0]
        show(_warning(f"{what}; the run has the tokens that were made before, in {known.directory}"))
        return _shown(config, existing(known.directory), show)
    if known is not None and resume:
        if not request.fits(known.index, executor):
            there = f"the run goes on with the tokens that it began with, in {known.directory}"
            show(_warning(f"data.files changed ({_names(request.changed(known.index))}); {there}"))
            return _shown(config, existing(known.directory), show)
        directory = known.directory
    elif config.data.directory is not None:
        directory = config.data.directory
        if not renew:
            _check_unchanged(directory, request, executor)
    else:
        directory = _place(config.runs / "data", request, executor, show)
    directory.parent.mkdir(parents=True, exist_ok=True)
    prepared = prepare_if_needed(request, output=directory, executor=executor, progress=show)
    return _shown(config, prepared, show)


def _shown(config: Config, prepared: Prepared, show: Callable[[Prepared | Incident], None]) -> Prepared:
    show(prepared)
    for text in on_data(config, prepared):
        show(_warning(text))
    return prepared


def _warning(text: str) -> Incident:
    return Incident(kind="data", text=text, step=0)


def _names(paths: list[str]) -> str:
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return ", ".join(paths[:_NAMED]) + more


def _known(config: Config, corpus: Corpus, tokenizer: Tokenizer) -> DataSet | None:
    """What ``data.directory`` holds, or else what the run's own record names."""
    if config.data.directory is not None:
        places = iter([config.data.directory])
        fingerprint = None
    else:
        try:
            content = json.loads((config.run_directory / RECORD).read_text(encoding="utf-8"))
            first, fingerprint = Path(content["directory"]), str(content["fingerprint"])
        except (OSError, ValueError, TypeError, KeyError):
            return None
        places = iter([first, *_folders(config.runs / "data")])  # they may have been moved together
    for found in _data_sets(places):
        if fingerprint in (None, found.index.fingerprint) and made_with(found.index, tokenizer, corpus):
            return found
    return None


def _folders(parent: Path) -> list[Path]:
    return sorted(path.parent for path in parent.glob("[!.]*/index.json"))


def _data_sets(places: Iterator[Path]) -> Iterator[DataSet]:
    """Those that are whole."""
    for place in places:
        with contextlib.suppress(ValueError, UnreadableError):
            yield DataSet(place, read_index(place))


def _check_unchanged(directory: Path, request: Request, executor: Executor) -> None:
    """Refuse tokens of something else: a run may be training on them."""
    for found in _data_sets(iter([directory])):
        if request.fits(found.index, executor):
            return
        changed = request.changed(found.index)
        why = f"data.files changed since ({_names(changed)})" if changed else "with other settings in data"
        raise ValueError(
            f"data.directory={str(directory)!r} holds tokens that were made before: {why}; replace them with "
            f"`braid prepare`, or name another data.directory"
        )


def _place(parent: Path, request: Request, executor: Executor, show: Callable[[Incident], None]) -> Path:
    """The folder of tokens that were made of the same files or of copies, else one of a name of its own."""
    own = parent / request.digest[:16]
    changed: DataSet | None = None
    paths = {source.path for source in request.sources}
    for found in _data_sets(iter([own, *_folders(parent)])):
        if request.fits(found.index, executor):
            return found.directory
        if made_with(found.index, request.tokenizer, request.corpus) and paths & {
            path for path, *_ in found.index.sources
        }:
            changed = found
    if changed is not None:
        names = _names(request.changed(changed.index))
        show(_warning(f"data.files changed ({names}); tokens of before stay in {changed.directory}"))
    return own
