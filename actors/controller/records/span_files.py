"""Writes the spans that ranks stream into the run directory, within a limit of bytes per rank."""

import contextlib
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from braid.scheduling.trace.batches import SUFFIX, Batch, decode, head

FILES = 4
"""Number of files per rank, which share the limit."""
_LAST_SECONDS = 5.0
"""Seconds to wait at the end of a run for spans under way."""


@dataclass
class _RankFile:
    number: int = -1
    file: IO[bytes] | None = None
    size: int = 0
    generation: int = -1
    expected: int = 0
    """Sequence number of the rank's next batch."""

    def close(self) -> None:
        file, self.file = self.file, None
        if file is not None:
            file.close()


@dataclass(frozen=True, kw_only=True)
class SpanCounts:
    """Counts of a run's spans so far."""

    written: int = 0
    lost: int = 0
    """Spans not written: the disk was full, or batches were missing or damaged."""
    trouble: str = ""
    """Why something could not be written; empty if everything was."""


class SpanFiles:
    """Appends batches to ``trace/rank-RRRRR.NNNN.arrows``; if a rank has too many files, the oldest is
    removed.

    Each file can be read alone. A failed write ends nothing: it is counted and reported.
    """

    target = None
    """Ranks that are processes send over a connection that they have from their start (`receive`)."""

    def __init__(self, directory: Path, bytes_per_rank: int) -> None:
        self._directory = directory
        self._file_bytes = max(1 << 16, bytes_per_rank // FILES)
        self._ranks: dict[int, _RankFile] = defaultdict(_RankFile)
        self._counts = SpanCounts()
        self._lock = threading.Lock()
        self._streams: dict[Connection, bool] = {}
        """Whether more is expected of a rank, by its connection."""

    def receive(self, connection: Connection) -> None:
        """Write what a rank sends, in a thread, until the rank closes the connection or sends anything but
        batches. An empty message ends a stream."""

        def read() -> None:
            with contextlib.suppress(EOFError, OSError, ValueError):
                while connection.poll(None):
                    self._streams[connection] = True
                    data = connection.recv_bytes()
                    self.take(data)
                    self._streams[connection] = bool(data)
            self._streams.pop(connection)
            connection.close()

        self._streams[connection] = False
        threading.Thread(target=read, name="spans", daemon=True).start()

    def take(self, data: bytes) -> int:
        """Write the complete batches among some bytes; return their number of bytes. Raise `ValueError` for
        damaged ones."""
        done = 0
        with self._lock:
            for batch, end in decode(data):
                self._write(batch, data[done:end])
                done = end
        return done

    def counts(self) -> SpanCounts:
        return self._counts

    def close(self) -> None:
        """Close the files, after the last spans of streams that have begun or wait to be read."""
        deadline = time.monotonic() + _LAST_SECONDS
        while any(map(self._has_more, [*self._streams])) and time.monotonic() < deadline:
            time.sleep(0.01)
        with self._lock:
            for rank in self._ranks.values():
                rank.close()

    def _has_more(self, connection: Connection) -> bool:
        with contextlib.suppress(OSError):  # its reader may have closed it just now
            return self._streams.get(connection, False) or connection.poll()
        return False

    def _write(self, batch: Batch, data: bytes) -> None:
        rank, counts = self._ranks[batch.rank], self._counts
        if batch.generation != rank.generation:
            rank.generation, rank.expected = batch.generation, 0
        counts = replace(counts, lost=counts.lost + max(0, batch.sequence - rank.expected))
        rank.expected = batch.sequence + 1
        try:
            if rank.file is None or rank.size >= self._file_bytes:
                self._open_next(f"rank-{batch.rank:05d}", rank)
            assert rank.file is not None
            rank.file.write(data)
            rank.file.flush()
            rank.size += len(data)
            self._counts = replace(counts, written=counts.written + len(batch.records))
        except OSError as error:
            with contextlib.suppress(OSError):  # it may end within a batch now, so another file is begun
                rank.close()
            self._counts = replace(counts, lost=counts.lost + len(batch.records), trouble=str(error))

    def _open_next(self, name: str, rank: _RankFile) -> None:
        rank.close()
        self._directory.mkdir(parents=True, exist_ok=True)
        # From number 9999 on, names have more digits, and do not sort by number.
        files = {int(path.name.split(".")[1]): path for path in self._directory.glob(f"{name}.*{SUFFIX}")}
        rank.number = 1 + (rank.number if rank.number >= 0 else max(files, default=-1))
        files[rank.number] = self._directory / f"{name}.{rank.number:04d}{SUFFIX}"
        rank.file = files[rank.number].open("wb")
        rank.size = rank.file.write(head())
        for number in sorted(files)[:-FILES]:
            files[number].unlink(missing_ok=True)
