"""`make gpu`: its plugin, its report, and modules that crash or stand still (tests/gpu)."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import __main__ as gpu
from tests.gpu.conftest import FAILED, NOT_MEASURED, PASSED

_FINDS = '''
import os, pytest, time

def test_holds(finding):
    """One is one."""
    finding.numbers["one"] = 1
    finding.tables.append([["head"], [0.5]])

@pytest.mark.parametrize("number", [2])
def test_fails(number):
    """Two is one."""
    assert number == 1, "it is not"

def test_timed(finding):
    """It is fast."""
    finding.timed(False, ms=3.0)
'''


_CRASHES = f"{_FINDS}\ndef test_crash():\n    os._exit(7)\n"
_STANDS_STILL = "import time\ntime.sleep(100)\n"


def made(monkeypatch: pytest.MonkeyPatch, folder: Path, modules: dict[str, tuple[str, float]]) -> Any:
    """The exit code and the report of some modules with their limits; the page is in the folder."""
    for name in ("pytest.ini", "conftest.py"):
        (folder / name).write_text((gpu.HERE / name).read_text(encoding="utf-8"), encoding="utf-8")
    for name, (text, _) in modules.items():
        (folder / f"test_{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(gpu, "HERE", folder)
    monkeypatch.setattr(gpu, "LIMITS_S", {name: limit_s for name, (_, limit_s) in modules.items()})
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    code = gpu.main(["--device", "cpu", "--output", str(folder / "report")])
    return code, json.loads((folder / "report" / "report.json").read_text(encoding="utf-8"))["claims"]


def test_modules_that_crash_or_stand_still(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    modules = {"first": (_CRASHES, 200.0), "second": (_FINDS, 200.0), "still": (_STANDS_STILL, 1.0)}
    code, claims = made(monkeypatch, tmp_path, modules)
    assert code == 1
    found = [(one["claim"], one["of"], one["verdict"]) for one in claims[1:]]
    own = [("One is one.", "", PASSED), ("Two is one.", "2", FAILED), ("It is fast.", "", NOT_MEASURED)]
    ends = "Every module of tests runs to its end."
    assert found == [(ends, "first", FAILED), *own, (ends, "second", PASSED), *own, (ends, "still", FAILED)]
    assert "it stood still" in claims[-1]["why"]
    assert "exit code 7" in claims[1]["why"]
    assert "it is not" in claims[3]["why"]
    assert claims[4]["numbers"] == {"ms": 3.0}
    page = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    assert "stand-in on a CPU" in page.splitlines()[0]
    assert "| One is one. |  | passed | one 1 |" in page
    assert "| head |\n| --- |\n| 0.5 |" in page


def test_the_stand_in_measures_a_module(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "LIMITS_S", {"schedules": 250, "training": 250})
    assert gpu.main(["-k", "test_bits and host", "--device", "cpu", "--output", str(tmp_path)]) == 0
    assert "stand-in on a CPU" in capsys.readouterr().out.splitlines()[0]
    claims = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["claims"]
    bits = {one["of"]: one["verdict"] for one in claims if "to the bit" in one["claim"]}
    assert bits == {
        f"host-{kind}-{name}": PASSED if kind == "eager" else NOT_MEASURED
        for kind in ("eager", "graph")
        for name in ("megatron", "wavelet", "dhelix", "braid")
    }


def test_wrong_input_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for arguments, message in (
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--device", "cpu", "--output", str(tmp_path / "file")], "name a folder"),
    ):
        with pytest.raises(SystemExit, match="2"):
            gpu.main(arguments)
        assert message in capsys.readouterr().err
