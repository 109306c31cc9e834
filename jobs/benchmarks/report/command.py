"""Makes the report: checks what was asked for, runs the parts, writes two files."""

import datetime
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from braid.jobs.benchmarks.gpu import check_device
from braid.jobs.benchmarks.report.claims import PARTS, Part
from braid.jobs.benchmarks.report.findings import Task
from braid.jobs.benchmarks.report.page import Report, as_text
from braid.jobs.benchmarks.report.parts import run_all

MARKDOWN: Final = "report.md"
JSON: Final = "report.json"


def make_report(
    *,
    device: str,
    quick: bool,
    minutes: float,
    output: Path,
    seed: int = 0,
    parts: Sequence[Part] = PARTS,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Run all parts for so many minutes at most, and write both files into ``output``.

    `ValueError` for a device that is not there, for too little time, and for a folder that cannot be written.
    """
    check_device(device)
    if device == "cpu" and not quick:
        raise ValueError("--device cpu needs --quick: at full size a CPU would take days")
    if not minutes > 0:
        raise ValueError(f"--minutes {minutes:g} must be more than 0")
    _writable(output)
    begin = time.time()
    task = Task(device=device, quick=quick, seed=seed, ends_at=begin + 60 * minutes)
    with tempfile.TemporaryDirectory(prefix="braid-report-") as folder:
        done = run_all(parts, task, Path(folder), progress)
    report = Report(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        device=device,
        quick=quick,
        seed=seed,
        minutes=minutes,
        seconds=time.time() - begin,
        parts=done,
    )
    (output / MARKDOWN).write_text(report.as_markdown(), encoding="utf-8")
    (output / JSON).write_text(as_text(report), encoding="utf-8")
    return report


def _writable(folder: Path) -> None:
    """Make the folder before anything is measured for it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARKDOWN).touch()
    except OSError as error:
        raise ValueError(f"--output {folder}: {error.strerror}") from None
