"""Reads data sets of the Hugging Face Hub, and folders, through the library `datasets` (``data.hub``); gets
tokenizers and weights that a configuration names.

A data set is identified by its files and their versions, on the Hub by the commit. All tasks of a preparation
read the commit that was found at its beginning.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from braid.actors.config import Config, ConfigError, DataConfig
from braid.actors.config.data import HubConfig
from braid.actors.config.paths import is_hub_name
from braid.jobs.data.corpus import FileRange, MissingSourcesError, Source, WorkItem
from braid.jobs.data.tokenizer import BESIDE, TOKENIZER_FILE, TOKENIZER_PARTS
from braid.jobs.output import first_line

KEY = "data.hub"
_ITEMS = 256
_ROWS = (1_000, 100_000)
"""Fewest and most rows of a work item."""
_ROWS_AT_ONCE = 256
_ANSWER_SECONDS = 5.0
"""Seconds to wait for the Hub's first answer."""
_TOKENIZER: Final = (TOKENIZER_FILE, *BESIDE, *TOKENIZER_PARTS)
_WEIGHTS: Final = (*_TOKENIZER, "model*.safetensors", "model.safetensors.index.json")
"""Patterns of the files to fetch: numbers and text, never pickles or code."""


def hub_source(hub: HubConfig) -> Source:
    """Look a data set up and return it as a source, whose path has the commit and whose time is a number for
    the versions of all files."""
    if not _is_folder(hub) and Path(hub.id).is_dir():
        raise ConfigError(f"{KEY}.id={hub.id!r} is also a folder here; write ./{hub.id} for the folder")
    if _is_folder(hub) and not Path(hub.id).is_dir():
        raise MissingSourcesError(f"{KEY}.id={hub.id!r} is no folder; correct the path")
    remedy = "correct data.hub.id or data.hub.subset"
    if not _is_folder(hub):
        remedy = f"see to the network, or {remedy}"
    what = f"{KEY}: {hub.id!r} cannot be looked up"
    with _told(what, remedy, MissingSourcesError), _library(hub) as library:
        builder = library.load_dataset_builder(hub.id, hub.subset)
        data_files = getattr(builder.config, "data_files", None) or {}
        files = {str(split): paths for split, paths in data_files.items()}
    if not _is_folder(hub) and builder.repo_id is None:
        raise ConfigError(
            f"{KEY}.id={hub.id!r} is a format, not a data set; name a data set, or give files to data.files"
        )
    names = [part.partition("[")[0] for part in hub.split.split("+")]
    if wrong := [name for name in names if files and name not in (*files, "all")]:
        raise ConfigError(f"{KEY}.split={wrong[0]!r} is not in {hub.id!r}, which has {', '.join(files)}")
    columns = builder.info.features
    if columns is None and names[0] in files and _is_folder(hub):
        with _told(f"{KEY}: {hub.id!r} cannot be read", "repair its files"):
            columns = next(iter(builder.as_streaming_dataset(names[0])), {})
    if columns:
        _check_column(hub, [*columns])
    commit = "" if _is_folder(hub) else f"@{builder.hash}"
    versions = [(split, [*map(str, paths)], str(paths.origin_metadata)) for split, paths in files.items()]
    version = hashlib.sha256(repr([versions, commit]).encode()).digest()
    return Source(f"hub://{hub.id}{commit}", 0, int.from_bytes(version[:7], "big"), hub.streaming, "hub")


def hub_items(hub: HubConfig, source: Source) -> tuple[WorkItem, ...]:
    """Cut a data set into items: ranges of its files if it is streamed, else of rows."""
    rows = _rows(hub, source.path)
    with _told(f"{KEY}: {hub.id!r} cannot be read", "see to the access, or take another data set"):
        columns = rows.column_names or list(next(iter(rows), {}))
    _check_column(hub, columns)
    total, (least, most) = (rows.num_shards, (1, 1 << 62)) if hub.streaming else (len(rows), _ROWS)
    size = min(max(-(-total // _ITEMS), least), most)
    return tuple(
        WorkItem(number, (FileRange(source.path, "hub", start, min(start + size, total), 0),))
        for number, start in enumerate(range(0, total, size))
    )


def _check_column(hub: HubConfig, columns: list[str]) -> None:
    if hub.column not in columns:
        raise ConfigError(f"{KEY}.column={hub.column!r} is not in {hub.id!r}, which has {', '.join(columns)}")


def hub_documents(part: FileRange, data: DataConfig) -> Iterator[str]:
    """Yield the documents of a range in order; a row without text is an empty one."""
    hub = data.hub
    assert hub is not None
    rows, files = _rows(hub, part.path), range(part.start, part.stop)
    if hub.streaming:
        parts = [rows.shard(num_shards=rows.num_shards, index=file) for file in files]
    else:
        parts = [rows.select(files)]
    for found in parts:
        with _told(f"{KEY}: {hub.id!r} cannot be read", "see to the access, or take another data set"):
            for batch in found.select_columns([hub.column]).iter(_ROWS_AT_ONCE):
                for text in batch[hub.column]:
                    if not isinstance(text, str | None):
                        raise ConfigError(
                            f"{KEY}.column={hub.column!r} of {hub.id!r} holds {type(text).__name__}, not "
                            f"text; name a column of text"
                        )
                    yield text or ""


@lru_cache(maxsize=1)
def _rows(hub: HubConfig, path: str) -> Any:
    """Load a data set, or open it for streaming, once per process; ``path``: that of its source."""
    commit = None if _is_folder(hub) else path.rpartition("@")[2]
    remedy = "correct the keys of data.hub, or see to the access"
    with _told(f"{KEY}: {hub.id!r} cannot be loaded", remedy), _library(hub) as library:
        return library.load_dataset(
            hub.id, hub.subset, split=hub.split, streaming=hub.streaming, revision=commit
        )


def _is_folder(hub: HubConfig) -> bool:
    return hub.id.startswith((".", "/"))


@contextlib.contextmanager
def _library(hub: HubConfig) -> Iterator[Any]:
    """Yield the library. If the Hub does not answer, the library reads its cache within the block, and does
    not ask for each file six times."""
    try:
        import datasets  # loads slowly
        from huggingface_hub import constants, get_session
    except ImportError as fault:
        raise ConfigError(f"{KEY} needs the package datasets ({fault}); pip install 'braid[hub]'") from None
    settings: tuple[Any, Any] = constants, datasets.config
    before = [module.HF_HUB_OFFLINE for module in settings]
    try:
        if not _is_folder(hub):
            get_session().head(constants.ENDPOINT, timeout=_ANSWER_SECONDS)
    except Exception:  # those of several HTTP clients
        for module in settings:
            module.HF_HUB_OFFLINE = True
    try:
        yield datasets
    finally:
        for module, offline in zip(settings, before, strict=True):
            module.HF_HUB_OFFLINE = offline


@contextlib.contextmanager
def _told(what: str, remedy: str, kind: type[ValueError] = ConfigError) -> Iterator[None]:
    """Turn any error of the library into one of one line."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as fault:  # the library, and file systems behind it, raise what they like
        raise kind(f"{what} ({first_line(fault.__cause__ or fault).rstrip('.')}); {remedy}") from None


# Tokenizers and weights by their names on the Hub.


def with_hub_files(config: Config) -> Config:
    """Return a copy in which ``data.tokenizer`` and ``model.initial`` are paths, after fetching the
    repositories that they name. Raise `ConfigError` if a repository cannot be fetched."""
    initial, tokenizer = config.model.initial, config.data.tokenizer
    if initial is not None and is_hub_name("model.initial", str(initial)):
        config = config.changed(model={"initial": _fetched("model.initial", str(initial), _WEIGHTS)})
    if tokenizer is not None and is_hub_name("data.tokenizer", tokenizer):
        config = config.changed(data={"tokenizer": str(_fetched("data.tokenizer", tokenizer, _TOKENIZER))})
    return config


def _fetched(key: str, name: str, patterns: tuple[str, ...]) -> Path:
    """Return the folder of a repository's files that match ``patterns``, without those in subfolders."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    try:
        return Path(snapshot_download(name, allow_patterns=[*patterns], ignore_patterns=["*/*"]))
    except RepositoryNotFoundError:  # also of one that only some may read
        why = "there is none that you may read: correct the name, or ask its owner, then `hf auth login`"
    except LocalEntryNotFoundError:
        why = "the Hub does not answer, and no copy is here: see to the network, or give a path"
    except Exception as error:  # of a name that cannot be one, or those of several HTTP clients
        why = f"it cannot be fetched: {error}".splitlines()[0]
    raise ConfigError(f"{key}={name!r} is no path here, and as a name on the Hugging Face Hub: {why}")
