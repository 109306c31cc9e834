"""The benchmark of kernels, run in Triton's interpreter: all of it but a GPU; its times mean nothing."""

import json

import pytest
import torch

from braid.jobs.bench import main
from braid.jobs.benchmarks import kernel_cases
from braid.jobs.benchmarks.kernels import (
    QUICK,
    KernelBenchmark,
    KernelTime,
    run_kernels,
    show_kernels,
)
from braid.kernels.fused import launch

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter")


@pytest.fixture(scope="module")
def printed() -> str:
    """What the command prints with ``--json``."""
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda text, **more: None if more else lines.append(text))
        assert main(["kernels", "--device", "cpu", "--quick", "--json"]) == 0
    (line,) = lines
    return line


def test_it_prints_one_object_that_says_it_is_no_measurement(printed: str) -> None:
    read = json.loads(printed)
    assert "no measurement" in read["machine"]["device"]
    assert read["machine"]["torch"] == torch.__version__
    assert read["shapes"]["tokens"] == QUICK.tokens
    rows = {row["kernel"]: row for row in read["kernels"]}
    assert len(rows) == len(read["kernels"]) == 19
    for row in rows.values():
        assert min(row["times_ns"].values()) > 0
        assert {"triton", "eager"} <= row["times_ns"].keys()
        assert row["notes"]["compile"] == "needs a GPU"
        rivals = [ns for way, ns in row["times_ns"].items() if not way.startswith("triton")]
        assert row["speedup"] == pytest.approx(min(rivals) / row["times_ns"]["triton"])
    for name in ("linear", "linear_input_gradient", "accumulate_product"):
        assert {"cublas", "triton 3/4"} <= rows[name]["times_ns"].keys()
    for name in ("linear", "grouped_linear", "grouped_input_gradient", "grouped_weight_gradient"):
        times = rows[name]["times_ns"]
        assert rows[name]["growth"] == pytest.approx(times["triton 3/4"] / times["triton"])


def test_every_way_of_a_case_computes_the_same() -> None:
    """Of those cases whose ways return a result that can be compared as it is."""
    compared = 0
    for case in kernel_cases.cases(QUICK, CPU):
        if case.name not in ("rms_norm", "swiglu", "rotary", "gather_rows", "combine_rows", "linear"):
            continue
        results = [way() for way in case.ways.values()]
        first, *others = [result[0] if isinstance(result, tuple) else result for result in results]
        for other in others:
            torch.testing.assert_close(other, first, rtol=1e-4, atol=1e-5)
            compared += 1
    assert compared >= 7


def test_ratios_and_verdict() -> None:
    one = KernelTime(
        kernel="one",
        times_ns={"triton": 100, "triton 3/4": 130, "eager": 300, "compile": 120},
        limit_ns=90,
        bound="bytes",
        notes={"liger": "is not installed"},
    )
    slow = KernelTime(
        kernel="two", times_ns={"triton": 100, "cublas": 80}, limit_ns=50, bound="flops", notes={}
    )
    assert (one.speedup, one.share_of_limit, one.growth) == (1.2, 0.9, 1.3)
    assert (slow.speedup, slow.share_of_limit, slow.growth) == (0.8, 0.5, None)
    machine: dict[str, object] = {"device": "a card", "torch": "2", "triton": "3", "date": "today"}
    machine |= {"multiprocessors": 132, "rounds": 3}
    text = show_kernels(
        KernelBenchmark(
            machine=machine,
            shapes=QUICK,
            copy_bytes_per_s=4e12,
            product_flops_per_s=8e14,
            kernels=(one, slow),
        )
    )
    assert text.splitlines()[-1] == "at least as fast as every rival: one"
    assert "copy 4000 GB/s, dense product 800 TFLOP/s" in text
    assert "liger: is not installed (one)" in text


def test_what_cannot_be_measured_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["kernels"]) == 2
    assert "--device cuda" in capsys.readouterr().err
    assert main(["kernels", "--device", "cpu"]) == 2
    assert "--quick" in capsys.readouterr().err
    assert main(["kernels", "--device", "cpu", "--quick", "--tune"]) == 2
    assert "--tune needs a CUDA device" in capsys.readouterr().err
    monkeypatch.setattr("braid.jobs.benchmarks.kernels.INTERPRETING", False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        run_kernels(device=CPU, quick=True, rounds=1)
    assert launch.INTERPRETING
