"""Keeps the spans that ranks stream in the run directory, within a budget of bytes per rank."""

import contextlib
import os
import selectors
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from braid.actors.controller.ranks.private_folders import private_folder
from braid.scheduling.trace.batches import SUFFIX, Batch, decode, head

FILES = 4
"""Files per rank; the budget is shared between them."""
_READ = 1 << 18


@dataclass
class _RankFile:
    number: int = -1
    file: IO[bytes] | None = None
    size: int = 0
    generation: int = -1
    expected: int = 0
    """Sequence number of its next batch."""

    def close(self) -> None:
        file, self.file = self.file, None
        if file is not None:
            file.close()


@dataclass(frozen=True, kw_only=True)
class SpanCounts:
    """What became of the spans of a run so far."""

    written: int = 0
    lost: int = 0
    """Not written: the disk was full, or batches were missing or damaged."""
    dropped: dict[int, int] = field(default_factory=dict)
    """By rank: what it dropped itself."""
    every: dict[int, int] = field(default_factory=dict)
    """By rank: it records every so many steps."""
    trouble: str = ""
    """Why something could not be written; empty if everything was."""


class SpanFiles:
    """Appends batches to ``trace/rank-RRRRR.NNNN.arrows``; where there are too many, the oldest file goes.

    Each can be read alone. Not being able to write ends nothing: it is counted and told.
    """

    target = ""
    """The path of a Unix socket that takes spans for these files, within `socket_collector`."""

    def __init__(self, directory: Path, bytes_per_rank: int) -> None:
        self._directory = directory
        self._file_bytes = max(1 << 16, bytes_per_rank // FILES)
        self._ranks: dict[int, _RankFile] = defaultdict(_RankFile)
        self._counts = SpanCounts()
        self._lock = threading.Lock()

    def take(self, data: bytes) -> int:
        """Write the whole batches in some bytes; how many bytes they were. `ValueError` for damaged ones."""
        done = 0
        with self._lock:
            for batch, end in decode(data):
                self._write(batch, data[done:end])
                done = end
        return done

    def counts(self) -> SpanCounts:
        return self._counts

    def close(self) -> None:
        with self._lock:
            for rank in self._ranks.values():
                rank.close()

    def _write(self, batch: Batch, data: bytes) -> None:
        rank, counts = self._ranks[batch.rank], self._counts
        if batch.generation != rank.generation:
            rank.generation, rank.expected = batch.generation, 0
        counts = replace(
            counts,
            lost=counts.lost + (batch.sequence - rank.expected if batch.sequence > rank.expected else 0),
            dropped={**counts.dropped, batch.rank: batch.dropped},
            every={**counts.every, batch.rank: batch.every},
        )
        rank.expected = batch.sequence + 1
        try:
            if rank.file is None or rank.size >= self._file_bytes:
                self._open_next(batch, rank)
            assert rank.file is not None
            rank.file.write(data)
            rank.file.flush()
            rank.size += len(data)
            self._counts = replace(counts, written=counts.written + len(batch.records))
        except OSError as error:
            with contextlib.suppress(OSError):  # it may end within a batch now: another file is begun
                rank.close()
            self._counts = replace(counts, lost=counts.lost + len(batch.records), trouble=str(error))

    def _open_next(self, batch: Batch, rank: _RankFile) -> None:
        rank.close()
        self._directory.mkdir(parents=True, exist_ok=True)
        if rank.number < 0:
            rank.number = max(map(_number, self._files(batch.rank)), default=-1)
        rank.number += 1
        rank.file = (self._directory / _name(batch.rank, f"{rank.number:04d}")).open("wb")
        rank.size = rank.file.write(head())
        for path in sorted(self._files(batch.rank), key=_number)[:-FILES]:
            path.unlink(missing_ok=True)

    def _files(self, rank: int) -> Iterator[Path]:
        return self._directory.glob(_name(rank, "*"))


def _name(rank: int, number: str) -> str:
    return f"rank-{rank:05d}.{number}{SUFFIX}"


def _number(path: Path) -> int:
    """Of a file: from 9999 on, names have more digits and do not stand in order."""
    return int(path.name.split(".")[1])


_SOCKET = "/spans"


@contextlib.contextmanager
def socket_collector(files: SpanFiles) -> Iterator[SpanFiles]:
    """Collect from ranks of this machine for as long as the block lasts; then everything that has arrived is
    in the files."""
    with private_folder(room=len(_SOCKET)) as folder:
        files.target = f"{folder}{_SOCKET}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(files.target)
        listener.listen()
        reading, stop = os.pipe()
        thread = threading.Thread(target=_collect, args=(listener, reading, files), name="span collector")
        thread.start()
        try:
            yield files
        finally:
            os.close(stop)
            thread.join()
            os.close(reading)
            listener.close()
            files.close()


def _collect(listener: socket.socket, stop: int, files: SpanFiles) -> None:
    """Read from all ranks until told to stop; a rank that sends other bytes than batches is shut out."""
    buffers: dict[socket.socket, bytearray] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(stop, selectors.EVENT_READ)
        stopping = False
        while not stopping:
            ready = selector.select()
            stopping = any(key.fileobj == stop for key, _ in ready)
            for key, _ in ready:
                if key.fileobj is listener:
                    rank, _ = listener.accept()
                    buffers[rank] = bytearray()
                    selector.register(rank, selectors.EVENT_READ)
                elif isinstance(key.fileobj, socket.socket) and not _read(key.fileobj, buffers, files):
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
                    del buffers[key.fileobj]
        for rank in buffers:
            rank.setblocking(False)
            while _read(rank, buffers, files):
                pass  # what is still on its way
            rank.close()


def _read(rank: socket.socket, buffers: dict[socket.socket, bytearray], files: SpanFiles) -> bool:
    """Read what there is; False at the end."""
    try:
        data = rank.recv(_READ)
        buffers[rank] += data
        del buffers[rank][: files.take(bytes(buffers[rank]))]
    except (OSError, ValueError):
        return False
    return bool(data)
