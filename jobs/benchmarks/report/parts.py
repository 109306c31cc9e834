"""Runs the report's parts, each in a process of its own, within what time there is."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from braid.jobs.benchmarks.report import sanitizers
from braid.jobs.benchmarks.report.claims import ENDS, SANITIZER, Part
from braid.jobs.benchmarks.report.findings import (
    Finding,
    Task,
    Verdict,
    Written,
    found,
    not_measured,
    read_sheet,
)

NO_TIME: Final = "no time left"
_SPARE: Final = 0.05
"""Share of its time that a part leaves for its end, before it is ended."""
_LOG_LINES: Final = 40


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A part, and what came of it."""

    part: Part
    written: Written = field(default_factory=Written)
    seconds: float = 0.0
    trouble: str = ""
    """Why it did not come to its end; empty where it did."""
    failed: bool = False
    """Whether that is its own fault."""
    output: str = ""
    """All that its process printed."""

    @property
    def findings(self) -> list[Finding]:
        """Verdicts on every claim of the part, claim by claim; what was written, and what is missing."""
        claims = self.part.claims
        if self.part.sanitizes and self.seconds:
            sums_up = bool(self.part.under)
            return [sanitizers.verdict(claims[0], self.output, trouble=self.trouble, sums_up=sums_up)]
        known = [one for one in self.written.findings if one.claim in claims]
        return sorted([*known, *self._missing(known)], key=lambda one: claims.index(one.claim))

    def _missing(self, known: Sequence[Finding]) -> Iterator[Finding]:
        for claim in self.part.claims:
            of_claim = [one for one in known if one.claim == claim]
            if not of_claim:
                yield not_measured(claim, self.trouble or "the part says nothing of it")
            elif self.trouble and all(one.subject for one in of_claim):
                yield not_measured(claim, self.trouble, "what else there is")

    @property
    def log(self) -> list[str]:
        """The last lines of the process, where something went wrong."""
        wrong = self.trouble or any(one.verdict is Verdict.FAILED for one in self.findings)
        return self.output.splitlines()[-_LOG_LINES:] if wrong else []


def run_all(
    parts: Sequence[Part],
    task: Task,
    folder: Path,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Ran]:
    """Run parts one after the other until ``task.ends_at``; their sheets and logs lie in ``folder``."""
    done = []
    for part in parts:
        why = left_out(part, task)
        progress(f"{part.title}: {why}" if why else part.title)
        done.append(Ran(part=part, trouble=why) if why else run(part, task, folder))
    return done


def left_out(part: Part, task: Task) -> str:
    """Why a part is not begun; empty where it is."""
    if part.gpu_only and not task.on_gpu:
        return part.gpu_only
    if part.under and sanitizers.program() is None:
        return f"{SANITIZER} is not installed"
    return NO_TIME if task.left_s < part.least_s else ""


def run(part: Part, task: Task, folder: Path) -> Ran:
    """Run one part until it ends or has to."""
    begin, limit_s = time.time(), min(part.most_s, task.left_s)
    own = Task(**{**asdict(task), "ends_at": begin + limit_s * (1 - _SPARE)})
    sheet, log = folder / f"{part.name}.jsonl", folder / f"{part.name}.log"
    code = _ended(command(part, own, sheet), environment(part, own), log, limit_s)
    output = log.read_text(encoding="utf-8", errors="replace")
    written = read_sheet(sheet)
    trouble, failed = "", False
    if code is None:
        failed = limit_s == part.most_s
        trouble = f"ended after {limit_s:.0f} s: it stood still, or is too slow" if failed else NO_TIME
    elif not written.ended:
        last = output.strip().splitlines()[-1:] or ["it printed nothing"]
        trouble, failed = f"exit code {code}: {last[0][:300]}", True
    return Ran(
        part=part,
        written=written,
        seconds=time.time() - begin,
        trouble=trouble,
        failed=failed and not part.sanitizes,
        output=output,
    )


def command(part: Part, task: Task, sheet: Path) -> list[str]:
    """What a part's process is started with."""
    under = [sanitizers.program() or SANITIZER, *part.under[1:]] if part.under else []
    module = "braid.jobs.benchmarks.report.child"
    return [*under, sys.executable, "-m", module, part.module, json.dumps(asdict(task)), str(sheet)]


def environment(part: Part, task: Task) -> dict[str, str]:
    """The variables that it begins with; Triton runs on a CPU in its interpreter only."""
    interpreted = {} if task.on_gpu else {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **interpreted, **part.environment}


def _ended(command: Sequence[str], variables: dict[str, str], log: Path, limit_s: float) -> int | None:
    """The exit code of a process; None where it had to be ended, with all that it had started."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=variables, start_new_session=True
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ends(done: Sequence[Ran]) -> list[Finding]:
    """Whether parts that were begun came to their ends; a finding for each that did not."""
    broken = [found(ENDS, False, ran.part.title, ran.trouble) for ran in done if ran.failed]
    begun = sum(bool(ran.seconds) for ran in done)
    return broken or [found(ENDS, True, numbers={"parts": begun})]
