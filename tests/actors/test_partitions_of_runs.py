"""How a run's schedule cuts collectives: by default, by profile, by plan, by file."""

import random
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from braid.actors.config import Config, ConfigError, parse_config
from braid.actors.controller.combining import combine
from braid.actors.controller.planning import build_schedule, model_graphs, plan_run, setting_of
from braid.scheduling.cost.analytic import analytic_profile
from braid.scheduling.cost.profile import with_piece_costs
from braid.scheduling.generate.partitions import mega_scale, with_partitions
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.plan.decide import simulate_setting
from braid.scheduling.plan.layouts import plan_of
from braid.scheduling.plan.plan import Plan
from braid.scheduling.schedule.memory import DTYPE_BYTES
from braid.scheduling.schedule.text import write
from tests.actors.test_profiling import operators_of, samples_of
from tests.scheduling.plans import cluster

VOCABULARY = 256


def configured(sequence: int = 64, tp: int = 2, **overlap: Any) -> Config:
    content = {
        "model": {"hidden": 256, "layers": 2, "heads": 4, "sequence": sequence},
        "train": {"global_batch": 8, "micro_batch": 2, "dtype": "fp32"},
        "parallel": {"tp": tp},
        "overlap": {"schedule": "intra_batch", **overlap},
    }
    return parse_config(content)


def shape_of(config: Config) -> ModelShape:
    return config.model.shape(VOCABULARY)


def test_two_pieces_without_a_profile_none_without_gathers() -> None:
    for config, found in (
        (configured(), mega_scale(2)),
        (configured(tp=1), ()),
        (configured(schedule="megatron"), ()),
    ):
        assert build_schedule(config, shape_of(config)).partitions == found


def test_the_latency_of_gathers_is_measured_and_counts_for_every_piece() -> None:
    """Two sizes of a gather, of 1 us + 1 ns a byte; a layer's own takes 5 us."""
    config = configured()
    parts = model_graphs(config, shape_of(config))
    samples = samples_of(config, random.Random(0), 0.5)
    solo = {op.key: [5000] for op in operators_of(parts)}
    transfers = {"tp/all_gather": [(8000, 9000), (1000, 2000)]}
    profile = combine([replace(samples, solo_ns=solo, transfers=transfers, together={})], parts)
    fit = profile.transfers["tp/all_gather"]
    assert (fit.latency_ns, fit.ns_per_byte) == (pytest.approx(1000), 1.0)
    cut = with_partitions(parts, mega_scale(4), config.layout())
    costs = with_piece_costs(profile, cut.values())
    assert costs.solo_ns["layer/mlp_gather.2of4"] == 1000 + 4000 // 4
    assert costs.solo_ns["layer/mlp_in.2of4"] == 5000 // 4


def planned() -> Plan:
    """The plan of `configured`."""
    config, spec = configured(), cluster(gpus=2, intra=2e8)
    return plan_of(simulate_setting(setting_of(config, shape_of(config)), spec), spec)


def test_a_plan_says_how(tmp_path: Path) -> None:
    plan = planned()
    (partition,) = plan.setting.partitions
    text = plan.to_yaml()
    now = f"pieces: {partition.pieces}\n"
    assert text.count(now) == 1
    file = tmp_path / "plan.yaml"
    for pieces in (2, 3, 8):
        file.write_text(text.replace(now, f"pieces: {pieces}\n"))
        config = configured(plan=str(file))
        assert build_schedule(config, shape_of(config)).partitions == mega_scale(pieces)
    short = configured(sequence=12, plan=str(file))
    with pytest.raises(ConfigError, match=r"^overlap\.plan=.* is for model=sequence 64, the configuration"):
        build_schedule(short, shape_of(short))


def test_a_plan_edited_into_nonsense(tmp_path: Path) -> None:
    """What else is nonsense: `tests.scheduling.test_partition_text`."""
    file = tmp_path / "plan.yaml"
    file.write_text(re.sub(r"pieces: \d+", "pieces: 0", planned().to_yaml(), count=1))
    config = configured(plan=str(file))
    parts, spec = model_graphs(config, shape_of(config)), cluster(gpus=2, intra=2e8)
    profile = analytic_profile(spec, config.layout(), parts, DTYPE_BYTES["fp32"])
    for made in (build_schedule, partial(plan_run, profile=profile)):
        says = r"^overlap\.plan.*partition tp/all_gather: pieces=0 must be between 1 and 64"
        with pytest.raises(ConfigError, match=says) as caught:
            made(config, shape_of(config))
        assert "\n" not in str(caught.value)


def test_a_file_says_how(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(write(build_schedule(config := configured(), shape_of(config))))
    own = configured(schedule_file=str(file))
    assert build_schedule(own, shape_of(own)).partitions == mega_scale(2)
    odd = configured(sequence=31, schedule_file=str(file))
    assert build_schedule(odd, shape_of(odd)).partitions == mega_scale(2)
    text = file.read_text()
    for pieces in ("", "partition tp/all_gather pieces 4 of tokens with 1\n"):
        file.write_text(text.replace("partition tp/all_gather pieces 2 of tokens with 1\n", pieces))
        with pytest.raises(ValueError, match=r"F:layer: the graph has no operator 'attention_gather\.1of2'"):
            build_schedule(own, shape_of(own))
    file.write_text(text.replace("pieces 2 of", "pieces 2 on"))
    with pytest.raises(ConfigError, match=r"^overlap\.schedule_file=.*, line 7: partition .* is not WHAT"):
        build_schedule(own, shape_of(own))
