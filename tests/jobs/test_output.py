"""Standard output in a thread of its own: nobody who reads it, or stops reading, holds a run up."""

import io
import os
from pathlib import Path

import pytest

from braid.jobs import output
from braid.jobs.output import BackgroundOutput, background


def pipe() -> tuple[int, io.TextIOWrapper]:
    reading, writing = os.pipe()
    return reading, os.fdopen(writing, "w", encoding="utf-8")


def test_what_is_written_arrives_in_order() -> None:
    reading, stream = pipe()
    print("before", file=stream)
    with background(stream) as out:
        print("grüß", "Gott", file=out)
        out.write("x" * 100_000)  # more than a pipe holds
        chunks = [os.read(reading, 1 << 20)]
        while len(b"".join(chunks)) < 100_018:
            chunks.append(os.read(reading, 1 << 20))
    assert b"".join(chunks).decode() == "before\ngrüß Gott\n" + "x" * 100_000
    stream.close()
    os.close(reading)


def test_a_reader_that_has_seen_enough_and_a_full_disk_end_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reading, stream = pipe()
    os.close(reading)
    full = Path("/dev/full").open("w", encoding="utf-8")  # noqa: SIM115
    for file, reason in ((stream, "Broken pipe"), (full, "No space left on device")):
        with background(file) as out:
            for number in range(1000):
                print("step", number, file=out)
        file.close()
        told = capsys.readouterr().err
        assert told == f"braid: standard output cannot be written ({reason}); training goes on without it\n"


def test_a_reader_that_does_not_read_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it missed is said, once it reads again."""
    monkeypatch.setattr(output, "_MOST_WRITES", 10)
    reading, stream = pipe()
    out = BackgroundOutput(stream)
    for _ in range(200):
        out.write("x" * 9_999 + "\n")  # two megabytes, more than a pipe holds
    text = b""
    while b"last" not in text:
        text += os.read(reading, 1 << 20)
        out.write("last\n")
    assert b"characters were left out, as nobody read them ...\nlast" in text
    os.close(reading)
    out.finish()
    stream.close()
