"""Makes calls of the command line one after the other, each in a fork that has loaded neither torch nor Ray.

python -m tests.jobs.mistakes   reads a JSON list of [folder, arguments], writes one of `Made` as mappings
"""

import contextlib
import io
import json
import multiprocessing
import multiprocessing.forkserver
import os
import subprocess
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Made:
    """What became of a call."""

    code: int
    output: str
    errors: str
    loaded: tuple[str, ...]
    """Of torch and Ray, those that are loaded at its end."""
    started: tuple[str, ...]
    """Processes that it started."""


def make(folders_and_calls: list[tuple[Path, list[str]]]) -> list[Made]:
    """Make calls in folders; in a Python of its own, as this one may have loaded anything."""
    asked = json.dumps([[str(folder), call] for folder, call in folders_and_calls])
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "COLUMNS": "80"}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-m", "tests.jobs.mistakes"]
    found = subprocess.run(
        command, cwd=root, env=environment, input=asked, capture_output=True, text=True, check=True
    )
    return [
        Made(**{**one, "loaded": tuple(one["loaded"]), "started": tuple(one["started"])})
        for one in json.loads(found.stdout)
    ]


def _made(folder: str, call: list[str]) -> Made:
    from braid.jobs.cli import main

    started: list[str] = []
    for kind, name in ((subprocess.Popen, "__init__"), (multiprocessing.process.BaseProcess, "start")):
        setattr(kind, name, lambda *given, **options: started.append(str(given)))
    os.chdir(folder)
    output, errors, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            main(call)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except Exception:
            traceback.print_exc()
            code = 1
    if multiprocessing.forkserver._forkserver._forkserver_pid is not None:  # type: ignore[attr-defined]
        started.append("the server of ranks")
    loaded = tuple(name for name in ("torch", "ray") if name in sys.modules)
    return Made(code, output.getvalue(), errors.getvalue(), loaded, tuple(started))


def _forked(folder: str, call: list[str]) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile() as file:
        child = os.fork()
        if child == 0:
            try:
                Path(file.name).write_text(json.dumps(asdict(_made(folder, call))), encoding="utf-8")
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        found: dict[str, Any] = json.loads(file.read())
        return found


if __name__ == "__main__":
    import braid.jobs.cli
    import braid.jobs.training.train  # noqa: F401 - imported once for all calls

    print(json.dumps([_forked(folder, call) for folder, call in json.load(sys.stdin)]))
