"""Runs that fit only because some layers recompute, or are cut: planned, trained, weighed to the byte."""

from pathlib import Path
from typing import Any

import pytest

from braid.actors.controller.planning import model_graphs, setting_of
from braid.jobs.layers import as_chosen, layer_search, layers_chosen
from braid.scheduling.analytic import analytic_profile
from braid.scheduling.planner.decide import anything, decide, measured
from braid.scheduling.planner.degree_problem import LayerChoice
from braid.scheduling.planner.layer_choices import choices_of, with_choices
from tests.actors.test_bytes_of_shares import assert_bytes
from tests.end_to_end.runs import BYTES_VOCABULARY, small_config
from tests.scheduling.plans import cluster

LAYERS = 6
AUTO: list[tuple[dict[str, Any], dict[str, Any], LayerChoice, LayerChoice]] = [
    ({"tp": 2}, {"recompute": "auto"}, LayerChoice(2, "full"), LayerChoice(2, "none")),
    ({"tp": 2, "tensor_degrees": "auto"}, {}, LayerChoice(2, "none"), LayerChoice(1, "none")),
]
"""What is chosen, and what all layers alike would be with least memory and with most."""


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "train", "least", "most"), AUTO, ids=["policies", "degrees"])
@pytest.mark.parametrize("schedule", ["megatron", "oases"])
def test_what_is_chosen_fits_and_holds_what_it_should(
    tmp_path: Path,
    parallel: dict[str, Any],
    train: dict[str, Any],
    least: LayerChoice,
    most: LayerChoice,
    schedule: str,
) -> None:
    sections: dict[str, Any] = {
        "model": {"hidden": 256, "heads": 4, "kv_heads": 4, "layers": LAYERS, "sequence": 128},
        "parallel": parallel,
        "train": {"global_batch": 8, "micro_batch": 2, **train},
        "overlap": {"schedule": schedule},
    }
    free = small_config(tmp_path, **sections)
    shape = free.check(BYTES_VOCABULARY)
    probe = with_choices(setting_of(free, shape), tuple(map(LayerChoice, (1, 2) * 3, ("none",) * LAYERS)))
    parts = model_graphs(as_chosen(free, probe), shape)
    profile = analytic_profile(cluster(gpus=2, intra=4e7), probe.layout, parts, 4)

    def alike(choice: LayerChoice) -> int:
        setting = with_choices(setting_of(free, shape), (choice,) * LAYERS)
        graphs = model_graphs(as_chosen(free, setting), shape)
        simulated = decide([setting], measured(graphs, profile), anything)[0].simulation
        return max(held.total_bytes for held in simulated.memory)

    limit = (alike(least) + alike(most)) / 2
    assert alike(most) > limit * 1.02
    bounded = small_config(tmp_path, **sections, cluster={"memory_gb": limit / 1e9})
    assert layer_search(bounded).limit_bytes == pytest.approx(limit)
    config, table = layers_chosen(bounded, shape, profile)
    assert len({*choices_of(setting_of(config, shape))}) > 1
    assert not table[0].trouble
    assert any("too much" in one.trouble for one in table)
    assert max(assert_bytes(config, tmp_path)) <= limit
