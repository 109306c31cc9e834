"""What the kernels' machine code takes on three generations of GPUs, compiled without one."""

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests" / "golden" / "kernels" / f"triton-{triton.__version__}.txt"


@pytest.mark.slow
def test_the_table_is_as_recorded_and_nothing_is_spilled(update_golden: bool) -> None:
    """In a process in which kernels are compiled, not interpreted.

    What a compiler makes of them is known of the versions that were recorded, and of no others.
    """
    if not GOLDEN.exists() and not update_golden:
        pytest.skip(f"no table was recorded with Triton {triton.__version__}; `make golden` makes one")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.kernels.triton.compiled"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    table = done.stdout
    rows = [line for line in table.splitlines() if not line.startswith("#")]
    assert len(rows) > 45
    assert [row for row in rows if int(row.split()[-2])] == []
    if update_golden:
        GOLDEN.write_text(table, encoding="utf-8")
    recorded = GOLDEN.read_text(encoding="utf-8")
    difference = difflib.unified_diff(
        recorded.splitlines(), table.splitlines(), f"golden/kernels/{GOLDEN.name}", "now", lineterm="", n=0
    )
    if recorded != table:
        shown = "\n".join(difference)
        pytest.fail(f"{shown}\n\nIf that is meant, run `make golden` and read the difference.", pytrace=False)
