"""Runs the live page of a training run in a separate process that only reads the run directory.

So neither a slow viewer nor a fault in the page affects the training.
"""

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

from braid.dashboards.run_files import PAGE_ADDRESS

_START_SECONDS = 20.0
_END_SECONDS = 3.0


class LivePage:
    """Starts the page's process on request and ends it when closed. Metrics count from this object's
    creation."""

    def __init__(self, port: int = 0) -> None:
        self._port, self._begin = port, time.time()
        self._process: subprocess.Popen[str] | None = None
        self._address: Path | None = None
        """File with the page's address."""
        self._url = queue.SimpleQueue[str]()
        """Receives the page's address once it serves, or an empty string when its process ends."""
        self._said = "its process ended"
        """Newest line of its output, apart from its address."""

    def open(self, run: Path) -> str:
        """Serve a run directory on this machine's loopback; return the address. Raise `ValueError` with the
        reason if the page does not start, which is no reason to end a training run."""
        arguments = (str(run), str(self._port), str(self._begin), str(os.getpid()))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "braid.jobs.training.page", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is meant for the training, which ends the page
        )
        assert self._process.stdout is not None
        threading.Thread(target=self._listen, args=(self._process.stdout,), name="page", daemon=True).start()
        try:
            if url := self._url.get(timeout=_START_SECONDS):
                self._address = run / PAGE_ADDRESS
                with contextlib.suppress(OSError):
                    self._address.write_text(url, encoding="utf-8")
                return url
            reason = self._said
        except queue.Empty:
            reason = f"it did not answer within {_START_SECONDS:g} s"
        self.close()
        raise ValueError(f"the live page did not start: {reason}")

    def close(self) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        if self._address is not None:
            with contextlib.suppress(OSError):
                self._address.unlink(missing_ok=True)
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _listen(self, lines: IO[str]) -> None:
        """Read all output of the process, which would block once its pipe is full."""
        with lines:
            for line in lines:
                if line.startswith("http://"):
                    self._url.put(line.strip())
                elif line.strip():
                    self._said = line.strip()
        self._url.put("")


def main(run: str, port: str, begin: str, parent: str) -> None:
    """Serve the page until the parent process ends it, or ends itself."""
    from braid.actors.controller.ranks.parent import die_with
    from braid.dashboards.metrics_feed import metrics_route
    from braid.dashboards.server import serve

    die_with(int(parent))
    os.nice(10)  # low priority: use the processor only when training leaves it idle

    def announce(url: str) -> None:
        print(url, flush=True)

    try:
        serve(Path(run), "127.0.0.1", int(port), None, announce, [metrics_route(Path(run), float(begin))])
    except (OSError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
