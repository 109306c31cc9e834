"""Verdicts from what sanitizers print: PyTorch's stream sanitizer, NVIDIA's ``compute-sanitizer``."""

import re
import shutil
from pathlib import Path
from typing import Final

from braid.jobs.benchmarks.report.claims import SANITIZER
from braid.jobs.benchmarks.report.findings import Finding, found, not_measured

_OF_TORCH: Final = "CSAN detected"
_SUMMARY: Final = re.compile(r"={3,} (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")
_PLACES: Final = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin")
_SHOWN: Final = 3
"""Lines of a finding that the report repeats; the rest is in the log."""


def verdict(claim: str, output: str, *, trouble: str, sums_up: bool) -> Finding:
    """What a sanitized process found, from all that it printed.

    ``trouble``: why it did not do all its work, empty if it did; if not, silence says nothing. ``sums_up``:
    whether the sanitizer counts faults at its end.
    """
    summaries = [int(count) for count in _SUMMARY.findall(output)]
    faults = sum(summaries) + output.count(_OF_TORCH)
    if faults:
        return found(claim, False, why=_first_fault(output), numbers={"faults": faults})
    if trouble:
        return not_measured(claim, trouble)
    if sums_up and not summaries:
        return not_measured(claim, f"{SANITIZER} printed no summary")
    return found(claim, True, numbers={"faults": 0})


def _first_fault(output: str) -> str:
    """The first lines about a fault."""
    lines = [line.strip("= ").strip() for line in output.splitlines()]
    begin = next(
        (n for n, line in enumerate(lines) if re.search(rf"{_OF_TORCH}|Invalid|[Hh]azard|Race|Error", line)),
        0,
    )
    return "; ".join(filter(None, lines[begin : begin + _SHOWN]))[:400]


def program() -> str | None:
    """Where ``compute-sanitizer`` is; None if it is not installed."""
    return shutil.which(SANITIZER) or next(
        (str(path) for place in _PLACES if (path := Path(place) / SANITIZER).is_file()), None
    )
