"""The benchmark on one GPU, run on the CPU: all of it but CUDA itself; its times there mean nothing."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from braid.jobs.bench import main
from braid.jobs.benchmarks.gpu import QUICK, GpuBenchmark, check_device, run, show, table
from braid.jobs.benchmarks.gpu_operators import OperatorTable, OperatorTime, effectiveness
from braid.jobs.benchmarks.gpu_ranks import SharedTime
from braid.jobs.benchmarks.gpu_rig import Rig, llama_8b
from braid.jobs.benchmarks.gpu_schedules import (
    Chain,
    Check,
    Decision,
    ScheduleTable,
    ScheduleTime,
    decisions,
    largest_difference,
    results_of,
)
from braid.jobs.benchmarks.gpu_utilisation import PEAK_FLOPS_PER_S, PassTime, peak_flops_per_s
from braid.scheduling.presets.library import cluster_names, cluster_preset
from braid.scheduling.schedule import Block, Direction

CPU = torch.device("cpu")

SHARED = [
    SharedTime(
        collective="all_gather", bytes=4_000_000, alone_ns=9_000, product_ns=5_000, together_ns=11_000
    ),
    SharedTime(collective="reduce_scatter", bytes=4_000_000, note="not on this device"),
]

ABSENT = """
import runpy, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}")

sys.meta_path.insert(0, Absent())
"""

BENCH = """
sys.argv = ["bench", *{arguments!r}]
runpy.run_module("braid.jobs.bench", run_name="__main__")
"""

SCHEDULES = """
import json
import torch
from braid.jobs.benchmarks.gpu import QUICK
from braid.jobs.benchmarks.gpu_operators import measure_operators
from braid.jobs.benchmarks.gpu_rig import Rig
from braid.jobs.benchmarks.gpu_schedules import measure_schedules

rig = Rig(shape=QUICK.shape, device=torch.device("cpu"), dtype=torch.float32)
with rig.running():
    found = measure_schedules(rig, measure_operators(rig, 1), pairs=2, rounds=1)
print(json.dumps([[one.schedule for one in found.schedules], found.left_out]))
"""


def without(names: tuple[str, ...], code: str) -> "subprocess.CompletedProcess[str]":
    """Run Python code where packages are not installed."""
    command = [sys.executable, "-c", ABSENT.format(names=names) + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def result() -> GpuBenchmark:
    """All but the processes, which have a test of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("braid.jobs.benchmarks.gpu.measure_ranks", lambda *arguments: (SHARED, ""))
        return run(device=CPU, sizes=QUICK, seed=3)


@pytest.mark.slow
def test_it_runs_with_torch_and_numpy_alone_and_prints_one_object() -> None:
    absent = ("ray", "typer", "rich", "pydantic", "yaml", "scipy")
    done = without(absent, BENCH.format(arguments=["gpu", "--device", "cpu", "--quick", "--json"]))
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    read = json.loads(line)
    machine = read["machine"]
    assert machine["torch"] == torch.__version__
    assert machine["date"].startswith("20")
    assert machine["device"].startswith("CPU")
    assert "host memory" in machine["link"]
    assert "mean nothing" in machine["link"]
    assert [row["schedule"] for row in read["schedules"]["schedules"]] == [
        "serial",
        "wavelet",
        "dhelix",
        "braid",
    ]
    assert read["schedules"]["left_out"] == {}
    assert read["notes"] == {"fences": "fences need a CUDA device"}
    assert [row["collective"] for row in read["shared"]] == ["all_gather", "reduce_scatter"]
    for row in read["shared"]:
        assert row["note"] == ""
        assert min(row["alone_ns"], row["product_ns"], row["together_ns"]) > 0
    assert "schedules" in done.stderr


def test_without_numpy_it_measures_what_needs_no_search() -> None:
    done = without(("numpy", "scipy", "yaml"), SCHEDULES)
    assert done.returncode == 0, done.stderr
    schedules, left_out = json.loads(done.stdout)
    assert schedules == ["serial", "wavelet"]
    assert left_out.keys() == {"dhelix", "braid"}
    assert all("No module named 'numpy'" in reason for reason in left_out.values())


def test_every_schedule_computes_what_the_serial_one_does(result: GpuBenchmark) -> None:
    for one in result.schedules.schedules:
        assert one.check == Check(
            repeatable=True, like_serial=True, graph_equal=None, largest_difference=0.0
        ), one.schedule
        assert one.eager_ns > 0
        assert one.communication_ns > 0
        assert 0.0 <= one.hidden_fraction <= 1.0
        assert one.graph_ns is None
        assert one.graph_note == "CUDA graphs need a CUDA device"
    assert result.schedules.serial().hidden_fraction == 0.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_graphs_and_streams_give_the_serial_results() -> None:
    found = run(device=torch.device("cuda"), sizes=QUICK, seed=3)
    assert "PCIe" in found.machine["link"]
    for one in found.schedules.schedules:
        assert one.check == Check(
            repeatable=True, like_serial=True, graph_equal=True, largest_difference=0.0
        ), (one.schedule, one.graph_note)
        assert one.graph_ns is not None


def test_the_comparison_sees_another_result() -> None:
    """Other inputs, weights and peers: everything differs; and a number that is none does, too."""
    found = []
    for seed in (0, 1):
        rig = Rig(shape=QUICK.shape, device=CPU, dtype=torch.float32, seed=seed)
        with rig.running():
            found.append(results_of(rig, Chain(rig, Decision("serial"), 2, rig.streams)))
    assert len(found[0]) == 2 * 2 + len(rig.gradients())
    assert all(largest_difference([a], [b]) > 0.0 for a, b in zip(*found, strict=True))
    assert largest_difference([torch.tensor([math.nan])], [torch.tensor([0.0])]) == math.inf


def test_late_weight_gradients_run_in_chains() -> None:
    """A decision that puts weight gradients off gives the serial results, too."""
    rig = Rig(shape=QUICK.shape, device=CPU, dtype=torch.float32, layers=2)
    order = Decision("braid", {"F:layer|B:layer|L:layer": tuple(_putting_off(rig, "qkv.wgrad"))})
    with rig.running():
        serial, put_off = (
            results_of(rig, Chain(rig, decision, 3, rig.streams)) for decision in (Decision("serial"), order)
        )
    assert largest_difference(serial, put_off) == 0.0


def test_a_rig_holds_the_layers_it_says_and_chains_leave_gradients_to_the_next_block() -> None:
    rig = Rig(shape=QUICK.shape, device=CPU, dtype=torch.float32, layers=2)
    assert [part.name for part in rig.model.chunks[rig.place]] == ["layer"] * 2
    late = {"F:layer|B:layer|L:layer": tuple(_putting_off(rig, "qkv.wgrad"))}
    blocks = [str(one) for one in rig.chain(2, late).stages[rig.place] if isinstance(one, Block)]
    assert blocks == ["F0.1", "[F1.1b|B0.1]", "[F2.1|B1.1b|L0.1]", "B2.1"]


def _putting_off(rig: Rig, late: str) -> Iterator[str]:
    """A pair of layers, one after the other, with an operator left to the next pair."""
    yield f"2:{late}"
    yield from (f"0:{op.name}" for op in rig.layer.forward.operators)
    yield from (f"1:{op.name}" for op in rig.layer.backward.operators if op.name != late)


def test_operators_stand_beside_copies(result: GpuBenchmark) -> None:
    operators = result.operators.operators
    assert len(operators) == 14 + 18
    for op in operators:
        assert op.alone_ns > 0
        assert (op.copy_oef is None) == (op.kind == "intra")
        assert op.with_product_ns is None
    assert result.operators.copy_bytes == 8 * 32 * 4


def test_the_table_labels_what_communication_is(result: GpuBenchmark) -> None:
    text = show(result)
    assert "communication: copies within host memory: times of them mean nothing" in text
    assert "peak: not known for this device, so no MFU" in text
    assert "fenced multiprocessors: not measured; fences need a CUDA device" in text
    for name in (
        "serial",
        "wavelet",
        "dhelix",
        "braid",
        "layer/mlp_in.wgrad",
        "all_gather",
        "reduce_scatter",
    ):
        assert name in text
    assert max(map(len, text.splitlines())) < 180


def test_ranks_that_share_a_device_are_shown_or_excused(result: GpuBenchmark) -> None:
    lines = show(result).splitlines()
    assert "all_gather  4.0    9.0      5.0      11.0" in lines
    assert "reduce_scatter: not measured; not on this device" in lines


def test_columns_are_aligned() -> None:
    assert table(("name", "ns"), [("a", "1"), ("long name", "1000")]) == [
        "name         ns",
        "a             1",
        "long name  1000",
    ]


def test_schedules_that_need_the_search_say_so(monkeypatch: pytest.MonkeyPatch, result: GpuBenchmark) -> None:
    monkeypatch.setitem(sys.modules, "braid.scheduling.planner.orders", None)
    rig = Rig(shape=QUICK.shape, device=CPU, dtype=torch.float32)
    made, left_out = decisions(rig, result.operators)
    assert [one.schedule for one in made] == ["serial", "wavelet"]
    assert set(left_out) == {"dhelix", "braid"}
    assert all("search cannot be loaded" in reason for reason in left_out.values())
    text = show(replace(result, schedules=replace(result.schedules, left_out=left_out)))
    assert "braid: not measured; its order has to be searched for" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu", "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("braid: --device cuda: torch ")
    assert "sees no such CUDA device" in captured.err
    assert "--device cpu --quick" in captured.err


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "meta", ""])
def test_other_devices_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"use cuda, a card such as cuda:1, or cpu"):
        check_device(name)


def test_without_torch_it_says_so() -> None:
    done = without(("torch",), BENCH.format(arguments=["gpu"]))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "braid: this benchmark needs PyTorch: No module named 'torch'\n"


@pytest.mark.parametrize(
    ("first", "second", "both", "expected"),
    [
        (100, 400, 400, 1.0),
        (100, 400, 500, 0.0),
        (400, 100, 450, 0.5),
        (100, 400, 900, -1.0),
        (100, 400, 300, 1.0),
        (100, None, 300, None),
        (0, 400, 400, None),
    ],
)
def test_effectiveness(first: int, second: int | None, both: int, expected: float | None) -> None:
    assert effectiveness(first, second, both) == expected


def test_short_operators_take_the_effectiveness_of_their_class() -> None:
    rows = {"long": (1000, 0.9), "short": (50, -1.0)}
    operators = tuple(
        OperatorTime(operator=f"layer/{name}", kind="gemm", alone_ns=ns, copy_oef=oef)
        for name, (ns, oef) in rows.items()
    )
    link = OperatorTime(operator="layer/gather", kind="intra", alone_ns=1000)
    measured = OperatorTable(
        operators=(*operators, link),
        copy_ns=1000,
        copy_bytes=4000,
        product_ns=None,
        product_shape=(1, 1, 1),
        barrier_ns=7,
    )
    profile = measured.profile(Rig(shape=QUICK.shape, device=CPU, dtype=torch.float32))
    assert profile.slowdown("layer/long", "layer/gather") == pytest.approx(0.1)
    of_class = (0.9 * 1000 - 1.0 * 50) / 1050
    assert profile.slowdown("layer/short", "layer/gather") == pytest.approx(1 - of_class)
    assert profile.barrier_ns == 7
    assert measured.copy_bytes_per_s == 4e9


def test_what_was_recovered_of_the_limit() -> None:
    check = Check(repeatable=True, like_serial=True, graph_equal=True, largest_difference=0.0)
    serial = ScheduleTime(
        schedule="serial",
        method="one after the other",
        eager_ns=1000,
        predicted_ns=None,
        communication_ns=300,
        hidden_fraction=0.0,
        check=check,
    )
    schedules = ScheduleTable(layers=1, pairs=2, schedules=(serial,))
    assert schedules.limit_ns == 700
    assert schedules.recovered(1000) == 0.0
    assert schedules.recovered(850) == 0.5
    nothing = replace(schedules, schedules=(replace(serial, communication_ns=0),))
    assert nothing.recovered(1000) is None


def test_utilisation_is_model_flops_over_time_and_peak() -> None:
    one = PassTime(
        sequence=4096,
        forward_ns=1_000_000,
        backward_ns=3_000_000,
        forward_flops=10**12,
        backward_flops=2 * 10**12,
        peak_flops_per_s=2e15,
    )
    assert one.mfu(Direction.FORWARD) == pytest.approx(0.5)
    assert one.mfu(Direction.BACKWARD) == pytest.approx(1 / 3)
    assert one.mfu() == pytest.approx(0.375)
    assert replace(one, peak_flops_per_s=None).mfu() is None


def test_flops_of_a_llama_layer_are_those_of_its_matrices_and_half_its_scores() -> None:
    shape = llama_8b(4096)
    rig = Rig(shape=shape, device=CPU, dtype=torch.float32, tp=1)
    weights = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    attention = 2 * 4096 * 4096 * 4096
    assert rig.layer.forward.flops == 2 * 4096 * weights + attention
    assert rig.layer.backward.flops == 2 * rig.layer.forward.flops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H200 NVL", 835.5e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 3090", 71e12),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H100", None),
        ("CPU, 1 thread(s)", None),
    ],
)
def test_peaks_by_name(name: str, peak: float | None) -> None:
    assert peak_flops_per_s(name) == peak


def test_peaks_agree_with_the_presets() -> None:
    """The same figures as the planner's, where it has the card."""
    presets = {
        cluster_preset(name).gpu.name: cluster_preset(name).gpu.peak_flops_per_s for name in cluster_names()
    }
    known = {"-".join(key): peak for key, peak in PEAK_FLOPS_PER_S.items()}
    known["H100"], known["RTX3090"] = known["H100-HBM3"], known["RTX-3090"]
    shared = presets.keys() & known.keys()
    assert {"A100", "H100", "H200"} <= shared
    assert {name: presets[name] for name in shared} == {name: known[name] for name in shared}
