"""The command that shows what the ranks of a run have written themselves."""

import contextlib
import fcntl
import os
import re
import sys
import time
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from braid.actors.config import ConfigError
from braid.actors.stage.rank.log import FOLDER, log_file, put_aside
from braid.jobs.usage import RunFolder

_LOOK_SECONDS = 0.3


def logs(
    run: RunFolder,
    rank: Annotated[int | None, typer.Option(help="Of this rank only.", min=0)] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
) -> None:
    """Show what the ranks of a run wrote: warnings, traces, errors of NCCL and gloo."""
    if not (run / "config.yaml").is_file() and not (run / FOLDER).is_dir():
        raise ConfigError(f"{run} holds no run; give a directory such as runs/NAME")
    if not (known := _known(run)):
        raise ConfigError(f"{run / FOLDER} holds no logs: no rank of this run could write any there")
    if rank is not None and rank not in known:
        raise ConfigError(f"--rank {rank}: {run} has logs of ranks {', '.join(map(str, known))}")
    try:
        _show_all(run, rank, follow)
    except BrokenPipeError:  # whoever read it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _known(run: Path) -> list[int]:
    names = [re.fullmatch(r"rank-(\d+)\.log", path.name) for path in (run / FOLDER).glob("*")]
    return sorted(int(name[1]) for name in names if name)


def _show_all(run: Path, rank: int | None, follow: bool) -> None:
    """Show what is there; ``follow``: also lines as they are written, until the run has ended."""
    begun, files = set[int](), dict[int, BinaryIO]()
    while True:
        over = not follow or not _goes_on(run)
        for number in _known(run) if rank is None else [rank]:
            with contextlib.suppress(FileNotFoundError):  # it is being put aside
                log = log_file(run, number)
                if number not in begun and (aside := put_aside(log)).exists():
                    with aside.open("rb") as old:
                        _show(number, old, whole=False)
                begun.add(number)
                if number not in files:
                    files[number] = log.open("rb")
                file = files[number]
                _show(number, file, whole=not over)
                now, read = log.stat(), os.fstat(file.fileno())
                if now.st_ino != read.st_ino or now.st_size < file.tell():  # or has begun anew
                    files.pop(number).close()
        sys.stdout.flush()
        if over:
            return
        time.sleep(_LOOK_SECONDS)


def _show(rank: int, file: BinaryIO, *, whole: bool) -> None:
    """The lines from where the file was left; ``whole``: an unfinished last line waits for its end."""
    for line in file:
        if whole and not line.endswith(b"\n"):
            file.seek(-len(line), os.SEEK_CUR)
            return
        print(f"rank {rank} | {line.decode(errors='replace').rstrip()}")


def _goes_on(run: Path) -> bool:
    """Whether a command holds the run's lock."""
    try:
        with (run / ".lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False
