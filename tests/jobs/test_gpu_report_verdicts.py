"""Verdicts of the report on GPUs, on results that are made up; and the runtime that it trains with."""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from braid.actors.stage.accelerator import accelerator_of
from braid.actors.stage.streams import streams_on
from braid.jobs.benchmarks.gpu_schedules import Check, ScheduleTable, ScheduleTime
from braid.jobs.benchmarks.report import (
    claims,
    kernels,
    layer,
    machine,
    parts,
    ranks,
    sanitizers,
    streams,
    training,
)
from braid.jobs.benchmarks.report.claims import PARTS
from braid.jobs.benchmarks.report.findings import (
    ON_CPU,
    Finding,
    Sheet,
    Task,
    Verdict,
    Written,
    found,
    read_sheet,
)
from braid.jobs.benchmarks.report.runtime import Job, RuntimeRank, lone_mesh

PASSED, FAILED, NOT_MEASURED = Verdict.PASSED, Verdict.FAILED, Verdict.NOT_MEASURED


def verdicts(findings: Sequence[Finding], claim: str) -> dict[str, Verdict]:
    """By what they are about."""
    return {one.subject: one.verdict for one in findings if one.claim == claim}


def task_of(device: str = "cpu") -> Task:
    return Task(device=device, quick=True, seed=0, ends_at=time.time() + 100)


def test_the_step_for_sanitizers_has_one_result() -> None:
    assert streams.one_step(torch.device("cpu")) == 0.0


def test_streams_that_give_other_bits_fail() -> None:
    differences = {"serial": [0.0, 0.0], "wavelet": [0.0, 1e-9], "braid": [0.0, math.inf]}
    findings = streams.verdicts(differences, {"dhelix": "no search"})
    assert verdicts(findings, claims.STREAM_BITS) == {
        "serial": PASSED,
        "wavelet": FAILED,
        "braid": FAILED,
        "dhelix": NOT_MEASURED,
    }


CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
INVALID = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 2 bytes
=========     at gather_kernel+0x90
========= ERROR SUMMARY: 2 errors
"""
HAZARDS = (
    "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"
)
RACE = "CSAN detected a possible data race on tensor with data pointer 139719969079296\nAccess by stream 0\n"


@pytest.mark.parametrize(
    ("output", "trouble", "sums_up", "verdict"),
    [
        ("", "", False, PASSED),
        ("a warning of torch\n", "", False, PASSED),
        (RACE, "exit code 1: CUDASanitizerErrors", False, FAILED),
        ("Traceback\n", "exit code 1: Traceback", False, NOT_MEASURED),
        (CLEAN, "", True, PASSED),
        (INVALID, "", True, FAILED),
        (INVALID, "exit code 1: 2 errors", True, FAILED),
        (HAZARDS, "", True, FAILED),
        (HAZARDS.replace("1", "0"), "", True, PASSED),
        ("========= COMPUTE-SANITIZER\n", "", True, NOT_MEASURED),
        (CLEAN, "no time left", True, NOT_MEASURED),
    ],
)
def test_what_sanitizers_print(output: str, trouble: str, sums_up: bool, verdict: Verdict) -> None:
    one = sanitizers.verdict("x", output, trouble=trouble, sums_up=sums_up)
    assert one.verdict is verdict
    assert one.why or verdict is PASSED


def test_a_sanitized_part_is_judged_by_what_it_prints() -> None:
    part = next(part for part in PARTS if part.name == "sanitizer")
    own = Written(findings=[found(claims.STREAM_BITS, True, "serial")], ended=True)
    clean = parts.Ran(part=part, written=own, seconds=9.0)
    raced = replace(clean, output=RACE, trouble="exit code 1: ...")
    assert verdicts(clean.findings, claims.SANITIZED) == {"": PASSED}
    assert verdicts(raced.findings, claims.SANITIZED) == {"": FAILED}
    assert raced.log == RACE.splitlines()
    assert verdicts(parts.Ran(part=part, trouble="no time left").findings, claims.SANITIZED) == {
        "": NOT_MEASURED
    }


def schedule_of(name: str, ns: int, **more: object) -> ScheduleTime:
    good = Check(repeatable=True, like_serial=True, graph_equal=True, largest_difference=0.0)
    known: dict[str, object] = {
        "schedule": name,
        "method": "order",
        "eager_ns": ns,
        "predicted_ns": None,
        "communication_ns": 300,
        "hidden_fraction": 0.9,
        "check": good,
        "graph_ns": ns,
    }
    return ScheduleTime(**{**known, **more})  # type: ignore[arg-type]


def table_of(*schedules: ScheduleTime, **left_out: str) -> ScheduleTable:
    return ScheduleTable(layers=2, pairs=4, schedules=schedules, left_out=left_out)


SERIAL = schedule_of("serial", 1000)


def test_a_good_layer_passes() -> None:
    table = table_of(
        SERIAL,
        schedule_of("wavelet", 900),
        schedule_of("dhelix", 880, predicted_ns=850),
        schedule_of("braid", 800, predicted_ns=790),
    )
    findings = [*layer.verdicts(table, "")]
    assert {one.verdict for one in findings} == {PASSED}
    part = next(part for part in PARTS if part.name == "layer")
    assert {one.claim for one in findings} == {*part.claims}
    on_cpu = [*layer.verdicts(table, ON_CPU)]
    assert verdicts(on_cpu, claims.LAYER_BITS) == verdicts(findings, claims.LAYER_BITS)
    for claim in (claims.NO_SLOWER, claims.GAINS, claims.PREDICTED):
        assert {*verdicts(on_cpu, claim).values()} == {NOT_MEASURED}


def test_a_bad_layer_fails_where_it_is_bad() -> None:
    other = Check(repeatable=True, like_serial=False, graph_equal=False, largest_difference=0.5)
    table = table_of(
        SERIAL,
        schedule_of("wavelet", 900, check=other),
        schedule_of("braid", 1010, predicted_ns=700, graph_ns=None, graph_note="not captured"),
        dhelix="no search",
    )
    table = replace(
        table,
        schedules=tuple(
            replace(one, check=replace(one.check, graph_equal=None)) if one.schedule == "braid" else one
            for one in table.schedules
        ),
    )
    findings = [*layer.verdicts(table, "")]
    assert verdicts(findings, claims.LAYER_BITS) == {
        "serial": PASSED,
        "wavelet": FAILED,
        "braid": PASSED,
        "dhelix": NOT_MEASURED,
    }
    assert verdicts(findings, claims.GRAPH_BITS) == {
        "serial": PASSED,
        "wavelet": FAILED,
        "braid": NOT_MEASURED,
        "dhelix": NOT_MEASURED,
    }
    assert verdicts(findings, claims.NO_SLOWER) == {"than wavelet": FAILED}
    assert verdicts(findings, claims.GAINS) == {"": FAILED}
    assert verdicts(findings, claims.PREDICTED) == {"braid": FAILED, "dhelix": NOT_MEASURED}


def test_nothing_can_be_gained_where_copies_take_no_time() -> None:
    table = table_of(replace(SERIAL, communication_ns=10), schedule_of("braid", 1000))
    assert verdicts([*layer.verdicts(table, "")], claims.GAINS) == {"": NOT_MEASURED}


def run_of(losses: Sequence[float] = (7.0, 6.5), seconds: float = 1.0, note: str = "") -> training.Run:
    return training.Run(losses=[*losses], step_s=[seconds] * 3 if losses else [], note=note)


def test_training_against_the_plain_loop() -> None:
    good = {
        training.BRAID: run_of(seconds=1.01),
        training.PLAIN: run_of((7.0, 6.51)),
        training.COMPILED: run_of(seconds=0.8),
        training.TRITON: run_of((7.0, 6.6)),
    }
    findings = [*training.verdicts(good, 1000, "")]
    assert verdicts(findings, claims.LOSSES) == {"": PASSED}
    assert verdicts(findings, claims.TRITON_LOSSES) == {"": FAILED}
    speed = next(one for one in findings if one.claim == claims.PLAIN_SPEED)
    assert speed.verdict is PASSED
    assert speed.numbers[f"speed_up over {training.COMPILED}"] == pytest.approx(0.8 / 1.01)
    assert verdicts(findings, claims.COMPILED_SPEED) == {"": NOT_MEASURED}
    for seconds, verdict in ((0.81, PASSED), (0.82, FAILED)):
        chosen = {**good, training.CHOSEN: run_of(seconds=seconds)}
        findings = [*training.verdicts(chosen, 1000, "")]
        assert verdicts(findings, claims.COMPILED_SPEED) == {"": verdict}
    slow = {**good, training.BRAID: run_of((7.0, math.nan), 1.1)}
    findings = [*training.verdicts(slow, 1000, "")]
    assert verdicts(findings, claims.LOSSES) == {"": FAILED}
    assert verdicts(findings, claims.PLAIN_SPEED) == {"": FAILED}
    assert verdicts([*training.verdicts(slow, 1000, ON_CPU)], claims.PLAIN_SPEED) == {"": NOT_MEASURED}
    alone = {training.BRAID: run_of(), training.PLAIN: run_of((), note="no time left")}
    assert {one.verdict for one in training.verdicts(alone, 1000, "")} == {NOT_MEASURED}
    text = "\n".join(training.lines({**good, training.NARROW: run_of((), note="no time left")}, 1000))
    assert f"{training.NARROW}: not measured; no time left" in text


def trained(ns: int, losses: tuple[float, ...] = (7.0, 6.5), digest: str = "a") -> ranks.Trained:
    return ranks.Trained(
        predicted_ns=1000,
        losses=losses,
        norms=(1.0, 1.0),
        digest=digest,
        step_ns=ns,
        communication_ns=400,
        hidden_ns=300,
    )


def test_ranks_against_the_serial_schedule() -> None:
    outcome = {
        "megatron": trained(1000),
        "wavelet": trained(900, losses=(7.0, 6.5000001)),
        "dhelix": trained(905, digest="b"),
        "braid": trained(910),
    }
    bits = [*ranks.same_bits(outcome, "nccl")]
    assert verdicts(bits, claims.RANK_BITS) == {"wavelet": FAILED, "dhelix": FAILED, "braid": PASSED}
    assert [one.why for one in bits] == ["other losses", "other digest", ""]
    assert ranks.same_losses(outcome, (7.0, 6.51), "nccl").verdict is PASSED
    assert ranks.same_losses(outcome, (7.0, 6.6), "nccl").verdict is FAILED
    speeds = [*ranks.speeds(outcome, "")]
    assert verdicts(speeds, claims.RANK_SPEED) == {
        "than megatron": PASSED,
        "than wavelet": PASSED,  # within noise
        "than dhelix": PASSED,
    }
    assert verdicts(speeds, claims.RANK_PREDICTED)["megatron"] is PASSED
    assert verdicts(speeds, claims.RANK_PREDICTED)["wavelet"] is FAILED
    late = [*ranks.speeds({**outcome, "braid": trained(1200)}, "")]
    assert {*verdicts(late, claims.RANK_SPEED).values()} == {FAILED}
    del outcome["dhelix"]
    assert verdicts([*ranks.same_bits(outcome, "nccl")], claims.RANK_BITS)["dhelix"] is NOT_MEASURED
    assert (
        ranks.lines(outcome)[1].split() == ["megatron", "1.00e-03"] or "megatron" in ranks.lines(outcome)[1]
    )


def test_one_gpu_is_no_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    path = tmp_path / "sheet"
    ranks.measure(task_of("cuda"), Sheet(path))
    findings = read_sheet(path).findings
    part = next(part for part in PARTS if part.name == "ranks")
    assert {one.claim for one in findings} == {*part.claims}
    assert {(one.verdict, one.why) for one in findings} == {(NOT_MEASURED, "one GPU")}


# -- kernels -------------------------------------------------------------------------------------------------


def test_kernels_that_are_wrong_or_slow_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    from braid.jobs.benchmarks import kernel_checks
    from braid.jobs.benchmarks.kernels import KernelTime

    device = torch.device("cpu")
    one = torch.ones(3)
    for name, ours in (("right", one), ("wrong", one * 1.001), ("nan", one * math.nan)):
        monkeypatch.setitem(kernel_checks.CHECKS, name, lambda make, ours=ours: iter([(ours, one.double())]))
    assert kernels.checked("right", task_of(), device).verdict is PASSED
    assert kernels.checked("wrong", task_of(), device).verdict is FAILED
    assert kernels.checked("nan", task_of(), device).numbers["error"] == math.inf
    slow = KernelTime(kernel="k", times_ns={"triton": 100, "eager": 90}, limit_ns=50, bound="bytes", notes={})
    fast = replace(slow, times_ns={"triton": 100, "eager": 99})
    alone = replace(slow, times_ns={"triton": 100})
    for time_, verdict in ((slow, FAILED), (fast, PASSED), (alone, NOT_MEASURED)):
        assert verdicts([*kernels.verdicts(time_, "")], claims.KERNEL_FAST) == {"k": verdict}
    assert verdicts([*kernels.verdicts(fast, ON_CPU)], claims.KERNEL_FAST) == {"k": NOT_MEASURED}
    broken = [*kernels.broken("k", RuntimeError("no image\nmore"))]
    assert verdicts(broken, claims.KERNEL_RIGHT) == {"k": FAILED}
    assert broken[0].why == "RuntimeError: no image"
    small = [*kernels.broken("k", torch.cuda.OutOfMemoryError("no room"))]
    assert verdicts(small, claims.KERNEL_FAST) == {"k": NOT_MEASURED}
    assert verdicts(small, claims.KERNEL_RIGHT) == {}


def test_every_kernel_of_the_benchmark_is_checked() -> None:
    from braid.jobs.benchmarks.kernel_cases import cases
    from braid.jobs.benchmarks.kernel_checks import CHECKS
    from braid.jobs.benchmarks.kernels import QUICK

    assert [case.name for case in cases(QUICK, torch.device("cpu"))] == list(CHECKS)


def test_without_triton_kernels_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    path = tmp_path / "sheet"
    kernels.measure(task_of(), Sheet(path))
    assert {one.why for one in read_sheet(path).findings} == {"Triton is not installed"}


# -- the runtime without a configuration ---------------------------------------------------------------------


def test_a_rank_begins_anew_with_the_same_losses() -> None:
    job = Job(shape=training.TINY, micro_batch=2, micro_batches=2, dtype=torch.bfloat16)
    device = torch.device("cpu")
    rank = RuntimeRank(job, lone_mesh(job), device, streams_on(accelerator_of(device)))
    executor = rank.executor(job.code(job.serial))
    first = [rank.step(executor, step).loss for step in range(3)]
    rank.reset()
    assert [rank.step(executor, step).loss for step in range(3)] == first
    assert len({*first}) == 3


def test_jobs_are_cut_to_the_card() -> None:
    job = Job(shape=training.BILLION, micro_batch=4, micro_batches=4, dtype=torch.bfloat16)
    assert job.fitted(80 << 30).shape.layers == 16
    assert job.fitted(24 << 30).shape.layers == 4
    assert job.fitted(1 << 30).shape.layers == 1
    assert replace(job, tp=2).fitted(24 << 30).shape.layers == 16
    a, b = (job.windows(step, torch.device("cpu")) for step in (0, 1))
    assert [window.shape for window in a] == [(4, 2049)] * 4
    assert not torch.equal(a[0], b[0])
    assert torch.equal(a[0], job.windows(0, torch.device("cpu"))[0])
    assert int(torch.stack(a).max()) < job.shape.vocabulary


def test_what_nvidia_smi_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = machine._ASKED
    row = ", ".join(f"v{n}" for n in range(len(asked)))
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(machine, "printed", lambda *command: f"{row}\n{row}\n")
    assert machine.nvidia_smi() == {"gpus": [{key: f"v{n}" for n, key in enumerate(asked)}] * 2}
    monkeypatch.setattr(machine, "printed", lambda *command: "Unable to determine the device handle\n")
    assert "gave no table" in machine.nvidia_smi()["note"]
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert machine.nvidia_smi() == {"note": "nvidia-smi is not installed"}


def test_programs_that_are_not_there_print_nothing() -> None:
    assert machine.printed("no-such-program") == ""
    assert machine.printed(sys.executable, "-c", "print(1)") == "1\n"
    assert machine.printed(sys.executable, "-c", "print(1); raise SystemExit(3)") == ""
