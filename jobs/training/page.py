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
    """The page's process. Metrics count from this object's creation."""

    def __init__(self, port: int = 0) -> None:
        self._port, self._begin = port, time.time()
        self._process: subprocess.Popen[bytes] | None = None
        self._address: Path | None = None
        """File with the page's address."""

    def open(self, run: Path) -> str:
        """Serve a run directory on this machine's loopback; return the address."""
        arguments = (str(run), str(self._port), str(self._begin), str(os.getpid()))
        with tempfile.NamedTemporaryFile() as output:  # a pipe would block the process once it is full
            self._process = subprocess.Popen(
                [sys.executable, "-m", "braid.jobs.training.page", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is meant for the training, which ends the page
            )
            deadline, ended = time.monotonic() + _START_SECONDS, False
            while time.monotonic() < deadline and not ended:
                ended = self._process.poll() is not None
                lines = Path(output.name).read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
                if url := next((line for line in lines if line.startswith("http://")), ""):
                    self._address = run / PAGE_ADDRESS
                    with contextlib.suppress(OSError):
                        self._address.write_text(url, encoding="utf-8")
                    return url
                time.sleep(_LOOK_SECONDS)
        self.close()
        reason = f"it did not answer within {_START_SECONDS:g} s"
        if ended:
            reason = next(filter(None, map(str.strip, reversed(lines))), "its process ended")
        raise ValueError(f"the live page did not start: {reason}")

    def close(self) -> None:
        """End the process, if there is one, and wait for it."""
        if self._process is None:
            return
        if self._address is not None:
            with contextlib.suppress(OSError):
                self._address.unlink(missing_ok=True)
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._process.kill()  # does nothing to a process that has ended
        self._process.wait()
        self._process = None


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
