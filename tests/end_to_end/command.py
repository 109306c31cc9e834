"""Runs the command line as a user does: a process of its own, in a session of its own."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from braid.actors.controller.records.json_lines import read_lines
from tests.end_to_end.forked import Command
from tests.in_process import Outcome
from tests.waiting import within

ROOT = Path(__file__).resolve().parents[2]

BASE: dict[str, Any] = {
    "name": "run",
    "model": {"hidden": 32, "layers": 4, "heads": 4, "sequence": 32},
    "data": {"files": ["corpus.txt"], "validation_fraction": 0.1},
    "train": {"steps": 4, "global_batch": 8, "micro_batch": 2},
    "cluster": {"launcher": "processes"},
    "telemetry": {"page": False},
}


def overlap_of(name: str, **more: Any) -> dict[str, Any]:
    """The section ``overlap`` for a schedule, perhaps with a pipeline (``braid:w``), and ``more`` keys."""
    schedule, _, pipeline = name.partition(":")
    return {"schedule": schedule, **({"pipeline": pipeline} if pipeline else {}), **more}


def environment() -> dict[str, str]:
    """The test's environment with the package importable and Ray kept private."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith("RAY_")},
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "RAY_AUTH_MODE": "disabled",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }


def start(folder: Path, *arguments: str) -> Command:
    return Command(arguments, folder, environment())


def braid(folder: Path, *arguments: str, timeout: float = 120.0) -> Outcome:
    """Run ``braid ARGUMENTS`` in a folder to its end; its whole session is killed if it takes too long."""
    process = start(folder, *arguments)
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return Outcome(process.returncode, output, errors)


def write_config(folder: Path, **sections: Any) -> Path:
    """Write ``run.yaml``: `BASE` with keys of sections replaced."""
    content = {key: dict(value) if isinstance(value, dict) else value for key, value in BASE.items()}
    for section, value in sections.items():
        content[section] = {**content.get(section, {}), **value} if isinstance(value, dict) else value
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def write_corpus(folder: Path) -> Path:
    """A small corpus of real text: some of this project's own source files."""
    path = folder / "corpus.txt"
    sources = [ROOT / "scheduling" / "schedule" / name for name in ("buckets.py", "code.py")]
    path.write_text("\n".join(source.read_text(encoding="utf-8") for source in sources), encoding="utf-8")
    return path


def losses_of(folder: Path, name: str) -> list[float]:
    """The losses of a run, checked to be of the steps 1, 2, 3, ..."""
    lines = read_lines(folder / "runs" / name / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def steps_done(folder: Path, least: int) -> None:
    """Wait until so many steps are on record."""
    metrics = folder / "runs" / "run" / "metrics.jsonl"
    assert within(120, lambda: len(read_lines(metrics)) >= least), "no steps are done"


def left_running(session: int, patience: float = 3.0) -> list[str]:
    """What still lives in a session after a moment for helper processes to notice their parent's end."""

    def inside(entry: Path) -> bool:
        stat = (entry / "stat").read_text().rpartition(")")[2].split()
        return int(stat[3]) == session and stat[0] != "Z"

    return _commands(lambda entry, command: inside(entry), patience)


def processes_mentioning(text: str, patience: float = 0.0) -> list[str]:
    """Command lines of live processes that mention a text, such as a cluster's folder, after a while."""
    return _commands(lambda entry, command: int(entry.name) != os.getpid() and text in command, patience)


def _commands(wanted: Callable[[Path, str], bool], patience: float) -> list[str]:
    """Command lines of processes that are wanted, as soon as there are none, or after so many seconds."""
    deadline = time.monotonic() + patience
    while True:
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, IndexError, ValueError):  # it may end meanwhile, or be none
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if entry.name.isdigit() and wanted(entry, command):
                    found.append(command)
        if not found or time.monotonic() >= deadline:
            return found
        time.sleep(0.1)
