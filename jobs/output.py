"""Writes the output of commands: mistakes, answers as tables or JSON, files; writes training's output in a
thread, so that a reader that does not read cannot block training."""

import contextlib
import io
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from braid.actors.config import ConfigError
from braid.scheduling.text.json_text import json_text

_MOST_WRITES = 10_000
"""Most pieces of output that wait for their reader; further output is dropped."""
_LAST_SECONDS = 5.0
"""Seconds to wait at the end for a reader that does not read."""


class ExitCode(IntEnum):
    """Exit code of a command that has not done what it was asked."""

    FAILURE = 1
    MISTAKE = 2
    """An error that the user can correct."""
    INTERRUPTED = 130


def complain(text: str) -> None:
    """Print one line on standard error, if it is open."""
    with contextlib.suppress(OSError, ValueError):
        print(f"braid: {text}", file=sys.stderr, flush=True)


def check_outputs(**files: Path | None) -> None:
    """Raise `ConfigError` if a file that an option (``output``: ``--output``) names cannot be written, before
    there is work to lose."""
    for option, file in files.items():
        if file is None:
            continue
        if file.is_dir():
            raise ConfigError(f"--{option} {file}: that is a folder; name a file in it")
        if not file.parent.is_dir():
            raise ConfigError(
                f"--{option} {file}: the folder {file.parent} does not exist; make it, or name another"
            )


def print_or_write(output: Path | None, text: str) -> None:
    """Write a text to the file that ``--output`` names; without it, print the text."""
    if output is None:
        print(text, end="")
    else:
        write_output("output", output, text)


def write_output(option: str, file: Path | None, content: str | bytes) -> None:
    """Write the file that an option names, if it is given."""
    if file is None:
        return
    try:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise ConfigError(f"--{option} {file}: {error.strerror}") from None


def on_disk(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk, so that they survive a crash."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def answer(as_json: bool, content: Callable[[], Any], show: Callable[[], object]) -> None:
    """Print a command's result: ``content()`` as JSON, or for people by ``show()``."""
    if as_json:
        print(json_text(content()))
    else:
        show()


def say(console: Console, text: str) -> None:
    """Print a line unchanged: unwrapped, without colours and markup."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def table_of(title: str, texts: Sequence[str], numbers: Sequence[str] = (), **look: Any) -> Table:
    """Make a table whose cells are never wrapped: columns of texts, then right-aligned columns of numbers."""
    columns = [Column(name, no_wrap=True) for name in texts]
    columns += [Column(name, no_wrap=True, justify="right") for name in numbers]
    return Table(*columns, title=title, title_justify="left", **look)


def facts_of(facts: Mapping[str, str | Text], title: str | None = None, **look: Any) -> Table:
    """Make a table with one row per fact: its name and its value."""
    columns = Column(style="dim"), Column(overflow="fold")
    table = Table(*columns, title=title, title_justify="left", show_header=False, **look)
    for row in facts.items():
        table.add_row(*row)
    return table


def first_line(error: BaseException) -> str:
    """Return the first line of what an exception says, or its type if it says nothing."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def listed(names: Sequence[str], most: int = 12) -> str:
    """Join the first names with commas, and dots for the others."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def counted(count: int, noun: str, plural: str = "s") -> str:
    """Format a number of things, such as 1 batch, 2 batches. ``plural``: ending of several."""
    return f"{count:,} {noun}{plural * (count != 1)}"


def duration(seconds: float) -> str:
    """Format as hours, minutes and seconds, or from 100 hours on as days: 0:01:23, 12 d."""
    whole = round(seconds)
    if whole >= 100 * 3600:
        return f"{whole / 86400:.0f} d"
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


class BackgroundOutput(io.TextIOBase):
    """A text stream over the file of another stream. Writing never waits and never fails: once the file
    cannot be written to, a line on standard error says so once, and further output is dropped."""

    def __init__(self, stream: TextIO) -> None:
        """``stream``: a stream with a file descriptor, such as ``sys.stdout``."""
        stream.flush()
        self._stream, self._file = stream, stream.fileno()
        self._waiting: queue.Queue[bytes] = queue.Queue(_MOST_WRITES)
        """Pieces of output; an empty one ends the thread."""
        self._left_out = 0
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._file

    def write(self, text: str) -> int:
        note = ""
        if self._left_out:
            note = f"\n... {self._left_out} characters were left out, as nobody read them ...\n"
        data = f"{note}{text}".encode(self.encoding, self._stream.errors or "strict")
        try:
            if data:
                self._waiting.put_nowait(data)
                self._left_out = 0
        except queue.Full:
            self._left_out += len(text)
        return len(text)

    def finish(self) -> None:
        """Wait a few seconds until all output is written; then leave the thread."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(b"", timeout=_LAST_SECONDS)
        self._thread.join(_LAST_SECONDS)

    def _run(self) -> None:
        try:
            while data := self._waiting.get():
                while data:
                    try:
                        data = data[os.write(self._file, data) :]
                    except BlockingIOError:
                        time.sleep(0.05)
        except OSError as error:
            complain(f"standard output cannot be written ({error.strerror}); training goes on without it")
            while self._waiting.get():
                pass


@contextlib.contextmanager
def background(stream: TextIO) -> Iterator[TextIO]:
    """Yield ``stream`` as a `BackgroundOutput` for the length of the block, or itself, if it has no file."""
    try:
        output = BackgroundOutput(stream)
    except (OSError, ValueError):
        yield stream
        return
    try:
        yield output  # type: ignore[misc]
    finally:
        output.finish()
