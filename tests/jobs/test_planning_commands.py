"""The planning commands as a user runs them: output, files, `--json`, what they load, what they gain."""

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from braid.actors.controller import profiling
from braid.actors.controller.planning import setting_of
from braid.actors.controller.profiling import Profiled
from braid.jobs.planning import work as planning
from braid.jobs.planning.view import usual_line
from braid.scheduling.plan.decide import modelled
from braid.scheduling.plan.plan import RunnerUp
from braid.scheduling.text.records import to_mapping
from tests.architecture.test_imports import loaded_after
from tests.in_process import Capture, called

SMALL = """\
model: {family: llama, hidden: 1024, ffn: 2816, layers: 8, heads: 16, kv_heads: 8, vocabulary: 1024,
        sequence: 1024}
train: {global_batch: 32, micro_batch: 1, dtype: bf16}
"""
CLUSTER = "name: mine\nnodes: 1\ngpus_per_node: 8\ngpu: A100\nintra: nvlink-600\ncontention: nvlink\n"

Says = Callable[[str], str]


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Says:
    """What a command says, in a folder with a configuration; of most the cluster is ``mine.yaml``."""
    (tmp_path / "small.yaml").write_text(SMALL)
    (tmp_path / "mine.yaml").write_text(CLUSTER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def call(words: str) -> str:
        on = [] if words.startswith(("presets", "compare t.")) else ["--cluster", "mine.yaml"]
        outcome = called(capsys, *shlex.split(words), *on)
        assert outcome.code == 0, outcome.errors
        assert "--json" not in words or outcome.errors == ""
        return outcome.output

    return call


def found(says: Says, words: str) -> dict[str, Any]:
    """The one object that a command prints with ``--json``."""
    return dict(json.loads(says(f"{words} --json")))


def rows_that_fit(text: str) -> int:
    """Check that numbers and names are neither cut off nor broken over lines of 80 columns; what is long
    stands below the tables, numbered. Return the number of the tables' rows."""
    rows = 0
    assert "\u2026" not in text, "something is cut off"
    assert max(map(len, text.splitlines())) <= 80
    for table in text.split("\u2521")[1:]:  # the line under a table's head begins with it
        body = table.partition("\u2514")[0].splitlines()[1:]
        cells = [[cell.strip() for cell in line.strip("\u2502").split("\u2502")] for line in body]
        assert all(row[0] for row in cells), "a cell goes on in the next line"
        rows += len(cells)
    return rows


@pytest.mark.slow
def test_plan_simulate_explain_compare(says: Says) -> None:
    plan = found(says, "plan small.yaml --set parallel=auto --output plan.yaml")
    assert plan["plan"]["score"] == plan["score"]
    assert plan["runners_up"]
    simulated = found(says, "simulate plan.yaml --trace t.json --svg s.svg")
    assert simulated["step_seconds"] == pytest.approx(plan["score"]["step_seconds"])
    needed = "step_seconds tokens_per_second mfu hidden_fraction exposed_seconds bubble_fraction peak_bytes"
    assert {*needed.split()} <= set(simulated)
    for level in ("intra", "inter"):
        assert set(simulated["communication"][level]) == {"bytes_per_gpu", "seconds"}
    events = json.loads(Path("t.json").read_text())["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X"}
    last = max(e["ts"] + e["dur"] for e in events if e["ph"] == "X")
    assert last == pytest.approx(simulated["step_seconds"] * 1e6, rel=1e-3)
    assert Path("s.svg").read_text().startswith("<svg")
    assert found(says, "explain plan.yaml")["what_if"]
    other = found(says, "simulate plan.yaml --schedule megatron")
    assert other["schedule"] == "megatron"
    assert other["step_seconds"] >= simulated["step_seconds"] * 0.999
    assert found(says, "compare plan.yaml plan.yaml")["speedup"] == 1.0


@pytest.mark.slow
def test_the_terminal_shows_plans(says: Says) -> None:
    shown = says("simulate small.yaml --set 'parallel={tp: 4, pp: 2}' --schedule braid:w")
    for part in ("braid (w), tp 4 x pp 2", "simulated", "communication hidden"):
        assert part in shown
    planned = says("plan small.yaml --set 'parallel={auto: true, dp: 2}' --output plan.yaml")
    fitting = says("plan small.yaml --set 'parallel={tp: 2, pp: 2, dp: 2}' --set overlap.schedule=auto")
    compared = says("simulate plan.yaml --trace t.arrows"), says("compare t.arrows t.arrows")
    explained = says("explain plan.yaml")
    assert sum(map(rows_that_fit, (planned, fitting, *compared, explained))) > 10
    for text in (planned, explained):
        text = " ".join(text.replace("│", " ").split())
        assert "dp 2" in text
        assert "ZeRO 1" in text
        assert "does not have" not in text
    text = " ".join(planned.replace("│", " ").split())
    for part in ("8 layers, hidden 1024, 1,024 tokens", "32 samples, 32,768 tokens a step"):
        assert part in text
    assert "usual way" in fitting


@pytest.mark.slow
def test_costs_from_a_profile_file(says: Says) -> None:
    """A profile with the modelled costs gives the modelled step; slower operators a slower one."""
    job = planning.request("small.yaml", ["parallel={tp: 8}"], "mine.yaml", None)
    bench = modelled(job.cluster)(setting_of(job.config, job.model))
    slower = {key: 2 * ns for key, ns in bench.profile.solo_ns.items()}
    for name, profile in (("same", bench.profile), ("slower", replace(bench.profile, solo_ns=slower))):
        Path(f"{name}.json").write_text(profile.to_json())
    by_model, same, slow = (
        found(says, f"simulate small.yaml --set 'parallel={{tp: 8}}'{file}")["step_seconds"]
        for file in ("", " --profile same.json", " --profile slower.json")
    )
    assert same == pytest.approx(by_model, rel=1e-12)
    assert 1.5 * same < slow <= 2 * same


def test_a_profile_is_printed_alone(says: Says, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``--json``: what ``--output`` writes, even if a quota disturbed the measurement."""
    job = planning.request("small.yaml", ["parallel={tp: 8}"], "mine.yaml", None)
    profile = modelled(job.cluster)(setting_of(job.config, job.model)).profile
    measured = Profiled(profile=profile, path=Path("kept.json"), reused=False, trouble="it says little")
    monkeypatch.setattr(profiling, "find_or_measure", Mock(return_value=measured))
    words = "profile small.yaml --launcher processes --json --output mine.json"
    outcome = called(capsys, *shlex.split(words))
    assert json.loads(outcome.output) == json.loads(Path("mine.json").read_text()) == to_mapping(profile)
    assert outcome.errors == "braid: it says little\n"


def test_presets_name_their_sources(says: Says) -> None:
    presets, shown = found(says, "presets"), says("presets")
    assert {*presets["clusters"], *presets["models"]} <= set(shown.split())
    assert "\u2026" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert {"a40", "h100", "h200", "b200"} <= set(presets["clusters"])
    assert {"llama-3.1-405b", "mixtral-8x7b", "qwen3-32b", "phi-3.5-moe"} <= set(presets["models"])
    assert all(model["source"] for model in presets["models"].values())
    assert all(c["source"] and c["gpu"]["source"] for c in presets["clusters"].values())


def test_planning_loads_neither_torch_nor_ray_nor_scipy() -> None:
    modules = ("braid.jobs.cli", "braid.jobs.planning.work", "braid.jobs.planning.view")
    loaded = loaded_after(f"import {', '.join(modules)}, braid.scheduling.plan.explain")
    assert not loaded & {"torch", "ray", "scipy", "triton"}


def usual(schedule: str, seconds: float) -> RunnerUp:
    form: dict[str, Any] = {"layout": "dp 4", "micro_batch": 1, "recompute": "none"}
    return RunnerUp(schedule=schedule, step_seconds=seconds, peak_bytes=1, reason="", **form)


def test_gains_are_over_the_best_of_the_usual_schedules() -> None:
    plan: Any = Mock()
    plan.score.step_seconds = 5.0
    plan.usual = (usual("ddp", 5.5), usual("zbv", 6.0), usual("megatron", 7.0))
    assert usual_line(plan) == "ddp 5.500 s, megatron 7.000 s; the plan is 10.0% faster than ddp"
    plan.usual = (usual("ddp", 5.05), usual("megatron", 7.0))
    line = usual_line(plan)
    assert "the plan is 1.0% faster than ddp, less than the simulator can tell (2%)" in line
    assert line.endswith("overlap beyond that gains nothing here")
