"""The report on GPUs: whole, as a stand-in on a CPU; its parts in their processes, and its pages."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from braid.jobs.bench import main
from braid.jobs.benchmarks.report import (
    claims,
    parts,
    sanitizers,
)
from braid.jobs.benchmarks.report.claims import PARTS, Part
from braid.jobs.benchmarks.report.findings import (
    ON_CPU,
    Finding,
    Sheet,
    Table,
    Task,
    Verdict,
    Written,
    found,
    not_measured,
    read_sheet,
)
from braid.jobs.benchmarks.report.page import Report

PASSED, FAILED, NOT_MEASURED = Verdict.PASSED, Verdict.FAILED, Verdict.NOT_MEASURED
ROOT = Path(__file__).resolve().parents[2]
ABSENT = ("ray", "typer", "rich", "pydantic", "yaml", "scipy")


def verdicts(findings: Sequence[Finding], claim: str) -> dict[str, Verdict]:
    """By what they are about."""
    return {one.subject: one.verdict for one in findings if one.claim == claim}


def task_of(device: str = "cpu", *, quick: bool = True, seconds: float = 100.0) -> Task:
    return Task(device=device, quick=quick, seed=0, ends_at=time.time() + seconds)


# -- all of it -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_stand_in_passes_with_torch_numpy_and_triton_alone(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    absent.mkdir()
    for name in ABSENT:  # on the path of all processes that the report starts
        (absent / f"{name}.py").write_text(f"raise ModuleNotFoundError({name!r})", encoding="utf-8")
    output = tmp_path / "report"
    command = [sys.executable, "-m", "braid.jobs.bench", "report", "--device", "cpu", "--quick"]
    done = subprocess.run(
        [*command, "--output", str(output)],
        env={**os.environ, "PYTHONPATH": f"{absent}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "stand-in on a CPU" in done.stdout.splitlines()[0]
    read = json.loads((output / "report.json").read_text(encoding="utf-8"))
    assert read["verdict"] == "passed"
    assert read["counts"]["failed"] == 0
    assert read["machine"]["versions"]["torch"] == torch.__version__
    by_claim: dict[str, dict[str, dict[str, object]]] = {}
    for one in read["claims"]:
        by_claim.setdefault(one["claim"], {})[one["subject"]] = one
    for claim, subjects in (
        (claims.ENDS, {""}),
        (claims.STREAM_BITS, {"serial", "wavelet", "dhelix", "braid"}),
        (claims.LAYER_BITS, {"serial", "wavelet", "dhelix", "braid"}),
        (claims.EXACT_LOSSES, {""}),
        (claims.LOSSES, {""}),
        (claims.RANK_BITS, {"wavelet", "dhelix", "braid"}),
        (claims.RANK_LOSSES, {""}),
    ):
        assert by_claim[claim].keys() == subjects, claim
        assert {one["verdict"] for one in by_claim[claim].values()} == {"passed"}, claim
    assert len(by_claim[claims.KERNEL_RIGHT]) == 19
    assert {one["verdict"] for one in by_claim[claims.KERNEL_RIGHT].values()} == {"passed"}
    for claim in (claims.NO_SLOWER, claims.GAINS, claims.PREDICTED, claims.PLAIN_SPEED, claims.RANK_SPEED):
        assert {(one["verdict"], one["why"]) for one in by_claim[claim].values()} == {
            ("not measured", ON_CPU)
        }
    for claim in (claims.SANITIZED, claims.MEMORY_CHECKED, claims.RACES_CHECKED):
        assert by_claim[claim][""]["why"] == "needs a CUDA device"
    page = (output / "report.md").read_text(encoding="utf-8")
    assert "Its times mean nothing" in page
    for part in PARTS:
        assert f"## {part.title}" in page
        for claim in part.claims:
            assert claim in page


def test_wrong_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    cases = {
        ("--device", "tpu"): "use cuda, a card such as cuda:1, or cpu",
        ("--device", "cpu"): "--device cpu needs --quick",
        ("--device", "cpu", "--quick", "--minutes", "0"): "--minutes 0 must be more than 0",
        ("--device", "cpu", "--quick", "--parts", "layer,disk"): "--parts disk: use some of machine, streams",
        ("--device", "cpu", "--quick", "--output", str(tmp_path / "file")): "file",
    }
    if not torch.cuda.is_available():
        cases["--minutes", "1"] = "sees no such CUDA device"
    for arguments, message in cases.items():
        assert main(["report", *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        (line,) = captured.err.splitlines()
        assert line.startswith("braid: ")
        assert message in line


@pytest.mark.parametrize(("holds", "code"), [(True, 0), (False, 1)])
def test_the_exit_code_says_whether_a_claim_failed(
    holds: bool,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    written = Written(findings=[found(claims.STREAM_BITS, holds, "braid")], ended=True)
    ran = parts.Ran(part=PARTS[1], written=written, seconds=1.0)
    monkeypatch.setattr("braid.jobs.benchmarks.report.command.run_all", lambda *arguments: [ran])
    output = tmp_path / "a" / "b"
    assert main(["report", "--device", "cpu", "--quick", "--output", str(output)]) == code
    assert ("FAILED: On the device's streams" in capsys.readouterr().out) == (not holds)
    assert json.loads((output / "report.json").read_text())["verdict"] == ("passed" if holds else "failed")
    assert ("**FAILED**" in (output / "report.md").read_text()) == (not holds)


# -- parts in their processes --------------------------------------------------------------------------------


def test_without_time_nothing_is_begun(tmp_path: Path) -> None:
    done = parts.run_all(PARTS, task_of(seconds=1), tmp_path)
    assert not any(tmp_path.iterdir())
    findings = [one for ran in done for one in ran.findings]
    assert {one.claim for one in findings} == {claim for part in PARTS for claim in part.claims}
    assert {one.verdict for one in findings} == {NOT_MEASURED}
    assert {one.why for one in findings} == {"no time left", "needs a CUDA device"}
    assert [one.verdict for one in parts.ends(done)] == [PASSED]


def test_what_needs_a_program_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizers, "program", lambda: None)
    checks = [part for part in PARTS if part.under]
    assert len(checks) == 2
    for part in checks:
        assert parts.left_out(part, task_of("cuda")) == "compute-sanitizer is not installed"
    monkeypatch.setattr(sanitizers, "program", lambda: "/opt/compute-sanitizer")
    for part in checks:
        assert parts.left_out(part, task_of("cuda")) == ""
        command = parts.command(part, task_of("cuda"), Path("sheet"))
        assert command[:3] == ["/opt/compute-sanitizer", "--tool", part.name]
        assert command[command.index("-m") + 2] == "tiny"


CRASHES = Part(name="crashes", title="Crashes", module="no_such_module", claims=(claims.GRAPH_BITS,))


def test_a_part_that_crashes_is_a_failure_and_its_claims_are_open(tmp_path: Path) -> None:
    ran = parts.run(CRASHES, task_of(), tmp_path)
    assert ran.failed
    assert ran.trouble.startswith("exit code 1: ModuleNotFoundError")
    assert verdicts(ran.findings, claims.GRAPH_BITS) == {"": NOT_MEASURED}
    (one,) = parts.ends([ran])
    assert (one.claim, one.verdict, one.subject) == (claims.ENDS, FAILED, "Crashes")
    assert any("no_such_module" in line for line in ran.log)


HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("most_s", "left_s", "its_fault"), [(1.5, 100.0, True), (100.0, 1.5, False)])
def test_a_part_that_stands_still_is_ended_with_all_that_it_started(
    most_s: float, left_s: float, its_fault: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "command", lambda *arguments: [sys.executable, "-c", HANGS])
    ran = parts.run(replace(CRASHES, most_s=most_s), task_of(seconds=left_s), tmp_path)
    assert ran.failed == its_fault
    assert ("stood still" in ran.trouble) == its_fault
    assert its_fault or ran.trouble == "no time left"
    state = Path(f"/proc/{int(ran.output)}/stat")
    deadline = time.time() + 10
    while state.exists() and state.read_text().split()[2] != "Z" and time.time() < deadline:
        time.sleep(0.01)
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_what_a_part_wrote_before_it_was_ended_counts(tmp_path: Path) -> None:
    path = tmp_path / "sheet"
    sheet = Sheet(path)
    sheet.find(found(claims.LAYER_BITS, True, "serial"), found(claims.GAINS, False))
    sheet.table("numbers", ["a  b"])
    sheet.data("x", {"y": 1})
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole + '{"finding": {"clai', encoding="utf-8")
    written = read_sheet(path)
    assert not written.ended
    assert written.tables == [Table(title="numbers", lines=["a  b"])]
    assert written.data == {"x": {"y": 1}}
    part = next(part for part in PARTS if part.name == "layer")
    ran = parts.Ran(part=part, written=written, seconds=3.0, trouble="no time left")
    assert verdicts(ran.findings, claims.LAYER_BITS) == {"serial": PASSED, "what else there is": NOT_MEASURED}
    assert verdicts(ran.findings, claims.GAINS) == {"": FAILED}
    assert verdicts(ran.findings, claims.GRAPH_BITS) == {"": NOT_MEASURED}
    path.write_text(whole, encoding="utf-8")
    sheet.end()
    assert read_sheet(path).ended
    assert read_sheet(tmp_path / "none") == Written()


def report_of(*findings: Finding) -> Report:
    part = Part(name="x", title="X", module="x", claims=tuple(one.claim for one in findings))
    written = Written(findings=[*findings], ended=True, data={"worst": math.inf})
    ran = parts.Ran(part=part, written=written, seconds=1.0)
    return Report(date="2026", device="cuda", quick=False, seed=0, minutes=25, seconds=60.0, parts=[ran])


def test_pages_hold_all_verdicts() -> None:
    report = report_of(
        found("One.", True, numbers={"ns": 12, "ratio": 1.23456}), not_measured("Two.", "a | b", "s")
    )
    assert not report.failed
    assert report.stand_in == ""
    lines = report.as_markdown().splitlines()
    assert "| One. |  | passed | ns 12, ratio 1.235 |" in lines
    assert "| Two. | s | not measured | a / b |" in lines
    assert report.summary() == "2 passed, 0 failed, 1 not measured"
    content = json.dumps(report.as_json(), allow_nan=False)
    assert json.loads(content)["parts"][0]["data"] == {"worst": "inf"}
    assert replace(report, quick=True).stand_in
    assert replace(report, device="cpu").stand_in
