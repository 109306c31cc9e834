"""The runs of a drill as commands that are started, watched, ended and started again, as a user does."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from braid.actors.controller.json_lines import last_line, read_lines
from braid.actors.controller.locks import FileHold, HeldError
from braid.jobs.drill.child import Spec

PATIENCE_S = 300.0
"""A fault that does not come, or is not over, within so long has failed the drill."""
RUNS = ("whole", "broken")
"""Without and with faults."""
_LOOK_S = 0.02


class DrillError(RuntimeError):
    """A fault did not fire, or the run did not go on."""


class Command:
    """The command under way, and what it leaves behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """Holds the run directories."""
        self._process: subprocess.Popen[str] | None = None
        for name in RUNS:
            self._log(name).unlink(missing_ok=True)

    def start(self, name: str, spec: Spec) -> None:
        """Start a run."""
        path = self.folder / f"{name}.json"
        path.write_text(spec.to_json(), encoding="utf-8")
        with self._log(name).open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "braid.jobs.drill.child", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    @property
    def process(self) -> int:
        """Its process."""
        assert self._process is not None
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def wait_for_end(self, limit_s: float = PATIENCE_S) -> int:
        """Wait until it has ended; returns its exit code."""
        assert self._process is not None
        try:
            return self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise DrillError(f"the run did not end within {limit_s:g} s: {self.last_words()}") from None

    def wait_for_controller(self) -> None:
        """Wait until nobody holds the run's directory: on a cluster a controller outlives its command."""
        lock = FileHold(self.broken / ".lock")
        try:
            lock.take(PATIENCE_S)
        except HeldError:
            raise DrillError(
                f"the controller did not end within {PATIENCE_S:g} s: {self.last_words()}"
            ) from None
        lock.release()

    def close(self) -> None:
        """Whatever happened: nothing of the run is left."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def wait(self, what: str, done: Callable[[], bool]) -> None:
        """Wait for something while the run goes on."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert self._process is not None
            if self._process.poll() not in (None, 0):
                raise DrillError(f"the run ended before {what}: {self.last_words()}")
            if time.monotonic() > deadline:
                raise DrillError(f"waited {PATIENCE_S:g} s in vain for {what}: {self.last_words()}")
            time.sleep(_LOOK_S)

    def _log(self, name: str) -> Path:
        """What a run prints; not on its disk, which may be full."""
        return self.folder.with_name(f"{self.folder.name}-{name}.log")

    def last_words(self) -> str:
        """The ends of what the runs have printed."""
        logs = [log.read_text(encoding="utf-8")[-2000:] for log in map(self._log, RUNS) if log.exists()]
        return "\n".join(logs).strip() or "it said nothing"

    # -- the run with faults ---------------------------------------------------------------------------------

    @property
    def broken(self) -> Path:
        """Directory of the run with faults."""
        return self.folder / "broken"

    def step(self) -> int:
        """Steps that are done."""
        return int(self.newest().get("step", 0))

    def newest(self) -> dict[str, Any]:
        """The newest step's record."""
        return last_line(self.broken / "metrics.jsonl")

    def incidents(self, since: float, *, resized: bool = False) -> list[dict[str, Any]]:
        """Failures that were detected since a time, or changes of the number of ranks that were begun."""
        lines = read_lines(self.broken / "incidents.jsonl")
        return [line for line in lines if line["time"] >= since and (line["kind"] == "resized") == resized]
