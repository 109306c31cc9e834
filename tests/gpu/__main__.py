"""`make gpu`: runs every module of tests in a process of its own, for so long at most, and makes one report.

A module that crashes or stands still is a failed claim and takes nothing with it; what its process printed
stands beside the report. Exit code 1: a claim failed; 2: wrong input.
"""

import argparse
import datetime
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch

from braid.actors.controller.ranks.rank_environment import default_environment
from tests.gpu.conftest import FAILED, PASSED, STAND_IN, Claim, read, write_report

HERE: Final = Path(__file__).parent
LIMITS_S: Final = {"schedules": 600, "training": 480, "kernels": 300, "sanitizers": 400}
"""Modules in the order in which they run, and how long they may take before something is wrong."""
_ALWAYS: Final = {
    **default_environment({}, deterministic=False),
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # else deterministic products are errors
}
_ON_CPU: Final = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
_ASKED: Final = "name,driver_version,memory.total,power.limit,clocks.sm,clocks.max.sm,temperature.gpu"
_NOTHING_CHOSEN: Final = 5
"""Pytest's exit code where ``-k`` leaves no test."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; returns the exit code."""
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("-k", default="", help="only tests and modules whose names match, as pytest's -k")
    parser.add_argument("--device", choices=("cuda", "cpu"), default=here, help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("gpu-report"), help="folder of the report")
    chosen = parser.parse_args(arguments)
    if chosen.device == "cuda" and here != "cuda":
        parser.error("--device cuda: torch sees no CUDA device; use cpu, which makes a stand-in")
    try:
        chosen.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output {chosen.output}: {error.strerror}; name a folder")
    claims = [Claim(claim="The machine says what it is.", of="", verdict=PASSED, numbers=_machine())]
    claims += [claim for name in LIMITS_S for claim in _run(name, chosen)]
    stand_in = STAND_IN if chosen.device == "cpu" else ""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    failed, summary = write_report(chosen.output, date, stand_in, claims)
    print(f"{summary}\n{chosen.output}/report.md, report.json")
    return int(failed)


def _machine() -> dict[str, str]:
    """System, versions, and what the driver says of the cards, their clocks and links."""
    facts = {"system": platform.platform(), "CPUs": str(len(os.sched_getaffinity(0)))}
    facts |= {"PyTorch": torch.__version__, "CUDA": str(torch.version.cuda)}
    for words in (f"--query-gpu={_ASKED} --format=csv,noheader", "topo -m"):
        with suppress(OSError, subprocess.SubprocessError):
            facts[words] = subprocess.check_output(["nvidia-smi", *words.split()], text=True, timeout=10)
    return facts


def _run(name: str, chosen: argparse.Namespace) -> Iterator[Claim]:
    """Run one module until it ends or has to; what it claims, and that it came to its end."""
    print(f"== {name}", file=sys.stderr, flush=True)
    sheet, log = (chosen.output / f"{name}.{kind}" for kind in ("jsonl", "log"))
    sheet.unlink(missing_ok=True)
    options = ["-q", "-p", "no:cacheprovider", "-c", str(HERE / "pytest.ini"), f"--confcutdir={HERE}"]
    options += ["-k", chosen.k, f"--device={chosen.device}"]
    command = [sys.executable, "-m", "pytest", *options, f"--sheet={sheet}", str(HERE / f"test_{name}.py")]
    environment = {**os.environ, **_ALWAYS, **(_ON_CPU if chosen.device == "cpu" else {})}
    with log.open("wb") as file:
        output: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, env=environment, start_new_session=True, **output)
        code = None
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(LIMITS_S[name])
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also what it has started
        process.wait()
    if code == _NOTHING_CHOSEN:
        return
    trouble = f"ended after {LIMITS_S[name]} s: it stood still, or is too slow" if code is None else ""
    if code not in (None, 0, 1):
        trouble = f"exit code {code}: {log.read_text('utf-8', 'replace').strip()[-300:]}"
    verdict = FAILED if trouble else PASSED
    yield Claim(claim="Every module of tests runs to its end.", of=name, verdict=verdict, why=trouble)
    yield from read(sheet)


if __name__ == "__main__":
    sys.exit(main())
