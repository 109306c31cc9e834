"""Which faults a drill has: a function of its seed, each often enough, apart from each other; its verdict."""

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.actors.config import Config, ConfigError, parse_config
from braid.jobs.drill.command import Command
from braid.jobs.drill.nodes import TOLERANCE, allowed_difference, node_range
from braid.jobs.drill.plan import (
    KINDS,
    NODE_FAULTS,
    NodeRange,
    check_faults,
    plan_drill,
    possible_faults,
    steps_of,
)
from braid.jobs.drill.report import Report
from braid.jobs.drill.runner import Drill
from tests.end_to_end.runs import SMALL

SOME = st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=6, unique=True)
CHANGES = [kind for kind, fault in KINDS.items() if fault.nodes]
MANY = st.lists(st.sampled_from([*CHANGES, "stop", "sigterm"]), min_size=1, max_size=12)


@st.composite
def node_ranges(draw: st.DrawFn) -> NodeRange:
    start = draw(st.integers(1, 5))
    return NodeRange(start, draw(st.integers(1, start)), start + draw(st.integers(0, 4)))


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


@given(MANY, st.integers(0, 2**32), node_ranges())
def test_nodes_stay_in_their_range(kinds: list[str], seed: int, nodes: NodeRange) -> None:
    """In an order if there is one, and else with an error: checked against all orders of the changes."""
    changes = [KINDS[kind].nodes for kind in kinds if KINDS[kind].nodes]
    if not exists(changes, nodes):
        with pytest.raises(ConfigError, match=r"lead from .*elastic.*--faults.*--count"):
            plan_drill(kinds, 1, seed, nodes)
        return
    planned = plan_drill(kinds, 1, seed, nodes)
    assert planned == plan_drill(kinds, 1, seed, nodes)
    assert sorted(one.kind for one in planned) == sorted(kinds)
    there = nodes.start
    for one in planned:
        assert one.nodes == there
        there += {"node-joins": 1, "node-lost": -1, "node-drained": -1}.get(one.kind, 0)
        assert one.nodes_after == there
        assert nodes.least <= there <= nodes.most
        own = one.in_rank(one.nodes)
        if own is not None:
            assert own.rank < one.nodes, "a rank that there is"
            assert own.step is None, "how many steps a change of nodes takes is not known before"


def exists(changes: list[int], nodes: NodeRange) -> bool:
    """Whether the changes have an order that stays in the range: by trying."""
    reached = {(nodes.start, changes.count(1))}  # nodes, and how many are left to join
    for left in range(len(changes), 0, -1):
        reached = {
            (there + step, joins - (step == 1))
            for there, joins in reached
            for step in (1, -1)
            if (joins if step == 1 else left - joins) and nodes.least <= there + step <= nodes.most
        }
    return bool(reached)


@given(st.integers(0, 2**32))
def test_one_of_three_nodes_or_more_is_slow(seed: int) -> None:
    kinds = ["node-joins", "node-joins", "node-slow", "node-lost", "node-drained"]
    planned = plan_drill(kinds, 1, seed, NodeRange(2, 1, 4))
    assert sorted(one.kind for one in planned) == sorted(kinds)
    (slow,) = [one for one in planned if one.kind == "node-slow"]
    assert slow.nodes is not None
    assert slow.nodes_after == slow.nodes >= 3
    with pytest.raises(ConfigError, match="with 2 nodes none of these can come; node-slow needs 3 nodes"):
        plan_drill(["node-slow", "node-joins", "node-lost"], 1, seed, NodeRange(2, 1, 2))


def test_nodes_change_in_many_orders() -> None:
    kinds = ["node-joins", "node-joins", "node-lost", "node-drained", "stop"]
    plans = [plan_drill(kinds, 1, seed, NodeRange(2, 1, 3)) for seed in range(200)]
    orders = {tuple(one.kind for one in plan) for plan in plans}
    assert len(orders) > 20
    assert {order[0] for order in orders} == set(kinds)


def elastic_config(**sections: dict[str, object]) -> Config:
    content: dict[str, dict[str, object]] = {
        **{key: dict(value) for key, value in SMALL.items()},
        "parallel": {"dp": 2},
        "elastic": {"max_ranks": 4},
    }
    content["train"] |= {"global_batch": 12, "micro_batch": 1}
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
    assert ("node-slow" in kinds) == (ranks > 2)
    assert {*NODE_FAULTS} - {"node-slow"} <= {*kinds}


def test_the_range_of_nodes() -> None:
    assert node_range(elastic_config()) == NodeRange(2, 1, 4)
    assert node_range(elastic_config(elastic={"min_ranks": 2, "max_ranks": 3})) == NodeRange(2, 2, 3)
    # 5 ranks share neither 12 samples nor 4 heads nor 4 layers: one of 5 nodes would have no rank.
    assert node_range(elastic_config(elastic={"max_ranks": 9})) == NodeRange(2, 1, 4)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"cluster": {"launcher": "processes"}}, "cluster.launcher=ray"),
        ({"cluster": {"address": "10.0.0.1:6379"}}, "leave out cluster.address='10.0.0.1:6379'"),
        ({"elastic": {"max_ranks": None}}, "--set elastic.max_ranks=4"),
        ({"elastic": {"min_ranks": 3}}, "the layout has 2 ranks, elastic allows 3 to 4"),
    ],
)
def test_what_nodes_need(sections: dict[str, dict[str, object]], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Drill(elastic_config(**sections), ["node-lost"], count=1, seed=0)


def test_what_is_asked_of_losses() -> None:
    """The same bits where all sums are the same ones."""
    exact = elastic_config(train={"deterministic_reduction": True})
    assert allowed_difference(exact, [2, 1, 4]) == 0
    assert allowed_difference(elastic_config(), [2]) == 0
    assert allowed_difference(elastic_config(), [2, 3]) == TOLERANCE
    train = {"deterministic_reduction": True}
    cut = elastic_config(train={**train, "global_batch": 8}, parallel={"dp": 1, "tp": 2})
    assert allowed_difference(cut, [2, 1]) == TOLERANCE, "the tensor-parallel degree changes"
    model = {"family": "moe", "experts": 4, "top_k": 2}
    experts = elastic_config(train=train, model=model, parallel={"dp": 4, "ep": 2})
    assert allowed_difference(experts, [4, 2]) == 0
    assert allowed_difference(experts, [4, 3]) == TOLERANCE, "without ep other rows meet at an expert"
    with pytest.raises(ConfigError, match=r"train\.deterministic_reduction=true"):
        allowed_difference(elastic_config(train={"dtype": "bf16"}), [2, 3])


@given(st.integers(1, 8), st.integers(0, 1000))
def test_every_rank_and_place_can_be_hit(ranks: int, seed: int) -> None:
    for one in plan_drill(list(KINDS), 1, seed):
        fault = one.in_rank(ranks)
        assert (fault is not None) == (KINDS[one.kind].in_rank is not None)
        if fault is not None:
            assert 0 <= fault.rank < ranks
            assert 0 <= fault.place < 1
            assert (fault.name, fault.step) == (one.name, one.step)
            assert (fault.kind, fault.phase) == KINDS[one.kind].in_rank


def test_the_name_of_a_fault_in_a_rank_says_what_it_does() -> None:
    for name, kind in KINDS.items():
        if kind.in_rank is not None:
            does, phase = kind.in_rank
            assert name in (does, f"{does}-{phase}", f"cut-{phase}")


# What a drill reads of the run that it breaks, and what it takes for a run that came out well.


def test_changes_of_ranks_are_no_failures(tmp_path: Path) -> None:
    command = Command(tmp_path)
    assert command.incidents(0.0) == []
    command.broken.mkdir()
    lines = [{"kind": kind, "time": time} for time, kind in enumerate(["rank failed", "resized"] * 2)]
    (command.broken / "incidents.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert [line["time"] for line in command.incidents(1.0)] == [2]
    assert [line["time"] for line in command.incidents(1.0, resized=True)] == [1, 3]


@pytest.mark.parametrize(
    ("same", "samples", "allowed", "difference", "passed"),
    [
        (True, True, 0.0, 0.0, True),
        (False, True, 0.0, 1e-9, False),
        (False, True, 2e-5, 1e-5, True),
        (False, True, 2e-5, 3e-5, False),
        (True, True, 2e-5, 0.0, True),
        (True, False, 2e-5, 0.0, False),
        (False, False, 2e-5, 1e-5, False),
    ],
)
def test_what_is_asked(same: bool, samples: bool, allowed: float, difference: float, passed: bool) -> None:
    found: dict[str, Any] = {"allowed_difference": allowed, "largest_difference": difference}
    found |= {"identical_losses": same, "identical_parameters": same, "identical_samples": samples}
    machine = {"emulated_hosts": False, "emulated_nodes": True, "interval": 5, "seconds": 1.0}
    report = Report(outcomes=[], held=[], **found, **machine)
    assert report.passed == passed
    assert report.as_json()["passed"] == passed
