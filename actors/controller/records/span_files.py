"""Writes the spans that ranks stream into the run directory, within a limit of bytes per rank."""

import contextlib
import socketserver
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from braid.actors.controller.ranks.private_folders import private_folder
from braid.scheduling.trace.batches import SUFFIX, Batch, decode, head

FILES = 4
"""Number of files per rank, which share the limit."""
_READ = 1 << 18


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

    target = ""
    """Path of a Unix socket that accepts spans for these files, within `socket_collector`."""

    def __init__(self, directory: Path, bytes_per_rank: int) -> None:
        self._directory = directory
        self._file_bytes = max(1 << 16, bytes_per_rank // FILES)
        self._ranks: dict[int, _RankFile] = defaultdict(_RankFile)
        self._counts = SpanCounts()
        self._lock = threading.Lock()

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
        with self._lock:
            for rank in self._ranks.values():
                rank.close()

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


_SOCKET = "/spans"
_QUIET_SECONDS = 0.1
"""Seconds without data after which, at the end of a run, nothing more is expected from a rank."""


class _Connection(socketserver.BaseRequestHandler):
    """Reads what a rank sends; disconnects a rank that sends anything but batches."""

    server: "_Connections"

    def handle(self) -> None:
        self.request.settimeout(_QUIET_SECONDS)
        unread = b""
        with contextlib.suppress(OSError, ValueError):
            while True:
                try:
                    data = self.request.recv(_READ)
                except TimeoutError:
                    if self.server.ending:
                        return
                    continue
                if not data:
                    return
                unread += data
                unread = unread[self.server.files.take(unread) :]


class _Connections(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    request_queue_size = 128
    ending = False

    def __init__(self, files: SpanFiles) -> None:
        self.files = files
        super().__init__(files.target, _Connection)


@contextlib.contextmanager
def socket_collector(files: SpanFiles) -> Iterator[SpanFiles]:
    """Collect spans from ranks of this machine for the length of the block; afterwards all spans that arrived
    are in the files."""
    with private_folder(room=len(_SOCKET)) as folder:
        files.target = f"{folder}{_SOCKET}"
        server = _Connections(files)
        thread = threading.Thread(target=server.serve_forever, args=(_QUIET_SECONDS,), name="span collector")
        thread.start()
        try:
            yield files
        finally:
            server.shutdown()
            server.ending = True
            server.server_close()  # waits until all connections have been read
            thread.join()
            files.close()
