"""Which faults a drill has: a function of its seed, each often enough, apart from each other; its verdict."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.actors.config import Config, ConfigError, parse_config
from braid.jobs.drill.command import Command
from braid.jobs.drill.nodes import usable_nodes
from braid.jobs.drill.plan import (
    KINDS,
    NODE_FAULTS,
    check_faults,
    plan_drill,
    possible_faults,
    steps_of,
)
from braid.jobs.drill.report import Report
from tests.end_to_end.runs import SMALL
from tests.in_process import Capture, called

SOME = st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=6, unique=True)
CHANGES = [kind for kind, fault in KINDS.items() if fault.nodes]
MANY = st.lists(st.sampled_from(CHANGES), min_size=1, max_size=10)


@given(SOME, st.integers(1, 4), st.integers(0, 2**32))
def test_a_plan_follows_from_its_seed(kinds: list[str], count: int, seed: int) -> None:
    random.seed(seed + 1)  # other randomness has no say
    planned = plan_drill(kinds, count, seed)
    random.seed(seed + 2)
    assert plan_drill(kinds, count, seed) == planned
    assert sorted(fault.kind for fault in planned) == sorted(kinds * count)
    assert len({fault.name for fault in planned}) == len(planned), "every fault has a mark of its own"
    gaps = [b.step - a.step for a, b in itertools.pairwise(planned)]
    assert all(gap >= 4 for gap in gaps), "the run has recovered, and trained, before the next one"
    for fault, gap in zip(planned, gaps, strict=False):
        if fault.kind == "disk-full":
            assert gap >= 16
    assert planned[0].step >= 4, "there is something to lose"
    assert steps_of(planned) >= planned[-1].step + 12, "the last one is over before the run ends"


@given(MANY, st.integers(0, 2**32), st.integers(1, 5), st.integers(0, 4), st.integers(0, 4))
def test_nodes_stay_in_their_range(kinds: list[str], seed: int, start: int, below: int, above: int) -> None:
    """In an order if there is one, and else with an error: checked against all orders of the changes."""
    usable = range(max(1, start - below), start + above + 1)
    if not exists([KINDS[kind].nodes for kind in kinds], start, usable):
        with pytest.raises(ConfigError, match=r"no order was found.*--faults.*--count.*elastic"):
            plan_drill(kinds, 1, seed, start, usable)
        return
    planned = plan_drill(kinds, 1, seed, start, usable)
    assert planned == plan_drill(kinds, 1, seed, start, usable)
    assert sorted(fault.kind for fault in planned) == sorted(kinds)
    nodes = start
    for fault in planned:
        assert fault.nodes == nodes
        nodes += 1 if fault.kind == "node-joins" else -1
        assert fault.nodes_after == nodes
        assert nodes in usable


def exists(changes: list[int], start: int, usable: range) -> bool:
    """Whether the changes have an order that stays in the range: by trying."""
    reached = {(start, changes.count(1))}  # nodes, and how many are left to join
    for left in range(len(changes), 0, -1):
        reached = {
            (there + step, joins - (step == 1))
            for there, joins in reached
            for step in (1, -1)
            if (joins if step == 1 else left - joins) and there + step in usable
        }
    return bool(reached)


@given(st.integers(0, 2**32))
def test_one_of_three_nodes_or_more_is_slow(seed: int) -> None:
    kinds = ["node-joins", "node-joins", "node-slow", "node-lost", "node-drained"]
    planned = plan_drill(kinds, 1, seed, 2, range(1, 5))
    assert sorted(fault.kind for fault in planned) == sorted(kinds)
    (slow,) = [fault for fault in planned if fault.kind == "node-slow"]
    assert slow.nodes is not None
    assert slow.nodes_after == slow.nodes >= 3
    with pytest.raises(ConfigError, match="node-slow needs 3 nodes"):
        plan_drill(["node-slow", "node-joins", "node-lost"], 1, seed, 2, (1, 2))


def elastic_config(**sections: dict[str, object]) -> Config:
    content: dict[str, dict[str, object]] = {
        **{key: dict(value) for key, value in SMALL.items()},
        "parallel": {"dp": 2},
        "elastic": {"max_ranks": 4},
    }
    content["train"] |= {"global_batch": 12, "micro_batch": 1, "deterministic_reduction": True}
    content["cluster"] |= {"launcher": "ray"}
    for name, section in sections.items():
        content[name] = {**content.get(name, {}), **section}
    return parse_config(content)


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_that_can_be_made_can_be_made_together(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = elastic_config(elastic={"max_ranks": ranks})
    kinds = possible_faults(config)
    check_faults(config, kinds)
    assert {*kinds} == {*NODE_FAULTS} - ({"node-slow"} if ranks == 2 else set())
    plan_drill(kinds, 1, 0, 2, usable_nodes(config))


def test_usable_numbers_of_nodes_give_each_a_rank_and_the_same_sums() -> None:
    assert usable_nodes(elastic_config()) == {1, 2, 3, 4}
    assert usable_nodes(elastic_config(elastic={"min_ranks": 2, "max_ranks": 3})) == {2, 3}
    # 5 ranks share neither 12 samples nor 4 heads nor 4 layers: one of 5 nodes would have no rank.
    assert usable_nodes(elastic_config(elastic={"max_ranks": 5})) == {1, 2, 3, 4}
    # The tensor-parallel degree changes with fewer nodes; without ep other rows meet at an expert.
    assert usable_nodes(elastic_config(parallel={"dp": 1, "tp": 2})) == {2, 4}
    model = {"family": "moe", "experts": 4, "top_k": 2}
    assert usable_nodes(elastic_config(model=model, parallel={"dp": 4, "ep": 2})) == {2, 4}


def test_faults_are_listed(capsys: Capture) -> None:
    listed = called(capsys, "drill", "run.yaml", "--list")
    assert listed.code == 0
    assert {*KINDS} <= {*listed.output.split()}


# What a drill reads of the run that it breaks, and what it takes for a run that came out well.


def test_changes_of_ranks_are_no_failures(tmp_path: Path) -> None:
    command = Command(tmp_path)
    assert command.incidents(0.0) == []
    command.broken.mkdir()
    lines = [{"kind": kind, "time": time} for time, kind in enumerate(["rank failed", "resized"] * 2)]
    (command.broken / "incidents.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert [line["time"] for line in command.incidents(1.0)] == [2]
    assert [line["time"] for line in command.incidents(1.0, resized=True)] == [1, 3]


@pytest.mark.parametrize("differs", ["losses", "parameters", "samples", ""])
def test_what_is_asked(differs: str) -> None:
    same: dict[str, Any] = {
        f"identical_{what}": what != differs for what in ("losses", "parameters", "samples")
    }
    machine: dict[str, Any] = {"emulated_hosts": False, "emulated_nodes": True, "seconds": 1.0}
    report = Report(outcomes=[], held=[], largest_difference=0.0, **same, **machine)
    assert report.as_json()["passed"] == report.passed == (not differs)
