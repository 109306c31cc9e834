"""Commands forked from a process that has imported what they need.

A command is a process of its own in a session of its own, with its own working folder, environment and exit
code, as if it had been started from a shell; what is saved is the import of torch, by the command and by the
server that it forks ranks from: nine tenths of the CPU time of a short run.

    server: python -m tests.end_to_end.forked ADDRESS   (ends with whoever holds its standard input)
    in:     one connection a command: a line of JSON (arguments, folder, environment) with three open files
    out:    on the same connection a line with the process id, and when it has ended one with its exit code
"""

import atexit
import contextlib
import json
import multiprocessing.connection
import multiprocessing.forkserver
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import IO, Any, NoReturn

PRELOADED = (
    "torch",
    "torch._dynamo",
    "braid.actors.stage.rank.worker",
    "braid.jobs.cli",
    "braid.jobs.training.train",
)
_LINE = 1 << 20
_START_SECONDS = 60.0


class Command:
    """A command that was started: what tests use of `subprocess.Popen`."""

    def __init__(self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self.args = arguments
        self.returncode: int | None = None
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(_server())
        asked = {"arguments": list(arguments), "folder": str(folder), "environment": dict(environment)}
        self.stdout, out = _pipe()
        self.stderr, err = _pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        message = json.dumps(asked).encode()
        socket.send_fds(self._line, [len(message).to_bytes(4, "big") + message], [nothing, out, err])
        for file in (nothing, out, err):
            os.close(file)
        self._replies = self._line.makefile("r")
        self.pid = int(self._replies.readline())

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal; `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            if not select.select([self._line], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
            self.returncode = int(self._replies.readline())
            self._replies.close()
            self._line.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it writes until its end; after `subprocess.TimeoutExpired` it may be called again."""
        if not hasattr(self, "_readers"):
            self._texts: list[list[str]] = [[], []]
            self._readers = [
                threading.Thread(target=lambda file, to: to.append(file.read()), args=pair, daemon=True)
                for pair in zip((self.stdout, self.stderr), self._texts, strict=True)
            ]
            for reader in self._readers:
                reader.start()
        for reader in self._readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
        self.wait(timeout)
        self.stdout.close()
        self.stderr.close()
        return "".join(self._texts[0]), "".join(self._texts[1])

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _pipe() -> tuple[IO[str], int]:
    ours, theirs = os.pipe()
    return os.fdopen(ours, encoding="utf-8"), theirs


_address: str | None = None


def _server() -> str:
    """The address of this process's server, which is started for its first command."""
    global _address
    if _address is None:
        folder = tempfile.mkdtemp(prefix="braid-commands-")
        _address = f"{folder}/server"
        command = [sys.executable, "-m", "tests.end_to_end.forked", _address]
        root = Path(__file__).resolve().parents[2]
        path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        server = subprocess.Popen(command, cwd=root, env=environment, start_new_session=True, **pipes)
        assert server.stdin is not None
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        atexit.register(server.wait)
        atexit.register(server.stdin.close)
    return _address


# -- the server ----------------------------------------------------------------------------------------------


def serve(address: str) -> None:
    """Fork commands until standard input ends."""
    for name in PRELOADED:
        __import__(name)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        print("ready", flush=True)
        running: dict[int, tuple[int, socket.socket]] = {}  # by pidfd
        while True:
            ready, _, _ = select.select([0, listener, *running], [], [])
            if 0 in ready:
                return
            for descriptor in ready:
                if descriptor is listener:
                    connection, _ = listener.accept()
                    asked, files = _asked(connection)
                    child = os.fork()
                    if child == 0:
                        listener.close()
                        for other, (_, line) in running.items():
                            os.close(other)
                            line.close()
                        connection.close()
                        _become(asked, files)
                    for file in files:
                        os.close(file)
                    connection.sendall(f"{child}\n".encode())
                    running[os.pidfd_open(child)] = child, connection
                elif descriptor in running:
                    child, connection = running.pop(descriptor)
                    os.close(descriptor)
                    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                    with contextlib.suppress(OSError):  # nobody waits for it any more
                        connection.sendall(f"{code}\n".encode())
                    connection.close()


def _asked(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    data, files, _, _ = socket.recv_fds(connection, _LINE, 3)
    size = int.from_bytes(data[:4], "big")
    while len(data) < 4 + size:
        data += connection.recv(_LINE)
    return json.loads(data[4:]), list(files)


def _become(asked: dict[str, Any], files: Sequence[int]) -> NoReturn:
    code = 1
    try:
        os.setsid()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(asked["environment"])
        os.chdir(asked["folder"])
        sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc] # noqa: SIM115
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # type: ignore[misc] # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # type: ignore[misc] # noqa: SIM115
        sys.argv = ["braid", *asked["arguments"]]
        sys.modules["__main__"] = types.ModuleType("__main__")  # what ranks would import again
        random.seed()
        _fork_server_of_ranks()
        code = _run()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _run() -> int:
    from braid.jobs.cli import main

    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return code


def _fork_server_of_ranks() -> None:
    """What `multiprocessing` starts for the first rank, without another Python that imports everything.

    Now, as long as nothing is open that it must not inherit.
    """
    from braid.actors.controller.ranks.parent import signals_held

    server = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    resource_tracker.ensure_running()
    with socket.socket(socket.AF_UNIX) as listener:
        address = multiprocessing.connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
        listener.bind(address)
        os.chmod(address, 0o600)
        listener.listen()
        alive, ours = os.pipe()
        with signals_held():
            child = os.fork()
            if child == 0:  # it keeps them blocked, as `multiprocessing`'s own server does
                os.close(ours)
                try:
                    multiprocessing.forkserver.main(listener.fileno(), alive, [])
                finally:
                    os._exit(0)
        os.close(alive)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, ours, child


if __name__ == "__main__":
    try:
        serve(sys.argv[1])
    finally:
        with contextlib.suppress(OSError):
            os.unlink(sys.argv[1])
            os.rmdir(os.path.dirname(sys.argv[1]))
