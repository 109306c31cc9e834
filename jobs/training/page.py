"""Runs the live page of a training run in a separate process that only reads the run directory.

So neither a slow viewer nor a fault in the page affects the training.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from braid.dashboards.run_files import PAGE_ADDRESS

_START_SECONDS = 20.0
_LOOK_SECONDS = 0.05
_END_SECONDS = 3.0


class LivePage:
    """Starts the page's process on request and ends it when closed. Metrics count from this object's
    creation."""

    def __init__(self, port: int = 0) -> None:
        self._port, self._begin = port, time.time()
        self._process: subprocess.Popen[bytes] | None = None
        self._address: Path | None = None
        """File with the page's address, which its process writes."""

    def open(self, run: Path) -> str:
        """Serve a run directory on this machine's loopback; return the address. Raise `ValueError` with the
        reason if the page does not start, which is no reason to end a training run."""
        arguments = (str(run), str(self._port), str(self._begin), str(os.getpid()))
        self._address = run / PAGE_ADDRESS
        self._address.unlink(missing_ok=True)  # of a run that was killed
        with tempfile.TemporaryFile() as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "braid.jobs.training.page", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is meant for the training, which ends the page
            )
            deadline = time.monotonic() + _START_SECONDS
            while self._process.poll() is None and time.monotonic() < deadline:
                if self._address.exists() and (url := self._address.read_text(encoding="utf-8")):
                    return url
                time.sleep(_LOOK_SECONDS)
            reason = f"it did not answer within {_START_SECONDS:g} s"
            if self._process.returncode is not None:
                output.seek(0)
                told = output.read().decode(errors="replace").split("\n")
                reason = next((line for line in reversed(told) if line.strip()), "its process ended")
        self.close()
        raise ValueError(f"the live page did not start: {reason}")

    def close(self) -> None:
        if self._process is None or self._address is None:
            return
        process, self._process = self._process, None
        with contextlib.suppress(OSError):
            self._address.unlink(missing_ok=True)
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main(run: str, port: str, begin: str, parent: str) -> None:
    """Serve the page until the parent process ends it, or ends itself."""
    from braid.actors.controller.ranks.parent import die_with
    from braid.dashboards.metrics_feed import metrics_route
    from braid.dashboards.server import serve

    die_with(int(parent))
    os.nice(10)  # low priority: use the processor only when training leaves it idle

    def announce(url: str) -> None:
        (Path(run) / PAGE_ADDRESS).write_text(url, encoding="utf-8")

    try:
        serve(Path(run), "127.0.0.1", int(port), None, announce, [metrics_route(Path(run), float(begin))])
    except (OSError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
