"""The pairing search beside brute force, in small; `tests/scheduling/test_pairing.py` tests the search."""

import pytest

from tests.papers import pairing
from tests.papers.pairing import LAYERS, run


def test_pairing_is_found_exact_and_every_comparison_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_ = LAYERS
    monkeypatch.setattr(pairing, "LAYERS", {first: LAYERS[first]})
    found = run(graphs=25, seed=11, repeats=1)
    exact, near, layer = found["exactness"], found["nearness"], found["layers"][first]
    assert exact["equal_to_brute_force"] == exact["graphs"] == 25
    assert exact["not_worse_than_round_robin"] == exact["not_worse_than_serial"] == 25
    assert 0 < exact["median_saving"] < 1
    assert near["equal_to_the_best"] <= near["within_two_percent_of_the_best"] <= near["graphs"] == 25
    assert layer["operators"] == (14, 18)
    assert layer["busiest_stream_ns"] <= layer["list_ns"] <= layer["serial_ns"]
    assert layer["busiest_stream_ns"] <= layer["pair_ns"] <= layer["serial_ns"]


@pytest.mark.parametrize("name", [name for name in LAYERS if "cp 2" in name])
def test_layers_with_experts_and_context_parallelism_have_both_links(name: str) -> None:
    """Tensor parallelism and the ring of two stay in the node, experts of eight ranks cross four nodes."""
    problem = LAYERS[name]()
    assert {*problem.forward.streams, *problem.backward.streams} == {0, 1, 2}
    assert len(problem.backward) > 18
