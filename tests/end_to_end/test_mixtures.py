"""Mixtures in real ranks: samples and losses depend neither on the layout nor on a resume nor on a change of
ranks; the loss of each set is that of a run on this set alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from braid.actors.controller.ranks.group import rendezvous
from braid.actors.stage.data.mixture import MIXTURE_FILE, MixedSet, open_splits, write_mixture
from braid.actors.stage.data.sample_order import samples_digest
from braid.actors.stage.rank.interface import Rank
from tests.actors.test_data import write_data
from tests.end_to_end.runs import KeptRanks, Run, run_plan, small_config, trained

SEQUENCE = 32
SIZES = {"web": (400, 60), "code": (30, 3)}
"""Samples of each set, for training and validation."""
MIXTURE = [{"name": "web", "weight": 0.6, "files": ["-"]}, {"name": "code", "weight": 0.4, "files": ["-"]}]
LAYOUTS: list[Mapping[str, Any]] = [
    {},
    {"parallel": {"dp": 3}},
    {"parallel": {"cp": 2}},
    {"parallel": {"tp": 2, "dp": 2}},
    {"parallel": {"pp": 2, "dp": 2}, "overlap": {"schedule": "megatron"}},
]


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    rng, sets = np.random.default_rng(3), []
    for entry in MIXTURE:
        folder = tmp_path / "data" / str(entry["name"])
        folder.mkdir(parents=True)
        train, held_out = (rng.integers(0, 257, n * SEQUENCE + 1) for n in SIZES[str(entry["name"])])
        write_data(folder, [train], [held_out])
        sets.append(MixedSet(str(entry["name"]), str(folder), float(str(entry["weight"]))))
    (tmp_path / "data" / MIXTURE_FILE).write_text(write_mixture(sets))
    return tmp_path / "data"


def sections(layout: Mapping[str, Any], **train: Any) -> dict[str, Any]:
    own = {"dtype": "fp64", "global_batch": 12, "micro_batch": 2, "steps": 6, "validation_samples": 20}
    return {"data": {"mixture": MIXTURE}, "train": {**own, **train}, **layout}


def validated(path: Path, folder: Path, layout: Mapping[str, Any], **more: Any) -> dict[str, float]:
    """Sums of losses by set, of the initial weights."""
    config = small_config(path, **{**sections(layout), **more})
    group = KeptRanks(config).start(config.layout().ranks)
    try:
        group.call_all(Rank.setup, run_plan(config, folder), rendezvous(group, 60.0))
        names = group.call(0, Rank.data_facts)["validation_tokens_by_set"]
        sums = map(sum, zip(*group.call_all(Rank.validate), strict=True))
        return dict(zip(names, sums, strict=True))
    finally:
        group.shutdown()


def test_losses_of_sets_are_those_of_the_sets_alone(tmp_path: Path, mixture: Path) -> None:
    alone = {}
    for name, count in (("web", 12), ("code", 3)):  # the set has 3 samples of the 8 that its weight allows
        train = {**sections({})["train"], "validation_samples": count}
        alone[name] = validated(tmp_path / "runs", mixture / name, {}, data={}, train=train)[""]
    for layout in LAYOUTS:
        found = validated(tmp_path / "runs", mixture, layout)
        assert found == pytest.approx(alone, rel=1e-12, abs=0), layout


def test_samples_and_losses_in_any_layout_and_after_a_resume(tmp_path: Path, mixture: Path) -> None:
    runs = [
        trained(run_plan(small_config(tmp_path / "runs", **sections(layout)), mixture))
        for layout in LAYOUTS[:2]
    ]
    shards, _ = open_splits(mixture, SEQUENCE)
    order = [shards.order(0, step * 12, 12) for step in range(6)]
    for run in runs:
        assert [record.samples for record in run.records] == list(map(samples_digest, order))
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-9, abs=0)
    last = runs[0].records[-1]
    weights = {"web": 12, "code": 3}
    mean = sum(last.validation_losses[name] * count for name, count in weights.items()) / 15
    assert last.validation_loss == pytest.approx(mean, rel=1e-12)
    assert runs[0].report["validation"]["sets"] == last.validation_losses
    # in the middle of the epoch of a set; then with other numbers of ranks
    for layouts in ((LAYOUTS[1], LAYOUTS[1]), (LAYOUTS[0], LAYOUTS[1])):
        plans = [run_plan(small_config(tmp_path / "r", **sections(one)), mixture) for one in layouts]
        first = trained(plans[0], 4)
        again = plans[1].config.model_copy(update={"name": plans[0].config.name})
        rest = trained(run_plan(again, mixture), resume=True)
        whole = Run.of(plans[1], [*first.events, *rest.events])
        if layouts[0] is layouts[1]:
            for name in ("loss", "grad_norm"):
                found, expected = ([getattr(r, name) for r in one.records] for one in (whole, runs[1]))
                assert found == expected, name
        assert [record.samples for record in whole.records] == list(map(samples_digest, order))
        assert whole.losses == pytest.approx(runs[0].losses, rel=1e-9, abs=0)


def test_other_weights_are_refused_on_resume(tmp_path: Path, mixture: Path) -> None:
    plan = run_plan(small_config(tmp_path / "runs", **sections({})), mixture)
    trained(plan, 2)
    changed = (mixture / MIXTURE_FILE).read_text().replace("0.6", "0.7")
    (mixture / MIXTURE_FILE).write_text(changed)
    with pytest.raises(ValueError, match="was trained on other tokens than data prepares now"):
        trained(plan, resume=True)
