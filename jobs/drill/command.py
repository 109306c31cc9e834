"""Runs a drill's trainings as commands that are started, watched, ended and restarted, as a user does.

``python -m braid.jobs.drill.command FILE`` does what ``braid train`` does; FILE, a pickle from the drill, has
the arguments of `braid.jobs.training.train.training`: also faults, and the emulated hosts of the ranks.
"""

import contextlib
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from braid.actors.controller.ranks.group import WorkerError
from braid.actors.controller.records.json_lines import last_line, read_lines
from braid.actors.controller.state.locks import FileHold, HeldError

PATIENCE_S = 300.0
"""Seconds within which a fault must occur and be over; otherwise the drill fails."""
WHOLE, BROKEN = "whole", "broken"
"""Names of the undisturbed run and of the run with faults."""
_LOOK_S = 0.02


class DrillError(RuntimeError):
    """A fault did not occur, or the run did not recover from it."""


class Command:
    """The command under way, and access to the records of the run with faults."""

    process: "subprocess.Popen[bytes]"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """Folder of the run directories."""
        self.broken = folder / BROKEN
        # Output of the runs is kept outside their disk, which may be full.
        self._logs = {name: folder.with_name(f"{folder.name}-{name}.log") for name in (WHOLE, BROKEN)}
        for log in self._logs.values():
            log.unlink(missing_ok=True)

    def start(self, name: str, **arguments: Any) -> None:
        """Start the run of this name; ``arguments``: of `training`."""
        path = self.folder / f"{name}.pickle"
        path.write_bytes(pickle.dumps(arguments))
        command = [sys.executable, "-m", __name__, str(path)]
        with self._logs[name].open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def wait_for_end(self, name: str, limit_s: float = PATIENCE_S) -> int:
        """Wait until the command of this run has ended, and no process holds the run's directory: on a
        cluster a controller outlives its command. Return the command's exit code."""
        lock = FileHold(self.folder / name / ".lock")
        try:
            code = self.process.wait(limit_s)
            lock.take(limit_s)
        except (subprocess.TimeoutExpired, HeldError):
            raise self.failed(f"the run did not end within {limit_s:g} s") from None
        lock.release()
        return code

    def wait(self, what: str, done: Callable[[], bool]) -> None:
        """Wait until ``done()``; raise `DrillError` if the run ends before ``what`` happens, or it takes too
        long."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            if self.process.poll() not in (None, 0):
                raise self.failed(f"the run ended before {what}")
            if time.monotonic() > deadline:
                raise self.failed(f"waited {PATIENCE_S:g} s in vain for {what}")
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Kill the command's process, if one was started."""
        if hasattr(self, "process"):
            self.process.kill()
            self.process.wait()

    def failed(self, what: str) -> DrillError:
        """Make an error with the last lines that the runs have printed."""
        ends = [log.read_text(encoding="utf-8")[-2000:] for log in self._logs.values() if log.exists()]
        said = "\n".join(ends).strip() or "it said nothing"
        return DrillError(f"{what}: {said}")

    def newest(self) -> dict[str, Any]:
        """Return the newest step's record; empty if there is none."""
        return last_line(self.broken / "metrics.jsonl")

    def step(self) -> int:
        """Return the number of steps done."""
        return int(self.newest().get("step", 0))

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return all recorded events of a kind."""
        return [line for line in read_lines(self.broken / "events.jsonl") if line["kind"] == kind]

    def incidents(self, since: float, *, resized: bool = False) -> list[dict[str, Any]]:
        """Return failures detected since a time (seconds since 1970); with ``resized``, changes of the number
        of ranks instead."""
        lines = read_lines(self.broken / "incidents.jsonl")
        return [line for line in lines if line["time"] >= since and (line["kind"] == "resized") == resized]

    def ranks_at(self, address: str) -> list[int]:
        """Return the ids of the ranks' processes at an address, as the run recorded them; empty while it
        writes the file."""
        with contextlib.suppress(OSError, ValueError):
            cluster = json.loads((self.broken / "cluster.json").read_text(encoding="utf-8"))
            if "ranks" in cluster:  # on Ray
                ranks = [(rank["address"], rank["process"]) for rank in cluster["ranks"]]
            else:
                ranks = list(zip(cluster["addresses"], cluster["processes"], strict=True))
            return [int(process) for where, process in ranks if where == address]
        return []


def census(*roots: int) -> dict[str, int]:
    """Count processes with all their descendants, and their threads, open files and sockets, and resident
    bytes; leave out a process that ends meanwhile."""
    held = Counter(processes=0)
    for process in family(*roots):
        folder = Path(f"/proc/{process}")
        with contextlib.suppress(OSError):
            held["threads"] += len(list((folder / "task").iterdir()))
            held["files"] += len(list((folder / "fd").iterdir()))
            held["bytes"] += int((folder / "statm").read_text().split()[1]) * resource.getpagesize()
            held["processes"] += 1
    return dict(held)


def family(*roots: int) -> list[int]:
    """Return the ids of processes and all their descendants."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            state, parent = (path / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(path.name))
    members = list(roots)
    for process in members:
        members += children.get(process, [])
    return members


def kill(*processes: int, signal_number: int = signal.SIGKILL) -> None:
    """Send a signal to all of these processes that still exist."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal_number)


if __name__ == "__main__":
    from braid.jobs.training.train import report_of, training

    try:
        report_of(training(**pickle.loads(Path(sys.argv[1]).read_bytes())))
    except (ValueError, WorkerError) as error:
        print(f"{getattr(error, 'trace', '')}\nbraid: {error}".lstrip(), file=sys.stderr)
        sys.exit(2)
