"""One part of the report, in a process of its own: `python -m braid.jobs.benchmarks.report.child`."""

import importlib
import json
import sys
from pathlib import Path

from braid.jobs.benchmarks.report.findings import Sheet, Task


def main(module: str, task: str, sheet: str) -> None:
    """Measure; ``task``: a `Task` as JSON, ``sheet``: the file that takes what was found."""
    written = Sheet(Path(sheet))
    measure = importlib.import_module(f"braid.jobs.benchmarks.report.{module}").measure
    measure(Task(**json.loads(task)), written)
    written.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
