"""Tokenises a corpus into the shards that `braid.actors.stage.data.token_files` reads.

The steps are: corpus -> sources -> work items -> (executor) -> shards in a hidden folder -> index -> renamed
to the final folder.

The output depends on the corpus alone, to the byte: never on the executor, the number of cores or the order
in which tasks end. Nothing is visible before it is complete; a killed preparation leaves only a hidden folder
beside the output, which the next one removes.

All nodes that tasks run on must see the inputs, the tokenizer and the output under the same paths.
"""

import contextlib
import logging
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from braid.actors.config.paths import BYTES
from braid.actors.controller.state.locks import FileHold, HeldError
from braid.actors.controller.state.manifest import write_durably
from braid.actors.stage.data.token_files import (
    INDEX_FILE,
    TOKEN_DTYPES,
    TRAIN,
    VALIDATION,
    DataIndex,
    TokenShard,
    read_index,
)
from braid.actors.stage.files.reading import UnreadableError
from braid.jobs.data.corpus import WorkItem
from braid.jobs.data.executors import Executor, local_map
from braid.jobs.data.identity import DataRequest
from braid.jobs.data.tokenise import ItemResult, Split, Tokenisation, dtype_of
from braid.jobs.output import on_disk

logger = logging.getLogger(__name__)

_OUR_FILES = re.compile(
    rf"({TRAIN}|{VALIDATION})-\d{{5,}}\.(bin|marks|counts)|\.?{re.escape(INDEX_FILE)}(\.partial-\d+)?"
)
_COUNTED = (
    *("documents_skipped", "documents_empty", "documents_long", "documents_silent"),
    *("characters", "characters_lost", "tokens_unknown", "tokens_padded"),
)
"""Fields of `DataIndex` that tasks count."""
_TOKENS_AT_ONCE = 1 << 20
_ROUNDED = 0.01
"""Share of the text's bytes that may be miscounted, as tokenizers add or drop a space here and there."""
_MOST_UNKNOWN = 0.1
"""Largest share of characters without a token, or of unknown tokens, with which a data set is accepted."""


@dataclass(frozen=True)
class Preparation:
    """Progress of a preparation."""

    items_done: int
    items: int
    tokens: int


@dataclass(frozen=True)
class Prepared:
    """A complete data set; ``reused``: it existed already, and its text was not read."""

    output: Path
    index: DataIndex
    reused: bool = True
    name: str = ""
    """Name of the set in ``data.mixture``; empty without a mixture."""

    @property
    def documents(self) -> int:
        return sum(shard.documents for shards in self.index.splits.values() for shard in shards)


Told = Callable[[Preparation], None]


def prepare(
    request: DataRequest, output: Path, executor: Executor = local_map, progress: Told = lambda _: None
) -> Prepared:
    """Prepare a corpus into the folder ``output``, unless it holds the result of the same request.

    Another data set there is replaced. ``executor`` does the work; ``progress`` is called for every finished
    item. It is safe to call this from many processes at once: one prepares, the others wait and find the
    result. Documents are assigned to validation by a hash of their text: the same text is always in the same
    split, whatever else the corpus holds. Only if a split would be empty, the document with the nearest hash
    moves to it; of a corpus of one document, the tail becomes validation.
    """
    output = output.resolve()
    # first without the lock, for data sets on a file system that is read-only here
    if found := _fitting(request, output):
        return found
    with _locked(output):
        if found := _fitting(request, output):
            return found
        there = [path.name for path in output.iterdir()] if output.is_dir() else ["itself"] * output.exists()
        if foreign := next((name for name in there if not _OUR_FILES.fullmatch(name)), ""):
            raise ValueError(
                f"data.directory: {str(output)!r} is there and is no prepared data set (see {foreign}); "
                "name a new folder"
            )
        items = request.items()
        folder = output.parent / f".{output.name}.tmp-{secrets.token_hex(6)}"
        try:
            folder.mkdir()
            results = _tokenised(request, folder, items, executor, progress)
            index = _assemble(request, folder, results)
            _publish(folder, output)
        except OSError as fault:
            raise ValueError(
                f"data.directory: cannot write {str(output)!r} ({fault.strerror or fault}); make room, or "
                "name a folder that can be written and that all nodes see"
            ) from fault
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return Prepared(output, index, reused=False)


def _fitting(request: DataRequest, output: Path) -> Prepared | None:
    """Return the data set in ``output`` if it is complete and was made from ``request``, else None."""
    try:
        index = read_index(output)
    except (ValueError, UnreadableError):
        return None
    return Prepared(output, index) if index.request == request.digest else None


def _tokenised(
    request: DataRequest, folder: Path, items: Sequence[WorkItem], executor: Executor, progress: Told
) -> list[ItemResult]:
    """Return the results of all items in order; run items again if a split is empty and need not be."""
    fraction, tokenizer = request.data.validation_fraction, request.tokenizer
    one_text = [source.format for source in request.sources] == ["text"]
    split = Split(tail=fraction) if one_text else Split(threshold=int(fraction * 2**64))
    rows, template = request.row_tokens, request.template
    task = Tokenisation(folder, request.data, tokenizer.name, tokenizer.fingerprint, rows, template, split)
    results = _run(executor, task, items, progress)
    counts = _counts(results)
    if not counts["documents"] and (long := counts["documents_long"]):
        raise ValueError(
            f"model.sequence: all {long} conversations of data.files with an answer are longer than the "
            f"{rows} tokens of a row; raise model.sequence"
        )
    if not counts["documents"] and (silent := counts["documents_silent"]):
        raise ValueError(
            f"data.files: {silent} conversations have no token of an assistant, on which alone "
            f"data.format=chat trains; give messages with the role assistant, or mend data.chat_template"
        )
    if not counts["documents"]:
        raise ValueError(
            f"data.files: {len(request.sources)} file(s) hold no text ({counts['documents_empty']} documents "
            f"are empty, {counts['documents_skipped']} are not UTF-8 and were skipped); give files with text"
        )
    lowest = min(result.lowest_hash for result in results)
    highest = max(result.highest_hash for result in results)
    if split.tail or not fraction or lowest < split.threshold <= highest:
        return results
    nearest = lowest + 1 if split.threshold <= lowest else highest
    better = Split(tail=fraction) if lowest == highest else Split(threshold=nearest)
    return _run(executor, replace(task, split=better), items, progress)


def _run(
    executor: Executor, task: Callable[[WorkItem], ItemResult], items: Sequence[WorkItem], progress: Told
) -> list[ItemResult]:
    results: list[ItemResult] = []
    tokens = 0
    with contextlib.ExitStack() as stack:
        running = executor(task, items)
        if close := getattr(running, "close", None):
            stack.callback(close)  # an error here must end the workers before their folder goes
        for result in running:
            results.append(result)
            tokens += sum(shard.tokens for shards in result.shards.values() for shard in shards)
            progress(Preparation(len(results), len(items), tokens))
    return sorted(results, key=lambda result: result.number)


def _counts(results: Sequence[ItemResult]) -> Counter[str]:
    return sum((result.counts for result in results), Counter())


def _assemble(request: DataRequest, folder: Path, results: Sequence[ItemResult]) -> DataIndex:
    """Name the shards in the order of the input, and write the index."""
    splits: dict[str, tuple[TokenShard, ...]] = {}
    for split in (TRAIN, VALIDATION):
        shards = [shard for result in results for shard in result.shards[split]]
        splits[split] = tuple(replace(s, file=f"{split}-{number:05d}.bin") for number, s in enumerate(shards))
        for shard, named in zip(shards, splits[split], strict=True):
            (folder / shard.file).rename(folder / named.file)
            for ending in ("marks", "counts") if request.row_tokens else ():
                (folder / shard.beside(ending)).rename(folder / named.beside(ending))
    tokenizer, totals = request.tokenizer, _counts(results)
    counted: dict[str, Any] = {name: totals[name] for name in _COUNTED}
    index = DataIndex(
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocabulary=tokenizer.vocabulary,
        end_of_document=tokenizer.end_of_document,
        end_token=tokenizer.end_token,
        dtype=dtype_of(tokenizer),
        splits=splits,
        request=request.digest,
        parameters=request.parameters,
        sources=tuple(source.facts for source in request.sources),
        row_tokens=request.row_tokens,
        **counted,
    )
    tokens = sum(index.tokens(split) for split in splits)
    for count, total, what in (
        (index.characters_lost, index.characters, "characters have no token in it"),
        (index.tokens_unknown, tokens, "tokens are its token for what it does not know"),
    ):
        if count > _MOST_UNKNOWN * total:  # the tokenizer was made for another text
            raise ValueError(
                f"data.tokenizer: {index.tokenizer!r} does not fit data.files: {count} of {total} {what}; "
                f"take a tokenizer that was trained on such text or works on bytes, such as "
                f"data.tokenizer={BYTES}"
            )
    spells = request.data.format == "chat"  # the names of its special tokens are bytes of its text
    if not spells and _covers(tokenizer.token_bytes, folder, index):
        index = replace(index, token_bytes=tokenizer.token_bytes)
    for path in folder.iterdir():
        if not _OUR_FILES.fullmatch(path.name):
            path.unlink()  # left by a task that ran twice
    write_durably(folder / INDEX_FILE, index.to_json())
    return index


def _covers(token_bytes: Sequence[int], folder: Path, index: DataIndex) -> bool:
    """Return whether the byte lengths of the tokens (array of size vocabulary) add up to the validation
    text."""
    shards, counts = index.splits[VALIDATION], np.zeros(index.vocabulary, np.int64)
    for shard in shards:
        tokens = np.memmap(folder / shard.file, TOKEN_DTYPES[index.dtype], mode="r")
        for begin in range(0, len(tokens), _TOKENS_AT_ONCE):
            counts += np.bincount(tokens[begin : begin + _TOKENS_AT_ONCE], minlength=index.vocabulary)
    text = sum(shard.bytes_of_text for shard in shards)
    repeated = 1 / index.row_tokens if index.row_tokens else 0.0  # rows of one document share a token
    return bool(abs(counts @ np.array(token_bytes) - text) <= (_ROUNDED + repeated) * text)


def _publish(folder: Path, output: Path) -> None:
    """Rename ``folder`` to ``output`` in one step, or in two if an old data set must be moved away first."""
    old = folder.with_name(f".{output.name}.replaced-{secrets.token_hex(6)}")
    if output.exists():
        output.rename(old)
    folder.rename(output)
    on_disk(output.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Hold the lock of ``output``. While it is held, hidden folders beside ``output`` can only belong to dead
    processes and are removed; if such a process ended between the two renames of `_publish`, the old data set
    gets its name back."""
    lock = FileHold(output.parent / f".{output.name}.lock")
    hidden = re.compile(rf"\.{re.escape(output.name)}\.(tmp|replaced)-[0-9a-f]{{12}}")
    try:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            try:
                lock.take()
            except HeldError as held:
                logger.warning("waiting for another run that prepares %s: %s", output, held)
                lock.take(-1)
            for path in list(output.parent.iterdir()):
                if not (name := hidden.fullmatch(path.name)):
                    continue
                if name[1] == "replaced" and not output.exists():
                    path.rename(output)
                else:
                    shutil.rmtree(path, ignore_errors=True)
        except OSError as fault:
            raise ValueError(
                f"data.directory: cannot write beside {str(output)!r} ({fault.strerror}); "
                "set it, or runs, to another folder"
            ) from None
        yield
    finally:
        lock.release()
