"""The pairing benchmark runs, reports, and finds the search exact."""

import io
import json

import pytest
from rich.console import Console

from tests.papers.pairing import LAYERS, NEAR, run, show


def test_benchmark_finds_pairing_exact_and_reports_every_comparison() -> None:
    said: list[str] = []
    first, *_ = LAYERS
    report = run(graphs=25, seed=11, progress=said.append, repeats=1, layers=[first])

    e, n = report.exactness, report.nearness
    assert e.graphs == e.equal == e.not_worse_than_round_robin == e.not_worse_than_serial == 25
    assert 0 <= e.largest_difference < 1e-9
    assert 0 < e.median_saving < 1
    assert n.best <= n.near <= n.graphs == 25
    assert (n.near == n.graphs) == (n.worst_loss <= NEAR)
    assert n.median_barrier_loss <= n.worst_barrier_loss
    (layer,) = report.layers
    assert (layer.forward_operators, layer.backward_operators) == (14, 18)
    assert layer.lower_bound_ns <= layer.list_ns <= layer.serial_ns
    assert layer.lower_bound_ns <= layer.pair_ns <= layer.serial_ns
    assert layer.pair_s > 0
    assert layer.list_s > 0
    assert len(said) == 3

    content = json.loads(json.dumps(report.as_json()))
    assert content["exactness"]["equal"] == 25
    assert content["machine"]["seed"] == 11
    out = io.StringIO()
    show(Console(file=out, width=160), report)
    assert "equal to brute force" in out.getvalue()
    assert first in out.getvalue()


def test_a_seed_draws_the_same_graphs_again() -> None:
    once, again, other = (run(graphs=6, seed=seed, repeats=1, layers=[]) for seed in (4, 4, 5))
    assert (once.exactness, once.nearness) == (again.exactness, again.nearness)
    assert once.exactness != other.exactness


@pytest.mark.parametrize("name", [name for name in LAYERS if "cp 2" in name])
def test_layers_with_experts_and_context_parallelism_have_both_links(name: str) -> None:
    problem = LAYERS[name]()
    streams = {*problem.forward.streams, *problem.backward.streams}
    # Tensor parallelism and the ring of two stay in the node, experts of eight ranks cross four nodes.
    assert streams == {0, 1, 2}
    assert len(problem.backward) > 18


def test_benchmark_refuses_what_cannot_be_run() -> None:
    with pytest.raises(ValueError, match="graphs=0 must be at least 1"):
        run(graphs=0)
    with pytest.raises(ValueError, match="repeats=0 must be at least 1"):
        run(repeats=0)
    with pytest.raises(ValueError, match="layers='llama' must be of"):
        run(layers=["llama"])
