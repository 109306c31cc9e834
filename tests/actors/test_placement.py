"""The numbers of ranks by their nodes and GPUs, at the begin and after some were replaced."""

from concurrent.futures import Future
from itertools import groupby
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from hypothesis import given
from hypothesis import strategies as st

from braid.actors.controller.ranks import placement
from braid.actors.controller.ranks.numbering import host_names, machine_name, numbered
from braid.actors.controller.records.span_files import SpanCounts


def at(*places: str) -> list[dict[str, Any]]:
    """``a0``: node a, GPU 0; ``a``: node a without GPUs."""
    return [
        {"address": f"10.0.0.{ord(p[0])}", "node": p[0], "gpus": [p[1:]] if p[1:] else []} for p in places
    ]


def test_by_node_and_gpu() -> None:
    nodes = at("b1", "a10", "a2", "b0")
    assert [nodes[n] for n in numbered(nodes, range(4))] == at("a2", "a10", "b0", "b1")


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_all_ranks_of_a_node_are_neighbours(places: list[str]) -> None:
    order = numbered(at(*places), range(len(places)))
    assert sorted(order) == list(range(len(places)))
    runs = [node for node, _ in groupby(places[n] for n in order)]
    assert len(runs) == len(set(places))


def test_a_rank_that_replaces_another_joins_the_ranks_of_its_node() -> None:
    # Of a a b b c c d d the first node is gone, and one rank of the last; e has come.
    nodes = at("e", "d", "b", "b", "c", "c", "d", "e")
    assert numbered(nodes, [0, 1, 7]) == [0, 7, 1]
    assert [nodes[n]["node"] for n in numbered(nodes, [0, 1, 7])] == ["e", "e", "d"]


def test_hosts_are_told_apart_where_nodes_share_an_address() -> None:
    assert host_names(["x", "y"], ["1" * 40, "2" * 40]) == ["x", "y"]
    assert host_names(["x", "x", "y"], ["1" * 40, "2" * 40, "3" * 40]) == [
        "x (11111111)",
        "x (22222222)",
        "y",
    ]


def test_a_collector_that_hangs_holds_up_nobody() -> None:
    answers = [Future[SpanCounts]() for _ in range(2)]
    ask = Mock(side_effect=[SimpleNamespace(future=lambda answer=answer: answer) for answer in answers])
    collector = placement.ActorCollector(SimpleNamespace(counts=SimpleNamespace(remote=ask)))
    assert [collector.counts().written for _ in range(3)] == [0, 0, 0]
    assert ask.call_count == 1
    answers[0].set_result(SpanCounts(written=1))
    assert [collector.counts().written for _ in range(3)] == [1, 1, 1]
    assert ask.call_count == 2


def test_machines_are_named_by_what_they_compute_with() -> None:
    has = {"node:10.0.0.7": 1.0, "CPU": 16.0, "GPU": 8.0, "accelerator_type:H100": 1.0, "memory": 1e12}
    assert machine_name(has) == "16 CPU 8 GPU accelerator_type:H100"
