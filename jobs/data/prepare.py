"""Prepare a corpus: tokenise it into the shards that `braid.actors.stage.data` reads.

    corpus -> sources -> work items -> (executor) -> shards in a hidden folder -> index -> renamed into place

What comes out depends on the corpus alone, to the byte: never on the executor, the number of cores or the
order in which tasks end. Nothing is visible before it is whole, and a run that was killed leaves only a
hidden folder beside the output, which the next run removes.

All nodes that tasks run on must see the inputs, the tokenizer and the output under the same paths.
"""

import contextlib
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from braid.actors.controller.locks import FileHold, HeldError
from braid.actors.stage.data import (
    INDEX_FILE,
    TRAIN,
    VALIDATION,
    DataIndex,
    Shard,
    read_index,
)
from braid.actors.stage.reading import UnreadableError
from braid.jobs.data.corpus import Corpus, WorkItem, cut
from braid.jobs.data.coverage import check_known, known_bytes
from braid.jobs.data.executors import Executor, local_map
from braid.jobs.data.tokenise import ItemResult, Split, SplitByHash, SplitTail, Task, tokenise
from braid.jobs.identity import Request

logger = logging.getLogger(__name__)

_OUR_FILES = re.compile(rf"({TRAIN}|{VALIDATION})-\d{{5,}}\.bin|{re.escape(INDEX_FILE)}")


@dataclass(frozen=True)
class Progress:
    """How far a preparation has come."""

    items_done: int
    items: int
    tokens: int
    bytes_of_text: int


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a preparation made, or found made already (``reused``; then nothing was read)."""

    output: Path
    index: DataIndex
    reused: bool
    documents: int
    train_tokens: int
    validation_tokens: int
    bytes_of_text: int
    duration_ns: int


def prepare(
    corpus: Corpus,
    *,
    output: Path | str,
    executor: Executor = local_map,
    progress: Callable[[Progress], None] | None = None,
) -> Prepared:
    """Prepare ``corpus`` into the folder ``output``, replacing a data set that is there.

    Work goes to ``executor`` (default `local_map`); ``progress`` hears of every item that is done. Documents
    are held out by a hash of their text: the same text is always in the same split, whatever else the
    corpus holds. Only to leave neither split empty, the nearest document moves; and of a corpus of one
    document, the tail is held out. Raises ValueError naming the key, the value and the remedy.
    """
    request = Request.of(corpus)
    output = Path(output).resolve()
    with _locked(output):
        return _prepare(request, output, executor, progress)


def prepare_if_needed(
    request: Request,
    *,
    output: Path | str,
    executor: Executor = local_map,
    progress: Callable[[Progress], None] | None = None,
) -> Prepared:
    """As `prepare`, but keep what is in ``output`` if it was made from the same request (`Request.fits`).

    Safe to call from many processes at once: one prepares, the others wait and find it done.
    """
    output = Path(output).resolve()
    # without the lock first, for data sets on a file system that is read-only here
    if found := _fitting(request, output, executor):
        return found
    with _locked(output):
        return _fitting(request, output, executor) or _prepare(request, output, executor, progress)


def _prepare(
    request: Request, output: Path, executor: Executor, progress: Callable[[Progress], None] | None
) -> Prepared:
    began_ns = time.monotonic_ns()
    _check_replaceable(output)
    items = cut(request.sources, request.corpus.text_field)
    folder = output.parent / f".{output.name}.tmp-{secrets.token_hex(6)}"
    try:
        folder.mkdir()
        results = _tokenise_all(request, folder, items, executor, progress)
        index = _assemble(request, folder, results, request.contents(executor))
        _publish(folder, output)
    except OSError as fault:
        raise ValueError(
            f"data.output: cannot write {str(output)!r} ({fault.strerror or fault}); make room, or name a "
            "folder that can be written and that all nodes see"
        ) from fault
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return _summary(output, index, reused=False, duration_ns=time.monotonic_ns() - began_ns)


def _tokenise_all(
    request: Request,
    folder: Path,
    items: Sequence[WorkItem],
    executor: Executor,
    progress: Callable[[Progress], None] | None,
) -> list[ItemResult]:
    """Results of all items in order; those that hold the wrong documents for a good split are done again."""
    task = Task(
        folder=str(folder),
        tokenizer=request.tokenizer.name,
        end_token=request.corpus.end_token,
        tokenizer_fingerprint=request.tokenizer.fingerprint,
        dtype="uint16" if request.tokenizer.vocabulary <= 2**16 else "uint32",
        text_field=request.corpus.text_field,
        encoding_errors=request.corpus.encoding_errors,
        split=_first_split(request),
    )
    results = _run(executor, task, items, progress)
    if not any(result.documents for result in results):
        skipped, empty = sum(r.skipped for r in results), sum(r.empty for r in results)
        raise ValueError(
            f"data.files: {len(request.sources)} file(s) hold no text ({empty} documents are empty, "
            f"{skipped} are not UTF-8 and were skipped); give files with text"
        )
    if (split := _better_split(task.split, results, request.corpus.validation_fraction)) is None:
        return results
    again = [item for item, result in zip(items, results, strict=True) if _changes(result, split)]
    done = {result.number: result for result in _run(executor, replace(task, split=split), again, progress)}
    return [done.get(result.number, result) for result in results]


def _run(
    executor: Executor, task: Task, items: Sequence[WorkItem], progress: Callable[[Progress], None] | None
) -> list[ItemResult]:
    results: list[ItemResult] = []
    tokens = bytes_of_text = 0
    with contextlib.ExitStack() as stack:
        running = executor(partial(tokenise, task), items)
        if close := getattr(running, "close", None):
            stack.callback(close)  # an error here must end the workers before their folder goes
        for result in running:
            results.append(result)
            shards = [shard for split in result.shards.values() for shard in split]
            tokens += sum(shard.tokens for shard in shards)
            bytes_of_text += sum(shard.bytes_of_text for shard in shards)
            if progress:
                progress(Progress(len(results), len(items), tokens, bytes_of_text))
    return sorted(results, key=lambda result: result.number)


def _first_split(request: Request) -> Split:
    fraction = request.corpus.validation_fraction
    if fraction and [source.format for source in request.sources] == ["text"]:
        return SplitTail(fraction)
    return SplitByHash(int(fraction * 2**64))


def _better_split(split: Split, results: Sequence[ItemResult], fraction: float) -> Split | None:
    """The split that leaves neither side without a document, if ``split`` does."""
    if not isinstance(split, SplitByHash) or not fraction:
        return None
    lowest = min(result.lowest_hash for result in results)
    highest = max(result.highest_hash for result in results)
    if lowest == highest:
        return SplitTail(fraction)
    if split.threshold <= lowest:
        return SplitByHash(lowest + 1)
    if split.threshold > highest:
        return SplitByHash(highest)
    return None


def _changes(result: ItemResult, split: Split) -> bool:
    """Whether the item holds documents that ``split``, which moves one or all of them, puts elsewhere."""
    if isinstance(split, SplitTail):
        return result.documents > 0
    return result.lowest_hash == split.threshold - 1 or result.highest_hash == split.threshold


def _assemble(
    request: Request, folder: Path, results: Sequence[ItemResult], contents: tuple[str, ...]
) -> DataIndex:
    """Give the shards their names in the order of the input, and write the index."""
    splits: dict[str, tuple[Shard, ...]] = {}
    for split in (TRAIN, VALIDATION):
        shards = [shard for result in results for shard in result.shards[split]]
        splits[split] = tuple(
            replace(shard, file=f"{split}-{number:05d}.bin") for number, shard in enumerate(shards)
        )
        for shard, final in zip(shards, splits[split], strict=True):
            (folder / shard.file).rename(folder / final.file)
    index = DataIndex(
        tokenizer=request.tokenizer.name,
        tokenizer_fingerprint=request.tokenizer.fingerprint,
        vocabulary=request.tokenizer.vocabulary,
        end_of_document=request.tokenizer.end_of_document,
        dtype="uint16" if request.tokenizer.vocabulary <= 2**16 else "uint32",
        splits=splits,
        documents_skipped=sum(result.skipped for result in results),
        documents_empty=sum(result.empty for result in results),
        request=request.digest,
        parameters=request.parameters,
        sources=request.places,
        contents=contents,
        end_token=request.tokenizer.end_token,
        characters=sum(result.characters for result in results),
        characters_lost=sum(result.characters_lost for result in results),
        tokens_unknown=sum(result.tokens_unknown for result in results),
    )
    check_known(index)
    index = replace(index, token_bytes=known_bytes(request.tokenizer, folder, index))
    for path in folder.iterdir():
        if not _OUR_FILES.fullmatch(path.name):
            path.unlink()  # of a task that was done twice
    _write_index(folder / INDEX_FILE, index)
    return index


def _write_index(path: Path, index: DataIndex) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(index.to_json())
        file.flush()
        os.fsync(file.fileno())


def _summary(output: Path, index: DataIndex, *, reused: bool, duration_ns: int) -> Prepared:
    shards = [shard for split in index.splits.values() for shard in split]
    return Prepared(
        output=output,
        index=index,
        reused=reused,
        documents=sum(shard.documents for shard in shards),
        train_tokens=index.tokens(TRAIN),
        validation_tokens=index.tokens(VALIDATION),
        bytes_of_text=sum(shard.bytes_of_text for shard in shards),
        duration_ns=duration_ns,
    )


# The output folder.


def existing(output: Path) -> Prepared:
    """The data set in ``output``, whatever it was made from. `UnreadableError` or `ValueError` if there
    is none."""
    began_ns = time.monotonic_ns()
    index = read_index(output)
    return _summary(output.resolve(), index, reused=True, duration_ns=time.monotonic_ns() - began_ns)


def _fitting(request: Request, output: Path, executor: Executor) -> Prepared | None:
    """The data set in ``output``, if it is whole and was made from ``request``."""
    try:
        found = existing(output)
    except (ValueError, UnreadableError):
        return None
    if not request.fits(found.index, executor):
        return None
    if found.index.request != request.digest:  # copies: not to be read again the next time
        _write_down(replace(found.index, request=request.digest, sources=request.places), output)
    return found


def _write_down(index: DataIndex, output: Path) -> None:
    """Replace the index; not where the data set cannot be written to."""
    folder = output.parent / f".{output.name}.tmp-{secrets.token_hex(6)}"
    with contextlib.suppress(OSError):
        folder.mkdir()
        _write_index(folder / INDEX_FILE, index)
        (folder / INDEX_FILE).replace(output / INDEX_FILE)
    shutil.rmtree(folder, ignore_errors=True)


def _check_replaceable(output: Path) -> None:
    """Refuse to replace what no preparation has made."""
    if not output.exists():
        return
    foreign = "" if output.is_dir() else "itself"
    if output.is_dir():
        foreign = next((path.name for path in output.iterdir() if not _OUR_FILES.fullmatch(path.name)), "")
    if foreign:
        raise ValueError(
            f"data.output: {str(output)!r} is there and is no prepared data set (see {foreign}); "
            "name a new folder"
        )


def _publish(folder: Path, output: Path) -> None:
    """Make ``folder`` visible as ``output`` in one step, or two if an old data set has to go first."""
    _sync(folder)
    old = folder.with_name(f".{output.name}.replaced-{secrets.token_hex(6)}")
    if output.exists():
        output.rename(old)
    folder.rename(output)
    _sync(output.parent)
    shutil.rmtree(old, ignore_errors=True)


def _undo_replacement(output: Path) -> None:
    """Give the old data set its name back if a crash has interrupted `_publish` between its two renames."""
    for old in _beside(output, "replaced"):
        if output.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(output)


def _beside(output: Path, what: str) -> list[Path]:
    """Hidden folders of preparations of ``output``."""
    name = re.compile(rf"\.{re.escape(output.name)}\.{what}-[0-9a-f]{{12}}")
    return [path for path in output.parent.iterdir() if name.fullmatch(path.name)]


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unwritable(output: Path, fault: OSError) -> ValueError:
    return ValueError(
        f"data.output: cannot write beside {str(output)!r} ({fault.strerror}); name another folder"
    )


@contextlib.contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Hold the lock of ``output``; who holds it knows that hidden folders beside it are of dead runs."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise _unwritable(output, fault) from None
    lock = FileHold(output.parent / f".{output.name}.lock")
    try:
        lock.take()
    except HeldError as held:
        logger.warning("waiting for another run that prepares %s: %s", output, held)
        lock.take(-1)
    try:
        try:
            _undo_replacement(output)
            for path in _beside(output, "tmp"):
                shutil.rmtree(path, ignore_errors=True)
        except OSError as fault:
            raise _unwritable(output, fault) from None
        yield
    finally:
        lock.release()
