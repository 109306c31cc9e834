"""The planning commands as a user runs them: output, files, `--json`, what they load."""

import json
import subprocess
import sys
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from braid.jobs.planning import work as planning
from braid.scheduling.planner.decide import EQUAL, modelled
from tests.end_to_end.forked import Command

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

SMALL = """\
model: {family: llama, hidden: 1024, ffn: 2816, layers: 8, heads: 16, kv_heads: 8, vocabulary: 1024,
        sequence: 1024}
train: {global_batch: 32, micro_batch: 1, dtype: bf16}
"""

CLUSTER = """\
name: mine
nodes: 1
gpus_per_node: 8
gpu: A100
intra: nvlink-600
contention: nvlink
"""


def braid(*arguments: str, cwd: Path, columns: int = 120) -> "subprocess.CompletedProcess[str]":
    """Run the command line in a folder."""
    outside = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "COLUMNS": str(columns)}
    process = Command(arguments, cwd, outside)
    output, errors = process.communicate(timeout=240)
    return subprocess.CompletedProcess(arguments, process.wait(), output, errors)


def as_json(*arguments: str, cwd: Path) -> dict[str, Any]:
    """The one object that a command prints with ``--json``."""
    result = braid(*arguments, "--json", cwd=cwd)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    content = json.loads(result.stdout)
    assert isinstance(content, dict)
    return content


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small.yaml").write_text(SMALL)
    (tmp_path / "mine.yaml").write_text(CLUSTER)
    return tmp_path


@pytest.mark.parametrize("parallel", ["auto", "{tp: 2, pp: 2, dp: 2}"])
def test_tables_fit_in_eighty_columns(folder: Path, parallel: str) -> None:
    """Numbers and names are neither cut off nor broken over lines; what is long stands below, numbered."""
    common = "--cluster", "mine.yaml", "--set", f"parallel={parallel}", "--set", "overlap.schedule=auto"
    shown = [
        braid("plan", "small.yaml", *common, "--output", "plan.yaml", cwd=folder, columns=80),
        braid("explain", "plan.yaml", "--cluster", "mine.yaml", cwd=folder, columns=80),
        braid(
            "simulate", "plan.yaml", "--cluster", "mine.yaml", "--trace", "t.arrows", cwd=folder, columns=80
        ),
        braid("compare", "t.arrows", "t.arrows", cwd=folder, columns=80),
    ]
    rows = 0
    for command in shown:
        assert command.returncode == 0, command.stderr
        assert "\u2026" not in command.stdout, "something is cut off"
        assert max(map(len, command.stdout.splitlines())) <= 80
        heads = command.stdout.split("\u2521")[1:]  # the line under a table's head begins with it
        for table in heads:
            body = table.partition("\u2514")[0].splitlines()[1:]
            cells = [[cell.strip() for cell in line.strip("\u2502").split("\u2502")] for line in body]
            assert all(row[0] for row in cells), "a cell goes on in the next line"
            rows += len(cells)
    assert rows > 10


def test_plan_simulate_explain_compare(folder: Path) -> None:
    """The way from a configuration to an explained plan."""
    plan = as_json(
        "plan", "small.yaml", "--cluster", "mine.yaml", "--set", "parallel=auto", "--output", "plan.yaml",
        cwd=folder,
    )  # fmt: skip
    assert plan["plan"]["score"] == plan["score"]
    assert plan["runners_up"]
    simulated = as_json(
        "simulate", "plan.yaml", "--cluster", "mine.yaml", "--trace", "t.json", "--svg", "s.svg", cwd=folder
    )
    assert simulated["step_seconds"] == pytest.approx(plan["score"]["step_seconds"])
    needed = "step_seconds tokens_per_second mfu hidden_fraction exposed_seconds bubble_fraction peak_bytes"
    assert {*needed.split()} <= set(simulated)
    for level in ("intra", "inter"):
        assert set(simulated["communication"][level]) == {"bytes_per_gpu", "seconds"}
    events = json.loads((folder / "t.json").read_text())["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X"}
    last = max(e["ts"] + e["dur"] for e in events if e["ph"] == "X")
    assert last == pytest.approx(simulated["step_seconds"] * 1e6, rel=1e-3)
    assert (folder / "s.svg").read_text().startswith("<svg")
    explained = as_json("explain", "plan.yaml", "--cluster", "mine.yaml", cwd=folder)
    assert explained["what_if"]
    other = as_json("simulate", "plan.yaml", "--cluster", "mine.yaml", "--schedule", "megatron", cwd=folder)
    assert other["schedule"] == "megatron"
    assert other["step_seconds"] >= simulated["step_seconds"] * 0.999
    compared = as_json("compare", "plan.yaml", "plan.yaml", "--cluster", "mine.yaml", cwd=folder)
    assert compared["speedup"] == 1.0


def test_the_terminal_shows_plans_and_pictures(folder: Path) -> None:
    shown = braid(
        "simulate", "small.yaml", "--cluster", "mine.yaml", "--set", "parallel={tp: 4, pp: 2}",
        "--schedule", "braid:w", cwd=folder,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    assert "braid (w), tp 4 x pp 2" in shown.stdout
    assert "simulated" in shown.stdout
    assert "stage 1" in shown.stdout
    assert "a paired block" in shown.stdout
    assert "F4B2" in shown.stdout
    planned = braid(
        "plan", "small.yaml", "--cluster", "mine.yaml", "--set", "parallel={auto: true, dp: 2}",
        "--output", "plan.yaml", cwd=folder,
    )  # fmt: skip
    assert planned.returncode == 0, planned.stderr
    explained = braid("explain", "plan.yaml", "--cluster", "mine.yaml", cwd=folder)
    assert explained.returncode == 0, explained.stderr
    for shown_plan in (planned.stdout, explained.stdout):
        text = " ".join(shown_plan.translate({ord("│"): " "}).split())
        assert "dp 2" in text
        assert "ZeRO 1" in text
        assert "does not have" not in text


def test_braid_is_the_best_of_its_pipelines(folder: Path) -> None:
    """Of those that are alike it takes the leanest, and says so; by its own name it takes as long."""
    arguments = ("--cluster", "mine.yaml", "--set", "parallel={tp: 4, pp: 2}")
    best, *single = (
        as_json("simulate", "small.yaml", *arguments, "--schedule", name, cwd=folder)
        for name in ("braid", "braid:w", "braid:eager_w", "braid:v")
    )
    assert best["fits"]
    by_pipeline = {one["pipeline"]: one for one in single}
    assert set(by_pipeline) == {"w", "eager_w", "v"}
    alike = (1 + EQUAL) * min(one["step_seconds"] for one in single)
    leanest = min((one for one in single if one["step_seconds"] <= alike), key=itemgetter("peak_bytes"))
    assert best["pipeline"] == leanest["pipeline"]
    assert best["step_seconds"] == leanest["step_seconds"]
    shown = braid("simulate", "small.yaml", *arguments, "--schedule", "braid", cwd=folder)
    assert f"braid ({best['pipeline']}), tp 4 x pp 2" in shown.stdout
    planned = braid(
        "plan", "small.yaml", *arguments, "--set", "overlap.schedule=braid", "--output", "p.yaml", cwd=folder
    )
    assert f"braid ({best['pipeline']}), 32 micro-batches" in planned.stdout, planned.stderr
    compared = braid("compare", "p.yaml", "p.yaml", "--cluster", "mine.yaml", cwd=folder)
    assert compared.stdout.count(f"braid ({best['pipeline']})") == 2, compared.stderr


def test_costs_from_a_profile_file(folder: Path) -> None:
    """A profile with the modelled costs gives the modelled step; slower operators a slower one."""
    job = planning.request(str(folder / "small.yaml"), ["parallel={tp: 8}"], str(folder / "mine.yaml"), None)
    bench = modelled(job.cluster)(planning.fixed_setting(job))
    slower = {key: 2 * ns for key, ns in bench.profile.solo_ns.items()}
    for name, profile in (("same", bench.profile), ("slower", replace(bench.profile, solo_ns=slower))):
        (folder / f"{name}.json").write_text(profile.to_json())
    arguments = ("simulate", "small.yaml", "--cluster", "mine.yaml", "--set", "parallel={tp: 8}")
    by_model = as_json(*arguments, cwd=folder)
    same = as_json(*arguments, "--profile", "same.json", cwd=folder)
    slow = as_json(*arguments, "--profile", "slower.json", cwd=folder)
    assert same["step_seconds"] == pytest.approx(by_model["step_seconds"], rel=1e-12)
    assert 1.5 * same["step_seconds"] < slow["step_seconds"] <= 2 * same["step_seconds"]


def test_presets_name_their_sources(folder: Path) -> None:
    presets = as_json("presets", cwd=folder)
    assert {"a40", "h100", "h200", "b200"} <= set(presets["clusters"])
    assert {"llama-3.1-405b", "mixtral-8x7b", "qwen3-32b", "phi-3.5-moe"} <= set(presets["models"])
    assert all(model["source"] for model in presets["models"].values())
    assert all(c["source"] and c["gpu"]["source"] for c in presets["clusters"].values())


def test_planning_loads_neither_torch_nor_ray_nor_scipy() -> None:
    code = (
        "import sys, braid.jobs.cli, braid.jobs.planning.work, braid.jobs.planning.view, "
        "braid.scheduling.planner.explain; "
        "print(*{m.split('.')[0] for m in sys.modules} & {'torch', 'ray', 'scipy', 'triton'})"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == ""
