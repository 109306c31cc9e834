"""``parallel: auto``: which layouts a run measures; a run takes the fastest (on Ray): `test_recovery`."""

from pathlib import Path

import pytest

from braid.actors.config import Config, ConfigError, load_config, parse_config
from braid.jobs.training.layouts import MEASURED, fitting_layouts, layer_search
from braid.scheduling.text.yaml_text import parse_yaml
from tests.end_to_end.command import braid, losses_of, write_config, write_corpus

pytestmark = pytest.mark.alone


MODEL = {"hidden": 64, "heads": 4, "kv_heads": 4, "layers": 4, "sequence": 32, "vocabulary": 64}


def config_of(**sections: object) -> Config:
    train = {"global_batch": 8, "micro_batch": 1}
    return parse_config({"model": MODEL, "train": train, "parallel": "auto", **sections})


def layouts(config: Config, room: int) -> set[str]:
    return {one.layout().describe() for one in fitting_layouts(config, config.model.shape(64), room)}


def test_all_layouts_of_the_ranks_there_is_room_for() -> None:
    assert layouts(config_of(), 2) == {"dp 2", "tp 2", "pp 2"}
    assert layouts(config_of(), 1) == {"1 rank"}
    assert layouts(config_of(parallel={"auto": True, "tp": 2}), 4) == {"dp 2 x tp 2", "tp 2 x pp 2"}
    for one in fitting_layouts(config_of(parallel={"auto": True, "zero": 1}), config_of().model.shape(64), 2):
        assert parse_config(parse_yaml(one.to_yaml(), "it")).parallel.zero == (one.parallel.dp > 1)
    folded = config_of(overlap={"schedule": "braid", "pipeline": "v"})
    assert layouts(folded, 2) == {f"{axis} 2 (folded)" for axis in ("dp", "tp", "pp")}


def test_fewer_ranks_where_more_do_not_suit_the_model() -> None:
    odd = config_of(model={**MODEL, "layers": 2}, train={"global_batch": 4, "micro_batch": 1})
    assert layouts(odd, 7) == layouts(odd, 6) == layouts(odd, 5) == layouts(odd, 4)
    with pytest.raises(ConfigError, match="none has the degrees that are given; lower them"):
        layouts(config_of(parallel={"auto": True, "tp": 2, "pp": 2}), 2)
    three = {"hidden": 60, "heads": 3, "kv_heads": 3, "vocabulary": 64}
    with pytest.raises(ConfigError, match=r"no layout of up to 2 ranks: .*parallel\.tp=2"):
        layouts(config_of(model=three, parallel={"auto": True, "tp": 2}), 2)


def test_of_many_layouts_the_most_promising() -> None:
    found = fitting_layouts(config_of(), config_of().model.shape(64), 16)
    assert len(found) == MEASURED
    assert {one.layout().ranks for one in found} == {16}


def test_layers_are_chosen_within_the_memory_that_a_run_has() -> None:
    """Which ones then: `tests.scheduling.test_layer_choices`."""
    assert layer_search(config_of(cluster={"memory_gb": 1.5})).limit_bytes == 1.5e9


@pytest.mark.slow
def test_degrees_and_policies_of_layers_are_chosen_and_then_as_if_given(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    auto = {"parallel": {"tp": 2, "tensor_degrees": "auto"}, "overlap": {"schedule": "oases"}}
    write_config(tmp_path, model={"layers": 4}, train={"recompute": "auto"}, **auto)
    common = ("train", "run.yaml", "--launcher", "processes")
    first = braid(tmp_path, *common, "--set", "name=chosen", timeout=240)
    assert first.code == 0, first.errors
    for seen in ("measuring layers of degree 1 and 2", "recompute full", "tp 2 (4*1)"):
        assert seen in first.output
    config = load_config(tmp_path / "runs" / "chosen" / "config.yaml")
    degrees = " ".join(map(str, config.layout().tensor_degrees or (2,) * 4))
    given = {"parallel.tensor_degrees": degrees, "train.recompute": config.train.recompute}
    options = [option for key, value in given.items() for option in ("--set", f"{key}={value}")]
    second = braid(tmp_path, *common, "--set", "name=given", *options, timeout=240)
    assert second.code == 0, second.errors
    assert losses_of(tmp_path, "chosen") == losses_of(tmp_path, "given")
